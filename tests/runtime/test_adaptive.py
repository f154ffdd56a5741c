"""Choosing nextn: against the best fixed one, on drafts that are accepted by chance."""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Bools, StepOutput
from mtpbuild.runtime.engine.acceptance import LEVELS, PRIOR, AcceptanceModel
from mtpbuild.runtime.engine.adaptive import TRIAL_SHARE, AdaptiveNextn
from mtpbuild.runtime.engine.loaded import warm_up
from mtpbuild.runtime.engine.step_times import (
    SHORT,
    StepSize,
    StepTable,
    StepTableFile,
    StepTimes,
    _find_path,
    open_step_times,
)
from tests.support.fakes import FakePrograms, continuation, fake_manifest

MOST, TOKENS, SKIPPED = 5, 288, 32  # of a request; the first ones are not measured
# Seconds of a step by nextn, with that of 0 as the unit: as measured of small and large models.
TABLES = {
    "small": (1.0, 1.5, 1.7, 1.9, 2.2, 2.4),
    "mixture": (1.0, 1.45, 1.8, 2.2, 2.6, 3.0),
    "dense": (1.0, 1.08, 1.12, 1.17, 1.25, 1.3),
    "batch": (1.0, 1.7, 2.3, 3.0, 3.6, 4.2),
}
Rates = Callable[[float], tuple[float, ...]]  # of each draft, by how much of a request is over


def steady(*rates: float) -> Rates:
    return lambda share: rates * (MOST if len(rates) == 1 else 1)


KINDS: dict[str, Rates] = {
    "0": steady(0.0),
    "0.3": steady(0.3),
    "0.6": steady(0.6),
    "0.85": steady(0.85),
    "0.95": steady(0.95),
    "falling": steady(0.85, 0.7, 0.6, 0.5, 0.4),
    "0.95, then 0": lambda share: (0.95 if share < 0.5 else 0.0,) * MOST,
    "0, then 0.95": lambda share: (0.0 if share < 0.5 else 0.95,) * MOST,
}


@dataclass
class Simulation:
    """Requests that share steps of known costs; drafts are accepted by chance."""

    costs: tuple[float, ...]
    seed: int = 0
    times: StepTimes | None = None  # what is known of the costs; by default nearly all
    spread: float = 0.0  # standard deviation of the logarithm of a step's time
    tokens: int = 0
    seconds: float = 0.0
    chosen: list[int] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng, self.disk = random.Random(self.seed), random.Random(self.seed)
        known = [cost * self.rng.uniform(0.97, 1.03) for cost in self.costs]
        times = self.times or StepTimes(MOST, StepTable(slots={1: known}))
        self.chooser = AdaptiveNextn(MOST, times)

    def run(self, rates: Rates, requests: int = 1, fixed: int | None = None) -> float:
        """Run requests to their ends; return the tokens per second after SKIPPED tokens."""
        self.tokens, self.seconds, self.chosen = 0, 0.0, []
        names = [f"{self.rng.random()}" for _ in range(requests)]
        self.left, drafts = dict.fromkeys(names, TOKENS), dict.fromkeys(names, 0)
        load = StepSize(1, SHORT)
        while running := {name: left for name, left in self.left.items() if left > 0}:
            nextn = self.chooser.choose(running, load) if fixed is None else fixed
            self.chosen.append(nextn)
            seconds = self.costs[nextn] * self.rng.uniform(0.95, 1.05)
            seconds *= self.disk.lognormvariate(0.0, self.spread)
            if fixed is None:
                self.chooser.record_time(load, seconds)
            counted = max(self.left.values()) <= TOKENS - SKIPPED
            self.seconds += seconds * counted
            for name, left in running.items():
                chances, drafted = rates(1 - left / TOKENS), min(drafts[name], nextn)
                accepted = 0
                while accepted < drafted and self.rng.random() < chances[accepted]:
                    accepted += 1
                if fixed is None:
                    self.chooser.add(name, accepted, drafted)
                self.left[name] -= accepted + 1
                self.tokens += (accepted + 1) * counted
                drafts[name] = nextn
        return self.tokens / self.seconds


@cache
def fixed_speeds(table: str, kind: str) -> list[float]:
    """Return the tokens per second of each fixed nextn."""
    return [
        float(np.mean([Simulation(TABLES[table], s).run(KINDS[kind], 1, k) for s in range(6)]))
        for k in range(MOST + 1)
    ]


def speed(table: str, kind: str, before: str | None, requests: int = 1, runs: int = 4) -> float:
    """Return the mean tokens per second of simulated requests; `before` is another request's."""
    found = []
    for seed in range(runs):
        simulation = Simulation(TABLES[table], seed)
        if before is not None:
            simulation.run(KINDS[before])
        found.append(simulation.run(KINDS[kind], requests))
    return float(np.mean(found))


@pytest.mark.parametrize(
    "table",
    ["small", "mixture", *(pytest.param(t, marks=pytest.mark.full) for t in ("dense", "batch"))],
)
def test_drafts_hardly_cost(table: str) -> None:
    """Four requests of each kind: by chance, one of them may choose badly."""
    for kind in KINDS:
        fixed, found = fixed_speeds(table, kind), speed(table, kind, None)
        assert found > 0.95 * fixed[0], kind
        assert found > 0.92 * max(fixed), kind


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("before", [None, "0", "0.95"])
def test_drafts_never_cost(table: str, kind: str, before: str | None) -> None:
    """Beside nextn 0, and beside the best fixed number; the last request may have been another."""
    fixed, found = fixed_speeds(table, kind), speed(table, kind, before, runs=12)
    assert found > 0.97 * fixed[0]
    assert found > 0.95 * max(fixed)


@pytest.mark.parametrize("kind", ["0", "0.95", "falling"])
@pytest.mark.parametrize("table", ["small", "dense"])
def test_requests_that_share_steps(table: str, kind: str) -> None:
    fixed, found = fixed_speeds(table, kind), speed(table, kind, None, 4)
    assert found / 4 > 0.94 * max(fixed)


def test_faster_than_any_fixed_nextn_where_a_text_changes() -> None:
    kind = "0.95, then 0"
    assert speed("mixture", kind, None) > 1.1 * max(fixed_speeds("mixture", kind))


DEAR = tuple(1 + 0.75 * k for k in range(MOST + 1))
WRONG = {  # the true costs, what the table says, the acceptance
    "drafts three times too dear": (TABLES["dense"], (1.0, *(3 * t for t in TABLES["dense"][1:]))),
    "drafts free": (DEAR, (1.0,) * (MOST + 1)),
}


@pytest.mark.parametrize("kind", ["0", "0.6", "0.95"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("quiet", [False, True])  # a new table of steps that hardly varied
def test_a_wrong_table_is_corrected(wrong: str, kind: str, quiet: bool, kept: Path) -> None:
    """Within five requests, and without trials of what is known after a restart."""
    costs, said = WRONG[wrong]
    kept.write_text(
        StepTable(slots={1: list(said)}, measured=time.time() * quiet).model_dump_json()
    )
    best = max(
        float(np.mean([Simulation(costs, s).run(KINDS[kind], 1, k) for s in range(8)]))
        for k in range(MOST + 1)
    )
    found = dict[str, list[float]](later=[], restarted=[])
    for seed in range(4):
        simulation = Simulation(costs, seed, open_times())
        for _ in range(5):
            simulation.run(KINDS[kind])
        found["later"] += [simulation.run(KINDS[kind]) for _ in range(2)]
        simulation.chooser.close()
        found["restarted"].append(Simulation(costs, seed, open_times()).run(KINDS[kind]))
    assert np.mean(found["later"]) > 0.95 * best
    assert np.mean(found["restarted"]) > 0.95 * best


def test_uneven_steps_teach_what_drafts_cost() -> None:
    """The table is of a model in memory; experts that come from a disk make drafts dear."""
    shares, spread = list[float](), 0.5
    for kind in ("0.3", "0.6", "0.85"):
        fixed = [
            float(
                np.mean(
                    [Simulation(DEAR, s, spread=spread).run(KINDS[kind], 1, k) for s in range(16)]
                )
            )
            for k in range(MOST + 1)
        ]
        for seed in range(16):
            table = StepTable(slots={1: [*TABLES["dense"]]}, measured=time.time())
            simulation = Simulation(DEAR, seed, StepTimes(MOST, table), spread)
            for _ in range(3):
                simulation.run(KINDS[kind])
            shares.append(simulation.run(KINDS[kind]) / max(fixed))
    assert np.mean(shares) > 0.93


def test_age_and_spread_of_a_table_make_doubts() -> None:
    """Relative to nextn 0; a table whose age is not known is doubted most."""

    def doubt(**fields: Any) -> float:
        table = StepTable(slots={1: [1.0, 1.1]}, **fields)
        return float(StepTimes(1, table).doubts(0)[1])

    now = time.time()
    quiet, later = doubt(measured=now), doubt(measured=now + 1e6)  # a clock that was set back
    assert 0 < quiet == pytest.approx(later)
    assert quiet < doubt(measured=now - 4 * 86400) < doubt(measured=now, spread=0.06) < doubt()


def test_trials_lose_no_more_than_their_share() -> None:
    """A long request whose drafts are never accepted."""
    simulation = Simulation(TABLES["mixture"])
    simulation.run(KINDS["0"])
    lost = sum(TABLES["mixture"][nextn] - 1 for nextn in simulation.chosen[SKIPPED:])
    assert 0 < lost < 2 * TRIAL_SHARE * len(simulation.chosen)


def test_no_trial_at_the_end_of_a_request() -> None:
    """What it could find out would help nobody."""
    chooser = AdaptiveNextn(1, StepTimes(1, StepTable(slots={1: [1.0, 1.5]})))
    load, chosen = StepSize(1, SHORT), []
    for left in [10_000] * 400 + [2] * 400:
        chosen.append(chooser.choose({"one": left}, load))
        chooser.record_time(load, (1.0, 1.5)[chosen[-1]])
        chooser.add("one", 0, chosen[-1])
    assert 0 < chosen[100:400].count(1) < 20
    assert chosen[420:].count(1) == 0


def test_a_belief_follows_what_was_accepted() -> None:
    model, belief = AcceptanceModel(3), PRIOR
    for _ in range(30):
        belief = model.update(belief, 3, 3)
    assert belief @ LEVELS > 0.93
    for _ in range(5):  # the text changes
        belief = model.update(belief, 0, 3)
    assert belief @ LEVELS < 0.3
    assert belief.sum() == pytest.approx(1)
    sure = float(belief.max())
    for _ in range(300):
        belief = model.update(belief, 0, 0)
    assert belief.max() < sure  # nothing was seen for long


def test_requests_profit_from_what_earlier_ones_accepted() -> None:
    """A new request of a model whose drafts are never accepted tries fewer than the first did."""
    simulation = Simulation(TABLES["small"])
    tried = list[int]()
    for _ in range(8):
        simulation.run(KINDS["0"])
        tried.append(sum(simulation.chosen))
    assert np.mean(tried[4:]) < 0.6 * tried[0]
    simulation.run(KINDS["0.95"])
    assert np.mean(simulation.chosen[TOKENS // 10 :]) > 4  # and one that could gain soon does


def test_factors_of_positions_are_learnt() -> None:
    """The second of two drafts is never accepted, whatever the first."""
    model = AcceptanceModel(2)
    for _ in range(20):
        belief = PRIOR
        for _ in range(40):
            belief = model.update(belief, 1, 2)
    _, one, two = belief @ model.tokens
    assert one > 1.85
    assert two - one < 0.2


def test_step_times_are_interpolated_and_follow_the_machine() -> None:
    table = StepTable(slots={1: [1.0, 2.0], 4: [4.0, 5.0]}, sampled=[1.5, 3.0], long=[2.0, 4.0])
    times = StepTimes(1, table, SHORT + 100)
    assert times.seconds(StepSize(1, SHORT)) == pytest.approx([1, 2])
    assert times.seconds(StepSize(2, SHORT)) == pytest.approx([2, 3])
    assert times.seconds(StepSize(1, SHORT + 50)) == pytest.approx([1.5, 3])
    assert times.seconds(StepSize(4, 4 * SHORT, sampling=4)) == pytest.approx([6, 9])
    load = StepSize(1, SHORT)
    times.correct(load, 0, 1e6)  # an interruption
    assert times.seconds(load) == pytest.approx([1, 2], rel=0.1)
    for _ in range(100):
        times.correct(load, 1, 4.0)
    assert times.seconds(load) == pytest.approx([2, 4], rel=0.15)


def test_a_disturbed_measurement_hardly_moves_the_others() -> None:
    short, sampled = [1.0, 1.5, 1.7, 1.9, 2.2, 2.4], [0.1, 0.2, 0.3, 0.4, 0.5, 5.0]
    table = StepTable(
        slots={1: short}, sampled=[a + b for a, b in zip(short, sampled, strict=True)]
    )
    found = StepTimes(5, table).seconds(StepSize(1, SHORT, sampling=1)) - np.array(short)
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])


def test_step_times_are_measured_once_and_kept(kept: Path) -> None:
    """The slots stay free."""
    programs = FakePrograms(manifest := adaptive_manifest())
    open_step_times(programs, manifest, 1, 60.0)
    text, steps = kept.read_text(), programs.steps
    table = StepTable.model_validate_json(text)
    assert all(len(each) == MOST + 1 for each in (table.slots[1], table.sampled, table.long))
    assert time.time() - 600 < table.measured <= time.time()
    assert 0 <= table.spread < 100
    assert set(programs.told) == {*range(MOST + 1)}
    open_step_times(programs, manifest, 1, 60.0)
    assert (kept.read_text(), programs.steps) == (text, steps)
    open_step_times(programs, manifest, 2, 0.0)  # another number of threads, and no time
    assert programs.steps == steps


GOOD = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
DAMAGED: dict[str, dict[str, Any]] = {
    "empty list": {"slots": {"1": []}},
    "number missing": {"slots": {"1": GOOD[1:]}},
    "NaN": {"slots": {"1": [*GOOD[1:], math.nan]}},
    "infinite": {"long": [*GOOD[1:], math.inf]},
    "integer beyond floats": {"slots": {"1": [*GOOD[1:], 10**400]}},
    "long integer": {"measured": 10**400},
    "sums overflow": {"slots": {"1": [1e308] * 6}},
    "falling": {"slots": {"1": GOOD[::-1]}},
    "negative": {"slots": {"1": [-1.0, *GOOD[1:]]}},
    "denormal": {"slots": {"1": [5e-324] * 6}},
    "slots of another engine": {"slots": {"1": GOOD, str(2**70): GOOD}},
    "no slots": {"slots": {"0": GOOD}},
    "text": {"slots": {"1": ["1.0", *GOOD[1:]]}},
    "factor of 0": {"factors": [0.0] * 6},
    "factors missing": {"factors": [1.0]},
    "NaN as the spread": {"spread": math.nan},
    "negative spread": {"spread": -1.0},
    "unknown key": {"speed": 1.0},
}
TEXTS = {
    "no text": b"",
    "brace": b"{",
    "list": b"[]",
    "bytes": b"\xff\xfe\x00",
    "nested": b"[" * 10**5,
}


@pytest.mark.parametrize("name", [*DAMAGED, *TEXTS])
def test_a_damaged_table_is_measured_anew(name: str, kept: Path) -> None:
    manifest = adaptive_manifest()
    whole: dict[str, Any] = {"slots": {"1": GOOD}, "sampled": GOOD, "long": GOOD}
    damaged = json.dumps(whole | DAMAGED.get(name, {})).encode()
    kept.write_bytes(TEXTS.get(name, damaged))
    programs = FakePrograms(manifest)
    times = open_step_times(programs, manifest, 1, 60.0)
    assert programs.steps > 100
    assert StepTable.model_validate_json(kept.read_text()).fits(MOST, 1)
    engine = Engine(programs, manifest, step_times=times)
    result = engine.generate([5, 6, 7], SamplingParams(max_tokens=99, ignore_eos=True))
    assert result.token_ids == continuation([5, 6, 7], 99)
    assert result.metrics.speculative_decoding.num_accepted_draft_tokens > 0


def test_a_refuted_table_is_measured_again_while_idle(kept: Path) -> None:
    """In steps between which requests are answered; an hour a step is what the table says."""
    manifest = adaptive_manifest()
    said = StepTable(slots={1: [3600.0] * 6}, sampled=GOOD, long=GOOD)
    kept.write_text(said.model_dump_json())
    programs = FakePrograms(manifest)
    engine = Engine(programs, manifest, step_times=open_step_times(programs, manifest, 1, 60.0))
    request, loop = SamplingParams(max_tokens=40, ignore_eos=True), engine._loaded.loop
    engine.generate([5, 6, 7], replace(request, max_tokens=1))
    assert not loop.idle_work
    while not loop.idle_work:
        engine.generate([5, 6, 7], request)
    for _ in range(20):
        loop.step()
    assert engine.generate([5, 6, 7], request).token_ids == continuation([5, 6, 7], 40)
    assert loop.idle_work

    async def wait() -> None:  # asyncio's thread goes on without requests
        async for _ in engine.astream([5, 6, 7], request):
            pass
        while loop.idle_work:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(wait(), 60))
    table = StepTable.model_validate_json(kept.read_text())
    assert max(table.slots[1]) < 3600
    assert not table.factors
    engine.close()


def test_a_measurement_that_fails_ends_no_request(
    kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    programs, times = FakePrograms(adaptive_manifest()), open_times()
    for _ in range(100):
        times.correct(StepSize(1, SHORT), 0, 1e3)
    assert times.refuted
    programs.fail = RuntimeError("out of memory")
    times.measure_again(programs)
    assert "out of memory" in caplog.text
    assert not times.refuted


def test_without_a_home_folder_step_times_are_measured_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container whose user is not in its passwd."""

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    programs = FakePrograms(manifest := adaptive_manifest())
    open_step_times(programs, manifest, 1, 60.0)
    assert programs.steps
    assert "no home folder: set XDG_CACHE_HOME" in caplog.text


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the step times of `adaptive_manifest`, in an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = _find_path(adaptive_manifest(), 1)
    path.parent.mkdir(parents=True)
    return path


def open_times() -> StepTimes:
    """Return the kept step times; measure nothing."""
    file = StepTableFile(adaptive_manifest(), 1)
    return StepTimes(MOST, file.read(), file=file)


def adaptive_manifest() -> Manifest:
    manifest = fake_manifest(nextn=MOST, max_seq_len=1000)
    build = manifest.build.model_copy(update={"adaptive": True})
    return manifest.model_copy(update={"build": build})


class RecordedPrograms(FakePrograms):
    """Fake programs that record what begins and what each step drafts."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self.calls = list[str]()

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
        self.calls.append("begin")
        super().begin(slot, length, newest, controls)

    def step(self, active: Bools, rows: int) -> StepOutput:
        self.calls.append(f"step of {self.window - 1}")
        return super().step(active, rows)


def test_a_load_runs_what_a_first_request_would_wait_for() -> None:
    """The step with one draft goes on from the one without, so that the drafter is filled in."""
    programs = RecordedPrograms(manifest := adaptive_manifest())
    warm_up(programs, manifest, [SamplingParams()])
    steps = [["begin", f"step of {nextn}"] for nextn in range(MOST + 1)]
    steps[1].remove("begin")
    assert programs.calls == [call for calls in steps for call in calls]


def test_slots_that_sample_are_counted_for_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that run the mixed program, as with `logprobs`, take the time of greedy ones."""
    sizes, choose = list[StepSize](), AdaptiveNextn.choose

    def record(self: AdaptiveNextn, left: Mapping[Any, int], size: StepSize) -> int:
        sizes.append(size)
        return choose(self, left, size)

    monkeypatch.setattr(AdaptiveNextn, "choose", record)
    engine = Engine(FakePrograms(manifest := adaptive_manifest()), manifest)
    engine.generate([5, 6, 7], SamplingParams(max_tokens=8, logprobs=1, ignore_eos=True))
    assert {size.sampling for size in sizes} == {0}
    sizes.clear()
    engine.generate([5, 6, 7], SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True))
    assert {size.sampling for size in sizes} == {1}


def test_an_engine_without_measured_times_guesses_and_counts_what_it_drafted() -> None:
    manifest = adaptive_manifest()
    programs = FakePrograms(manifest, draft_is_right=lambda position: position % 3 != 0)
    engine = Engine(programs, manifest)
    prompt = [5, 6, 7]
    result = engine.generate(prompt, SamplingParams(max_tokens=400, ignore_eos=True))
    assert result.token_ids == continuation(prompt, 400)
    drafting = result.metrics.speculative_decoding
    assert drafting.num_spec_tokens == MOST
    assert drafting.num_draft_tokens == sum(
        min(before, now) for before, now in zip((0, *programs.told), programs.told, strict=False)
    )
