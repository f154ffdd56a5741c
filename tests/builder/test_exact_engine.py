"""Engines with our kernels: a result depends on tokens and weights alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.targets.onnxruntime import exact
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.lab.measure import checks
from mtpbuild.runtime import Engine, SamplingParams, cpu_library
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.cpu_library import LAYOUT
from mtpbuild.runtime.errors import BuildError, EngineError, MissingDependencyError, UsageError
from mtpbuild.runtime.programs import onnxruntime
from tests.support.checkpoints import QUANTIZABLE, random_checkpoint
from tests.support.exact_engines import HEAD, said, same, save
from tests.support.isas import isas
from tests.support.requests import build

pytestmark = pytest.mark.xdist_group("exact")  # another worker would build the engines anew
FULL: Any = pytest.mark.full
KINDS = [  # model, weights, caches
    ("many", "int4", "float32"),
    *(
        pytest.param(kind, marks=FULL)
        for kind in [
            ("many", "float32", "float32"),
            ("glm-4.6", "int8", "bfloat16"),
            ("few", "int8", "int8"),
            *(("qwen3-next", weights, "float32") for weights in ("int8", "int4")),
            *((name, "int4", "int8") for name in ("many", "glm-4.6", "mimo", "qwen3.5")),
            ("many", "int4", "bfloat16"),
            ("few", "int4", "float32"),
            ("few", "float32", "float32"),
            ("few", "int8", "bfloat16"),
            ("glm-4.6", "int8", "float32"),
            *((name, "float32", "float32") for name in ("mimo", "qwen3.5", "glm-5")),
            *((name, "int4", "float32") for name in ("mimo", "qwen3.5")),
            ("glm-5", "int4", "bfloat16"),
            ("gemma4-dense", "int4", "int8"),
            ("gemma4-mixture", "int4", "float32"),
            ("gemma4-small", "int8", "bfloat16"),
            ("deepseek-v4", "float32", "float32"),
            ("deepseek-v4", "int4", "bfloat16"),
            ("deepseek-v4-dspark", "int8", "bfloat16"),
        ]
    ),
]
PARAMS = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1)
TEXTS = 44  # 20,000 tokens of three kinds of engines, played in three ways


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Alone and without drafts; three at once with drafts, prompts in small pieces."""
    torch.set_num_threads(1)
    (name, weights, caches), place = request.param, tmp_path_factory.mktemp("exact")
    folder = save(place / "model", name)
    scheme = None if weights == "float32" else build_scheme(weights)
    options = {"cache_dtype": caches}
    head = place / HEAD
    mtp = head if head.is_dir() else None
    whole = BuildRequest(
        str(folder), max_seq_len=160, scheme=scheme, out=place / "alone", options=options, mtp=mtp
    )
    requests = (
        replace(whole, nextn=(0,), prefill_chunk=64),
        replace(whole, nextn=(1,), prefill_chunk=5, max_batch=3, out=place / "many"),
    )
    return [built.folder for each in requests for built in build(each)]


@pytest.mark.parametrize("count", [12, pytest.param(TEXTS, marks=FULL)])
def test_alone_or_beside_others(engines: Sequence[Path], count: int) -> None:
    """Drafts, neighbours, pieces of a prompt and threads change no bit."""
    alone, many = engines
    wanted = said(alone, count, at_once=False)
    assert same(said(many, count, at_once=True), wanted)
    assert same(said(many, count, at_once=False, threads=2), wanted)


def test_prefixes(engines: Sequence[Path]) -> None:
    """A prompt that goes on from rows of another one says what it says from a cold start."""
    _, many = engines
    prompt = [5, 9, 40, 11, 3]
    with (
        Engine.load(many, threads=1, prefix_cache=True) as warm,
        Engine.load(many, threads=1, prefix_cache=False) as cold,
    ):
        for _ in range(5):
            one, other = (engine.generate(prompt, PARAMS) for engine in (warm, cold))
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs
            prompt = [*prompt, *one.token_ids, 7]


@pytest.mark.full
def test_int8_rows_on_disk(tmp_path: Path) -> None:
    """A process that reads rows which another one kept says what it says from a cold start."""
    folder, options = save(tmp_path / "model", "few"), {"cache_dtype": "int8"}
    asked = BuildRequest(str(folder), nextn=(1,), max_seq_len=160, scheme=build_scheme("int8"))
    (built,) = build(replace(asked, out=tmp_path / "engine", options=options))
    found, warm = list[Any](), {"prefix_cache": True, "prefix_cache_dir": tmp_path / "kept"}
    for how in ({"prefix_cache": False}, warm, warm):
        with Engine.load(built.folder, threads=1, **how) as engine:
            found.append(engine.generate([5, 9, 40, 11, 3] * 20, PARAMS))
    assert [each.metrics.cached_tokens > 0 for each in found] == [False, False, True]
    assert [each.token_ids for each in found] == 3 * [found[0].token_ids]
    assert [each.logprobs for each in found] == 3 * [found[0].logprobs]


def test_instruction_sets(engines: Sequence[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits by plain C++, AVX2 and AVX-512, as far as this machine has them."""
    if isas() == ["plain"]:
        pytest.skip("this machine has no other instruction set")
    found = []
    for isa in isas():
        monkeypatch.setenv("MTPBUILD_CPU_ISA", isa)
        found.append(said(engines[1], 4, at_once=True))
    assert all(same(each, found[0]) for each in found[1:])


@pytest.mark.full
def test_the_other_compiler(
    engines: Sequence[Path], zig_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that zig's compiler makes says the same."""
    wanted = said(engines[1], 4, at_once=True)
    monkeypatch.setattr(onnxruntime, "find_library_for", lambda *_: zig_library)
    assert same(said(engines[1], 4, at_once=True), wanted)


def test_the_manifest_says_what_it_is(engines: Sequence[Path]) -> None:
    builds = [read_manifest(engine).build for engine in engines]
    assert {build.cpu_layout for build in builds} == {LAYOUT}
    assert all(build.exact for build in builds)


def test_a_build_probes_its_engine(engines: Sequence[Path]) -> None:
    alone, many = (read_manifest(engine).build.probed for engine in engines)
    steps, chunks, batch = checks.PROBES
    assert (alone, many) == ((steps, chunks), (steps, chunks, batch))


@pytest.mark.full
def test_a_probe_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is: here another model's engine speaks in place of the one in other chunks."""
    folder = save(tmp_path / "model", "few")
    wanted = BuildRequest(str(folder), nextn=(0,), max_seq_len=160, out=tmp_path / "engine")
    stranger = random_checkpoint(tmp_path / "stranger", **QUANTIZABLE)
    (other,) = build(replace(wanted, model=str(stranger), out=tmp_path / "other"))
    monkeypatch.setattr(checks, "reload_engine", lambda *given, **_: Engine.load(other.folder))
    differs = "prompt chunks and threads change nothing, but: text 0, token 0: "
    with pytest.raises(BuildError, match=f"--exact: engine: {differs}"):
        build(replace(wanted, exact=True))
    assert not wanted.out.exists()  # type: ignore[union-attr]
    (built,) = build(wanted)
    assert (built.manifest.build.exact, built.manifest.build.probed) == (False, ())
    assert f"note: engine is not exact: {differs}" in caplog.text

    def broken(*given: object, **options: object) -> Engine:
        raise EngineError("it is damaged")

    monkeypatch.setattr(checks, "reload_engine", broken)
    with pytest.raises(BuildError, match="--exact: engine: it was not probed: it is damaged"):
        build(replace(wanted, exact=True, force=True))


@pytest.mark.full
def test_an_operator_that_nobody_has_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with one is not called exact, and --exact refuses it by the operator's name."""
    folder = save(tmp_path / "model", "few")
    monkeypatch.delitem(exact.ALLOWED, "Clip")
    wanted = BuildRequest(str(folder), nextn=(1,), max_seq_len=160, out=tmp_path / "engine")
    with pytest.raises(BuildError, match=r"--exact: engine: operators .* probed: Clip$"):
        build(replace(wanted, exact=True))
    assert not wanted.out.exists()  # type: ignore[union-attr]
    (built,) = build(wanted)
    assert not built.manifest.build.exact


def test_rows_that_an_indexer_reads(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "glm-5")
    options, scheme = {"cache_dtype": "int8"}, build_scheme("int8")
    wanted = BuildRequest(str(folder), scheme=scheme, out=tmp_path / "engine", options=options)
    with pytest.raises(UsageError, match=r"--cache-dtype int8: .* can't be int8: use bfloat16$"):
        build(wanted)
    assert not wanted.out.exists()  # type: ignore[union-attr]


def test_refusals(engines: Sequence[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "LAYOUT", "panels64")
    with pytest.raises(EngineError, match=r"are panels32.13, .* panels64; build it again, or upgr"):
        Engine.load(engines[0], prefix_cache=False)
    monkeypatch.undo()
    monkeypatch.setattr(cpu_library, "FILE", "nothing.so")
    with pytest.raises(MissingDependencyError, match="not built here: install m"):
        Engine.load(engines[0], prefix_cache=False)
    with pytest.raises(MissingDependencyError, match="not built here: install m"):
        build(BuildRequest("deepseek-tiny", nextn=(0,), out=engines[0].parent / "none"))
