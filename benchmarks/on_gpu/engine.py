"""Times a decode step of deepseek-tiny, one request: eager, as an engine, graph, overlap."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import ModelConfig, find_family_of, load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.precision import FLOATS, set_dtype
from mtpbuild.builder.models.common.weight import convert_weights, join_slices
from mtpbuild.builder.plan.plan import Plan, make_state_specs
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.lab.measure.workbench import WORKBENCH
from mtpbuild.runtime import Engine, Manifest, SamplingParams
from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.contract.features import Features
from mtpbuild.runtime.contract.manifest import FloatType, read_manifest
from mtpbuild.runtime.contract.programs import Bools, Ints, Programs, StepOutput
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.ranks import ALONE
from mtpbuild.runtime.text.tokenizer import load_tokenizer
from on_gpu.machine import Machine, Row

PROMPT = "def fibonacci(n):"


def load_model(folder: Path, config: ModelConfig, dtype: FloatType) -> CausalLM:
    """Return the model with the weights that an engine for a GPU has."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.settle(config)
    model = find_family_of(config).make_model(config, ALONE)
    set_dtype(model, FLOATS[dtype], for_gpu=True)
    types = {name: weight.dtype for name, weight in model.named_parameters()}
    weights = join_slices(convert_weights(checkpoint, checkpoint.check(config)))
    model.load_state_dict({name: w.to(types[name]) for name, w in weights}, assign=True)
    return model.eval()


class Eager:
    """The step program with one greedy slot, run in PyTorch operator by operator."""

    def __init__(self, manifest: Manifest, device: str) -> None:
        built, folder = manifest.build, find_model(manifest.model.name).folder
        config = load_config(folder)
        sizes = built.max_batch, built.max_seq_len, built.prefill_chunk
        plan = Plan(config, built.nextn, built.drafter, *sizes, GraphStyle(dtype=built.dtype))
        model = load_model(folder, config, built.dtype).to(device)
        self.lookahead, self.device = plan.lookahead, device
        self.features: Features = frozenset()
        self.prefill_program, self.step_program, _ = make_programs(plan, model)
        self.state = {
            s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device=device)
            for s in make_state_specs(plan)
        }

    @torch.no_grad()
    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        given = torch.from_numpy(tokens)[None].to(self.device)
        chunk = given.shape[1] - self.lookahead
        state = {name: self.state[name] for name in self.prefill_program.state}
        ahead = (given[:, chunk:],) if self.lookahead else ()
        first = torch.tensor([start], device=self.device)
        self.state |= self.prefill_program.module(state, given[:, :chunk], first, *ahead)

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
        assert controls.plain, "greedy alone"
        self.state["lengths"][:], self.state["num_drafts"][:] = length, 0
        self.state["window"][:, 0] = newest

    def move(self, source: int, target: int) -> None:
        raise AssertionError("there is one slot")

    def finite(self, slot: int, rows: int) -> bool:
        return all(bool(tensor[slot].isfinite().all()) for tensor in self.state.values())

    def clear(self, slot: int) -> None:
        for tensor in self.state.values():
            tensor[slot] = 0

    @torch.no_grad()
    def step(self, active: Bools, rows: int) -> StepOutput:
        judged = {name: self.state[name] for name in ("window", "num_drafts")}
        ready = torch.from_numpy(active).to(self.device)
        self.state, outputs = self.step_program.module(self.state, ready)
        arrays = {name: tensor.cpu().numpy() for name, tensor in (judged | outputs).items()}
        return StepOutput(**arrays)


def engine(folder: Path | None, machine: Machine) -> Iterator[Row]:
    """Time the variants.

    folder: an engine of deepseek-tiny for one request; None builds one. On a GPU the first row is
    the CPU's engine: all others must give its tokens.
    """
    with tempfile.TemporaryDirectory() as scratch:
        plain = BuildRequest("deepseek-tiny", (3,), out=Path(scratch) / "cpu")
        if folder is None:
            asked = replace(plain, target="inductor", options={"device": "cuda"})
            folder = build(replace(asked, out=Path(scratch) / "engine"), WORKBENCH)[0].folder
        manifest = read_manifest(folder)
        if manifest.build.max_batch > 1:
            sys.exit(f"--engine {folder}: built for {manifest.build.max_batch} requests, not one")
        tokenizer = load_tokenizer(folder, manifest)
        wanted: list[int] = []
        first = None
        if machine.device == "cuda":
            with Engine.load(build(plain, WORKBENCH)[0].folder, prefix_cache=False) as loaded:
                wanted, each = decode(loaded, machine)
            yield Row("step", f"nextn {manifest.build.nextn}, the CPU's engine", 0, each)
        for name, make, overlap in variants(folder, manifest, machine):
            with Engine(make(), manifest, tokenizer, overlap=overlap) as loaded:
                tokens, each = decode(loaded, machine)
            wanted, first = wanted or tokens, first or each
            wrong = sum(a != b for a, b in zip(tokens, wanted, strict=True))
            row = Row("step", f"nextn {manifest.build.nextn}, {name}", wrong, each)
            row.beside = [f"{first / each:.2f}x eager"]
            yield row


def variants(
    folder: Path, manifest: Manifest, machine: Machine
) -> Iterator[tuple[str, Callable[[], Programs], bool]]:
    """Yield each variant: its name, its programs, and whether steps overlap."""
    yield "eager", partial(Eager, manifest, machine.device), False
    if machine.device == "cpu":
        yield "engine", partial(load_programs, folder, manifest), False
        return
    from mtpbuild.runtime.gpu.torch_cuda import Gpu
    from mtpbuild.runtime.programs.aot_package import open_packages
    from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms

    def load(graphs: bool) -> Programs:
        return CudaPrograms(manifest, Gpu(), open_packages(folder, manifest), graphs=graphs)

    yield "engine", partial(load, graphs=False), False
    yield "+ CUDA graph", partial(load, graphs=True), False
    yield "+ overlap", partial(load, graphs=True), True


def decode(loaded: Engine, machine: Machine) -> tuple[list[int], float]:
    """Return a prompt's tokens and the microseconds of a later step, the best of some runs."""
    count, repeats = (12, 1) if machine.device == "cpu" else (256, 3)
    best, tokens = float("inf"), list[int]()
    for _ in range(repeats):
        result = loaded.generate(PROMPT, SamplingParams(max_tokens=count, ignore_eos=True))
        tokens, metrics = result.token_ids, result.metrics
        assert metrics.tpot_s is not None
        seconds = metrics.tpot_s * (len(tokens) - 1)
        best = min(best, 1e6 * seconds / (metrics.speculative_decoding.num_spec_steps - 1))
    return tokens, best
