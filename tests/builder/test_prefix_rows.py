"""A prompt that begins with rows of earlier ones: tokens and drafts are a cold start's.

Blocks have four rows here, so that prompts of 20 tokens have borders of them. Each bug below breaks
one thing that this rests on, and the oracle must find it.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.builder.models import register
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import DrafterName, Plan, state_specs
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.prefix_cache import cache as prefix_cache
from mtpbuild.runtime.prefix_cache import tree as prefix_tree
from mtpbuild.runtime.prefix_cache.cache import PrefixCache
from mtpbuild.runtime.prefix_cache.tree import CacheEntry, PrefixTree
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.host_slots import HostSlots, PackedCaches
from mtpbuild.runtime.requests.request import Request
from mtpbuild.runtime.requests.scheduler import Filling, Scheduler
from tests.reference.eager import EagerPrograms
from tests.support.checkpoints import lower
from tests.support.engines import EngineBuilder
from tests.support.recurrent_family import CONFIG, SUMS, PlainSumming, make_summing, parse_config
from tests.support.warm_starts import (
    COMMON,
    COUNTED,
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
PLENTY = 1 << 24
BLOCK, CHUNK = 4, 4
SOME = (4, 5, 12, 23)  # tokens in common


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prefix_cache, prefix_tree):
        monkeypatch.setattr(module, "BLOCK", BLOCK)


@pytest.fixture(scope="module")
def summing() -> PlainSumming:
    torch.set_num_threads(1)
    register(SUMS)
    return make_summing()


def recurrent(summing: PlainSumming, drafter: DrafterName | None) -> EagerPrograms:
    plan = Plan(parse_config(CONFIG), NEXTN if drafter else 0, drafter, SLOTS, 200, CHUNK)
    return EagerPrograms(plan, lower(summing))


def pooled(programs: EagerPrograms, pool: int = PLENTY, chunk: int = CHUNK) -> Service:
    return Service(programs, chunk, pool=pool, state=state_specs(programs.plan))


def check_branches(
    programs: EagerPrograms, chunk: int = CHUNK, shared: Sequence[int] = SOME
) -> None:
    """Prompts share c tokens with what was said before, for many c; each is then gone on with.

    So blocks end where prompts part, and two prompts have the same rows but not the same tokens
    behind them.
    """
    size, states = programs.plan.config.vocab_size, state_specs(programs.plan)
    prompt, service = [t % size for t in tokens(1, 20)], pooled(programs, chunk=chunk)
    cold = Service(programs, chunk)
    said = [t for _, emitted, _ in cold.answer(prompt, 8) for t in emitted]
    service.answer(prompt)
    known, ahead = prompt + said[:8], programs.lookahead
    carried = ahead if any(s.name == "past_hidden" for s in states) else 0

    def check(asked: list[int], where: str, most: int) -> list[int]:
        """Returns what is known after the answer."""
        wanted, service.programs.rows = cold.answer(asked), 0
        check_same(service.answer(asked), wanted, where)
        service.check_pool()
        assert service.programs.rows <= most, f"{FILLED}: {where}"
        return asked + [t for _, emitted, _ in wanted for t in emitted]

    for c in shared:
        other, new = [(t + 1) % size for t in known[c:]][:2], [t % size for t in tokens(c, 6)]
        second, where = [*known[:c], *other, new[0]], f"{c} tokens in common"
        reused = 0 if service.cache.recurrent else min(c - ahead, 27, len(second) - 1 - carried)
        said = check(second, where, len(second) - 1 - max(0, reused))
        check(second, f"{where}, again", carried)
        check(said + new, f"{where}, gone on with", len(said + new) - len(second) + carried)
    check(known, "the first one, gone on with", 8 + carried)


@pytest.mark.parametrize("drafter", ["mtp-eagle", "mtp-vanilla"])
def test_branches(predictable: PlainDeepseek, drafter: DrafterName) -> None:
    check_branches(eager(predictable, drafter))


@pytest.mark.full
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("chunk", [4, 100])
def test_more_branches(predictable: PlainDeepseek, drafter: DrafterName | None, chunk: int) -> None:
    check_branches(eager(predictable, drafter), chunk, COMMON)


RECURRENT: list[Any] = [("mtp-eagle", 4)]
for more in ((None, 4), (None, 100), ("mtp-eagle", 100)):
    RECURRENT.append(pytest.param(*more, marks=pytest.mark.full))


@pytest.mark.parametrize(("drafter", "chunk"), RECURRENT)
def test_recurrent_states(summing: PlainSumming, drafter: DrafterName | None, chunk: int) -> None:
    check_branches(recurrent(summing, drafter), chunk)


def check_small(predictable: PlainDeepseek, pool: int) -> None:
    """Rows are evicted while others are saved, and a prompt is longer than the cache."""
    programs = eager(predictable, "mtp-vanilla")
    service, cold = pooled(programs, pool), Service(programs)
    for n in (1, 2, 1, 3, 1, 2):
        prompt = [*tokens(n, 12), *tokens(n + 10, 8 * n)]
        check_same(service.answer(prompt), cold.answer(prompt), f"prompt {n}")
        service.check_pool()


@pytest.mark.parametrize("pool", [5760, pytest.param(20_000, marks=pytest.mark.full)])
def test_a_cache_that_is_too_small(predictable: PlainDeepseek, pool: int) -> None:
    check_small(predictable, pool)


@pytest.mark.full
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_traffic(predictable: PlainDeepseek, drafter: DrafterName | None) -> None:
    programs = eager(predictable, drafter)
    check_traffic(programs, pool=PLENTY, state=state_specs(programs.plan))


def check_engine(engine: Path) -> None:
    manifest = read_manifest(engine)
    programs = load_programs(engine, manifest, threads=1)
    check_traffic(programs, pool=PLENTY, state=manifest.state)


@pytest.fixture
def engine(predictable_folder: Path, build_engine: EngineBuilder) -> Path:
    return build_engine(predictable_folder, NEXTN, "mtp-vanilla", prefill_chunk=4, max_batch=SLOTS)


def test_traffic_on_an_engine(engine: Path) -> None:
    check_engine(engine)


Patch = Callable[[pytest.MonkeyPatch], None]


def a_block_is_cut_at_the_lookahead(patch: pytest.MonkeyPatch) -> None:
    """Its last rows have seen tokens of whoever left it."""
    nothing = property(lambda self: 0, lambda self, value: None)
    patch.setattr(PrefixTree, "lookahead", nothing, raising=False)


def past_hiddens_are_those_of_before(patch: pytest.MonkeyPatch) -> None:
    nothing = property(lambda self: 0, lambda self, value: None)
    patch.setattr(PrefixCache, "_refilled", nothing, raising=False)


def a_block_counts_twice(patch: pytest.MonkeyPatch) -> None:
    """Where a longer block takes the place of a shorter one."""
    drop = PrefixTree.drop

    def wrong(self: PrefixTree, entry: CacheEntry) -> None:
        drop(self, entry)
        self.used += entry.size

    patch.setattr(PrefixTree, "drop", wrong)


def a_shorter_block_is_left_in_place(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: PrefixTree, entry: CacheEntry) -> None:
        self.used -= entry.size

    patch.setattr(PrefixTree, "drop", wrong)


def the_newest_token_has_a_row(patch: pytest.MonkeyPatch) -> None:
    release = Scheduler.release

    def wrong(self: Scheduler) -> Iterator[tuple[int, Request, int]]:
        for slot, request, rows in release(self):
            yield slot, request, rows + 1

    patch.setattr(Scheduler, "release", wrong)


def rows_are_saved_before_they_are_filled_in(patch: pytest.MonkeyPatch) -> None:
    save = PrefixCache.save_chunk

    def wrong(self: PrefixCache, filling: Filling) -> None:
        at = min(filling.at + CHUNK, filling.end)
        save(self, Filling(filling.slot, filling.request, at))

    patch.setattr(PrefixCache, "save_chunk", wrong)


def a_block_outlives_its_parent(patch: pytest.MonkeyPatch) -> None:
    """The parent counts as unused while the block is added, which needs its room."""
    patch.setattr(PrefixTree, "use", lambda self, entry: None)


def states_stay_where_they_were(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EagerPrograms, "load_states", lambda self, slot, number: None)


def states_are_those_of_the_next_border(patch: pytest.MonkeyPatch) -> None:
    """They are saved one chunk too late, under the rows of the one before."""
    save = PrefixCache.save

    def wrong(
        self: PrefixCache,
        slot: int,
        tokens: list[int],
        rows: int,
        *given: Request,
        states: bool = False,
    ) -> None:
        save(self, slot, tokens, rows - CHUNK if states else rows, *given, states=states)

    patch.setattr(PrefixCache, "save", wrong)


def a_saved_block_is_the_slots_own_memory(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: HostSlots, slot: int, start: int, pieces: Sequence[tuple[int, int]]) -> bool:
        for number, count in pieces:
            self._saved[number] = self._caches.read(slot, start, start := start + count)
        return True

    patch.setattr(HostSlots, "save_rows", wrong)


def pieces_are_not_where_they_begin(patch: pytest.MonkeyPatch) -> None:
    """All are put at the slot's beginning."""
    write = PackedCaches.write

    def wrong(self: PackedCaches, slot: int, pieces: Sequence[Any]) -> None:
        write(self, slot, pieces)
        write(self, slot, pieces[-1:])

    patch.setattr(PackedCaches, "write", wrong)


def a_cancelled_prompt_counts_as_whole(patch: pytest.MonkeyPatch) -> None:
    release = Scheduler.release

    def wrong(self: Scheduler) -> Iterator[tuple[int, Request, int]]:
        for slot, request, _ in release(self):
            yield slot, request, request.length

    patch.setattr(Scheduler, "release", wrong)


def slots_share_the_rows_in_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PackedCaches, "start", lambda self, slot: slot * max(self.rows, 128))


def prompts_are_filled_in_where_steps_write(patch: pytest.MonkeyPatch) -> None:
    pack = PackedCaches.pack

    def wrong(self: PackedCaches, count: int) -> None:
        pack(self, count)
        for flat in self._flat.values():
            for slot in range(count, SLOTS):
                flat[slot * self._capacity + 8 : slot * self._capacity + 12] = 1

    patch.setattr(PackedCaches, "pack", wrong)


def a_move_is_short(patch: pytest.MonkeyPatch) -> None:
    move = PackedCaches.move

    def wrong(self: PackedCaches, source: int, target: int, lengths: NDArray[Any]) -> None:
        move(self, source, target, lengths - 1)

    patch.setattr(PackedCaches, "move", wrong)


BRANCH_BUGS: list[tuple[Patch, DrafterName | None]] = [
    (a_block_is_cut_at_the_lookahead, "mtp-eagle"),
    (past_hiddens_are_those_of_before, "mtp-vanilla"),
    (a_block_counts_twice, "mtp-eagle"),
    (a_shorter_block_is_left_in_place, "mtp-eagle"),
    (the_newest_token_has_a_row, None),
]
TRAFFIC_BUGS: list[Patch] = [
    rows_are_saved_before_they_are_filled_in,
    a_saved_block_is_the_slots_own_memory,
    pieces_are_not_where_they_begin,
    a_cancelled_prompt_counts_as_whole,
    slots_share_the_rows_in_use,
    prompts_are_filled_in_where_steps_write,
    a_move_is_short,
]
FOUND = f"{WARM}|{FILLED}|{COUNTED}"


@pytest.mark.parametrize(("bug", "drafter"), BRANCH_BUGS, ids=[b.__name__ for b, _ in BRANCH_BUGS])
def test_branches_catch(
    bug: Patch,
    drafter: DrafterName | None,
    predictable: PlainDeepseek,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=FOUND):
        check_branches(eager(predictable, drafter))


def test_a_small_cache_catches(predictable: PlainDeepseek, monkeypatch: pytest.MonkeyPatch) -> None:
    a_block_outlives_its_parent(monkeypatch)
    with pytest.raises(AssertionError, match=FOUND):
        check_small(predictable, 5760)


@pytest.mark.parametrize(
    "bug",
    [states_stay_where_they_were, states_are_those_of_the_next_border],
    ids=lambda bug: bug.__name__,
)
def test_recurrent_states_catch(
    bug: Patch, summing: PlainSumming, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=f"{WARM}|{FILLED}"):
        check_branches(recurrent(summing, "mtp-eagle"))


@pytest.mark.parametrize("bug", TRAFFIC_BUGS, ids=lambda bug: bug.__name__)
def test_traffic_catches(bug: Patch, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=FOUND):
        check_engine(engine)
