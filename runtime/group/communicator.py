"""NCCL without torch: the communicator in which a TensorRT engine's collectives run.

Its library is called directly, as PyTorch for CPUs, which ranks have for their messages, has none.
NCCL waits on the GPU, for ever if another rank is gone; so the host asks while it waits, and aborts
(`nccl.py` does the same for PyTorch's communicators).
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
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.nccl import ABORTING, within
from mtpbuild.runtime.group.start import environment
from mtpbuild.runtime.programs.cuda import Device

LIBRARY, WHEEL = "libnccl.so.2", "nvidia.nccl"
# Prompts are not captured and share the communicator with captured steps. NCCL's default lets them;
# a machine that is tuned for graphs alone may not.
SETTINGS = {"NCCL_GRAPH_MIXING_SUPPORT": "1"}
CAPSULE = b"ncclComm_t"  # the name that TensorRT's bindings look for
ID_BYTES = 128


class UniqueId(ctypes.Structure):
    """Is NCCL's ncclUniqueId: rank 0 makes it, all ranks meet by it."""

    _fields_ = (("bytes", ctypes.c_byte * ID_BYTES),)


def nccl_library() -> Any:
    """NCCL, as TensorRT finds it: the loader's, or that of NVIDIA's wheel.

    Once it is loaded TensorRT's own search by name gives the same one.
    """
    names = [LIBRARY]
    with contextlib.suppress(ModuleNotFoundError):
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
    """Is this rank's end of what connects the GPUs. All ranks make it at the same time."""

    def __init__(self, library: Any, rank: int, ranks: int) -> None:
        self._nccl, self._rank, self._ranks = library, rank, ranks
        self._handle = ctypes.c_void_p()

    def invite(self) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """Rank 0's id for all, as bytes."""
        name = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(name))
        return np.frombuffer(bytes(name), np.uint8).copy()

    def meet(self, device: Device, name: bytes) -> None:
        """Join the others on this rank's GPU; waits for them."""
        device.use()
        handle, unique = ctypes.byref(self._handle), UniqueId.from_buffer_copy(name)
        ranks, rank = ctypes.c_int(self._ranks), ctypes.c_int(self._rank)
        self._call("ncclCommInitRank", handle, ranks, unique, rank)

    @property
    def capsule(self) -> object:
        """Returns the communicator as TensorRT's bindings take it."""
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        made: object = make(self._handle, CAPSULE, None)
        return made

    def failed(self) -> bool:
        """Tells whether NCCL has found a rank gone: collectives then end early, with any result."""
        error = ctypes.c_int()
        self._call("ncclCommGetAsyncError", self._handle, ctypes.byref(error))
        return error.value != 0

    def abort(self) -> None:
        """Wait for no rank; whatever the GPU still waits for ends."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            with contextlib.suppress(RuntimeError):
                within(ABORTING, partial(self._call, "ncclCommAbort", handle))

    def _call(self, name: str, *arguments: Any) -> None:
        """Call NCCL; raises EngineError with what it says."""
        if code := int(getattr(self._nccl, name)(*arguments)):
            self._nccl.ncclGetErrorString.restype = ctypes.c_char_p
            reason = self._nccl.ncclGetErrorString(ctypes.c_int(code))
            raise EngineError(f"{name} failed: {reason.decode()}")


def join(device: Device, channel: Channel, library: Callable[[], Any]) -> Communicator:
    """Connect this rank's GPU with the others'. All ranks call it, at the same time."""
    communicator = Communicator(library(), channel.rank, channel.ranks)
    with channel.unbroken():
        own = np.zeros(ID_BYTES, np.uint8) if channel.rank else communicator.invite()
        name = channel.gather(own)[0].tobytes()  # a rank without GPU or NCCL has left by now
        with environment(SETTINGS):
            within(channel.patience, partial(communicator.meet, device, name))
        channel.leaving.append(communicator.abort)
    return communicator
