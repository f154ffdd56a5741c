"""Where the caches' rows lie in the host's memory."""

import numpy as np

from mtpbuild.runtime.manifest import StateSpec
from mtpbuild.runtime.programs.host_slots import ROW_STEP, PackedCaches


def spec(slots: int, rows: int) -> StateSpec:
    return StateSpec(name="kv.0", kind="cache", dtype="float32", shape=(slots, 1, rows, 4))


def test_rows_are_written_to_before_a_step_does() -> None:
    """Seen by what was there: rows that were never in use are zeroed once, others never."""
    caches = PackedCaches([spec(1, 1000)])
    (flat,) = caches._flat.values()
    flat[:] = 7
    assert caches.fit(10)
    assert not flat[:ROW_STEP].any()
    assert (flat[ROW_STEP:] == 7).all()

    caches.views()["kv.0"][:] = 1
    assert not caches.fit(ROW_STEP)
    assert caches.fit(ROW_STEP + 1)
    assert (flat[:ROW_STEP] == 1).all()
    assert not flat[ROW_STEP : 2 * ROW_STEP].any()

    flat[: 2 * ROW_STEP] = 2
    assert caches.fit(5)
    assert caches.fit(2 * ROW_STEP)
    assert (flat[: 2 * ROW_STEP] == 2).all()


def test_slots_keep_their_rows_when_all_get_more() -> None:
    caches = PackedCaches([spec(3, 1000)])
    caches.fit(ROW_STEP)
    held = np.arange(3 * ROW_STEP * 4, dtype=np.float32).reshape(3, 1, ROW_STEP, 4)
    caches.views()["kv.0"][:] = held
    assert caches.fit(ROW_STEP + 1)
    grown = caches.views()["kv.0"]
    assert grown.shape[2] == 2 * ROW_STEP
    assert np.array_equal(grown[:, :, :ROW_STEP], held)
