"""Messages from rank 0 to the other ranks of an engine: the calls of its programs.

torch.distributed transports them. Each rank computes the output tokens by itself, from logits that
are equal on all ranks. Each message contains a checksum of rank 0's last tokens, and a rank whose
tokens differ ends the run.
"""

import contextlib
import json
import os
import re
import tempfile
import threading
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

from mtpbuild.runtime.contract.controls import StepControls
from mtpbuild.runtime.errors import EngineError, RankError, take_first_line
from mtpbuild.runtime.group.start import GROUP, LISTENER, SECONDS, read_time_limit

# The beginnings of lines that compiled code, gloo and NCCL write to stderr when they throw.
THROWN = re.compile(rb"(Error: |Exception |frame #|\[?[EWF]\d{4} |\[rank\d|terminate|\s*$)")
# Shares of the time limit: how often an idle rank 0 sends, and after how long a silent rank is
# given up. A pause shorter than the limit may begin just before a message was due.
KEEP_ALIVE, GRACE = 0.25, 1.5
HEAD = 512  # bytes of the first broadcast; a longer message follows in a second broadcast


class Channel:
    """The channel for rank 0's messages to the other ranks; all ranks create it together.

    While rank 0 is idle it sends keep-alive messages, so a rank that receives nothing within the
    time limit knows that rank 0 hangs.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.limit = rank, ranks, read_time_limit()
        self.patience = GRACE * max(self.limit, SECONDS)  # until all ranks have loaded
        self.failure: str | None = None
        self.leaving: list[Callable[[], None]] = []  # called in reverse before the group is left
        self.digest = 0  # CRC-32 of this rank's tokens of the last step
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._groups: list[dist.ProcessGroup] = []
        self._joined = not dist.is_initialized()
        try:
            with self.unbroken():
                self._join(timedelta(seconds=GRACE * self.limit))
        except BaseException:
            self._leave()
            raise

    def ready(self) -> None:
        """Wait until all ranks have loaded; from then on the time limit applies."""
        with self.unbroken():
            dist.barrier()
        self.patience = GRACE * self.limit
        if self.rank == 0:
            threading.Thread(target=self._keep_alive, daemon=True).start()

    def share(self, value: bool) -> bool:
        """Return rank 0's value on every rank; all ranks call it together, before `ready`."""
        if self.rank == 0:
            self.send("share", value)
            return value
        return bool(self.receive()[1][0])

    def send(self, name: str, *arguments: Any) -> None:
        self.broadcast(self.encode(name, *arguments))

    def encode(self, name: str, *arguments: Any) -> bytes:
        """Return a message, with the checksum of rank 0's last tokens."""
        return _encode([name, self.digest, *arguments])

    def broadcast(self, text: bytes) -> None:
        """Send an encoded message to all ranks."""
        with self._lock, self.unbroken():
            if len(text) > HEAD:
                self._broadcast(str(len(text)).encode().ljust(HEAD))
                self._broadcast(text)
            else:
                self._broadcast(text.ljust(HEAD))

    def receive(self) -> tuple[str, list[Any]]:
        """Return name and arguments; raise EngineError if rank 0's last tokens were different."""
        with self.unbroken():
            message = json.loads(self._broadcast(bytes(HEAD)), object_hook=_decode_value)
            if isinstance(message, int):
                message = json.loads(self._broadcast(bytes(message)), object_hook=_decode_value)
        name, digest, *arguments = message
        if digest not in (None, self.digest):
            raise EngineError(
                f"rank {self.rank} got other tokens than rank 0: run all ranks on CPUs of one kind"
            )
        return name, arguments

    def gather(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return all ranks' bytes [ranks, ..]; all ranks call it together, between programs."""
        every = torch.empty(self.ranks, *data.shape, dtype=torch.uint8)
        with self.unbroken():
            dist.all_gather([*every], torch.from_numpy(data), group=self._groups[2])
        return every.numpy()

    def close(self) -> None:
        """Tell the other ranks to end, unless a rank has failed, and leave the group."""
        self._closed.set()
        with contextlib.suppress(RankError):  # the others are told to end by its failure
            if self.rank == 0:
                self.send("end")
        self._leave()

    @contextlib.contextmanager
    def unbroken(self) -> Iterator[None]:
        """Mark the group as failed for good if the block fails or is interrupted.

        The ranks are then in different states, and every later call raises RankError.
        """
        if self.failure:
            raise RankError(self.failure)
        try:
            yield
        except RuntimeError as error:
            self.failure = self._describe_failure(error)
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
        # Separate groups for messages, for programs and for `gather`. gloo would mix up messages
        # that two threads send in one group.
        for _ in range(3):
            group = dist.new_group(backend="gloo", timeout=limit)
            assert isinstance(group, dist.ProcessGroup)
            self._groups.append(group)
        dist.barrier(self._groups[0])  # from here on the group is complete, even if a rank fails
        self._sums = YieldingGroup(self._groups[1])  # torch's registry does not keep it alive
        use_in_programs(self._sums)

    def _leave(self) -> None:
        """Leave the groups that this channel has joined, but not a default group of the caller."""
        while self.leaving:
            self.leaving.pop()()
        with contextlib.suppress(RuntimeError):  # groups of a rank that was lost
            if self._joined and dist.is_initialized():
                dist.destroy_process_group()
            for group in [] if self._joined else self._groups:
                dist.destroy_process_group(group)

    def _describe_failure(self, error: BaseException) -> str:
        what, reason = take_first_line(error), str(error)
        if re.search("timed out|timeout", reason, re.IGNORECASE):
            what = f"another rank has not answered for {self.patience / GRACE:g} s"
        elif "gloo" in reason:
            what = "another rank is gone"
        return f"rank {self.rank} of {self.ranks}: {what}"

    def _broadcast(self, data: bytes) -> bytes:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(tensor, src=0, group=self._groups[0])
        return tensor.numpy().tobytes()

    def _keep_alive(self) -> None:
        with contextlib.suppress(RankError):  # the next call raises the error again
            while not self._closed.wait(KEEP_ALIVE * self.limit):
                self.broadcast(_encode(["wait", None]))  # no digest: a step may be running


class YieldingGroup(dist.ProcessGroup):
    """The sums of compiled programs, which let other threads run while they wait.

    A program holds the GIL from its start to its end. If it waited for a paused rank inside, the
    server and the keep-alive messages would stand still, and so would a thread that is to wake
    that rank. A call from Python waits without the GIL.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # not in the stub
        self._group = group

    def allreduce(self, *arguments: Any) -> Any:
        work = self._group.allreduce(*arguments)
        work.wait()
        return work


def use_in_programs(group: dist.ProcessGroup) -> None:
    """Register this group for the collectives that are compiled into programs."""
    with contextlib.suppress(RuntimeError):  # a group of an earlier engine, or the gloo group
        c10d._unregister_process_group(GroupName(GROUP))
    c10d._register_process_group(GroupName(GROUP), group)


def _store(listener: str, limit: timedelta) -> c10d.TCPStore:
    """Return the store by which ranks on one machine meet; rank 0 has already opened its socket."""
    return c10d.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=bool(listener),
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=os.dup(int(listener)) if listener else None,
    )


def _encode(message: list[Any]) -> bytes:
    return json.dumps(message, default=_encode_value).encode()


def _encode_value(value: Any) -> Any:
    """Represent an array or controls as JSON."""
    if isinstance(value, StepControls):
        return {"controls": asdict(value)}
    return value.item() if value.ndim == 0 else {"array": value.tolist(), "dtype": str(value.dtype)}


def _decode_value(value: dict[str, Any]) -> Any:
    """Restore a value from the object of `_encode_value`; JSON has no tuples."""
    if "array" in value:
        return np.array(value["array"], value["dtype"])
    if "controls" in value:
        items = value["controls"].items()
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in items}
        return StepControls(**fields)
    return value


class Silence:
    """A context manager that holds back standard error, where compiled code writes its exceptions.

    Other threads' lines are written at the end. If the block fails, the lines of compiled code are
    dropped, since the raised error has the same reason in one line. Several threads may be inside;
    the last thread to leave writes the output.
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
            self._captured = tempfile.TemporaryFile()
            os.dup2(self._captured.fileno(), 2)

    def __exit__(self, kind: object, *failure: object) -> None:
        with self._lock:
            self._inside -= 1
            self._failed |= kind is not None
            if self._inside:
                return
            os.dup2(self._stderr, 2)
            os.close(self._stderr)
            with self._captured as captured:
                captured.seek(0)
                lines = captured.readlines()
            if kept := [line for line in lines if not (self._failed and THROWN.match(line))]:
                os.write(2, b"".join(kept))


silence = Silence()  # of this process
