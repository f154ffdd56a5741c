"""Processes as ranks that sum by the kernel of `sum_of_ranks`, in Triton's interpreter.

    python -m tests.support.one_shot_ranks '[{"ranks": 3, "calls": 20}]'

Each process sees the memory of all, as GPUs see each other's, and really waits for the others'
signals. The kernel may have a mistake. Each rank sleeps in turn, between what it tells and what it
reads. Prints how many calls each rank got wrong.
"""

import ctypes
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtpbuild.plugins.sum_of_ranks import triton as correct
from mtpbuild.runtime.contract.sums import BYTES, CALLS, PROGRAMS, RANKS
from mtpbuild.runtime.group.nccl import release
from tests.support.scripts import load_script

SIZES = (5, 2048, 4097, 1, 70, 1024)  # of tensors, in turn
DTYPES = (torch.float32, torch.bfloat16)
WAITS = "while behind(heard, call, other < RANKS):\n        pass"
WRITES = "    tl.store(tl.multiple_of((memory + block).to(kind), 16) + value, values, there)\n"
BEHIND = "    tl.debug_barrier()  # no thread reads before all signals have arrived\n"
MISTAKES = {
    "waits for nobody": [(WAITS, "behind(heard, call, other < RANKS)")],
    "has one block": [("(call & 1)", "0")],
    "tells before it writes": [(WRITES, ""), (BEHIND, BEHIND + WRITES)],
    "counts no calls": [("    tl.store(calls, call)\n", "")],
    "adds its own first": [("(tl.load(peers + r),)", "(tl.load(peers + (rank + r) % RANKS),)")],
    "compares counts": [("told - call, 0), 0) < 0", "told, call), 0) < call")],
}


@dataclass(frozen=True)
class Memory:
    """What all ranks see: a piece for each, which begins at any number of calls."""

    addresses: tuple[int, ...]
    kept: tuple[Any, ...]

    @classmethod
    def of(cls, ranks: int, calls: int) -> "Memory":
        pieces = [mmap.mmap(-1, BYTES) for _ in range(ranks)]
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(piece)) for piece in pieces]
        for address in addresses:
            words = (ctypes.c_int32 * (PROGRAMS * RANKS)).from_address(address)
            counts = (ctypes.c_int32 * PROGRAMS).from_address(address + CALLS)
            words[:], counts[:] = [calls] * len(words), [calls] * len(counts)
        return cls(tuple(addresses), tuple(pieces))

    def seen_by(self, rank: int) -> Tensor:
        return torch.tensor([*self.addresses, rank])


def given(rank: int, call: int) -> Tensor:
    """Return what a rank sums in a call: sizes and types change, so that programs come and go."""
    g = torch.Generator().manual_seed(1000 * call + rank)
    size, dtype = SIZES[call % len(SIZES)], DTYPES[call // len(SIZES) % len(DTYPES)]
    return (torch.randn(size, generator=g) * 10 ** (call % 3)).to(dtype)


def expected(ranks: int, call: int) -> Tensor:
    """Add in order, in fp32; the interpreter cuts numbers to bfloat16, where a GPU rounds."""
    total = torch.zeros(SIZES[call % len(SIZES)])
    for rank in range(ranks):
        total = total + given(rank, call).float()
    if given(0, call).dtype == torch.float32:
        return total
    return (total.view(torch.int32) >> 16 << 16).view(torch.float32).bfloat16()


def module_with(mistake: str | None, folder: Path) -> Any:
    """Import the kernel's module as it is, or a copy with a mistake."""
    if mistake is None:
        return correct
    text = Path(correct.__file__).read_text()
    for right, wrong in MISTAKES[mistake]:
        assert text.count(right) == 1, f"{right!r} occurs once"
        text = text.replace(right, wrong)
    text = text.replace("@by_kernels(sum_of_ranks)\n", "")  # the op is there already
    file = folder / "mistaken.py"
    file.write_text(text)
    return load_script(file)


def run_rank(rank: int, memory: Memory, calls: int, pause: float, launches: Any) -> int:
    """Make all calls of a rank; return how many were wrong."""
    from triton.runtime import interpreter

    wrong, ranks, peers = 0, len(memory.addresses), memory.seen_by(rank)
    late = [False]

    def barrier(self: Any) -> None:
        if late[0]:
            time.sleep(pause)

    interpreter.InterpreterBuilder.create_barrier = barrier
    for call in range(calls):
        late[0] = call % ranks == rank
        got = launches(given(rank, call), peers).run()
        wrong += not torch.equal(got, expected(ranks, call))
    return wrong


def run(ranks: int, calls: int, mistake: str | None = None, begin: int = 0) -> list[int]:
    """Return how many calls each rank got wrong; begin: calls that were made before."""
    memory, pause = Memory.of(ranks, begin), 0.05 if mistake else 0.002
    with tempfile.TemporaryDirectory() as folder:
        launches = module_with(mistake, Path(folder)).sum_of_ranks_launches
        return forked(ranks, lambda rank: run_rank(rank, memory, calls, pause, launches))


def freed(begin: int = 0) -> bool:
    """Tell whether a rank waits for one that is gone, and end when it is released."""
    memory = Memory.of(2, begin)
    peers = memory.seen_by(0)
    if not (child := os.fork()):
        correct.sum_of_ranks_launches(torch.zeros(5000), peers).run()
        os._exit(0)
    time.sleep(1)
    waits = os.waitpid(child, os.WNOHANG) == (0, 0)
    release(torch.frombuffer(memory.kept[0], dtype=torch.uint8))
    return waits and os.waitpid(child, 0) == (child, 0)


def forked(ranks: int, work: Callable[[int], int]) -> list[int]:
    """Do a rank's work in a process for each; return what they got, up to 255."""
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            code = 255
            try:
                code = work(rank)
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    print(json.dumps([run(**case) if "ranks" in case else freed(**case) for case in asked]))
