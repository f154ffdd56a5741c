"""The part of torch.cuda that programs use: one stream, what is queued on it in order, graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtpbuild.runtime.errors import EngineError

Work = Callable[[], Any]


class Gpu:
    """The visible GPU (the first of CUDA_VISIBLE_DEVICES). All but `zeros` is queued on one stream.

    Any thread may call, one at a time: the stream is named by each call, not the thread's own.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            built = "" if torch.version.cuda else " (this torch is built without CUDA)"
            raise EngineError(f"no NVIDIA GPU can be used here: torch finds none{built}")
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()  # of intermediate results, for all graphs

    @property
    def compute_capability(self) -> str:
        """Such as 9.0."""
        return ".".join(map(str, torch.cuda.get_device_capability()))

    def free_memory(self) -> int:
        """Bytes."""
        return int(torch.cuda.mem_get_info()[0])

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.zeros(shape, dtype=dtype, device="cuda")

    def pinned(self, size: int) -> Tensor:
        """Bytes of the host that the GPU writes to while the host goes on."""
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Of the same shape. What lies in pageable memory is read before this returns."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def capture(self, work: Work) -> Work:
        """What `work` queues, as one CUDA graph; the result queues it again. Nothing runs yet.

        The work was run before (it may load code), and keeps no tensor that it makes.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            work()
        return lambda: self.run(graph.replay)

    def mark(self) -> Work:
        """The result waits until everything queued so far is done."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event.synchronize

    def synchronise(self) -> None:
        self._stream.synchronize()
