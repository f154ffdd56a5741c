"""fp8 and nvfp4 weights that stay so: their numbers are the dequantised model's, bit for bit."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import SINGLE
from mtpbuild.builder.compiler.notes import list_notes
from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.formats import FORMATS
from mtpbuild.builder.formats.fp8 import FP8
from mtpbuild.builder.formats.nvfp4 import NVFP4
from mtpbuild.builder.models import find_family_of
from mtpbuild.builder.models.common.blocks import ScaledWeight
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.weight import Share, convert_weights, join_slices
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.program.engine_weights import EngineWeights
from mtpbuild.builder.program.opened_model import OpenedModel
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.builder.program.trace import trace
from mtpbuild.builder.weights.scheme import SCHEMES, Scheme
from mtpbuild.lab.measure.compare import LARGEST_DIFFERENCE
from mtpbuild.lab.measure.runs import run_prompts
from mtpbuild.lab.verify.plain import judge_texts, load_plain
from mtpbuild.plugins.matmul_scaled.op import dequantise, e2m1, e4m3, matmul_scaled
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import WEIGHTS, FloatType, read_manifest
from mtpbuild.runtime.contract.state import name_layer_rows
from mtpbuild.runtime.ranks import ALONE, Ranks
from tests.reference.recompute import greedy
from tests.support.checkpoints import QUANTIZABLE, make_predictable, save_checkpoint
from tests.support.inductor_engines import compiled_soon
from tests.support.opened import load_model, opened
from tests.support.requests import build, quantize
from tests.support.styles import style_of

BOTH = ("fp8", "nvfp4")
PROMPTS = [[5, 17, 3], [40, 2], [9, 9, 33, 21, 60]]
MANY = QUANTIZABLE | {"n_routed_experts": 24, "n_group": 4, "num_experts_per_tok": 3}  # gathered
SCALED: dict[str, tuple[dict[str, Any], Scheme]] = {
    "fp8": (QUANTIZABLE, SCHEMES["fp8"]),
    "nvfp4": (QUANTIZABLE, Scheme("nvfp4", "nvfp4", ("*.kv_b_proj",))),
    "fp8-experts": (MANY, SCHEMES["fp8"]),
    "nvfp4-experts": (MANY, SCHEMES["nvfp4"]),
    "mixed": (MANY, Scheme("fp8", "nvfp4", ("*.mlp.experts.*.down_proj",))),
}
MakeFolder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> MakeFolder:
    """folder(name) -> the checkpoint of `SCALED`."""
    torch.set_num_threads(1)
    place, made = tmp_path_factory.mktemp("scaled"), dict[str, Path]()

    def make(name: str) -> Path:
        if name not in made:
            shape, scheme = SCALED[name]
            plain = place / f"{name}-plain"
            save_checkpoint(plain, make_predictable(**shape), **shape)
            quantize(QuantizeRequest(str(plain), scheme, place / name))
            made[name] = place / name
        return made[name]

    return make


def source(folder: Path, formats: tuple[str, ...] = BOTH, **how: Any) -> OpenedModel:
    return opened(folder, formats=formats, **how)


def kept_model(folder: Path, to: Path, dtype: FloatType = "float32") -> CausalLM:
    """Make the model with the weights that an engine would have."""
    kept = source(folder, dtype=dtype, for_gpu=True)  # experts are gathered, as in `load_model`
    EngineWeights(kept).write(to, siblings=None)
    kept.model.load_state_dict(load_file(to / WEIGHTS), assign=True)
    return kept.model.eval()


def logits(model: CausalLM) -> list[Tensor]:
    """Compute those of the main model, and of a module."""
    tokens, start = torch.tensor([[5, 17, 3, 60, 9]]), torch.zeros(1, dtype=torch.int64)
    kind = model.embed(tokens).dtype
    width = find_family_of(model.config).cache_widths(model.config, ALONE)[0]
    caches = [torch.zeros(1, 1, 9, width, dtype=kind) for _ in range(3)]
    rows = model.rope(start, 5)
    hidden, _ = model(tokens, {name_layer_rows(i): caches[i] for i in range(2)}, rows)
    module: Any = model.mtp[0]
    drafted, _ = module(module.combine_inputs(model.embed(tokens), hidden, rows), caches[2], rows)
    return [model.logits(hidden), model.logits(module.norm(drafted))]


SOME = [pytest.param(n, marks=[] if n == "mixed" else [pytest.mark.full]) for n in SCALED]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_the_dequantised_models_numbers(
    name: str, dtype: FloatType, folder: MakeFolder, tmp_path: Path
) -> None:
    """Joined, permuted and stacked, in either precision: what is multiplied is the same."""
    kept = kept_model(folder(name), tmp_path, dtype)
    whole = load_model(folder(name), kept.config, dtype, for_gpu=True)
    for ours, theirs in zip(logits(kept), logits(whole), strict=True):
        assert torch.equal(ours, theirs)


def test_what_stays(folder: MakeFolder, caplog: pytest.LogCaptureFixture) -> None:
    fp8, nvfp4 = source(folder("fp8")), source(folder("nvfp4-experts"))
    assert (fp8.weights_type, nvfp4.weights_type) == BOTH
    attention = {"qkv_a_proj", "q_b_proj", "o_proj"}
    mlp = {"gate_up_proj", "down_proj"}
    names = {f"self_attn.{leaf}" for leaf in attention} | {f"mlp.{leaf}" for leaf in mlp}
    assert {n for n in fp8.table.formats if n.startswith("layers.0.")} == {
        f"layers.0.{n}" for n in names
    }
    experts = {f"layers.1.mlp.{at}{leaf}" for at in ("", "shared_experts.") for leaf in mlp}
    assert set(nvfp4.table.formats) == experts | {f"layers.0.mlp.{leaf}" for leaf in mlp}
    assert source(folder("fp8"), ("nvfp4",)).table.formats == {}
    assert caplog.text == ""
    assert "quantised weights (3 in fp8) are dequantised" in "".join(list_notes(fp8))  # kv_b_proj


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    "ranks",
    [
        Ranks(),
        pytest.param(Ranks(2), marks=pytest.mark.full),
        Ranks(4, 2),
        pytest.param(Ranks(4, 2, attention_dp=True), marks=pytest.mark.full),
    ],
    ids=["1", "2", "4-2", "attention-dp"],
)
def test_ranks_hold_their_part(name: str, ranks: Ranks, folder: MakeFolder) -> None:
    """Values and scales are cut so that they decode to what a rank would hold in fp32."""
    for rank in range(ranks.tp):
        share = Share(ranks, rank)
        kept = source(folder(name), ranks=ranks)
        table, checkpoint = kept.table.of_rank(rank), kept.checkpoint
        floats = [replace(weight, format=None) for weight in table]
        plain = dict(join_slices(convert_weights(checkpoint, floats, share)))
        stored = dict(join_slices(convert_weights(checkpoint, table, share)))
        assert kept.table.formats
        for weight in kept.table.formats:
            parts = (stored.get(f"{weight}.{part}") for part in ("values", "scales", "scales_2"))
            assert torch.equal(dequantise(*parts), plain[weight])  # type: ignore[arg-type]
        parameters = dict(kept.model.named_parameters())
        assert all(tensor.shape == parameters[name].shape for name, tensor in stored.items())


def test_what_does_not_split(folder: MakeFolder) -> None:
    """A rank of 4 has 48 of a dense MLP's 192 columns, and 16 of an expert's 64; of 8 but 8."""
    places = {"gate_up_proj", "down_proj"}
    for tp, there in ((4, places), (8, {"gate_up_proj"})):
        names = source(folder("nvfp4"), ranks=Ranks(tp)).table.formats
        assert {n.rpartition(".")[2] for n in names if ".experts." in n} == there


def test_bytes_of_an_engine(folder: MakeFolder, tmp_path: Path) -> None:
    """A value takes a byte or half of one; fp8's scales are one per output and 128 inputs."""
    for name, parts in {"fp8-experts": 2, "nvfp4-experts": 3}.items():
        layer: Any = kept_model(folder(name), tmp_path).layers[1]
        weight = layer.mlp.gate_up_proj
        assert isinstance(weight, ScaledWeight)
        assert len(list(weight.parameters())) == parts
        assert weight.values.shape == (24, 160 // (parts - 1), 128)
        assert weight.scales.shape == (24, 5 if parts == 2 else 10, 128)  # 160 = 5 * 32


@pytest.mark.full
@pytest.mark.parametrize("name", ["fp8-experts", "nvfp4"])
def test_programs(name: str, folder: MakeFolder, tmp_path: Path) -> None:
    """Prefill and a step as they are exported."""
    kept = kept_model(folder(name), tmp_path)
    whole = load_model(folder(name), kept.config)
    plan = Plan(kept.config, 1, "mtp-eagle", 1, 64, 8)
    pairs = zip(make_programs(plan, kept), make_programs(plan, whole), strict=True)
    for ours, theirs in list(pairs)[:2]:
        found = [trace(program, plan) for program in (ours, theirs)]
        state, *given = found[0].exported.example_inputs[0]
        state |= {n: torch.zeros(1, 1, 20, t.shape[3]) for n, t in state.items() if "kv." in n}
        results = [each.exported.module()(copy.deepcopy(state), *given) for each in found]
        for a, b in zip(*map(torch.utils._pytree.tree_leaves, results), strict=True):
            assert torch.equal(a, b)


@pytest.mark.full
@pytest.mark.parametrize("slots", [1, 4])
def test_experts_go_by_kernels_on_a_gpu(slots: int, folder: MakeFolder, tmp_path: Path) -> None:
    """Prompts and open batches do too: an expert per token would be the model many times."""
    kept = kept_model(folder("fp8-experts"), tmp_path)
    style = style_of("inductor", device="cuda")
    plan = Plan(kept.config, 1, "mtp-eagle", slots, 64, 8, style)
    for program in make_programs(plan, kept)[:2]:
        exported = trace(program, plan).exported
        used = {str(node.target) for node in exported.graph.nodes}
        assert {"mtpbuild.moe.default", "mtpbuild.matmul_scaled.default"} <= used


def test_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = (codes & 0x7F) != 0x7F
    assert torch.equal(e4m3(codes)[finite], codes.view(torch.float8_e4m3fn).float()[finite])
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert e2m1(codes[:16]).tolist() == magnitudes + [-size for size in magnitudes]


@pytest.mark.parametrize("format", [FP8, NVFP4], ids=BOTH)
@pytest.mark.parametrize("shape", [(3, 16), (130, 288), (5, 128), (256, 400)])
def test_a_lone_weight(format: Any, shape: tuple[int, int]) -> None:
    """A kept weight decodes to what the format says; the op multiplies with that."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    parts = format.encode(weight, weight.abs().max())
    values = parts[""].view(torch.uint8).T.contiguous()
    if format is FP8:
        block = math.gcd(128, shape[1])
        scales = parts["_scale_inv"].repeat_interleave(128, dim=0)[: shape[0]]
        scales = scales.repeat_interleave(128 // block, dim=1)[:, : shape[1] // block]
        operands: tuple[Tensor, ...] = (values, scales.T.contiguous())
    else:
        scales = parts["_scale"].view(torch.uint8).T.contiguous()
        operands = (values, scales, parts["_scale_2"].expand(1, shape[0]))
    decoded = FORMATS[format.name].decode(parts).T
    assert torch.equal(dequantise(*operands), decoded)
    x = torch.randn(2, 4, shape[1])
    torch.testing.assert_close(matmul_scaled(x, *operands), x @ decoded, rtol=1e-4, atol=1e-4)
    narrow = matmul_scaled(x.bfloat16(), *operands)
    assert torch.equal(narrow, x.bfloat16() @ decoded.bfloat16().contiguous())


@pytest.mark.full
@pytest.mark.parametrize("name", ["fp8", "nvfp4-experts", "mixed"])
def test_an_engine(name: str, folder: MakeFolder, tmp_path: Path) -> None:
    """Compiled for the CPU: the dequantised model's text, with its log-probabilities."""
    asked = BuildRequest(str(folder(name)), (1,), max_seq_len=64, out=tmp_path, target="inductor")
    with compiled_soon():
        build(asked)
    manifest, plain = read_manifest(tmp_path), load_plain(folder(name))
    assert manifest.build.weights == ("nvfp4" if name.startswith("nvfp4") else "fp8")
    sources = (folder(name) / SINGLE).stat().st_size
    assert manifest.files[WEIGHTS].size < 1.5 * sources, "spread scales, embedding and head in fp32"
    params = [SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)] * len(PROMPTS)
    with Engine.load(tmp_path, threads=1) as engine:
        played = run_prompts(engine, PROMPTS, params)
    for prompt, text in zip(PROMPTS, played, strict=True):
        assert text.token_ids == greedy(plain, prompt, 40)
    found = judge_texts(plain, PROMPTS, played, LARGEST_DIFFERENCE)
    assert found.passed, found.detail
    assert sum(text.drafting.num_accepted_draft_tokens for text in played) > 0
