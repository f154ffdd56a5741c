"""A prompt that begins with rows of earlier ones: tokens and drafts are a cold start's.

Blocks have four rows here, so that prompts of 20 tokens have borders of them. Each bug below breaks
one thing that this rests on, and the oracle must find it.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild.builder.models import register
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import DrafterName, Plan, make_state_specs
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.prefix_cache import cache as prefix_cache
from mtpbuild.runtime.prefix_cache import tree as prefix_tree
from mtpbuild.runtime.prefix_cache.cache import PrefixCache
from mtpbuild.runtime.prefix_cache.tree import PrefixTree
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.host_slots import HostSlots, PackedCaches
from mtpbuild.runtime.requests.scheduler import Filling, Scheduler
from tests.reference.eager import EagerPrograms
from tests.support.checkpoints import lower
from tests.support.engines import EngineBuilder
from tests.support.planted import Patch, replaced, wrapped
from tests.support.recurrent_family import CONFIG, SUMS, PlainSumming, SummingConfig, make_summing
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
    plan = Plan(SummingConfig.parse(CONFIG), NEXTN if drafter else 0, drafter, SLOTS, 200, CHUNK)
    return EagerPrograms(plan, lower(summing))


def pooled(programs: EagerPrograms, pool: int = PLENTY, chunk: int = CHUNK) -> Service:
    return Service(programs, chunk, pool=pool, state=make_state_specs(programs.plan))


def check_branches(
    programs: EagerPrograms, chunk: int = CHUNK, shared: Sequence[int] = SOME
) -> None:
    """Prompts share c tokens with what was said before, for many c; each is then gone on with.

    So blocks end where prompts part, and two prompts have the same rows but not the same tokens
    behind them.
    """
    size, states = programs.plan.config.vocab_size, make_state_specs(programs.plan)
    prompt, service = [t % size for t in tokens(1, 20)], pooled(programs, chunk=chunk)
    cold = Service(programs, chunk)
    output = [t for _, emitted, _ in cold.answer(prompt, 8) for t in emitted]
    service.answer(prompt)
    known, ahead = prompt + output[:8], programs.lookahead
    carried = ahead if any(s.name == "past_hidden" for s in states) else 0

    def check(asked: list[int], where: str, most: int) -> list[int]:
        """Return what is known after the answer."""
        wanted, service.programs.rows = cold.answer(asked), 0
        check_same(service.answer(asked), wanted, where)
        service.check_pool()
        assert service.programs.rows <= most, f"{FILLED}: {where}"
        return asked + [t for _, emitted, _ in wanted for t in emitted]

    for c in shared:
        other, new = [(t + 1) % size for t in known[c:]][:2], [t % size for t in tokens(c, 6)]
        second, where = [*known[:c], *other, new[0]], f"{c} tokens in common"
        reused = 0 if service.cache.recurrent else min(c - ahead, 27, len(second) - 1 - carried)
        output = check(second, where, len(second) - 1 - max(0, reused))
        check(second, f"{where}, again", carried)
        check(output + new, f"{where}, gone on with", len(output + new) - len(second) + carried)
    check(known, "the first one, gone on with", 8 + carried)


@pytest.mark.parametrize(
    "drafter", ["mtp-eagle", pytest.param("mtp-vanilla", marks=pytest.mark.full)]
)
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
    check_traffic(programs, pool=PLENTY, state=make_state_specs(programs.plan))


def check_engine(engine: Path) -> None:
    manifest = read_manifest(engine)
    programs = load_programs(engine, manifest, threads=1)
    check_traffic(programs, pool=PLENTY, state=manifest.state)


@pytest.fixture
def engine(predictable_engine: EngineBuilder) -> Path:
    return predictable_engine(NEXTN, max_batch=SLOTS)


def test_traffic_on_an_engine(engine: Path) -> None:
    check_engine(engine)


NOTHING = property(lambda self: 0, lambda self, value: None)


def a_block_counts_twice(drop: Any, tree: Any, entry: Any) -> None:
    """Where a longer block takes the place of a shorter one."""
    drop(tree, entry)
    tree.used += entry.size


def a_shorter_block_is_left_in_place(drop: Any, tree: Any, entry: Any) -> None:
    tree.used -= entry.size


def released(rows: Callable[[Any, int], int]) -> Patch:
    """Let a request leave as many rows as are said here."""

    def wrong(release: Any, scheduler: Scheduler) -> Iterator[tuple[int, Any, int]]:
        for slot, request, held in release(scheduler):
            yield slot, request, rows(request, held)

    return wrapped(Scheduler, "release", wrong)


def rows_are_saved_before_they_are_filled_in(save: Any, cache: Any, filling: Filling) -> None:
    at = min(filling.at + CHUNK, filling.end)
    save(cache, Filling(filling.slot, filling.request, at))


def states_are_those_of_the_next_border(
    save: Any, cache: Any, slot: int, tokens: Any, rows: int, *given: Any, states: bool = False
) -> None:
    """They are saved one chunk too late, under the rows of the one before."""
    save(cache, slot, tokens, rows - CHUNK if states else rows, *given, states=states)


def a_saved_block_is_the_slots_own_memory(
    save: Any, slots: Any, slot: int, start: int, pieces: Sequence[tuple[int, int]]
) -> bool:
    for number, count in pieces:
        slots._saved[number] = slots._caches.read(slot, start, start := start + count)
    return True


def pieces_are_not_where_they_begin(write: Any, caches: Any, slot: int, pieces: Any) -> None:
    """All are put at the slot's beginning."""
    write(caches, slot, pieces)
    write(caches, slot, pieces[-1:])


def prompts_are_filled_in_where_steps_write(pack: Any, caches: Any, count: int) -> None:
    pack(caches, count)
    for flat in caches._flat.values():
        for slot in range(count, SLOTS):
            flat[slot * caches._capacity + 8 : slot * caches._capacity + 12] = 1


BRANCH_BUGS: dict[str, tuple[Patch, DrafterName | None]] = {
    # Its last rows have seen tokens of whoever left it.
    "a block is cut at the lookahead": (replaced(PrefixTree, "lookahead", NOTHING), "mtp-eagle"),
    "old past hiddens": (replaced(PrefixCache, "_refilled", NOTHING), "mtp-vanilla"),
    "a block counts twice": (wrapped(PrefixTree, "drop", a_block_counts_twice), "mtp-eagle"),
    "a shorter block is left in place": (
        wrapped(PrefixTree, "drop", a_shorter_block_is_left_in_place),
        "mtp-eagle",
    ),
    "the newest token has a row": (released(lambda request, held: held + 1), None),
}
# The parent counts as unused while the block is added, which needs its room.
A_BLOCK_OUTLIVES_ITS_PARENT = replaced(PrefixTree, "use", lambda tree, entry: None)
STATE_BUGS = {
    "states stay where they were": replaced(
        EagerPrograms, "load_states", lambda programs, slot, number: None
    ),
    "states of the next border": wrapped(PrefixCache, "save", states_are_those_of_the_next_border),
}
TRAFFIC_BUGS = {
    "saved too early": wrapped(PrefixCache, "save_chunk", rows_are_saved_before_they_are_filled_in),
    "the slot's own memory": wrapped(HostSlots, "save_rows", a_saved_block_is_the_slots_own_memory),
    "pieces at the beginning": wrapped(PackedCaches, "write", pieces_are_not_where_they_begin),
    "a cancelled prompt counts as whole": released(lambda request, held: request.length),
    "slots share the rows in use": replaced(
        PackedCaches, "start", lambda caches, slot, name: slot * max(caches.rows, 128)
    ),
    "filled in where steps write": wrapped(
        PackedCaches, "pack", prompts_are_filled_in_where_steps_write
    ),
    "a move is short": wrapped(
        PackedCaches,
        "move",
        lambda move, caches, source, target, lengths: move(caches, source, target, lengths - 1),
    ),
}
FOUND = f"{WARM}|{FILLED}|{COUNTED}"


@pytest.mark.parametrize("name", BRANCH_BUGS)
def test_branches_catch(
    name: str, predictable: PlainDeepseek, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug, drafter = BRANCH_BUGS[name]
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=FOUND):
        check_branches(eager(predictable, drafter))


def test_a_small_cache_catches(predictable: PlainDeepseek, monkeypatch: pytest.MonkeyPatch) -> None:
    A_BLOCK_OUTLIVES_ITS_PARENT(monkeypatch)
    with pytest.raises(AssertionError, match=FOUND):
        check_small(predictable, 5760)


@pytest.mark.parametrize("name", STATE_BUGS)
def test_recurrent_states_catch(
    name: str, summing: PlainSumming, monkeypatch: pytest.MonkeyPatch
) -> None:
    STATE_BUGS[name](monkeypatch)
    with pytest.raises(AssertionError, match=f"{WARM}|{FILLED}"):
        check_branches(recurrent(summing, "mtp-eagle"))


@pytest.mark.parametrize("name", TRAFFIC_BUGS)
def test_traffic_catches(name: str, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TRAFFIC_BUGS[name](monkeypatch)
    with pytest.raises(AssertionError, match=FOUND):
        check_engine(engine)
