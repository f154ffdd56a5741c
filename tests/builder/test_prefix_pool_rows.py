"""A prompt that begins with rows of the pool: tokens and drafts are a cold start's.

Blocks have four rows here, so that prompts of 20 tokens have borders of them. Each bug below breaks
one thing that this rests on, and the oracle must find it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.builder.models import register
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan import DrafterName, Plan, state_specs
from mtpbuild.runtime import prefix_pool, prefix_tree
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.prefix_pool import PrefixPool
from mtpbuild.runtime.prefix_tree import Kept
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.host_slots import PackedCaches
from tests.reference.eager import EagerPrograms
from tests.support.engines import EngineBuilder
from tests.support.families import lower_family
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
    for module in (prefix_pool, prefix_tree):
        monkeypatch.setattr(module, "BLOCK", BLOCK)


@pytest.fixture(scope="module")
def summing() -> PlainSumming:
    torch.set_num_threads(1)
    register(SUMS)
    return make_summing()


def recurrent(summing: PlainSumming, drafter: DrafterName | None) -> EagerPrograms:
    plan = Plan(parse_config(CONFIG), NEXTN if drafter else 0, drafter, SLOTS, 200, CHUNK)
    return EagerPrograms(plan, lower_family(summing))


def pooled(programs: EagerPrograms, pool: int = PLENTY, chunk: int = CHUNK) -> Service:
    """Rows come from the pool alone: slots keep none."""
    return Service(programs, chunk, warm=False, pool=pool, state=state_specs(programs.plan))


def check_branches(
    programs: EagerPrograms, chunk: int = CHUNK, shared: Sequence[int] = SOME
) -> None:
    """Prompts share c tokens with what was said before, for many c; each is then gone on with.

    So blocks end where prompts part, and two prompts have the same rows but not the same tokens
    behind them.
    """
    size, states = programs.plan.config.vocab_size, state_specs(programs.plan)
    prompt, service = [t % size for t in tokens(1, 20)], pooled(programs, chunk=chunk)
    cold = Service(programs, chunk, warm=False)
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
        reused = 0 if service.pool.recurrent else min(c - ahead, 27, len(second) - 1 - carried)
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


@pytest.mark.parametrize("pool", [500, pytest.param(4000, marks=pytest.mark.full)])
def test_a_pool_that_is_too_small(predictable: PlainDeepseek, pool: int) -> None:
    """Rows are given up while others are kept, and a prompt is longer than the pool."""
    programs = eager(predictable, "mtp-vanilla")
    service, cold = pooled(programs, pool), Service(programs, warm=False)
    for n in (1, 2, 1, 3, 1, 2):
        prompt = [*tokens(n, 12), *tokens(n + 10, 8 * n)]
        check_same(service.answer(prompt), cold.answer(prompt), f"prompt {n}")
        service.check_pool()


@pytest.mark.full
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_traffic(predictable: PlainDeepseek, drafter: DrafterName | None) -> None:
    programs = eager(predictable, drafter)
    check_traffic(programs, pool=PLENTY, state=state_specs(programs.plan))


def check_engine(engine: Path) -> None:
    """Traffic on an engine whose slots keep nothing: all rows come from the pool."""
    manifest = read_manifest(engine)
    programs = load_programs(engine, manifest, threads=1)
    check_traffic(programs, warm=False, pool=PLENTY, state=manifest.state)


@pytest.fixture
def engine(predictable_folder: Path, build_engine: EngineBuilder) -> Path:
    return build_engine(predictable_folder, NEXTN, "mtp-vanilla", prefill_chunk=4, max_batch=SLOTS)


def test_traffic_on_an_engine(engine: Path) -> None:
    check_engine(engine)


Patch = Callable[[pytest.MonkeyPatch], None]


def a_block_is_cut_at_the_lookahead(patch: pytest.MonkeyPatch) -> None:
    """Its last rows have seen tokens of whoever left it."""
    patch.setattr(
        PrefixPool, "lookahead", property(lambda self: 0, lambda self, value: None), False
    )


def a_block_counts_twice(patch: pytest.MonkeyPatch) -> None:
    """Where a longer block takes the place of a shorter one."""
    drop = PrefixPool._drop

    def wrong(self: PrefixPool, kept: Kept) -> None:
        drop(self, kept)
        self.used += kept.size

    patch.setattr(PrefixPool, "_drop", wrong)


def a_shorter_block_is_left_in_place(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: PrefixPool, kept: Kept) -> None:
        self.used -= kept.size

    patch.setattr(PrefixPool, "_drop", wrong)


def states_stay_where_they_were(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EagerPrograms, "load_states", lambda self, slot, number: None)


def states_are_those_of_the_next_border(patch: pytest.MonkeyPatch) -> None:
    """They are kept one chunk too late, under the rows of the one before."""
    add = PrefixPool.add

    def wrong(
        self: PrefixPool, slot: int, tokens: list[int], rows: int, *salt: str, states: bool = False
    ) -> None:
        add(self, slot, tokens, rows - CHUNK if states else rows, *salt, states=states)

    patch.setattr(PrefixPool, "add", wrong)


def a_borrowed_block_is_written_to(patch: pytest.MonkeyPatch) -> None:
    """It is still the slot's own memory."""

    def wrong(self: PackedCaches, slot: int, start: int, stop: int) -> dict[str, NDArray[Any]]:
        at = self.start(slot)
        return {name: flat[at + start : at + stop] for name, flat in self._flat.items()}

    patch.setattr(PackedCaches, "rows_of", wrong)


def pieces_are_not_where_they_begin(patch: pytest.MonkeyPatch) -> None:
    """All are put at the slot's beginning."""
    fill = PackedCaches.fill

    def wrong(self: PackedCaches, slot: int, pieces: Sequence[Any]) -> None:
        fill(self, slot, pieces)
        fill(self, slot, pieces[-1:])

    patch.setattr(PackedCaches, "fill", wrong)


BUGS: list[Patch] = [
    a_block_is_cut_at_the_lookahead,
    a_block_counts_twice,
    a_shorter_block_is_left_in_place,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_branches_catch(
    bug: Patch, predictable: PlainDeepseek, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=f"{WARM}|{FILLED}|{COUNTED}"):
        check_branches(eager(predictable, "mtp-eagle"))


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


@pytest.mark.parametrize(
    "bug",
    [a_borrowed_block_is_written_to, pieces_are_not_where_they_begin],
    ids=lambda bug: bug.__name__,
)
def test_traffic_catches(bug: Patch, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=f"{WARM}|{FILLED}|{COUNTED}"):
        check_engine(engine)
