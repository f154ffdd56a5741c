"""An engine that drafts as many tokens as pay: its text is that of plain decoding all the same."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan import plan
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.state import name_module_rows
from mtpbuild.runtime.engine.adaptive import AdaptiveNextn
from mtpbuild.runtime.engine.step_times import StepSize, StepTable
from mtpbuild.runtime.files import find_user_cache
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.onnxruntime import OnnxPrograms
from tests.reference.recompute import greedy
from tests.support.engines import EngineBuilder
from tests.support.requests import build

COUNT = 60
PLAIN = SamplingParams(max_tokens=COUNT, ignore_eos=True)
CHUNK, ROWS = 4, name_module_rows(0)
HOT = replace(PLAIN, temperature=0.8, top_p=0.95, seed=5)


class Restless(AdaptiveNextn):
    """A launcher that takes another nextn in every step."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._rng = np.random.default_rng(2)

    def choose(self, left: Mapping[Any, int], size: StepSize) -> int:
        super().choose(left, size)
        assert self._last is not None
        self._last.nextn = int(self._rng.integers(self._max_nextn + 1))
        return self._last.nextn


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow one draft, which is six programs to compile; tests/builder/test_step.py has more."""
    monkeypatch.setattr(plan, "ADAPTIVE_NEXTN", 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep step times in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.full
@pytest.mark.xdist_group("predictable")
@pytest.mark.usefixtures("few")
def test_step_times_are_measured_once(predictable_engine: EngineBuilder) -> None:
    """By the first load on a machine; a damaged file is measured again."""
    folder, times = predictable_engine("auto", max_batch=3), find_user_cache() / "step-times"
    built = {*times.glob("*")}  # the build's and its probe's, with one and two threads
    Engine.load(folder, threads=3).close()
    (kept,) = {*times.iterdir()} - built
    text = kept.read_text()
    table = StepTable.model_validate_json(text)
    lists = [*table.slots.values(), table.sampled, table.long]
    assert sorted(table.slots) == [1, 2, 3]
    assert all(len(each) == 2 and min(each) > 0 for each in lists)
    Engine.load(folder, threads=3).close()
    assert kept.read_text() == text
    kept.write_text(text.replace("[", "[-1.0,", 1))
    Engine.load(folder, threads=3).close()
    assert StepTable.model_validate_json(kept.read_text()).slots.keys() == {1, 2, 3}
    Engine.load(folder, threads=4).close()
    assert len({*times.iterdir()} - built) == 2


@pytest.mark.full
@pytest.mark.xdist_group("predictable")
@pytest.mark.usefixtures("few")
def test_text_is_that_of_plain_decoding(
    predictable: PlainDeepseek, predictable_engine: EngineBuilder
) -> None:
    """Greedy, sampled and rejecting requests, alone and together."""
    folder, base = (predictable_engine(nextn, max_batch=3) for nextn in ("auto", 0))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(9, 61, n).tolist() for n in (11, 1, 6, 2)]
    plain = [PLAIN] * 4
    mixed = [PLAIN, HOT, replace(HOT, seed=6, draft_sample_method="greedy"), PLAIN]
    warm = Engine.load(folder, threads=1, warm=[HOT])
    with warm as engine, Engine.load(base, threads=1) as without:
        engine._loaded.loop._launcher = Restless(engine.manifest.build.nextn)
        for prompt, result in zip(prompts, engine.generate(prompts, plain), strict=True):
            assert result.token_ids == greedy(predictable, prompt, COUNT)
        drafting = engine.stats.speculative_decoding
        assert min(drafting.acceptance_histogram) > 0  # from none to all accepted
        for results in (
            engine.generate(prompts, mixed),
            [engine.generate(p, own) for p, own in zip(prompts, mixed, strict=True)],
        ):
            wanted = without.generate(prompts, mixed)
            assert [r.token_ids for r in results] == [r.token_ids for r in wanted]
        rejecting = replace(HOT, acceptance="rejection")
        result = engine.generate(prompts[0], rejecting)
        assert result.metrics.speculative_decoding.num_accepted_draft_tokens > 0


@pytest.mark.full
@pytest.mark.xdist_group("predictable")
@pytest.mark.usefixtures("few")
def test_drafters_are_given_what_they_missed(predictable_engine: EngineBuilder) -> None:
    """Rows and drafts after steps without drafts are those after a prompt, to the bit."""
    folder = predictable_engine("auto", max_batch=3)
    programs, fresh = load(folder), load(folder)
    rng = np.random.default_rng(4)
    known = {slot: rng.integers(9, 61, 7 - 3 * slot).tolist() for slot in (0, 1)}
    for slot, tokens in known.items():
        start(programs, slot, tokens)

    def step(nextn: int) -> None:
        programs.draft(nextn)
        active = np.array([slot in known for slot in range(3)])
        output = programs.step(active, max(map(len, known.values())) + 2)
        for slot, tokens in known.items():
            tokens += output.tokens[slot, : output.num_tokens[slot]].tolist()

    def check_drafts() -> None:
        for slot, tokens in known.items():
            start(fresh, 0, tokens[:-1])
            fresh.step(np.arange(3) == 0, len(tokens) + 2)
            assert programs.drafts(slot) == fresh.drafts(0)
            check_rows(slot, programs.state[ROWS][slot, 0])

    def check_rows(slot: int, rows: NDArray[Any], first: int = 0) -> None:
        last = len(known[slot]) - 1
        start(fresh, 0, known[slot])
        np.testing.assert_array_equal(rows[: last - first], fresh.state[ROWS][0, 0, first:last])

    for without in (3, 11, 0, 1):
        for nextn in (*[0] * without, 1):
            step(nextn)
        check_drafts()
    step(0)
    step(0)
    programs.move(1, 2)
    known[2] = known.pop(1)
    step(0)
    last = len(known[2]) - 1
    assert programs.save_rows(2, 3, [(1, last - 3)])
    check_rows(2, programs.saved(1)[ROWS], 3)
    step(0)
    known[0] = rng.integers(9, 61, 12).tolist()
    start(programs, 0, known[0])  # what an earlier request left is forgotten
    assert programs.save_rows(0, 0, [(2, 11)])
    check_rows(0, programs.saved(2)[ROWS])
    step(1)
    check_drafts()


def load(folder: Path) -> OnnxPrograms:
    programs = load_programs(folder, read_manifest(folder), threads=1)
    assert isinstance(programs, OnnxPrograms)
    return programs


def start(programs: OnnxPrograms, slot: int, tokens: list[int]) -> None:
    for at in range(0, len(tokens) - 1, CHUNK):
        programs.prefill(slot, at, np.array(tokens[at : at + CHUNK + 1]))
    programs.begin(slot, len(tokens) - 1, tokens[-1])


@pytest.mark.usefixtures("quick")
def test_building_one(smallest: Path, tmp_path: Path) -> None:
    (built,) = build(BuildRequest(str(smallest), ("auto",), out=tmp_path / "e"))
    assert (built.manifest.build.drafts, built.manifest.build.drafter) == ("0 to 5", "mtp-eagle")
    counts = ("", *(f"_{k}" for k in range(5)))
    steps = {f"{kind}{k}" for kind in ("decode", "decode_mixed") for k in counts}
    assert set(read_manifest(built.folder).programs) == {"prefill", "fill_drafter", *steps}
