"""Notes the collectives of ranks with fake GPUs in order, and compares them before they happen.

NCCL matches the n-th collective of one rank with the n-th of another, whatever they are for, and a
captured one with a captured one. Ranks that disagree would hang, or continue with wrong sums. Here
they stop, and report what each was about to do.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from mtpbuild.plugins import sum_of_ranks
from mtpbuild.runtime.group import nccl
from tests.support.fake_gpu import FakeGpu, Work

LOGS = "FAKE_GPU_LOGS"  # environment variable: a folder for each rank's log
ROOM = 160  # bytes of a line that ranks compare
AT_ONCE = "at once"


class Order:
    """The captures and collectives of this process's rank, in their order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.group: dist.ProcessGroup | None = None  # the group that compares; None: no other ranks
        self.doing = AT_ONCE
        self.program = ""

    def note(self, what: str) -> None:
        """Note the next action; raise RuntimeError if another rank is about to do another."""
        self.lines.append(f"{self.doing}: {self.program}{what}")
        if self.group is None:
            return
        own = self.lines[-1].encode()
        mine = torch.frombuffer(bytearray(own[:ROOM].ljust(ROOM)), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(every, mine, group=self.group)
        for rank, theirs in enumerate(every):
            if not torch.equal(theirs, mine):
                output = theirs.numpy().tobytes().decode().strip()
                raise RuntimeError(f"{self.lines[-1]!r} here, {output!r} on rank {rank}")

    @contextlib.contextmanager
    def of(self, program: str) -> Iterator[None]:
        """Note the collectives in the block as those of a program."""
        self.program = f"{program}: "
        yield
        self.program = ""

    def write(self) -> None:
        """Write the log for a test to read, at the end."""
        if folder := os.environ.get(LOGS):
            text = json.dumps(self.lines)
            (Path(folder) / f"rank{os.environ['RANK']}.json").write_text(text)


HERE = Order()


def agreed(logs: Path, ranks: int = 2) -> list[str]:
    """Return the log that all ranks wrote to that folder; assert that they are the same."""
    first, *others = (json.loads((logs / f"rank{rank}.json").read_text()) for rank in range(ranks))
    assert first, "they have done something"
    assert all(other == first for other in others)
    return list(first)


def listened_to(program: GraphModule) -> GraphModule:
    """Make a program's sums note themselves before they happen; one-shot ones are the kernel's."""
    real, one_shot = torch.ops._c10d_functional.all_reduce.default, sum_of_ranks._opoverload

    def all_reduce(x: Tensor, *how: Any) -> Any:
        HERE.note(f"sum of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}")
        return real(x, *how)

    def by_kernel(x: Tensor, peers: Tensor) -> Any:
        HERE.note(f"one-shot sum of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}")
        return sum_of_ranks_launches(x.contiguous(), peers).run()

    for node in program.graph.nodes:
        if node.target is real:
            node.target = all_reduce
        if node.target is one_shot:
            from mtpbuild.plugins.sum_of_ranks.triton import sum_of_ranks_launches

            node.target = by_kernel
    program.recompile()
    return program


class GlooPeers(nccl.Peers):
    """Sums with gloo in place of NCCL."""

    backend = "gloo"

    def __init__(self, device: torch.device, limit: float) -> None:
        super().__init__(device, limit)
        HERE.lines.clear()
        HERE.group = dist.new_group(backend=self.backend, timeout=timedelta(seconds=limit))

    def share(self, size: int) -> tuple[Tensor, list[int]]:
        """Share the host's memory, by files that are open on all ranks and then gone."""
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder, src=0, group=self.group)
        files = [Path(folder[0]) / f"{rank}" for rank in range(self.group.size())]
        own = files[self.group.rank()]
        own.write_bytes(bytes(size))
        dist.barrier(self.group)
        seen = [torch.from_file(str(f), True, size, dtype=torch.uint8) for f in files]
        dist.barrier(self.group)
        own.unlink()
        self._kept = seen
        return seen[self.group.rank()], [piece.data_ptr() for piece in seen]

    def failed(self) -> bool:
        return False

    def abort(self) -> None:
        HERE.write()
        HERE.group = None
        super().abort()


class RankGpu(FakeGpu):
    """A rank's GPU. A captured step repeats the sums of the run before its capture."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[Work, list[str]] | None = None
        self._captured: list[list[str]] = []

    def _perform(self, work: Work, graph: int | None = None) -> None:
        before = len(HERE.lines)
        HERE.doing = AT_ONCE if graph is None else f"graph {graph}"
        super()._perform(work, graph)
        HERE.doing = AT_ONCE
        sums = [line.partition(": ")[2] for line in HERE.lines[before:]]
        self._last = work, sums
        assert graph is None or sums == self._captured[graph], "it replays what was captured"

    def capture(self, work: Work) -> Work:
        assert self._last is not None
        assert self._last[0] is work, "what was run last is captured"
        sums = self._last[1]
        HERE.note(f"capture {self.captures} of {len(sums)} sums, {next(iter(sums), 'none')} first")
        self._captured.append(sums)
        return super().capture(work)
