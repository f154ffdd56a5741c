"""`build --weights`: the engine of the checkpoint that `quantize` would write."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.checkpoint.readable import name_stored_format, read_quantisation
from mtpbuild.builder.compiler.dry_run import dry_run
from mtpbuild.builder.compiler.notes import list_notes
from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.graph.pipeline import TRACED_THROUGH
from mtpbuild.builder.models import ModelConfig
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.program.engine_weights import EngineWeights
from mtpbuild.builder.program.opened_model import OpenedModel
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.targets.onnxruntime.pipeline import CPU
from mtpbuild.builder.weights.quantised_view import QuantisedView
from mtpbuild.builder.weights.scheme import (
    SCHEMES,
    Scheme,
    build_scheme,
    make_engine_scheme,
    make_scheme,
)
from mtpbuild.lab.measure.runs import TimedAnswer, run_prompts
from mtpbuild.lab.verify import verify
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import WEIGHTS, read_manifest
from mtpbuild.runtime.errors import CheckpointError, UsageError
from mtpbuild.runtime.ranks import Ranks
from mtpbuild.runtime.safetensors_header import read_header
from tests.support.checkpoints import (
    QUANTIZABLE,
    SMALLEST,
    load_config,
    make_predictable,
    random_checkpoint,
    save_checkpoint,
)
from tests.support.invoke import invoke
from tests.support.numbers import check_rounded, plain_with_rounding
from tests.support.opened import opened
from tests.support.requests import build, quantize

ALL = ("int8", "int4", "fp8", "nvfp4")
SMALL = QUANTIZABLE | SMALLEST
ENDS = make_scheme("int4", None, None, head="int8")
LIMITS: dict[str, Any] = {"max_seq_len": 64, "prefill_chunk": 8}
PROMPTS = [[5, 17, 3], [40, 2], [9, 9, 33, 21, 60]]


def save(folder: Path, seed: int = 0, **shape: Any) -> Path:
    torch.set_num_threads(1)
    return save_checkpoint(folder, make_predictable(seed, **shape), **shape)


def quantised(model: Path, scheme: Scheme, out: Path) -> Path:
    quantize(QuantizeRequest(str(model), scheme, out))
    return out


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("weights") / "plain", **QUANTIZABLE)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer and one module."""
    return save(tmp_path_factory.mktemp("weights") / "small", **SMALL)


def source(folder: Path, scheme: Scheme | None = None, **how: Any) -> OpenedModel:
    config: ModelConfig = load_config(folder)
    if "layers" in how:
        config = how["layers"].of(config)
    main = name_stored_format(read_quantisation(folder), "") if scheme is None else scheme.main
    kernels = main in ("int8", "int4")
    pipeline = CPU if kernels else TRACED_THROUGH
    return opened(folder, config, formats=ALL, pipeline=pipeline, scheme=scheme, **how)


def parameters(model: OpenedModel) -> list[tuple[str, Any, Any]]:
    return [(name, p.shape, p.dtype) for name, p in model.model.named_parameters()]


def written(model: OpenedModel, folder: Path, rank: int = 0) -> bytes:
    folder.mkdir()
    EngineWeights(model).write(folder, None, rank)
    return (folder / WEIGHTS).read_bytes()


WANTED = dict(zip([*ALL, "int4-ends"], [*(SCHEMES[name] for name in ALL), ENDS], strict=True))
PAIRS = {("int4-ends", "bf16"), ("int8", "fp8"), ("fp8", "nvfp4"), ("nvfp4", "bf16")}


@pytest.mark.parametrize(
    ("wanted", "stored"),
    [
        pytest.param(*pair, marks=[] if pair in PAIRS else [pytest.mark.full])
        for pair in product(WANTED, ("bf16", "fp8", "nvfp4"))
    ],
)
def test_the_weights(wanted: str, stored: str, plain: Path, tmp_path: Path) -> None:
    """They are those of the checkpoint that `quantize` writes, whatever the source is in."""
    model, scheme = plain, WANTED[wanted]
    if stored != "bf16":
        model = quantised(plain, SCHEMES[stored], tmp_path / "source")
    anew = source(quantised(model, scheme, tmp_path / "checkpoint"))
    ours = source(model, scheme)
    assert ours.table.formats.keys() == anew.table.formats.keys()
    assert ours.weights_type == anew.weights_type == scheme.main
    assert ours.dequantised() == anew.dequantised()
    assert parameters(ours) == parameters(anew)  # of which, with places, programs are made
    assert written(ours, tmp_path / "a") == written(anew, tmp_path / "b")
    ends = {"embed_tokens", "lm_head"}
    assert ends & ours.table.formats.keys() == (ends if scheme is ENDS else set())


def test_some_layers_and_one_rank(plain: Path, tmp_path: Path) -> None:
    cut, scheme = LayersSlice(1, 1), SCHEMES["nvfp4"]
    whole = quantised(plain, scheme, tmp_path / "checkpoint")
    ours, anew = source(plain, scheme, layers=cut), source(whole, layers=cut)
    assert written(ours, tmp_path / "a") == written(anew, tmp_path / "b")
    ours, anew = source(plain, scheme, ranks=Ranks(2)), source(whole, ranks=Ranks(2))
    assert written(ours, tmp_path / "c", 1) == written(anew, tmp_path / "d", 1)


def test_large_weights_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight in pieces of 128 rows is that of one piece."""
    shape = SMALL | {"vocab_size": 300, "intermediate_size": 288}
    model = save(tmp_path / "model", **shape)
    for name in ALL:
        scheme = make_scheme(name, None, None, head="int8")
        whole = written(source(model, scheme), tmp_path / name)
        with monkeypatch.context() as patch:
            patch.setattr("mtpbuild.builder.weights.checkpoint.PIECE", 128)
            assert written(source(model, scheme), tmp_path / f"{name}-pieces") == whole


def test_what_no_block_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It stays as it is, and the build says so; embedding and head as well."""
    folder = random_checkpoint(tmp_path / "model", **SMALLEST | {"hidden_size": 40})
    model = source(folder, ENDS)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(model.unfit)
    assert not {"embed_tokens", "lm_head"} & set(model.table.formats)
    output = "\n".join(list_notes(model))
    assert f"{len(model.unfit)} weights stay in float32: their columns do" in output


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_weights_at_the_ends_of_fp16(
    to: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks that lose accuracy are counted, by both commands; a weight beyond them is refused."""
    tiny, huge = (make_predictable(**SMALL) for _ in range(2))
    name = "model.layers.0.mlp.down_proj.weight"
    weight = tiny.get_parameter(name).detach()
    weight[1:].mul_(1e-7 / weight.square().mean().sqrt())
    huge.get_parameter(name).detach()[3, 5] = 1e7
    blocks = weight[1:].numel() // 32
    model = source(save_checkpoint(tmp_path / "tiny", tiny, **SMALL), SCHEMES[to])
    written(model, tmp_path / "engine")
    output = f"{blocks:,} blocks of 32 weights lose accuracy"
    assert f"note: {output}" in caplog.text
    request = "quantize", "--model", tmp_path / "tiny", "--to", to, "--out", tmp_path / "q"
    assert output in invoke(*request)[1]
    weight[0] = 0.5 * weight[1]
    model = source(save_checkpoint(tmp_path / "small", tiny, **SMALL), SCHEMES[to])
    with pytest.raises(CheckpointError, match=f"{name} is too small for {to}, whose scales"):
        written(model, tmp_path / "none")
    model = source(save_checkpoint(tmp_path / "huge", huge, **SMALL), SCHEMES[to])
    with pytest.raises(CheckpointError, match=f"{name} holds 10,000,000, but {to} ends at"):
        written(model, tmp_path / "other")


def test_the_plain_model(plain: Path, tmp_path: Path) -> None:
    """`verify` compares with the dequantised weights of the engine."""
    ours = load_plain(plain, scheme=ENDS).state_dict()
    wanted = load_plain(quantised(plain, ENDS, tmp_path / "checkpoint")).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in ours.items())
    engines = make_engine_scheme("int4", "int8")
    assert engines == replace(ENDS, join="int8")
    joined, plain_join = (
        {name: tensor for name, tensor in state.items() if name.endswith("eh_proj.weight")}
        for state in (load_plain(plain, scheme=engines).state_dict(), wanted)
    )
    assert joined.keys() == plain_join.keys() != set()
    for name, tensor in joined.items():
        error = (tensor - plain_join[name]).norm() / plain_join[name].norm()
        assert 0 < error < 0.01, name
    changed = load_plain(plain).state_dict()["lm_head.weight"]
    assert not torch.equal(ours["lm_head.weight"], changed)


@pytest.mark.parametrize("name", ALL)
def test_a_weight_is_encoded_once(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight's values and scales are asked for together."""
    model = source(plain, SCHEMES[name])
    seen, encoded = list[str](), QuantisedView.encoded

    def noted(checkpoint: QuantisedView, weight: str) -> Any:
        seen.append(weight)
        return encoded(checkpoint, weight)

    monkeypatch.setattr(QuantisedView, "encoded", noted)
    written(model, tmp_path / "engine")
    kept = [stored.name for w in model.table if w.format is not None for stored in w.stored]
    assert sorted(set(seen) & set(kept)) == sorted(weight for weight in seen if weight in kept)
    assert set(kept) <= set(seen)


# Builds, whose programs are placeholders


@pytest.mark.usefixtures("quick")
class TestQuick:
    def test_a_build(self, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        request = BuildRequest(str(small), (0,), scheme=ENDS)
        (built,) = build(request)
        assert built.folder == Path("engines/small_n0_int4")
        found = built.manifest.build
        assert (found.weights, found.quantised_to, found.head_weights) == ("int4", "int4", "int8")
        assert build(request)[0].unchanged
        (bare,) = build(BuildRequest(str(small), (0,), scheme=build_scheme("int4", "none")))
        assert not bare.unchanged
        held = bare.manifest.build
        assert (held.quantised_to, held.head_weights) == ("int4", None)
        assert "lm_head.values" in load_file(bare.folder / WEIGHTS)
        out = invoke("inspect", bare.folder)[1]
        assert "int4, quantised by the build; embedding and head float32" in out

    def test_a_head_in_int4(self, small: Path, tmp_path: Path) -> None:
        """The embedding stays in int8, of whose rows a step reads few."""
        request = BuildRequest(str(small), (0,), out=tmp_path, scheme=build_scheme("int4", "int4"))
        (built,) = build(request)
        assert built.manifest.build.head_weights == "int4"
        held = load_file(built.folder / WEIGHTS)
        bits = {
            name: 4 * held[f"{name}.values"].numel() // held[f"{name}.scales"].numel() // 16
            for name in ("lm_head", "embed_tokens", "layers.0.mlp.down_proj")
        }
        assert bits == {"lm_head": 4, "embed_tokens": 8, "layers.0.mlp.down_proj": 4}

    @pytest.mark.usefixtures("quick_inductor")
    def test_target_inductor(self, small: Path, tmp_path: Path) -> None:
        how: dict[str, Any] = {"target": "inductor", "scheme": SCHEMES["fp8"], "out": tmp_path}
        found = build(BuildRequest(str(small), (0,), **how))[0].manifest.build
        assert (found.weights, found.quantised_to, found.head_weights) == ("fp8", "fp8", None)

    @pytest.mark.parametrize(
        "head", ["int4", *(pytest.param(h, marks=pytest.mark.full) for h in (None, "none"))]
    )
    def test_new_weights(self, head: str | None, small: Path, tmp_path: Path) -> None:
        """A refit quantises the new checkpoint as the build did."""
        other = save(tmp_path / "other", 1, **SMALL)
        first, wanted = (
            build(BuildRequest(str(m), (0,), out=tmp_path / o, scheme=build_scheme("int4", head)))
            for m, o in ((small, "engine"), (other, "wanted"))
        )
        old, new = refit(first[0].folder, str(other))
        assert new.build.quantised_to == "int4"
        assert new.files[WEIGHTS] == wanted[0].manifest.files[WEIGHTS] != old.files[WEIGHTS]
        done = quantised(other, SCHEMES["fp8"], tmp_path / "fp8")
        refit(first[0].folder, str(done))
        tight = random_checkpoint(tmp_path / "tight", **SMALL | {"hidden_size": 152})
        with pytest.raises(UsageError, match="hidden_size 160 -> 152"):
            refit(first[0].folder, str(tight))

    def test_a_dry_run(self, small: Path, tmp_path: Path) -> None:
        flags = ("build", "--model", small, "--nextn", "0", "--weights", "int4", "--dry-run")
        code, out, err = invoke(*flags, "--out", tmp_path / "engine")
        assert (code, err) == (0, "")
        assert "weights would be quantised to int4; embedding and head to int8" in out
        assert "GB int4" in out
        request = BuildRequest(str(small), (0,), out=tmp_path / "engine", scheme=ENDS)
        (foreseen,) = dry_run(request, Stages()).engines
        (built,) = build(request)
        _, _, start = read_header(built.folder / WEIGHTS)
        assert foreseen.weight_file_bytes == built.manifest.files[WEIGHTS].size - start

    def test_the_baseline(
        self, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`verify` builds the nextn 0 engine with the same weights, and leaves the user's alone."""
        monkeypatch.chdir(tmp_path)
        (theirs,) = build(BuildRequest(str(small), (0,), out=Path("engines/small_n0")))
        (built,) = build(BuildRequest(str(small), (1,), scheme=build_scheme("int8", "none")))
        request = verify.VerifyRequest(built.folder, model=str(small))
        folder = verify.find_baseline(request, built.manifest, print)
        found = read_manifest(folder).build
        assert (found.nextn, found.quantised_to, found.head_weights) == (0, "int8", None)
        assert read_manifest(theirs.folder) == theirs.manifest
        fp8 = built.manifest.build.model_copy(update={"quantised_to": "fp8"})
        manifest = built.manifest.model_copy(update={"build": fp8})
        with pytest.raises(UsageError, match="fp8: target onnxruntime keeps int8, int4"):
            verify.find_baseline(request, manifest, print)


# Real engines


@pytest.mark.full
def test_engines(small: Path, tmp_path: Path) -> None:
    """A draft and none say the same: what the dequantised model says with rounded inputs."""
    request = BuildRequest(str(small), (0, 1), out=tmp_path, scheme=ENDS, **LIMITS)
    output = [texts_of(built.folder) for built in build(request)]
    assert [t.token_ids for t in output[0]] == [t.token_ids for t in output[1]]
    checkpoint = quantised(small, ENDS, tmp_path / "checkpoint")
    check_rounded(plain_with_rounding(checkpoint), PROMPTS, output[1])
    no_wide_ends(tmp_path / "small_n1_int4")


@pytest.mark.full
def test_the_programs(small: Path, tmp_path: Path) -> None:
    """They are those of the quantised checkpoint, byte for byte, and one draft changes no text."""
    (ours,) = build(BuildRequest(str(small), (1,), out=tmp_path / "a", scheme=ENDS, **LIMITS))
    checkpoint = quantised(small, ENDS, tmp_path / "checkpoint")
    none, anew = build(BuildRequest(str(checkpoint), (0, 1), out=tmp_path, **LIMITS))
    for name in (WEIGHTS, *(program.file for program in ours.manifest.programs.values())):
        assert (anew.folder / name).read_bytes() == (ours.folder / name).read_bytes()
    output = [texts_of(engine.folder) for engine in (none, ours)]
    assert [t.token_ids for t in output[0]] == [t.token_ids for t in output[1]]


def texts_of(engine: Path) -> list[TimedAnswer]:
    params = [SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)] * len(PROMPTS)
    with Engine.load(engine, threads=1) as loaded:
        return run_prompts(loaded, PROMPTS, params)


def no_wide_ends(engine: Path) -> None:
    """Embedding and head are in no graph, and in no file, as floats."""
    vocabulary = read_manifest(engine).model.vocab_size
    stored = load_file(engine / WEIGHTS)
    ends = {name: t.dtype for name, t in stored.items() if "embed_tokens" in name or "head" in name}
    ends = {name: dtype for name, dtype in ends.items() if "norm" not in name}
    assert ends == {
        f"{name}.{part}": dtype
        for name in ("embed_tokens", "lm_head")
        for part, dtype in (("values", torch.uint8), ("scales", torch.float16))
    }
    for path in engine.glob("*.onnx"):
        graph = onnx.load(path, load_external_data=False).graph
        for tensor in graph.initializer:
            wide = tensor.data_type == onnx.TensorProto.FLOAT and vocabulary in tensor.dims
            assert not wide or tensor.dims[-1] == SMALL["hidden_size"] // 32, tensor.name
        takes = {node.op_type for node in graph.node if "model.embed_tokens.values" in node.input}
        assert takes in ({"Gather"}, {"Chain"}), "a chain of operators begins with it"
