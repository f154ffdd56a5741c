"""Engines in bfloat16: what is in it and what is not, their text beside the plain model's.

Rounding makes near-ties frequent, and a product of one row may round otherwise than one of four.
So texts are judged token by token: each must be the plain model's argmax in fp32, on the same
weights, or nearly. Here programs run eagerly; compiled ones are in the full matrix.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mtpbuild.builder.compiler.dry_run import dry_run
from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.models.common.precision import set_dtype
from mtpbuild.builder.models.deepseek_v3.model import DeepseekV3
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import DrafterName, Plan, make_state_specs
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.builder.stages import Stages
from mtpbuild.lab.measure.runs import run_prompts
from mtpbuild.runtime import Engine, EngineError, Manifest, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.programs import Programs
from mtpbuild.runtime.programs import inductor_cuda
from mtpbuild.runtime.programs.inductor_cpu import InductorPrograms
from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms
from mtpbuild.runtime.safetensors_header import read_header
from tests.support.bfloat16 import check, check_logprobs, rounded
from tests.support.checkpoints import lower, make_predictable, random_checkpoint, save_checkpoint
from tests.support.eager_package import EagerPackage, manifest_of
from tests.support.engines import EngineBuilder
from tests.support.fake_gpu import FakeGpu, opened
from tests.support.inductor_engines import compiled_soon, prompts
from tests.support.requests import altered, build, build_request
from tests.support.styles import style_of

CHUNK, SLOTS, LENGTH = 4, 2, 30
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
HOT = replace(GREEDY, temperature=0.8, top_p=0.95, seed=5)
ENGINES: list[tuple[int, DrafterName | None]] = [(0, None), (2, "mtp-eagle"), (3, "mtp-vanilla")]
WIDE = {"lm_head", "gate.weight", "gate.e_score_correction_bias"}


@pytest.fixture(scope="module")
def model() -> PlainDeepseek:
    """Make a model that computes in fp32, of weights that bfloat16 holds exactly."""
    torch.set_num_threads(1)
    return rounded(make_predictable())


def narrow(model: PlainDeepseek, for_gpu: bool = False) -> DeepseekV3:
    """Return the program's model in bfloat16."""
    wide, made = lower(model).state_dict(), DeepseekV3(model.config)
    set_dtype(made, torch.bfloat16, for_gpu)
    types = {name: weight.dtype for name, weight in made.named_parameters()}
    made.load_state_dict({n: w.to(types[n]) for n, w in wide.items()}, assign=True)
    return made.eval()


MakePrograms = Callable[..., tuple[Programs, Manifest]]


@pytest.fixture
def eagerly(model: PlainDeepseek) -> MakePrograms:
    """eagerly(nextn, drafter, gpu) -> programs behind the CPU's or the GPU's run time."""

    def make(
        nextn: int, drafter: DrafterName | None, gpu: FakeGpu | None = None
    ) -> tuple[Programs, Manifest]:
        style = style_of("inductor", device="cuda" if gpu else "cpu", dtype="bfloat16")
        plan = Plan(model.config, nextn, drafter, SLOTS, 200, CHUNK, style)
        made = make_programs(plan, narrow(model, gpu is not None))
        packages, manifest = {p.name: EagerPackage(p) for p in made}, manifest_of(plan, made)
        opener = opened(packages)
        if gpu is None:
            return InductorPrograms(manifest, 1, opener), manifest
        return CudaPrograms(manifest, gpu, opener), manifest  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize(
    "engines", [ENGINES[::2], pytest.param(ENGINES, marks=pytest.mark.full)], ids=["some", "all"]
)
def test_texts_of_every_nextn(
    engines: list[tuple[int, DrafterName | None]], eagerly: MakePrograms, model: PlainDeepseek
) -> None:
    """Drafting changes a text at near-ties alone."""
    asked, texts = prompts(20, 1, 6, 11), []
    for nextn, drafter in engines:
        programs, manifest = eagerly(nextn, drafter)
        with Engine(programs, manifest) as engine:
            texts.append(run_prompts(engine, asked, [GREEDY] * len(asked), together=True))
            hot = run_prompts(engine, asked[:1], [HOT])
        check(model, asked, texts[-1])
        check_logprobs(model, asked[:1], hot)
        drafting = texts[-1][0].drafting
        often = drafting.num_accepted_draft_tokens > drafting.num_spec_steps / 2
        assert often == (nextn > 0)
    for one, other in itertools.pairwise(texts):
        same = sum(a.token_ids == b.token_ids for a, b in zip(one, other, strict=True))
        assert same >= len(asked) / 2


def test_caches_are_bits_to_the_host(eagerly: MakePrograms) -> None:
    programs, manifest = eagerly(3, "mtp-vanilla")
    with Engine(programs, manifest) as engine:
        engine.generate(prompts(6)[0], GREEDY)
    assert isinstance(programs, InductorPrograms)
    kinds = {spec.name: spec.dtype for spec in manifest.state}
    assert {kinds[name] for name in ("kv.0", "mtp_kv.2", "past_hidden")} == {"bfloat16"}
    assert kinds["draft_probs"] == "float32"
    cache = torch.from_numpy(programs.state["kv.0"]).view(torch.bfloat16)
    rows = cache[0, 0, :20].float()
    assert bool(rows.isfinite().all())
    assert 0.1 < float(rows.std()) < 10


def test_on_a_gpu(eagerly: MakePrograms, model: PlainDeepseek, tmp_path: Path) -> None:
    """The run time works on a GPU that is not there; a cache takes half the memory."""
    gpu = FakeGpu()
    programs, manifest = eagerly(2, "mtp-eagle", gpu)
    asked = prompts(9, 3, 5)
    with Engine(programs, manifest) as engine:
        check(model, asked, run_prompts(engine, asked, [GREEDY] * 3, together=True))
    assert isinstance(programs, CudaPrograms)
    assert programs.state["kv.0"].dtype == np.uint16
    held, opener = programs._given.values(), opened(programs._packages)
    needed = manifest.files["weights.safetensors"].size + sum(tensor.nbytes for tensor in held)
    with pytest.raises(EngineError, match="of GPU memory"):
        inductor_cuda.load(tmp_path, manifest, FakeGpu(free=needed - 1), opener)  # type: ignore[arg-type]
    inductor_cuda.load(tmp_path, manifest, FakeGpu(free=needed), opener)  # type: ignore[arg-type]


@pytest.mark.parametrize(("nextn", "drafter"), [*ENGINES, (2, "none")])
def test_state_keeps_its_types(
    nextn: int, drafter: DrafterName | None, model: PlainDeepseek
) -> None:
    """What a target writes over a state tensor must be of its type."""
    plan = Plan(
        model.config, nextn, drafter, SLOTS, 60, CHUNK, style_of("inductor", dtype="bfloat16")
    )
    specs = {spec.name: spec for spec in make_state_specs(plan)}
    for program in make_programs(plan, narrow(model)):
        slots = 1 if program.name == "prefill" else len(program.arguments["active"])
        state = {
            name: torch.zeros(slots, *spec.shape[1:], dtype=getattr(torch, spec.dtype))
            for name, spec in specs.items()
            if name in program.state
        }
        wanted = {name: tensor.dtype for name, tensor in state.items()}
        given = list(program.arguments.values())
        for arguments in (given, [torch.zeros_like(each) for each in given]):  # sampled, greedy
            result = program.module(state, *arguments)
            new = result[0] if isinstance(result, tuple) else result
            assert {name: tensor.dtype for name, tensor in new.items()} == wanted


def test_logits_are_not_rounded(model: PlainDeepseek) -> None:
    made = narrow(model)
    hidden = torch.randn(1, 50, model.config.hidden_size).bfloat16()
    logits = made.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ made.lm_head)
    rounded = logits.bfloat16()
    assert len(logits.unique()) == logits.numel()
    assert len(rounded.unique()) < rounded.numel() / 2, "in bfloat16 they would tie"


@pytest.mark.usefixtures("quick_inductor")
def test_an_engine_directory(tmp_path: Path) -> None:
    source = random_checkpoint(tmp_path / "source", num_hidden_layers=2)
    wide = build_request(source, (3,), out=tmp_path / "engine", target="inductor")
    request = altered(wide, dtype="bfloat16")
    (foreseen,) = dry_run(request, Stages()).engines
    (before,), (built,) = build(wide), build(request)
    assert not built.unchanged, "another type, another engine"
    assert (built.manifest.build.weights, built.manifest.build.dtype) == ("bfloat16", "bfloat16")
    assert before.manifest.build.dtype == "float32"
    file = built.folder / "weights.safetensors"
    kinds = {name: entry["dtype"] for name, entry in read_header(file)[0].items()}
    stays = {name for name, kind in kinds.items() if kind == "F32"}
    assert stays == {name for name in kinds if name.rpartition("mlp.")[2] in WIDE}
    assert len(stays) > 4
    assert {kinds[name] for name in set(kinds) - stays} == {"BF16"}
    assert foreseen.weight_file_bytes == file.stat().st_size - read_header(file)[2]
    assert foreseen.state_bytes < 4 * sum(np.prod(s.shape) for s in built.manifest.state)

    stored, held = load_file(source / "model.safetensors"), load_file(file)
    for to, name in (
        ("embed_tokens", "model.embed_tokens.weight"),
        ("mtp.0.eh_proj", "model.layers.2.eh_proj.weight"),
        ("lm_head", "lm_head.weight"),
        ("layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.weight"),
    ):
        wanted = stored[name] if to == "embed_tokens" else stored[name].T
        assert torch.equal(held[to], wanted.to(held[to].dtype)), to

    other = random_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=2)
    refit(built.folder, str(other))
    assert {n: e["dtype"] for n, e in read_header(file)[0].items()} == kinds
    assert not torch.equal(load_file(file)["embed_tokens"], held["embed_tokens"])
    assert read_manifest(built.folder).build.dtype == "bfloat16"


@pytest.mark.usefixtures("quick_inductor")
def test_it_has_a_place_of_its_own(
    smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = build_request(smallest, (0,), target="inductor", dtype="bfloat16")
    (built,) = build(request)
    assert built.folder == Path("engines/small_n0_bf16")


@pytest.mark.full
@pytest.mark.parametrize(("nextn", "drafter"), ENGINES)
def test_compiled(
    nextn: int,
    drafter: DrafterName | None,
    model: PlainDeepseek,
    build_engine: EngineBuilder,
    tmp_path: Path,
) -> None:
    folder = save_checkpoint(tmp_path / "exact", model)
    flags: dict[str, Any] = {"target": "inductor", "dtype": "bfloat16", "prefill_chunk": CHUNK}
    with compiled_soon():
        built = build_engine(folder, nextn, drafter, **flags)
    asked = prompts(140, 1, 6, 11)
    with Engine.load(built, threads=1, prefix_cache=False) as engine:
        check(model, asked, run_prompts(engine, asked, [GREEDY] * len(asked)))
        check_logprobs(model, asked, run_prompts(engine, asked, [HOT] * len(asked)))
