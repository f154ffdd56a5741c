"""A prompt that begins with another one's rows: tokens and drafts are a cold start's.

Each bug below breaks one thing that this rests on, and the oracle must find it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mtpbuild.builder.models.deepseek_v3.reference import Transformer
from mtpbuild.builder.plan import DrafterName, Plan
from mtpbuild.runtime.contract.controls import GREEDY, Controls
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.programs import Bools, Ints, StepOutput
from mtpbuild.runtime.loop import Loop
from mtpbuild.runtime.prefixes import Placement, Prefixes
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.host_slots import PackedCaches
from mtpbuild.runtime.request import FinishReason, Request
from mtpbuild.runtime.sampling import SamplingParams
from mtpbuild.runtime.scheduler import Scheduler
from tests.reference.eager import EagerPrograms
from tests.support.checkpoints import lower
from tests.support.engines import EngineBuilder
from tests.support.fakes import fake_manifest

pytestmark = pytest.mark.xdist_group("predictable")  # another worker would wait for the engine
NEXTN, SLOTS, VOCABULARY = 3, 3, 61
DRAFTERS: tuple[DrafterName | None, ...] = (None, "mtp-eagle", "mtp-vanilla")
COMMON = (1, 3, 4, 5, 9, 12, 19, 23, 26, 27, 28)  # of 27 rows; the prompt has 20 tokens
Steps = list[tuple[list[int], list[int], list[float]]]  # window, emitted tokens, their margins
# How the oracle's messages begin; a planted bug is caught by one of them and by nothing else.
WARM = "a warm start differs from a cold one"
FILLED = "the number of rows that were filled in differs"


class Counted:
    """Programs whose chunks are counted, in rows."""

    def __init__(self, programs: Any) -> None:
        self._own, self.rows, self.lookahead = programs, 0, programs.lookahead
        self.features = programs.features & {Feature.KEEP}

    def check_rows(self, wanted: int) -> None:
        assert self.rows == wanted, f"{FILLED}: {self.rows}, not {wanted}"

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self.rows += len(tokens) - self.lookahead
        self._own.prefill(slot, start, tokens)

    def begin(self, slot: int, length: int, newest: int, controls: Controls = GREEDY) -> None:
        self._own.begin(slot, length, newest, controls)

    def move(self, source: int, target: int) -> None:
        self._own.move(source, target)

    def clear(self, slot: int) -> None:
        self._own.clear(slot)

    def copy(self, source: int, target: int, rows: int) -> None:
        self._own.copy(source, target, rows)

    def swap(self, source: int, target: int) -> None:
        self._own.swap(source, target)

    def step(self, active: Bools, rows: int) -> StepOutput:
        output: StepOutput = self._own.step(active, rows)
        return output


class Noted:
    """Notes a request's steps."""

    def __init__(self) -> None:
        self.steps: Steps = []

    def step(self, request: Request, output: StepOutput, slot: int) -> None:
        window = output.window[slot, : 1 + output.num_drafts[slot]]
        n = output.num_tokens[slot]
        emitted, margins = output.tokens[slot, :n], output.margins[slot, :n]
        self.steps.append((window.tolist(), emitted.tolist(), margins.tolist()))

    def end(self, request: Request, reason: FinishReason) -> None:
        """Note nothing of the end."""


def check_same(steps: Steps, wanted: Steps, where: str) -> None:
    """Tokens and drafts are equal, margins nearly: a row that is a little wrong shows there."""
    assert len(steps) == len(wanted), f"{WARM}: {where}, {len(steps)} steps, not {len(wanted)}"
    for (window, emitted, margins), other in zip(steps, wanted, strict=True):
        assert (window, emitted) == other[:2], f"{WARM}: {where}"
        np.testing.assert_allclose(margins, other[2], atol=1e-3, err_msg=f"{WARM}: {where}")


class Service:
    """A loop over programs of a real model, and what its requests get."""

    def __init__(self, programs: Any, chunk: int = 4, *, warm: bool = True) -> None:
        self.programs = Counted(programs)
        nextn = NEXTN if programs.lookahead else 0
        self.manifest = fake_manifest(
            nextn=nextn, max_batch=SLOTS, max_seq_len=200, prefill_chunk=chunk, eos=()
        )
        self.loop = Loop(self.programs, self.manifest, prefix_cache=warm)

    def ask(self, prompt: Sequence[int], count: int) -> tuple[Request, Steps]:
        noted, params = Noted(), SamplingParams(max_tokens=count, ignore_eos=True)
        request = Request(list(prompt), params, self.manifest, None, observer=noted)
        self.loop.scheduler.add(request)
        return request, noted.steps

    def run(self) -> None:
        while self.loop.scheduler.waiting or self.loop.scheduler.admitted:
            self.loop.step()

    def answer(self, prompt: Sequence[int], count: int = 8) -> Steps:
        _, steps = self.ask(prompt, count)
        self.run()
        return steps


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(9, VOCABULARY, count).tolist()


def eager(predictable: Transformer, drafter: DrafterName | None) -> EagerPrograms:
    torch.set_num_threads(1)
    plan = Plan(predictable.config, NEXTN if drafter else 0, drafter, SLOTS, 200, 4)
    return EagerPrograms(plan, lower(predictable))


def check_branches(predictable: Transformer, drafter: DrafterName | None, chunk: int) -> None:
    """A second prompt that has the first c tokens of what was said before, for many c."""
    programs = eager(predictable, drafter)
    prompt, ahead = tokens(1, 20), programs.lookahead
    cold = Service(programs, chunk, warm=False)
    said = [t for _, emitted, _ in cold.answer(prompt, 8) for t in emitted]
    known = prompt + said[:8]  # the last one has no row
    for c in COMMON:
        second = known[:c] + [(t + 1 - 9) % 52 + 9 for t in known[c:]][:2] + tokens(c, 1)
        wanted = cold.answer(second)
        service = Service(programs, chunk)
        service.answer(prompt)
        service.programs.rows = 0
        check_same(service.answer(second), wanted, f"{c} tokens in common")
        reused = max(0, min(c, 27, len(second) - 1) - ahead)
        service.programs.check_rows(len(second) - 1 - reused)
    again = Service(programs, chunk)
    wanted = again.answer(prompt)
    again.programs.rows = 0
    check_same(again.answer(prompt), wanted, "the same prompt")
    again.programs.check_rows(ahead)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("chunk", [4, 100])
def test_branches(predictable: Transformer, drafter: DrafterName | None, chunk: int) -> None:
    check_branches(predictable, drafter, chunk)


class Traffic:
    """Requests that come and go; in the end each must have got what it gets alone."""

    def __init__(self, programs: Any) -> None:
        self.service, self.cold = Service(programs), Service(programs, warm=False)
        self.asked: list[tuple[list[int], int, Request, Steps]] = []

    def ask(self, prompt: list[int], count: int) -> Request:
        request, steps = self.service.ask(prompt, count)
        self.asked.append((prompt, count, request, steps))
        return request

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.service.loop.step()

    def ended(self, request: Request) -> None:
        while not request.ended:
            self.service.loop.step()

    def go_on(self, request: Request) -> None:
        """The conversation's next turn, to its end.

        Three tokens have no rows yet, and the last of them needs none.
        """
        programs = self.service.programs
        before = programs.rows
        self.ended(self.ask([*request.prompt, *request.token_ids, 33, 34], 6))
        programs.check_rows(before + 2 + programs.lookahead)

    def check(self) -> None:
        self.service.run()
        for prompt, count, request, steps in self.asked:
            wanted = self.cold.answer(prompt, count)
            check_same(steps, wanted[: len(steps)], f"{len(prompt)} and {count} tokens")
            assert len(steps) == len(wanted) or request.finish_reason == "cancelled"
        assert self.service.programs.rows < self.cold.programs.rows


def a_gap_is_closed(traffic: Traffic) -> None:
    """The first of two ends: the other one takes its slot, where its rows were."""
    first, second = traffic.ask(tokens(1, 20), 40), traffic.ask(tokens(2, 25), 60)
    traffic.ended(first)
    traffic.steps(3)
    traffic.go_on(first)
    traffic.ended(second)
    traffic.go_on(second)


def the_layout_grows(traffic: Traffic) -> None:
    """One of two that run outgrows the rows that both have; a third one's are kept meanwhile."""
    kept = traffic.ask(tokens(3, 60), 4)
    traffic.ended(kept)
    both = traffic.ask(tokens(2, 100), 60), traffic.ask(tokens(1, 20), 60)
    for request in (*both, kept):
        traffic.ended(request)
    for request in (kept, *both):
        traffic.go_on(request)


def a_prompt_is_cancelled(traffic: Traffic) -> None:
    """It is cancelled between its chunks, as others run; what it had filled in is used."""
    running = traffic.ask(tokens(5, 6), 60)
    traffic.steps(2)
    late = traffic.ask(tokens(6, 40), 5)
    traffic.steps(5)
    traffic.service.loop.scheduler.cancel(late)
    traffic.steps(1)
    traffic.ended(traffic.ask(late.prompt, 8))
    traffic.ended(running)


def a_prompt_comes_where_two_ended(traffic: Traffic) -> None:
    """It replaces the older rows; those of the other, which steps computed too, stay."""
    first = traffic.ask(tokens(1, 9), 90)
    second, third = traffic.ask(tokens(2, 12), 4), traffic.ask(tokens(3, 30), 9)
    traffic.ended(second)
    traffic.ended(third)
    traffic.ended(traffic.ask(tokens(4, 12), 4))
    traffic.go_on(third)
    traffic.ended(first)


def some_share_their_beginning(traffic: Traffic) -> None:
    """They come at once: the later ones begin with a copy of the rows of one that runs."""
    for n in range(4):
        traffic.ask([*tokens(7, 30), 40 + n, 41], 12)


STORIES = (
    a_gap_is_closed,
    the_layout_grows,
    a_prompt_is_cancelled,
    a_prompt_comes_where_two_ended,
    some_share_their_beginning,
)


def check_traffic(programs: Any) -> None:
    for story in STORIES:
        traffic = Traffic(programs)
        story(traffic)
        traffic.check()


@pytest.fixture
def vanilla(predictable_folder: Any, build_engine: EngineBuilder) -> Any:
    engine = build_engine(
        predictable_folder, NEXTN, "mtp-vanilla", prefill_chunk=4, max_batch=SLOTS
    )
    return load_programs(engine, read_manifest(engine), threads=1)


def test_traffic_on_an_engine(vanilla: Any) -> None:
    check_traffic(vanilla)


@pytest.mark.full
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_traffic(predictable: Transformer, drafter: DrafterName | None) -> None:
    check_traffic(eager(predictable, drafter))


Patch = Callable[[pytest.MonkeyPatch], None]


def modules_rows_end_with_the_main_ones(patch: pytest.MonkeyPatch) -> None:
    """Row c - 1 of a module has seen token c: not the new prompt's."""
    patch.setattr(Prefixes, "lookahead", property(lambda self: 0, lambda self, value: None))


def past_hiddens_are_those_of_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefixes, "lookahead", property(lambda self: 1, lambda self, value: None))


def the_newest_token_has_a_row(patch: pytest.MonkeyPatch) -> None:
    release = Scheduler.release

    def wrong(self: Scheduler) -> Iterator[tuple[int, Request, int]]:
        for slot, request, rows in release(self):
            yield slot, request, rows + 1

    patch.setattr(Scheduler, "release", wrong)


def more_than_the_prompt_is_taken(patch: pytest.MonkeyPatch) -> None:
    place = Prefixes.place

    def wrong(self: Prefixes, prompt: list[int], *rest: Any) -> Placement:
        return place(self, [*prompt, 0, 0, 0, 0], *rest)

    patch.setattr(Prefixes, "place", wrong)


def a_move_leaves_the_kept_rows_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefixes, "holds", lambda self, slot: False)


def nobody_notes_a_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefixes, "exchange", lambda self, source, target: None)


def a_cancelled_prompt_counts_as_whole(patch: pytest.MonkeyPatch) -> None:
    release = Scheduler.release

    def wrong(self: Scheduler) -> Iterator[tuple[int, Request, int]]:
        for slot, request, _ in release(self):
            yield slot, request, request.length

    patch.setattr(Scheduler, "release", wrong)


def slots_share_the_rows_in_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PackedCaches, "start", lambda self, slot: slot * max(self.rows, 128))


def a_layout_that_changes_forgets_slots(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: PackedCaches, rows: int) -> None:
        self.rows, self.packed = rows, 0

    patch.setattr(PackedCaches, "_lay_out", wrong)


def a_prompt_forgets_the_slots_above_it(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: PackedCaches, slot: int, rows: int) -> None:
        self._parked[slot], self.packed = rows, min(self.packed, slot)

    patch.setattr(PackedCaches, "park", wrong)


def prompts_are_filled_in_where_steps_write(patch: pytest.MonkeyPatch) -> None:
    pack = PackedCaches.pack

    def wrong(self: PackedCaches, count: int) -> None:
        pack(self, count)
        for flat in self._flat.values():
            for slot in range(count, SLOTS):
                flat[slot * self._capacity + 8 : slot * self._capacity + 12] = 1

    patch.setattr(PackedCaches, "pack", wrong)


def a_copy_is_short(patch: pytest.MonkeyPatch) -> None:
    copy = PackedCaches.copy

    def wrong(self: PackedCaches, source: int, target: int, rows: int) -> None:
        copy(self, source, target, rows - 1)

    patch.setattr(PackedCaches, "copy", wrong)


BRANCH_BUGS: list[tuple[Patch, DrafterName | None]] = [
    (modules_rows_end_with_the_main_ones, "mtp-eagle"),
    (modules_rows_end_with_the_main_ones, "mtp-vanilla"),
    (past_hiddens_are_those_of_before, "mtp-vanilla"),
    (the_newest_token_has_a_row, None),
    (more_than_the_prompt_is_taken, "mtp-eagle"),
]
TRAFFIC_BUGS: list[Patch] = [
    a_move_leaves_the_kept_rows_behind,
    nobody_notes_a_move,
    a_cancelled_prompt_counts_as_whole,
    slots_share_the_rows_in_use,
    a_layout_that_changes_forgets_slots,
    a_prompt_forgets_the_slots_above_it,
    prompts_are_filled_in_where_steps_write,
    a_copy_is_short,
]


@pytest.mark.parametrize(
    ("bug", "drafter"), BRANCH_BUGS, ids=[f"{b.__name__}-{d}" for b, d in BRANCH_BUGS]
)
def test_branches_catch(
    bug: Patch,
    drafter: DrafterName | None,
    predictable: Transformer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=f"{WARM}|{FILLED}"):
        check_branches(predictable, drafter, 4)


@pytest.mark.parametrize("bug", TRAFFIC_BUGS, ids=lambda bug: bug.__name__)
def test_traffic_catches(bug: Patch, vanilla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=f"{WARM}|{FILLED}"):
        check_traffic(vanilla)
