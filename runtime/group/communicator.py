"""NCCL without torch: the communicator in which a TensorRT engine's collectives run.

The library is called directly, because ranks need only PyTorch for CPUs, which comes without NCCL.
NCCL's kernels wait for ever if another rank has ended. So the host checks for errors while it waits
for the GPU, and aborts (`nccl.py` does the same for PyTorch's communicators).
"""

import contextlib
import ctypes
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mtpbuild.runtime.errors import EngineError, MissingDependencyError
from mtpbuild.runtime.gpu.cuda import Device
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.nccl import ABORTING, run_within
from mtpbuild.runtime.group.start import environment

LIBRARY, WHEEL = "libnccl.so.2", "nvidia.nccl"
# Captured steps and prompts, which are not captured, share the communicator. NCCL's default allows
# this, but a machine's own settings may not.
SETTINGS = {"NCCL_GRAPH_MIXING_SUPPORT": "1"}
CAPSULE = b"ncclComm_t"  # the capsule's name that TensorRT's bindings expect
ID_BYTES = 128


class UniqueId(ctypes.Structure):
    """NCCL's ncclUniqueId, which rank 0 creates and all ranks use to join."""

    _fields_ = (("bytes", ctypes.c_byte * ID_BYTES),)


def load_nccl() -> Any:
    """Load NCCL by its name or, failing that, from NVIDIA's wheel.

    TensorRT loads NCCL by name too, and then gets this library.
    """
    names = [LIBRARY]
    with contextlib.suppress(ModuleNotFoundError):  # no wheel: the system's library
        spec = find_spec(WHEEL)
        folders = spec.submodule_search_locations if spec is not None else None
        names += [str(Path(folder) / "lib" / LIBRARY) for folder in folders or ()]
    for name in names:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    raise MissingDependencyError(
        f"several ranks of target tensorrt need NCCL ({LIBRARY}): pip install nvidia-nccl-cu13"
    )


class Communicator:
    """This rank's NCCL communicator; all ranks create it together."""

    def __init__(self, library: Any, rank: int, ranks: int) -> None:
        self._nccl, self._rank, self._ranks = library, rank, ranks
        self._handle = ctypes.c_void_p()

    def invite(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Create the unique id that all ranks need, as bytes; for rank 0."""
        name = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(name))
        return np.frombuffer(bytes(name), np.uint8).copy()

    def meet(self, device: Device, name: bytes) -> None:
        """Join the communicator with this rank's GPU; waits for the other ranks."""
        device.use()
        handle, unique = ctypes.byref(self._handle), UniqueId.from_buffer_copy(name)
        ranks, rank = ctypes.c_int(self._ranks), ctypes.c_int(self._rank)
        self._call("ncclCommInitRank", handle, ranks, unique, rank)

    @property
    def capsule(self) -> object:
        """The communicator as a PyCapsule, for TensorRT's bindings."""
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        capsule: object = make(self._handle, CAPSULE, None)
        return capsule

    def failed(self) -> bool:
        """Tell whether NCCL has lost a rank; collectives then end early with undefined results."""
        error = ctypes.c_int()
        self._call("ncclCommGetAsyncError", self._handle, ctypes.byref(error))
        return error.value != 0

    def abort(self) -> None:
        """Abort all collectives without waiting for other ranks."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            with contextlib.suppress(RuntimeError):  # what can't be aborted ends with the process
                run_within(ABORTING, partial(self._call, "ncclCommAbort", handle))

    def _call(self, name: str, *arguments: Any) -> None:
        """Call NCCL; raises EngineError with its error text."""
        if code := int(getattr(self._nccl, name)(*arguments)):
            self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
            reason = self._nccl.ncclGetErrorString(ctypes.c_int(code))
            raise EngineError(f"{name} failed: {reason.decode()}")


def join(device: Device, channel: Channel, library: Callable[[], Any]) -> Communicator:
    """Connect this rank's GPU with those of the other ranks; all ranks call it together."""
    communicator = Communicator(library(), channel.rank, channel.ranks)
    with channel.unbroken():
        invitation = np.zeros(ID_BYTES, np.uint8) if channel.rank else communicator.invite()
        name = channel.gather(invitation)[0].tobytes()  # fails here if a rank has no GPU or no NCCL
        with environment(SETTINGS):
            run_within(channel.patience, partial(communicator.meet, device, name))
        channel.leaving.append(communicator.abort)
    return communicator
