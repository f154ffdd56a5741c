"""sum_of_ranks in Triton: one launch, in which each GPU reads the other GPUs' blocks.

A program writes its block of x to its rank's own memory, signals the same program of every rank,
waits for the signals of all ranks, and adds their blocks. A signal is the number of the call, so
signals are never reset, and a replayed CUDA graph goes on counting.

In call n + 2 a rank overwrites its block of call n. By then every rank has signalled call n + 1,
and so has read all blocks of call n. So two blocks and one barrier are enough.
"""

import triton
import triton.language as tl
from torch import Tensor

from mtpbuild.plugins.launch import Launch, Launches, cdiv, round_up_to_tile, run_launches
from mtpbuild.plugins.sum_of_ranks.op import sum_of_ranks
from mtpbuild.runtime.contract.sums import BLOCK, BLOCKS, CALLS, MOST, SIGNALS

WARPS = 8  # each thread has 16 bytes of a block


@triton.jit
def add_in_order(
    x, peers,
    size,
    out,
    RANKS: tl.constexpr, PLACES: tl.constexpr, VALUES: tl.constexpr, BYTES: tl.constexpr,
    SIGNALS: tl.constexpr, CALLS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Program i adds VALUES values (BYTES bytes) of all ranks.

    PLACES is RANKS rounded up to a power of two.
    """
    program = tl.program_id(0)
    value = tl.arange(0, VALUES)
    kind: tl.constexpr = tl.pointer_type(x.dtype.element_ty)
    there = program * VALUES + value < size
    values = tl.load(x + program * VALUES + value, there, 0.0)
    rank = tl.load(peers + RANKS)
    memory = tl.load(peers + rank)
    memories = ()
    for r in tl.static_range(RANKS):
        memories += (tl.load(peers + r),)  # type: ignore[assignment]
    calls = (memory + CALLS + 4 * program).to(tl.pointer_type(tl.int32))
    call = tl.load(calls) + 1
    block = BLOCKS + (2 * program + (call & 1)) * BYTES
    tl.store(tl.multiple_of((memory + block).to(kind), 16) + value, values, there)
    tl.debug_barrier()  # all threads have written before one of them signals
    other = tl.arange(0, PLACES)
    told = tl.load(peers + other, other < RANKS, 0) + program * SIGNALS + 4 * rank
    told = told.to(tl.pointer_type(tl.int32))
    news = tl.zeros((PLACES,), tl.int32) + call
    tl.atomic_xchg(told, news, other < RANKS, sem="release", scope="sys")
    heard = (memory + program * SIGNALS + 4 * other).to(tl.pointer_type(tl.int32))
    while behind(heard, call, other < RANKS):
        pass
    tl.debug_barrier()  # no thread reads before all signals have arrived
    every = ()
    for r in tl.static_range(RANKS):
        at = tl.multiple_of((memories[r] + block).to(kind), 16) + value
        every += (tl.load(at, there, 0.0),)  # type: ignore[assignment]
    # The assembler would add one rank's values before it loads those of the next. The sum starts
    # with a 0 that is loaded last, so the loads from all ranks are in flight together.
    tl.debug_barrier()
    total = tl.zeros((VALUES,), tl.float32) + (tl.load(calls) + 1 - call)
    for r in tl.static_range(RANKS):
        total += every[r].to(tl.float32)
    tl.store(out + program * VALUES + value, total.to(out.dtype.element_ty), there)
    tl.store(calls, call)


@triton.jit
def behind(heard, call, there):
    """Return whether a rank has not signalled this call yet; it may have signalled the next one."""
    nothing = tl.zeros(heard.shape, tl.int32)
    told = tl.atomic_add(heard, nothing, there, sem="acquire", scope="sys")
    return tl.min(tl.where(there, told - call, 0), 0) < 0  # a difference, since counts wrap around


def sum_of_ranks_launches(x: Tensor, peers: Tensor) -> Launches:
    """Return the op's launch. Raises NotImplementedError for more than `MOST` bytes."""
    size, itemsize = x.numel(), x.element_size()
    if isinstance(size, int) and size * itemsize > MOST:  # symbolic sizes are checked by the caller
        raise NotImplementedError(f"sum_of_ranks takes up to {MOST} bytes, not {size * itemsize}")
    ranks = peers.shape[0] - 1
    values = BLOCK // itemsize
    out = x.new_empty(x.shape)
    constants = {
        "RANKS": ranks,
        "PLACES": round_up_to_tile(ranks, 2),
        "VALUES": values,
        "BYTES": BLOCK,
    }
    constants |= {"SIGNALS": SIGNALS, "CALLS": CALLS, "BLOCKS": BLOCKS}
    grid = (cdiv(size, values),)
    launch = Launch(add_in_order, grid, (x, peers), (size,), (out,), constants, WARPS)
    return Launches((launch,), out)


sum_of_ranks_triton = run_launches(sum_of_ranks, sum_of_ranks_launches, "x")
