"""The built ONNX engine: oracles O2, O3 and O7 through onnxruntime, and what its graphs hold."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import EngineError, MissingDependencyError, UsageError, advise_install
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.host_slots import ROW_STEP
from mtpbuild.runtime.programs.onnxruntime import OnnxPrograms
from tests.reference.recompute import greedy
from tests.reference.sampling import check_texts
from tests.support.engines import EngineBuilder, greedy_ids
from tests.support.fake_target import greedy_only
from tests.support.forced import check_programs

pytestmark = pytest.mark.xdist_group("predictable")  # another worker would wait for the engines
CHUNK = 4
Kind = tuple[int, str | None]
KINDS: list[Any] = [(0, None), (3, "mtp-vanilla")]
EAGLE = pytest.param((3, "mtp-eagle"), marks=pytest.mark.full)


def load(engine: Path) -> OnnxPrograms:
    programs = load_programs(engine, read_manifest(engine), threads=1)
    assert isinstance(programs, OnnxPrograms)
    return programs


def portable_engine(build: EngineBuilder, nextn: int = 0, drafter: str | None = None) -> Path:
    """Build one for greedy requests."""
    with greedy_only():
        return build(nextn, drafter, portable=True)


@pytest.mark.parametrize("kind", [*KINDS, EAGLE])
def test_every_step_equals_recomputation(
    kind: Kind, predictable: PlainDeepseek, predictable_engine: EngineBuilder
) -> None:
    check_programs(load(predictable_engine(*kind)), predictable, *kind, CHUNK)


@pytest.mark.parametrize("kind", [KINDS[1], EAGLE, pytest.param(KINDS[0], marks=pytest.mark.full)])
def test_batches_equal_single_requests(
    kind: Kind, predictable: PlainDeepseek, predictable_engine: EngineBuilder
) -> None:
    """O7: more requests than slots, of all lengths; slots are left and taken at different steps."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 61, n).tolist() for n in (150, 1, 6, 2, 40, 13, 3)]
    counts = [5, 60, 17, 40, 3, 90, 11]
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in counts]
    with Engine.load(predictable_engine(*kind, max_batch=3), threads=1) as loaded:
        check_texts(loaded, predictable, prompts, params)


def test_an_engine_fills_its_capacity(vanilla: Engine, predictable: PlainDeepseek) -> None:
    """The last step before max_seq_len stays within the caches and the text ends there."""
    prompt = [5 + i % 50 for i in range(vanilla.manifest.build.max_seq_len - 30)]
    result = vanilla.generate(prompt, SamplingParams(max_tokens=999, ignore_eos=True))
    assert result.finish_reason == "length"
    assert list(result.token_ids) == greedy(predictable, prompt, 30)


def test_a_step_costs_what_is_used(predictable_engine: EngineBuilder) -> None:
    """The programs are given the rows in use, whatever the capacity."""
    engine = predictable_engine(0)
    assert read_manifest(engine).build.max_seq_len > ROW_STEP
    programs = load(engine)
    programs.begin(0, 0, 5)
    programs.step(np.array([True]), 1)
    assert programs.state["kv.0"].shape == (1, 1, ROW_STEP, 20)


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_move_with_their_slots(batch: int, predictable_engine: EngineBuilder) -> None:
    """Growing and shrinking the bound rows keeps every committed row."""
    nextn = 0 if batch == 1 else 3  # others build them too
    programs = load(predictable_engine(nextn, max_batch=batch))
    cache = programs.state["kv.0"]
    assert cache.shape[2] == 0
    active = np.zeros(batch, np.bool_)
    programs.step(active, 100)
    for slot in range(batch):
        programs.state["kv.0"][slot, 0, :50] = slot + 1
    for rows in (100, 130, 200, 257, 60, 100):
        programs.step(active, rows)
        for slot in range(batch):
            assert (programs.state["kv.0"][slot, 0, :50] == slot + 1).all()


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.full), EAGLE])
def test_graphs(kind: Kind, predictable_engine: EngineBuilder, tmp_path: Path) -> None:
    """Standard operators, one write per cache, no weight inside, nothing of the build machine."""
    built = portable_engine(predictable_engine, *kind)
    engine = shutil.copytree(built, tmp_path / "engine")  # onnx refuses hard-linked weights
    caches = [s.name for s in read_manifest(engine).state if s.role == "rows"]
    for file in ("prefill.onnx", "decode.onnx"):
        onnx.checker.check_model(engine / file, full_check=True)
        model = onnx.load(engine / file, load_external_data=False)
        assert {node.domain for node in model.graph.node} == {""}
        ranges = [node for node in model.graph.node if node.op_type == "Range"]
        assert len(ranges) <= 2, "the layers share one mask"
        writes = [node for node in model.graph.node if node.op_type == "TensorScatter"]
        assert sorted(w.input[0] for w in writes) == sorted(caches)
        assert sorted(w.output[0] for w in writes) == sorted(f"{c}.out" for c in caches)
        inline = [i for i in model.graph.initializer if not i.external_data]
        assert sum(len(i.raw_data) for i in inline) < 4096
        text = (engine / file).read_bytes()
        assert str(Path(__file__).parents[2]).encode() not in text


def test_caches_are_updated_in_place(predictable_engine: EngineBuilder) -> None:
    """The step writes the very memory that was bound: no second cache, no copy back."""
    programs = load(predictable_engine(0))
    programs.begin(0, 3, 7)
    programs.step(np.array([True]), 4)
    cache = programs.state["kv.0"]
    address, before = cache.__array_interface__["data"][0], cache.copy()
    programs.step(np.array([True]), 5)
    assert programs.state["kv.0"].__array_interface__["data"][0] == address
    changed = np.flatnonzero((cache != before).any(axis=(0, 1, 3)))
    assert changed.tolist() == [4]


def test_threads_stop_with_a_run(predictable_engine: EngineBuilder) -> None:
    programs = load(predictable_engine(0))
    for session in programs._sessions.values():
        options = session.get_session_options()
        assert options.get_session_config_entry("session.force_spinning_stop") == "1"


def test_attention_has_a_floor(predictable_engine: EngineBuilder) -> None:
    """Every softmax over rows is of a maximum, `floored_softmax`, in prompts as in steps."""
    folder = portable_engine(predictable_engine)
    for program in ("prefill", "decode"):
        graph = onnx.load(folder / f"{program}.onnx", load_external_data=False).graph
        made = {name: node.op_type for node in graph.node for name in node.output}
        inputs = [made[node.input[0]] for node in graph.node if node.op_type == "Softmax"]
        assert inputs
        assert set(inputs) == {"Max"}


@pytest.mark.parametrize("also", [(), pytest.param(((3, "mtp-eagle"),), marks=pytest.mark.full)])
def test_engines_of_one_checkpoint_agree(
    also: Sequence[Kind], predictable_engine: EngineBuilder
) -> None:
    """O2 with natural drafts, through the run time."""
    rng = np.random.default_rng(11)
    prompts = [rng.integers(0, 61, n).tolist() for n in (1, 2, 3, 5, 8, 13)]
    texts = [greedy_ids(predictable_engine(*kind), prompts, 100) for kind in (*KINDS, *also)]
    assert texts[1:] == texts[:-1]


@pytest.mark.parametrize(
    ("provider", "available", "error", "says"),
    [
        ("tpu", ["CPUExecutionProvider"], UsageError, "tpu is unknown; known: cpu, cuda"),
        (
            "cuda",
            ["CPUExecutionProvider"],
            MissingDependencyError,
            advise_install("onnxruntime-gpu"),
        ),
        ("cuda", ["CUDAExecutionProvider"], EngineError, "can't hold the caches, "),
    ],
)
def test_providers_that_are_not_there(
    provider: str,
    available: list[str],
    error: type[Exception],
    says: str,
    predictable_engine: EngineBuilder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = portable_engine(predictable_engine)
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: available)
    with pytest.raises(error, match=re.escape(says)):
        Engine.load(engine, provider=provider)
