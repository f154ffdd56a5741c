"""A GPU whose memory is the host's: the part of `cuda.bindings.runtime` that programs call.

It checks more than CUDA reports: copies stay within allocations, a captured copy uses no pageable
memory, and nothing is used after it was freed.
"""

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

SUCCESS, OUT_OF_MEMORY, NO_DEVICE = 0, 2, 100
TEXTS = {OUT_OF_MEMORY: b"out of memory", NO_DEVICE: b"no CUDA-capable device is detected"}
STREAM = 7


class FakeCuda:
    """One GPU with `free` bytes; `fail` maps a function's name to the error that it returns."""

    cudaMemcpyKind = SimpleNamespace(  # noqa: N815  # CUDA's names
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3
    )
    cudaDeviceAttr = SimpleNamespace(  # noqa: N815
        cudaDevAttrComputeCapabilityMajor=75, cudaDevAttrComputeCapabilityMinor=76
    )
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)  # noqa: N815
    cudaError_t = SimpleNamespace(cudaErrorNotReady=600)  # noqa: N815

    def __init__(
        self, capability: tuple[int, int] = (12, 0), free: int = 1 << 40, gpus: int = 1
    ) -> None:
        self.capability, self.free, self.gpus = capability, free, gpus
        self.current = dict[int, int]()  # a thread's current GPU
        self.busy = 0  # how often the stream still reports to be busy
        self.fail: dict[str, int] = {}
        self.device: dict[int, np.ndarray[Any, Any]] = {}  # by address
        self.host: dict[int, np.ndarray[Any, Any]] = {}
        self.captured: list[Callable[[], object]] | None = None
        self.graphs: dict[int, list[Callable[[], object]]] = {}
        self.launches = 0

    def queue(self, work: Callable[[], object]) -> None:
        """Run a stream's work at once, or keep it until the graph being captured is launched."""
        if self.captured is None:
            work()
        else:
            self.captured.append(work)

    def on_device(self, address: int, size: int) -> bool:
        return _within(self.device, address, size)

    def __getattribute__(self, name: str) -> Any:
        fail = object.__getattribute__(self, "fail") if name.startswith("cuda") else {}
        if name in fail:
            return lambda *args: (fail[name], None)
        return object.__getattribute__(self, name)

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:  # noqa: N802
        return SUCCESS, TEXTS[error]

    def cudaGetDeviceCount(self) -> tuple[int, int]:  # noqa: N802
        return SUCCESS, self.gpus

    def cudaSetDevice(self, device: int) -> tuple[int]:  # noqa: N802
        assert 0 <= device < self.gpus
        self.current[threading.get_ident()] = device
        return (SUCCESS,)

    def cudaStreamQuery(self, stream: int) -> tuple[int]:  # noqa: N802
        assert (stream, self.captured) == (STREAM, None)
        self.busy -= self.busy > 0
        return (self.cudaError_t.cudaErrorNotReady if self.busy else SUCCESS,)

    def cudaDeviceGetAttribute(self, attribute: int, device: int) -> tuple[int, int]:  # noqa: N802
        assert device == self.current[threading.get_ident()]
        return SUCCESS, self.capability[attribute - 75]

    def cudaMemGetInfo(self) -> tuple[int, int, int]:  # noqa: N802
        return SUCCESS, self.free, 1 << 40

    def cudaStreamCreate(self) -> tuple[int, int]:  # noqa: N802
        return SUCCESS, STREAM

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:  # noqa: N802
        assert stream == STREAM
        return (SUCCESS,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:  # noqa: N802
        assert (stream, self.captured) == (STREAM, None)
        return (SUCCESS,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:  # noqa: N802
        if size > self.free:
            return OUT_OF_MEMORY, 0
        self.free -= size
        return SUCCESS, _allocate(self.device, size, fill=0xFF)

    def cudaMallocHost(self, size: int) -> tuple[int, int]:  # noqa: N802
        return SUCCESS, _allocate(self.host, size, fill=0xFF)

    def cudaFree(self, address: int) -> tuple[int]:  # noqa: N802
        self.free += self.device.pop(address).nbytes - 256
        return (SUCCESS,)

    def cudaFreeHost(self, address: int) -> tuple[int]:  # noqa: N802
        del self.host[address]
        return (SUCCESS,)

    def cudaMemsetAsync(  # noqa: N802
        self, address: int, value: int, size: int, stream: int
    ) -> tuple[int]:
        assert stream == STREAM
        assert self.on_device(address, size)
        ctypes.memset(address, value, size)
        return (SUCCESS,)

    def cudaMemcpyAsync(  # noqa: N802
        self, target: int, source: int, size: int, kind: int, stream: int
    ) -> tuple[int]:
        assert stream == STREAM
        sides = {1: (False, True), 2: (True, False), 3: (True, True)}[kind]
        for address, device in zip((source, target), sides, strict=True):
            if device:
                assert self.on_device(address, size), "within what was allocated"
            elif self.captured is not None:
                assert _within(self.host, address, size), "a graph copies pinned memory only"
        self.queue(lambda: ctypes.memmove(target, source, size))
        return (SUCCESS,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:  # noqa: N802
        assert (stream, mode, self.captured) == (STREAM, 1, None)
        self.captured = []
        return (SUCCESS,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, Any]:  # noqa: N802
        graph, self.captured = self.captured, None
        return SUCCESS, graph

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, int]:  # noqa: N802
        assert flags == 0
        self.graphs[len(self.graphs) + 1] = list(graph)
        return SUCCESS, len(self.graphs)

    def cudaGraphDestroy(self, graph: Any) -> tuple[int]:  # noqa: N802
        return (SUCCESS,)

    def cudaGraphExecDestroy(self, program: int) -> tuple[int]:  # noqa: N802
        self.graphs[program] = []
        return (SUCCESS,)

    def cudaGraphLaunch(self, program: int, stream: int) -> tuple[int]:  # noqa: N802
        assert (stream, self.captured) == (STREAM, None)
        assert self.graphs[program], "instantiated, not destroyed"
        for work in self.graphs[program]:
            work()
        self.launches += 1
        return (SUCCESS,)


def _allocate(memory: dict[int, np.ndarray[Any, Any]], size: int, fill: int) -> int:
    """Allocate at a multiple of 256 bytes, as cudaMalloc does; the array keeps it alive."""
    array = np.full(size + 256, fill, np.uint8)
    address = -(-array.ctypes.data // 256) * 256
    memory[address] = array
    return address


def _within(memory: dict[int, np.ndarray[Any, Any]], address: int, size: int) -> bool:
    return any(
        start <= address and address + size <= start + array.nbytes - 256
        for start, array in memory.items()
    )
