"""torch.cuda as programs use it: one GPU, one stream, copies, captured graphs."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from mtpbuild.runtime.errors import EngineError

Work = Callable[[], Any]
Alive = Callable[[], None]  # polled while the host waits; raises if waiting is pointless


class Wait(Protocol):
    """A function that waits for the work queued before a mark."""

    def __call__(self, alive: Alive | None = None) -> None: ...


class Gpu:
    """A visible GPU and its memory; work is queued on one stream.

    Any thread may call, one at a time: each call sets the stream for its thread.
    """

    def __init__(self, index: int = 0) -> None:
        if not (count := visible_gpus()):
            built = "" if torch.version.cuda else " (this torch is built without CUDA)"
            raise EngineError(f"no NVIDIA GPU can be used here: torch finds none{built}")
        if index >= count:
            raise EngineError(f"GPU {index} is asked for, torch finds {count} (numbered from 0)")
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)  # else this thread would allocate on the first GPU
        # Sum bfloat16 products in fp32, as on other targets: cuBLAS may reduce split-K in bf16.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._stream = torch.cuda.Stream(self.device)
        self._pool = torch.cuda.graph_pool_handle()  # all graphs share it for intermediate results

    @property
    def compute_capability(self) -> str:
        """The GPU's compute capability, such as 9.0."""
        return ".".join(map(str, torch.cuda.get_device_capability(self.device)))

    def free_memory(self) -> int:
        """Return the number of free bytes."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def pinned(self, size: int) -> Tensor:
        """Allocate pinned bytes on the host, which the GPU writes to asynchronously."""
        with torch.cuda.device(self.device):
            return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: Tensor | NDArray[Any], target: Tensor) -> None:
        """Queue a copy between equal shapes; a source in pageable memory is read at once."""
        with torch.cuda.stream(self._stream):
            target.copy_(from_host(source, target), non_blocking=True)

    def host(self, array: Tensor) -> NDArray[Any]:
        """Return a copy after all queued work is done; bfloat16 as bits."""
        self.synchronise()
        return as_host(array.cpu())

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def aside(self, work: Work) -> None:
        """Queue work on a new stream, so that it does not wait for work on the main stream."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            work()

    def capture(self, work: Work) -> Work:
        """Capture the work in a CUDA graph without running it; return a function that queues it.

        The work must have run before, as it may load code, and must not keep tensors that it
        allocates. Other threads may use the GPU meanwhile: NCCL's watchdog queries its events.
        """
        graph, mode = torch.cuda.CUDAGraph(), "thread_local"
        with (
            torch.cuda.device(self.device),  # `graph` synchronises the current device
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode),
        ):
            work()
        return lambda: self.run(graph.replay)

    def mark(self) -> Wait:
        """Return a function that waits for all work queued so far and calls `alive` meanwhile."""
        event = torch.cuda.Event()
        event.record(self._stream)

        def wait(alive: Alive | None = None) -> None:
            if alive is None:
                event.synchronize()
                return
            while not event.query():
                alive()
                time.sleep(0)  # let other threads run
            alive()  # after the loss of a rank the work may have ended early

        return wait

    def settle(self, alive: Alive) -> None:
        """Wait for all queued work; meanwhile call `alive`, which may raise."""
        self.mark()(alive)

    def synchronise(self) -> None:
        self._stream.synchronize()


def visible_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def from_host(source: Tensor | NDArray[Any], target: Tensor) -> Tensor:
    """Return the source of a copy as a tensor; uint16 is taken as bits of a bfloat16 target."""
    tensor = torch.as_tensor(source)
    bits = tensor.dtype == torch.uint16 and target.dtype == torch.bfloat16
    return tensor.view(torch.bfloat16) if bits else tensor


def as_host(tensor: Tensor) -> NDArray[Any]:
    """Return a CPU tensor as a NumPy array; bfloat16 as bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
