"""CUDA as programs use it, without torch: one GPU, its memory, one stream, copies, graphs."""

import ctypes
import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.contract.programs import host_type
from mtpbuild.runtime.errors import EngineError, explain_missing_package

Place: TypeAlias = "DeviceArray | NDArray[Any]"


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A contiguous tensor in the GPU's memory."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def reshape(self, shape: tuple[int, ...]) -> "DeviceArray":
        return DeviceArray(self.address, shape, self.dtype)

    def __getitem__(self, slots: slice) -> "DeviceArray":
        """Return a view [last - first, ..] of entries of the first dimension."""
        first, last, _ = slots.indices(self.shape[0])
        size = self.nbytes // self.shape[0]
        return DeviceArray(self.address + first * size, (last - first, *self.shape[1:]), self.dtype)


class Device:
    """A visible GPU and everything that was allocated on it.

    Work is queued on `stream` in order; `synchronise` waits for it. Calls raise EngineError with
    CUDA's error text. Any thread may call, one at a time.
    """

    def __init__(self, group: str, index: int = 0) -> None:
        """group: the dependency group that the error names if CUDA's package is missing."""
        self._cuda = _import_bindings(group)
        error, count = self._cuda.cudaGetDeviceCount()
        if int(error) or not count:
            raise EngineError(f"no NVIDIA GPU can be used here: {self._describe_error(error)}")
        if index >= count:
            raise EngineError(f"GPU {index} is asked for, CUDA finds {count} (numbered from 0)")
        self.index, self._thread = index, threading.local()
        self.stream = int(self._call("cudaStreamCreate"))
        self._owned: list[Callable[[], object]] = [
            partial(self._cuda.cudaStreamDestroy, self.stream)
        ]
        weakref.finalize(self, _release, self._owned)

    @property
    def compute_capability(self) -> str:
        """The GPU's compute capability, such as 12.0."""
        names = self._cuda.cudaDeviceAttr
        parts = (names.cudaDevAttrComputeCapabilityMajor, names.cudaDevAttrComputeCapabilityMinor)
        numbers = (self._call("cudaDeviceGetAttribute", part, self.index) for part in parts)
        return ".".join(map(str, numbers))

    def free_memory(self) -> int:
        """Return the number of free bytes."""
        return int(self._call("cudaMemGetInfo")[0])

    def zeros(self, shape: tuple[int, ...], dtype: "str | np.dtype[Any]") -> DeviceArray:
        """Allocate zeros on the GPU, aligned to 256 bytes by CUDA, as programs require.

        dtype: NumPy's, or as a manifest spells it.
        """
        array = DeviceArray(0, shape, host_type(dtype) if isinstance(dtype, str) else dtype)
        address = int(self._call("cudaMalloc", max(array.nbytes, 1)))
        self._owned.append(partial(self._cuda.cudaFree, address))
        self._call("cudaMemsetAsync", address, 0, array.nbytes, self.stream)
        return DeviceArray(address, shape, array.dtype)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Allocate pinned zeros on the host, which captured copies may use."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        address = int(self._call("cudaMallocHost", max(size, 1)))
        self._owned.append(partial(self._cuda.cudaFreeHost, address))
        raw = np.frombuffer((ctypes.c_byte * size).from_address(address), np.byte)
        array = raw.view(dtype).reshape(shape)
        array[...] = 0
        return array

    def copy(self, source: Place, target: Place) -> None:
        """Queue a copy of `source` to the beginning of `target`; at least one is on the GPU."""
        assert source.nbytes <= target.nbytes, "a copy would overrun"
        kinds = self._cuda.cudaMemcpyKind
        kind = {
            (False, True): kinds.cudaMemcpyHostToDevice,
            (True, False): kinds.cudaMemcpyDeviceToHost,
            (True, True): kinds.cudaMemcpyDeviceToDevice,
        }[isinstance(source, DeviceArray), isinstance(target, DeviceArray)]
        places = (_find_address(target), _find_address(source))
        self._call("cudaMemcpyAsync", *places, source.nbytes, kind, self.stream)

    def host(self, array: DeviceArray) -> NDArray[Any]:
        """Return a copy after all queued work is done."""
        result = np.empty(array.shape, array.dtype)
        self.copy(array, result)
        self.synchronise()
        return result

    def synchronise(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)

    def settle(self, alive: Callable[[], None]) -> None:
        """Wait for all queued work; meanwhile call `alive`, which may raise."""
        self.use()
        not_ready = int(self._cuda.cudaError_t.cudaErrorNotReady)
        while int(error := self._cuda.cudaStreamQuery(self.stream)[0]) == not_ready:
            alive()
            time.sleep(0)  # let other threads run
        self._check("cudaStreamQuery", error)
        alive()  # after the loss of a rank the work may have ended early

    def use(self) -> None:
        """Make this GPU current for this thread, also for other libraries."""
        if not getattr(self._thread, "used", False):
            (error,) = self._cuda.cudaSetDevice(self.index)
            self._check("cudaSetDevice", error)
            self._thread.used = True

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the work in a CUDA graph without running it; return a function that queues it."""
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self.stream, mode)
        try:
            work()
        finally:
            error, graph = self._cuda.cudaStreamEndCapture(self.stream)
        self._check("cudaStreamEndCapture", error)
        program = self._call("cudaGraphInstantiate", graph, 0)
        self._call("cudaGraphDestroy", graph)
        self._owned.append(partial(self._cuda.cudaGraphExecDestroy, program))
        return lambda: self._call("cudaGraphLaunch", program, self.stream)

    def _call(self, name: str, *arguments: Any) -> Any:
        self.use()
        error, *results = getattr(self._cuda, name)(*arguments)
        self._check(name, error)
        return results[0] if len(results) == 1 else results

    def _check(self, name: str, error: Any) -> None:
        if int(error):
            raise EngineError(f"{name} failed: {self._describe_error(error)}")

    def _describe_error(self, error: Any) -> str:
        _, text = self._cuda.cudaGetErrorString(error)
        return text.decode() if isinstance(text, bytes) else str(text)


def visible_gpus(group: str) -> int:
    """Count the GPUs that this process can use; raises MissingDependencyError without CUDA."""
    error, count = _import_bindings(group).cudaGetDeviceCount()
    return 0 if int(error) else int(count)


def _import_bindings(group: str) -> Any:
    with explain_missing_package("using a GPU", group):
        return import_module("cuda.bindings.runtime")


def _find_address(place: Place) -> int:
    if isinstance(place, DeviceArray):
        return place.address
    assert place.flags.c_contiguous, "CUDA copies runs of bytes"
    return place.ctypes.data


def _release(owned: list[Callable[[], object]]) -> None:
    while owned:
        owned.pop()()
