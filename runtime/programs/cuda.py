"""The part of CUDA that programs use: memory of one GPU, copies, one stream, captured graphs."""

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
from mtpbuild.runtime.errors import EngineError, MissingDependencyError, install

Place: TypeAlias = "DeviceArray | NDArray[Any]"


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Is a contiguous tensor in the GPU's memory."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, slots: slice) -> "DeviceArray":
        """[last - first, ..]: entries of the first dimension, in place."""
        first, last, _ = slots.indices(self.shape[0])
        size = self.nbytes // self.shape[0]
        return DeviceArray(self.address + first * size, (last - first, *self.shape[1:]), self.dtype)


class Device:
    """Is a visible GPU, as a rule the first one, and all that was allocated on it.

    Calls that take effect in order are queued on `stream`; `synchronise` waits for them. Each
    raises EngineError with what CUDA says. Any thread may call, one at a time.
    """

    def __init__(self, group: str, index: int = 0) -> None:
        """group: the dependency group that a user without CUDA's package is told to install."""
        self._cuda = _bindings(group)
        error, count = self._cuda.cudaGetDeviceCount()
        if int(error) or not count:
            raise EngineError(f"no NVIDIA GPU can be used here: {self._reason(error)}")
        if index >= count:
            raise EngineError(f"GPU {index} is asked for, CUDA finds {count} (numbered from 0)")
        self.index, self._here = index, threading.local()
        self.stream = int(self._call("cudaStreamCreate"))
        self._owned: list[Callable[[], object]] = [
            partial(self._cuda.cudaStreamDestroy, self.stream)
        ]
        weakref.finalize(self, _release, self._owned)

    @property
    def compute_capability(self) -> str:
        """Returns what the GPU is capable of, such as 12.0."""
        names = self._cuda.cudaDeviceAttr
        parts = (names.cudaDevAttrComputeCapabilityMajor, names.cudaDevAttrComputeCapabilityMinor)
        found = (self._call("cudaDeviceGetAttribute", part, self.index) for part in parts)
        return ".".join(map(str, found))

    def free_memory(self) -> int:
        """Returns the bytes that nobody has taken."""
        return int(self._call("cudaMemGetInfo")[0])

    def zeros(self, shape: tuple[int, ...], dtype: "str | np.dtype[Any]") -> DeviceArray:
        """Allocate on the GPU; programs want multiples of 256 bytes, and so it comes.

        dtype: NumPy's, or as a manifest spells it.
        """
        array = DeviceArray(0, shape, host_type(dtype) if isinstance(dtype, str) else dtype)
        address = int(self._call("cudaMalloc", max(array.nbytes, 1)))
        self._owned.append(partial(self._cuda.cudaFree, address))
        self._call("cudaMemsetAsync", address, 0, array.nbytes, self.stream)
        return DeviceArray(address, shape, array.dtype)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Allocate on the host, at an address that a captured copy may use."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        address = int(self._call("cudaMallocHost", max(size, 1)))
        self._owned.append(partial(self._cuda.cudaFreeHost, address))
        raw = np.frombuffer((ctypes.c_byte * size).from_address(address), np.byte)
        array = raw.view(dtype).reshape(shape)
        array[...] = 0
        return array

    def copy(self, source: Place, target: Place) -> None:
        """Copies all of `source` to where `target` begins; one of them at least is on the GPU."""
        assert source.nbytes <= target.nbytes, "a copy would overrun"
        kinds = self._cuda.cudaMemcpyKind
        kind = {
            (False, True): kinds.cudaMemcpyHostToDevice,
            (True, False): kinds.cudaMemcpyDeviceToHost,
            (True, True): kinds.cudaMemcpyDeviceToDevice,
        }[isinstance(source, DeviceArray), isinstance(target, DeviceArray)]
        places = (_address(target), _address(source))
        self._call("cudaMemcpyAsync", *places, source.nbytes, kind, self.stream)

    def host(self, array: DeviceArray) -> NDArray[Any]:
        """Returns a copy, once all that is queued is done."""
        found = np.empty(array.shape, array.dtype)
        self.copy(array, found)
        self.synchronise()
        return found

    def synchronise(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)

    def settle(self, alive: Callable[[], None]) -> None:
        """Wait until all that is queued is done; `alive` is asked meanwhile, and may raise."""
        self.use()
        not_ready = int(self._cuda.cudaError_t.cudaErrorNotReady)
        while int(error := self._cuda.cudaStreamQuery(self.stream)[0]) == not_ready:
            alive()
            time.sleep(0)  # other threads' turn
        self._check("cudaStreamQuery", error)
        alive()  # what a rank has lost may end early

    def use(self) -> None:
        """Let this thread's calls be for this GPU; those of other libraries too."""
        if not getattr(self._here, "used", False):
            (error,) = self._cuda.cudaSetDevice(self.index)
            self._check("cudaSetDevice", error)
            self._here.used = True

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Make one CUDA graph of what `work` queues; the result queues it. Nothing runs yet."""
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
            raise EngineError(f"{name} failed: {self._reason(error)}")

    def _reason(self, error: Any) -> str:
        _, text = self._cuda.cudaGetErrorString(error)
        return text.decode() if isinstance(text, bytes) else str(text)


def visible_gpus(group: str) -> int:
    """Counts the GPUs that this process can use; raises MissingDependencyError without CUDA."""
    error, count = _bindings(group).cudaGetDeviceCount()
    return 0 if int(error) else int(count)


def _bindings(group: str) -> Any:
    try:
        return import_module("cuda.bindings.runtime")
    except ImportError as missing:
        raise MissingDependencyError(
            f"using a GPU needs {missing.name}: {install(group)}"
        ) from None


def _address(place: Place) -> int:
    if isinstance(place, DeviceArray):
        return place.address
    assert place.flags.c_contiguous, "CUDA copies runs of bytes"
    return place.ctypes.data


def _release(owned: list[Callable[[], object]]) -> None:
    while owned:
        owned.pop()()
