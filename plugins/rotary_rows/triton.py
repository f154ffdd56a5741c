"""rotary_rows in Triton: one program per token."""

from typing import Any

import triton
import triton.language as tl

from mtpbuild.plugins.definition import bind, empty_results
from mtpbuild.plugins.launch import Launch, Launches, round_up_to_tile, run_launches
from mtpbuild.plugins.rotary_rows.op import rotary_rows


@triton.jit
def place_token(
    start, active, inv_freq,
    tokens, end,
    cos, sin, base, place, first,
    PAIRS: tl.constexpr, OFFSET: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program n writes the angles of token n of all slots; a slot's first writes row numbers, too.

    WIDE is PAIRS rounded up to a power of two.
    """
    n = tl.program_id(0)
    b, t = n // tokens, n % tokens
    seen = tl.load(start + b)
    written = seen
    if active is not None:
        on = tl.load(active + b) != 0
        written = tl.where(on, seen, end)
        seen = tl.where(on, seen, 0)
    p = tl.arange(0, WIDE)
    position = (written + OFFSET + t).to(tl.float32)
    angle = position * tl.load(inv_freq + p, p < PAIRS, 0.0)
    to = n.to(tl.int64) * PAIRS + p
    tl.store(cos + to, tl.cos(angle) * SCALE, p < PAIRS)
    tl.store(sin + to, tl.sin(angle) * SCALE, p < PAIRS)
    if t == 0:
        tl.store(base + b, seen)
        tl.store(place + b, written)
        tl.store(first + b, OFFSET)


def rotary_rows_launches(*operands: Any) -> Launches:
    """Return the op's launch."""
    known = bind(rotary_rows, operands)
    slots, pairs = known["start"].shape[0], known["inv_freq"].shape[0]
    results = empty_results(rotary_rows, known)
    known |= {"PAIRS": pairs, "WIDE": round_up_to_tile(pairs, 2)}
    launch = Launch.by_name(place_token, (slots * known["tokens"],), known, results, warps=1)
    return Launches((launch,), results)


rotary_rows_triton = run_launches(rotary_rows, rotary_rows_launches, "start")
