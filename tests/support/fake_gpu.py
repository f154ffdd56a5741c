"""A GPU whose memory is the host's: it works when the host waits for it, or as soon as possible.

It stands in for `Gpu` and checks more than CUDA reports: an asynchronous copy uses no pageable
memory, and a graph's work was run before its capture.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtpbuild.runtime.gpu.torch_cuda import Wait, as_host, from_host
from mtpbuild.runtime.programs.aot_package import Opener, Runner

Work = Callable[[], object]


class FakeGpu:
    """A GPU whose work the CPU does; it counts what the host asked of it.

    `captures` and `replays` count graphs; `waits` counts how often the host waited.

    `ahead`: work is done as soon as it is queued, before the host has read the step before it.
    """

    def __init__(
        self, compute_capability: str = "9.0", free: int = 1 << 40, ahead: bool = False
    ) -> None:
        self.ahead = ahead
        self.device = torch.device("cpu")
        self.compute_capability, self._free = compute_capability, free
        self.queue: deque[Work] = deque()
        self.queued = self.done = 0
        self.captures = self.replays = self.waits = 0
        self._memory: list[tuple[int, int]] = []  # own and pinned memory: from .. to
        self._ran: set[int] = set()

    def free_memory(self) -> int:
        return self._free

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return self._known(torch.zeros(shape, dtype=getattr(torch, dtype)))

    def host(self, array: Tensor) -> NDArray[Any]:
        self.synchronise()
        return as_host(array)

    def pinned(self, size: int) -> Tensor:
        return self._known(torch.full((size,), 99, dtype=torch.uint8))

    def _known(self, tensor: Tensor) -> Tensor:
        self._memory.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    def _knows(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return any(begin <= at and at + tensor.nbytes <= end for begin, end in self._memory)

    def copy(self, source: Tensor | NDArray[Any], target: Tensor) -> None:
        source = from_host(source, target)
        assert source.shape == target.shape
        assert self._knows(target), "a copy to pageable memory would be waited for"
        taken = source if self._knows(source) else source.clone()
        self._add(lambda: target.copy_(taken))

    def run(self, work: Work) -> None:
        self._ran.add(id(work))
        self._add(partial(self._perform, work))

    def _perform(self, work: Work, graph: int | None = None) -> None:
        """Do the work at once, or as the graph of that number."""
        work()

    def aside(self, work: Work) -> None:
        work()

    def capture(self, work: Work) -> Work:
        assert id(work) in self._ran, "what loads code can't be captured"
        assert not self.queue, "a capture begins when the GPU is at rest"
        graph = self.captures
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            self._add(partial(self._perform, work, graph))

        return replay

    def mark(self) -> Wait:
        at = self.queued

        def wait(alive: Callable[[], None] | None = None) -> None:
            asked = alive or (lambda: None)
            asked()
            self._wait(at)
            asked()

        return wait

    def settle(self, alive: Callable[[], None]) -> None:
        self.mark()(alive)

    def synchronise(self) -> None:
        self._wait(self.queued)

    def _add(self, work: Work) -> None:
        self.queue.append(work)
        self.queued += 1
        if self.ahead:
            self._work(self.queued)

    def _wait(self, until: int) -> None:
        self.waits += 1
        self._work(until)

    def _work(self, until: int) -> None:
        while self.done < until:
            self.queue.popleft()()
            self.done += 1


@contextlib.contextmanager
def torch_finds(gpus: int) -> Iterator[None]:
    """Let torch report so many GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        patch.setattr(torch.cuda, "device_count", lambda: gpus)
        yield


def opened(programs: Mapping[str, Runner]) -> Opener:
    """Return an Opener of programs that are open already, on any device."""
    return lambda device: programs.__getitem__
