"""Messages from rank 0 to the other ranks of an engine: the calls of its programs.

They go over torch.distributed. Each rank computes by itself what comes out, from logits that are
the same on all. With the next message rank 0 says which tokens it got, so that a rank which got
others ends the run.
"""

import contextlib
import json
import os
import re
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from mtpbuild.runtime.contract.controls import Controls
from mtpbuild.runtime.contract.programs import StepOutput
from mtpbuild.runtime.errors import EngineError, RankError
from mtpbuild.runtime.group.start import GROUP, LISTENER, SECONDS, time_limit

# How lines begin that compiled code, gloo and NCCL write when they throw.
THROWN = re.compile(rb"(Error: |Exception |frame #|\[?[EWF]\d{4} |\[rank\d|terminate|\s*$)")
HEAD = 512  # bytes of a message; what is longer follows


class Channel:
    """Carries rank 0's messages to the others, in order. All ranks make it at the same time.

    While rank 0 has nothing to tell it says so: a rank that waits longer than the time limit knows
    that rank 0 hangs.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.limit = rank, ranks, time_limit()
        self.patience = max(self.limit, SECONDS)  # others may still start, or load
        self.failure: str | None = None
        self.leaving: list[Callable[[], None]] = []  # what to do before the group is left
        self.digest = 0  # of the last step's tokens
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._groups: list[dist.ProcessGroup] = []
        self._joined = not dist.is_initialized()
        try:
            with self.unbroken():
                self._join(timedelta(seconds=self.limit))
        except BaseException:
            self._leave()
            raise

    def ready(self) -> None:
        """Wait until all ranks have loaded; from now on each answers within the time limit."""
        with self.unbroken():
            dist.barrier()
        self.patience = self.limit
        if self.rank == 0:
            threading.Thread(target=self._stay, daemon=True).start()

    def share(self, value: bool) -> bool:
        """Rank 0's value, on all ranks; all call it, at the same time and before `ready`."""
        if self.rank == 0:
            self.send("share", value)
            return value
        return bool(self.receive()[1][0])

    def send(self, name: str, *arguments: Any) -> None:
        self.tell(self.encode(name, *arguments))

    def encode(self, name: str, *arguments: Any) -> bytes:
        """Return a message, which also says which tokens rank 0 got last."""
        return _encode([name, self.digest, *arguments])

    def tell(self, text: bytes) -> None:
        """Send an encoded message to all ranks."""
        with self._lock, self.unbroken():
            if len(text) > HEAD:
                self._broadcast(str(len(text)).encode().ljust(HEAD))
                self._broadcast(text)
            else:
                self._broadcast(text.ljust(HEAD))

    def receive(self) -> tuple[str, list[Any]]:
        """Name and arguments; raises EngineError if rank 0 got other tokens in the last step."""
        with self.unbroken():
            message = json.loads(self._broadcast(bytes(HEAD)), object_hook=_typed)
            if isinstance(message, int):
                message = json.loads(self._broadcast(bytes(message)), object_hook=_typed)
        name, digest, *arguments = message
        if digest not in (None, self.digest):
            raise EngineError(
                f"rank {self.rank} got other tokens than rank 0: do they have the same kind of CPU?"
            )
        return name, arguments

    def note(self, output: StepOutput) -> None:
        """Keep what this rank got: the next message tells it, or checks it."""
        self.digest = zlib.crc32(output.tokens.tobytes())

    def gather(self, own: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns all ranks' bytes, [ranks, ..]; called between programs, on all ranks."""
        every = torch.empty(self.ranks, *own.shape, dtype=torch.uint8)
        with self.unbroken():
            dist.all_gather([*every], torch.from_numpy(own), group=self._groups[2])
        return every.numpy()

    def close(self) -> None:
        """Send the others home, unless something went wrong; leave the group."""
        self._closed.set()
        with contextlib.suppress(RankError):
            if self.rank == 0:
                self.send("end")
        self._leave()

    @contextlib.contextmanager
    def unbroken(self) -> Iterator[None]:
        """Guard what leaves ranks apart if it fails or is interrupted: nothing can be done then."""
        if self.failure:
            raise RankError(self.failure)
        try:
            yield
        except RuntimeError as error:
            self.failure = self._what_failed(str(error))
            raise RankError(self.failure) from error
        except BaseException as error:
            self.failure = self.failure or f"a step was interrupted ({type(error).__name__})"
            raise

    def _join(self, limit: timedelta) -> None:
        if self._joined:
            meeting = timedelta(seconds=self.patience)
            listener = os.environ.get(LISTENER)
            dist.init_process_group(
                "gloo",
                store=None if listener is None else _store(listener, meeting),
                rank=self.rank,
                world_size=self.ranks,
                timeout=meeting,
            )
        # One for messages: gloo would mix up what two threads do in one. One for programs: these
        # keep Python's lock, which gloo's threads need, inside their own, to drop Python's tensors.
        for _ in range(3):
            group = dist.new_group(backend="gloo", timeout=limit)
            assert isinstance(group, dist.ProcessGroup)
            self._groups.append(group)
        dist.barrier(self._groups[0])  # who fails next leaves a group that all have joined
        use_in_programs(self._groups[1])

    def _leave(self) -> None:
        """Leave what this channel has joined; a group that the caller has joined stays."""
        while self.leaving:
            self.leaving.pop()()
        with contextlib.suppress(RuntimeError):
            if self._joined and dist.is_initialized():
                dist.destroy_process_group()
            for group in [] if self._joined else self._groups:
                dist.destroy_process_group(group)

    def _what_failed(self, reason: str) -> str:
        what = reason.splitlines()[0]
        if re.search("timed out|timeout", reason, re.IGNORECASE):
            what = f"another rank has not answered for {self.patience:g} s"
        elif "gloo" in reason:
            what = "another rank is gone"
        return f"rank {self.rank} of {self.ranks}: {what}"

    def _broadcast(self, data: bytes) -> bytes:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(tensor, src=0, group=self._groups[0])
        return tensor.numpy().tobytes()

    def _stay(self) -> None:
        with contextlib.suppress(RankError):  # whoever calls next is told
            while not self._closed.wait(self.limit / 4):
                self.tell(_encode(["wait", None]))  # perhaps in the middle of a step


def use_in_programs(group: dist.ProcessGroup) -> None:
    """Let the collectives that are compiled into programs run in this group."""
    with contextlib.suppress(RuntimeError):  # of an engine before this one, or its gloo
        c10d._unregister_process_group(GroupName(GROUP))
    c10d._register_process_group(GroupName(GROUP), group)


def _store(listener: str, limit: timedelta) -> c10d.TCPStore:
    """Returns the meeting place of ranks on one machine: a socket that rank 0 has open already."""
    return c10d.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=bool(listener),
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=os.dup(int(listener)) if listener else None,
    )


def _encode(message: list[Any]) -> bytes:
    return json.dumps(message, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Says an array or controls in JSON."""
    if isinstance(value, Controls):
        return {"controls": asdict(value)}
    return value.item() if value.ndim == 0 else {"array": value.tolist(), "dtype": str(value.dtype)}


def _typed(said: dict[str, Any]) -> Any:
    """Turns an object of JSON into what `_plain` said; controls' tuples have become lists."""
    if "array" in said:
        return np.array(said["array"], said["dtype"])
    if "controls" in said:
        items = said["controls"].items()
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in items}
        return Controls(**fields)
    return said


class Silence:
    """Holds back standard error: compiled code writes there what it throws, which we say in a line.

    What is written meanwhile is passed on in the end, for other threads may log. If the work fails,
    compiled code's lines are left out. Any thread may enter; the last one to leave passes it on.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._failed = False

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            self._failed, self._stderr = False, os.dup(2)
            self._held = tempfile.TemporaryFile()
            os.dup2(self._held.fileno(), 2)

    def __exit__(self, kind: object, *failure: object) -> None:
        with self._lock:
            self._inside -= 1
            self._failed |= kind is not None
            if self._inside:
                return
            os.dup2(self._stderr, 2)
            os.close(self._stderr)
            with self._held as held:
                held.seek(0)
                lines = held.readlines()
            if kept := [line for line in lines if not (self._failed and THROWN.match(line))]:
                os.write(2, b"".join(kept))


_SILENCE = Silence()


def silent() -> Silence:
    """Returns this process's `Silence`."""
    return _SILENCE
