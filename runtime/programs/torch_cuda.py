"""The part of torch.cuda that programs use: one stream, what is queued on it in order, graphs."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from mtpbuild.runtime.errors import EngineError

Work = Callable[[], Any]
Alive = Callable[[], None]  # asked while the host waits; raises when that is of no use


class Wait(Protocol):
    """Waits for what was queued before a mark."""

    def __call__(self, alive: Alive | None = None) -> None: ...


class Gpu:
    """Is a visible GPU, as a rule the first, and its memory. Work is queued on one stream.

    Any thread may call, one at a time: the stream is named by each call, not the thread's own.
    """

    def __init__(self, index: int = 0) -> None:
        if not (found := visible_gpus()):
            built = "" if torch.version.cuda else " (this torch is built without CUDA)"
            raise EngineError(f"no NVIDIA GPU can be used here: torch finds none{built}")
        if index >= found:
            raise EngineError(f"GPU {index} is asked for, torch finds {found} (numbered from 0)")
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)  # else this thread would take memory of the first one
        # Products in bfloat16 sum in fp32, as everywhere else; cuBLAS may join its splits in bf16.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._stream = torch.cuda.Stream(self.device)
        self._pool = torch.cuda.graph_pool_handle()  # of intermediate results, for all graphs

    @property
    def compute_capability(self) -> str:
        """Returns what the GPU is capable of, such as 9.0."""
        return ".".join(map(str, torch.cuda.get_device_capability(self.device)))

    def free_memory(self) -> int:
        """Returns the bytes that nobody has taken."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def pinned(self, size: int) -> Tensor:
        """Returns the bytes of the host that the GPU writes to while the host goes on."""
        with torch.cuda.device(self.device):
            return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: Tensor | NDArray[Any], target: Tensor) -> None:
        """Equal in shape. What lies in pageable memory is read before this returns."""
        with torch.cuda.stream(self._stream):
            target.copy_(torch.as_tensor(source), non_blocking=True)

    def host(self, array: Tensor) -> NDArray[Any]:
        """Returns a copy, once all that is queued is done; bfloat16 as bits."""
        self.synchronise()
        return as_host(array.cpu())

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def aside(self, work: Work) -> None:
        """Do it now, whatever the stream still waits for."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            work()

    def capture(self, work: Work) -> Work:
        """Make one CUDA graph of what `work` queues; the result queues it. Nothing runs yet.

        The work was run before (it may load code), and keeps no tensor that it makes. Other threads
        may use the GPU meanwhile: NCCL's watchdog asks for its events.
        """
        graph, own = torch.cuda.CUDAGraph(), "thread_local"
        with (
            torch.cuda.device(self.device),  # which is waited for, whatever this thread's was
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=own),
        ):
            work()
        return lambda: self.run(graph.replay)

    def mark(self) -> Wait:
        """The result waits until everything queued so far is done; `alive` is asked meanwhile."""
        event = self._event()

        def wait(alive: Alive | None = None) -> None:
            if alive is None:
                event.synchronize()
                return
            while not event.query():
                alive()
                time.sleep(0)  # other threads' turn
            alive()  # what a rank has lost may end early

        return wait

    def settle(self, alive: Alive) -> None:
        """Wait until all that is queued is done; `alive` is asked meanwhile, and may raise."""
        self.mark()(alive)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def synchronise(self) -> None:
        self._stream.synchronize()


def visible_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def as_host(tensor: Tensor) -> NDArray[Any]:
    """Returns a CPU's tensor as NumPy holds it: bfloat16 as bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
