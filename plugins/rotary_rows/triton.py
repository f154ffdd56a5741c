"""rotary_rows in Triton: one program per token."""

import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.launch import Launch, Launches, by_kernels, tile
from mtpbuild.plugins.rotary_rows.op import empty_places, rotary_rows


@triton.jit
def place_token(
    start, active, inv_freq,
    tokens, end,
    cos, sin, base, place, first,
    PAIRS: tl.constexpr, OFFSET: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program n writes the angles of token n of all slots; a slot's first also writes row numbers.

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


def rotary_rows_launches(
    start: Tensor,
    active: Tensor | None,
    inv_freq: Tensor,
    tokens: int,
    offset: int,
    end: int,
    scale: float,
) -> Launches:
    """Return the op's launch."""
    results, pairs = empty_places(start, active, inv_freq, tokens), inv_freq.shape[0]
    constants = {"PAIRS": pairs, "OFFSET": offset, "SCALE": scale, "WIDE": tile(pairs, 2)}
    grid, inputs = (start.shape[0] * tokens,), (start, active, inv_freq)
    launch = Launch(place_token, grid, inputs, (tokens, end), results, constants, warps=1)
    return Launches((launch,), results)


@by_kernels(rotary_rows)
def rotary_rows_triton(start: Tensor, *operands: object) -> tuple[Tensor, ...]:
    """Run rotary_rows on a GPU."""
    return rotary_rows_launches(start.contiguous(), *operands).run()  # type: ignore[arg-type]
