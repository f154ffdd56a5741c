"""A prompt that begins with another one's rows: tokens and drafts are a cold start's.

Each bug below breaks one thing that this rests on, and the oracle must find it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan import DrafterName
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.prefixes import Placement, Prefixes
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.host_slots import PackedCaches
from mtpbuild.runtime.request import Request
from mtpbuild.runtime.scheduler import Scheduler
from tests.support.engines import EngineBuilder
from tests.support.warm_starts import (
    COMMON,
    DRAFTERS,
    FILLED,
    NEXTN,
    SLOTS,
    WARM,
    Service,
    check_same,
    check_traffic,
    eager,
    tokens,
)

pytestmark = pytest.mark.xdist_group("predictable")  # another worker would wait for the engine


def check_branches(predictable: PlainDeepseek, drafter: DrafterName | None, chunk: int) -> None:
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
def test_branches(predictable: PlainDeepseek, drafter: DrafterName | None, chunk: int) -> None:
    check_branches(predictable, drafter, chunk)


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
def test_traffic(predictable: PlainDeepseek, drafter: DrafterName | None) -> None:
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
    predictable: PlainDeepseek,
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
