"""The caches' rows lie in the host's memory where they are expected."""

import mmap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mtpbuild.runtime.contract.manifest import CacheType
from mtpbuild.runtime.contract.programs import NO_VALUE, host_type
from mtpbuild.runtime.contract.state import StateSpec, make_rows_spec
from mtpbuild.runtime.programs.host_slots import (
    GROWTH,
    ROW_STEP,
    HostMemory,
    PackedCaches,
    round_up_rows,
)
from mtpbuild.runtime.programs.slots import Caches, Memory, finite
from tests.support.fake_gpu import FakeGpu

SLOTS, CAPACITY = 4, 1000
CACHE_ROWS = Path(__file__).parents[2] / "plugins/cpu/source/cache_rows.h"


def test_kernels_have_the_same_mark_of_a_row_without_a_value() -> None:
    assert f"constexpr int8_t NO_VALUE = {NO_VALUE};" in CACHE_ROWS.read_text(encoding="utf-8")


def spec(slots: int, rows: int, width: int = 4) -> StateSpec:
    return make_rows_spec("kv.0", "layers.0", "float32", (slots, 1, rows, width))


def held(caches: PackedCaches, slot: int) -> NDArray[np.float32]:
    """Return a slot's rows, wherever they are."""
    return caches.views(slot, 1)["kv.0"][0, 0, :, 0]


def fill(caches: PackedCaches, slot: int, rows: int, value: float) -> None:
    """Do as a prompt does that fills a slot."""
    caches.park(slot, rows)
    held(caches, slot)[:rows] = value


def test_rows_are_written_to_before_a_step_does() -> None:
    """`pack` writes x + 0 to each row: values stay, and -0.0 becomes 0.0, which shows it."""
    caches = PackedCaches([spec(1, CAPACITY)])
    (flat,) = caches._flat.values()
    flat[:] = -0.0
    flat[0] = 7
    assert caches.fit(10)
    caches.pack(1)
    assert (flat[0] == 7).all()
    assert not np.signbit(flat[:ROW_STEP]).any()
    assert np.signbit(flat[ROW_STEP:]).all()
    assert not caches.fit(ROW_STEP)
    assert caches.fit(ROW_STEP + 1)
    caches.pack(1)
    assert not np.signbit(flat[: 2 * ROW_STEP]).any()
    assert np.signbit(flat[2 * ROW_STEP :]).all()


def test_slots_keep_their_rows_when_all_get_more() -> None:
    caches = PackedCaches([spec(3, CAPACITY)])
    caches.fit(ROW_STEP)
    caches.pack(3)
    held = np.arange(3 * ROW_STEP * 4, dtype=np.float32).reshape(3, 1, ROW_STEP, 4)
    caches.views(0, 3)["kv.0"][:] = held
    assert caches.fit(ROW_STEP + 1)
    caches.pack(3)
    grown = caches.views(0, 3)["kv.0"]
    assert grown.shape[2] == 2 * ROW_STEP
    assert np.array_equal(grown[:, :, :ROW_STEP], held)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_no_nan_is_left_behind_a_slot(dtype: CacheType) -> None:
    """Wherever its rows have lain; what other slots' rows hold stays."""
    caches = PackedCaches([make_rows_spec("kv.0", "layers.0", dtype, (SLOTS, 1, CAPACITY, 4))])
    (flat,) = caches._flat.values()
    damaged = {"float32": np.nan, "bfloat16": 0x7FC0, "int8": NO_VALUE}[dtype]
    for slot in range(SLOTS):
        fill(caches, slot, 300, damaged if slot == 1 else slot + 1)  # parked
    held(caches, 2)[7] = damaged  # nobody has found it yet
    caches.fit(300)
    caches.pack(3)
    caches.clear(1)
    left = np.flatnonzero(~finite(flat).all(1))
    assert left.tolist() == [2 * CAPACITY + 7]
    assert all((held(caches, slot)[8:300] == slot + 1).all() for slot in (0, 2, 3))
    caches.fit(900)
    caches.pack(2)
    assert finite(caches.views(0, 2)["kv.0"]).all()


@pytest.mark.parametrize("large", [True, False])
def test_memory_is_held_where_rows_are(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given back reads as zeros; rows of packed and parked slots are all there."""
    monkeypatch.setattr("mtpbuild.runtime.programs.host_slots.LARGE", 1 if large else 1 << 30)
    caches = PackedCaches([spec(SLOTS, CAPACITY, mmap.PAGESIZE // 4)])  # a row is a page
    (flat,) = caches._flat.values()
    for slot in range(SLOTS):
        fill(caches, slot, 200, slot + 1)
    flat[900] = 7  # left by something that is gone
    caches.fit(200)
    for count in (1, 3):
        caches.pack(count)
        for slot in range(SLOTS):
            assert (held(caches, slot)[:200] == slot + 1).all()
    left = [slot * CAPACITY + 100 for slot in (1, 2)]  # where they were parked
    assert flat[[900, *left], 0].tolist() == ([0, 0, 0] if large else [7, 2, 3])


def test_rows_grow_by_a_quarter_and_shrink_late() -> None:
    """Rows of several slots are moved seldom, and steps read few rows too many."""
    caches = PackedCaches([spec(SLOTS, 10_000)])
    seen = []
    for rows in range(1, 10_001):
        if caches.fit(rows):
            seen.append(caches.rows)
        assert rows <= caches.rows < GROWTH * rows + 2 * ROW_STEP
    assert all(after >= min(GROWTH * before, 10_000) for before, after in pairwise(seen))
    assert not caches.fit(5_100)
    assert caches.fit(4_900)
    assert caches.rows == round_up_rows(4_900, 10_000)


def test_parked_slots_are_out_of_reach() -> None:
    """Steps of fewer slots, of more and fewer rows, and prompts: a parked slot keeps its rows."""
    caches = PackedCaches([spec(SLOTS, CAPACITY)])
    for slot in range(SLOTS):
        fill(caches, slot, 900, slot + 1)
    for count, rows in ((1, 10), (2, 500), (3, 130), (1, 900), (2, 10), (3, 999)):
        caches.fit(rows)
        caches.pack(count)
        step = caches.views(0, count)["kv.0"]
        assert step.shape[2] >= rows
        step[:, :, -4:] = -1  # the garbage of inactive slots
        for slot in range(3, SLOTS):
            assert (held(caches, slot)[:900] == slot + 1).all()
        caches.park(1, 50)
        held(caches, 1)[:] = 8  # another prompt
        assert (held(caches, 3)[:900] == 4).all()


def test_moves_between_packed_and_parked_slots() -> None:
    """All pairs of places; a slot that packs later brings its rows along."""
    for packed in range(SLOTS + 1):
        for source in range(SLOTS):
            for target in set(range(SLOTS)) - {source}:
                caches = PackedCaches([spec(SLOTS, CAPACITY)])
                for slot in range(SLOTS):
                    fill(caches, slot, 100, slot + 1)
                caches.fit(ROW_STEP)
                caches.pack(packed)
                caches.move(source, target, np.full(SLOTS, 100))
                wanted = [1.0, 2.0, 3.0, 4.0]
                wanted[target] = source + 1
                for slot, value in enumerate(wanted):
                    assert (held(caches, slot)[:100] == value).all()
                caches.fit(3 * ROW_STEP)
                caches.pack(SLOTS)
                rows = caches.views(0, SLOTS)["kv.0"][:, 0, :100, 0]
                assert (rows == np.array(wanted)[:, None]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("where", ["packed", "host", "GPU"])
def test_rows_are_written_and_read(where: str, dtype: CacheType) -> None:
    """In pieces, of which first rows are taken; other slots keep theirs."""
    specs = [make_rows_spec("kv.0", "layers.0", dtype, (SLOTS, 1, CAPACITY, 4))]
    memory: Memory = FakeGpu() if where == "GPU" else HostMemory()
    caches = PackedCaches(specs) if where == "packed" else Caches(specs, memory)
    kind = host_type(dtype)
    one, two = (np.arange(n, n + 400).astype(kind).reshape(100, 4) for n in (16_000, 17_000))
    caches.write(0, [({"kv.0": two}, 100)])
    caches.write(1, [({"kv.0": one}, 64), ({"kv.0": two}, 36)])
    assert np.array_equal(caches.read(1, 0, 64)["kv.0"], one[:64])
    assert np.array_equal(caches.read(1, 64, 100)["kv.0"], two[:36])
    assert np.array_equal(caches.read(0, 10, 100)["kv.0"], two[10:])
