"""Programs of a multi-rank engine: rank 0 sends each call to the other ranks, which repeat it.

If a call that runs a program fails on one rank, the ranks are in different states and the engine
has failed. Any other call is host work for one request: the ranks exchange how it ended, and if one
failed, only that request fails.
"""

import itertools
import weakref
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest, check_files
from mtpbuild.runtime.contract.programs import Bools, Programs, StepOutput
from mtpbuild.runtime.errors import EngineError, RankError, RequestFailedError, UsageError
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.start import find_own_folders, find_own_rank

RUNS = frozenset({"prefill", "step", "launch", "land"})  # calls that run programs
DONE, REFUSED, FAILED = range(3)  # how host work ended; REFUSED: with False, FAILED: by raising

LoadRank: TypeAlias = Callable[..., Programs]  # (rank's folder, manifest, channel=..) -> Programs


class Calls:
    """Calls of a rank's own programs by name, on rank 0 and on the ranks that repeat its calls.

    Besides the calls of `Programs` there are `launch`, which numbers its step, and `land`, which
    reads the output of a numbered step. So steps overlap in the same way on all ranks.
    """

    def __init__(self, own: Programs, channel: Channel) -> None:
        self._own, self._channel = own, channel
        self._launched = dict[int, Callable[[], StepOutput]]()  # steps that are not read yet

    def make(self, name: str, arguments: Sequence[Any]) -> Any:
        """Make a call that runs a program; store the checksum of a step's tokens."""
        if name == "launch":
            number, *given = arguments
            self._launched.pop(number - 2, None)  # this launch reuses its arrays
            self._launched[number] = getattr(self._own, name)(*given)
            return None
        if name == "land":
            result = self._launched.pop(*arguments)()
        else:
            result = getattr(self._own, name)(*arguments)
        if name in ("step", "land"):
            self._channel.digest = zlib.crc32(result.tokens.tobytes())
        return result

    def work(self, name: str, arguments: Sequence[Any]) -> Exception | bool:
        """Do host work on all ranks; return an error if it failed on any rank.

        Otherwise return False if any rank returned False, else True.
        """
        failure = None
        try:
            ended = REFUSED if getattr(self._own, name)(*arguments) is False else DONE
        except RankError:
            raise
        except Exception as error:
            ended, failure = FAILED, error
        every = self._channel.gather(np.array([ended], np.uint8))[:, 0]
        if failure is None and FAILED in every:
            rank = every.tolist().index(FAILED)
            failure = RequestFailedError(f"the request failed: rank {rank} failed to {name}")
        return failure or REFUSED not in every


def _forward(name: str) -> Callable[..., Any]:
    """Return the method of `LeadingPrograms` that makes this call on all ranks."""
    return lambda self, *arguments: self._call(name, *arguments)


class LeadingPrograms:
    """Rank 0's programs; each call is sent to the other ranks first."""

    def __init__(self, own: Programs, channel: Channel) -> None:
        self.lookahead = own.lookahead
        known = {Feature.PREFIX_CACHE, Feature.OVERLAP}
        self.features = own.features & known | {Feature.SHARE}
        self._channel, self._calls = channel, Calls(own, channel)
        self._numbers = itertools.count()
        channel.ready()
        self.close = weakref.finalize(self, channel.close)  # garbage collection calls it too

    @property
    def failure(self) -> str | None:
        return self._channel.failure

    prefill, step = _forward("prefill"), _forward("step")
    begin, move, clear = _forward("begin"), _forward("move"), _forward("clear")
    finite, discard = _forward("finite"), _forward("discard")
    save_rows, save_states = _forward("save_rows"), _forward("save_states")
    load_rows, load_states = _forward("load_rows"), _forward("load_states")

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        """Launch a step on all ranks; the result reads it on all of them."""
        number = next(self._numbers)
        self._call("launch", number, active, rows)
        return partial(self._call, "land", number)

    def _call(self, name: str, *arguments: Any) -> Any:
        call = self._channel.encode(name, *arguments)  # may raise, so not after a broadcast
        with self._channel.unbroken():
            self._channel.broadcast(call)
            if name in RUNS:
                return self._calls.make(name, arguments)
            result = self._calls.work(name, arguments)
        if isinstance(result, Exception):
            raise result
        return result


def lead(folder: Path, manifest: Manifest, load: LoadRank) -> LeadingPrograms:
    """Load rank 0's programs of an engine whose files were checked."""
    if rank := find_own_rank(folder, manifest):
        raise EngineError(
            f"this is rank {rank}: it follows rank 0 (mtpbuild.runtime.programs.follow)"
        )
    *_, (own_folder, own) = find_own_folders(folder, manifest)
    channel = Channel(0, manifest.build.tp)
    try:
        return LeadingPrograms(load(own_folder, own, channel=channel), channel)
    except BaseException:
        channel.close()
        raise


def repeat_calls(folder: Path, manifest: Manifest, load: LoadRank) -> None:
    """Load another rank's programs and repeat rank 0's calls until it ends."""
    rank = find_own_rank(folder, manifest)
    if rank == 0:
        raise UsageError("rank 0 is the engine: Engine.load")
    channel = Channel(rank, manifest.build.tp)
    try:
        for own_folder, own in find_own_folders(folder, manifest):  # other ranks notice a failure
            check_files(own_folder, own)
        _repeat(load(own_folder, own, channel=channel), channel)
    finally:
        channel.close()


def _repeat(own: Programs, channel: Channel) -> None:
    """Repeat rank 0's calls until it sends `end`."""
    channel.ready()
    calls = Calls(own, channel)
    while (call := channel.receive())[0] != "end":
        if call[0] in RUNS:
            calls.make(*call)
        elif call[0] != "wait":
            calls.work(*call)  # gathers the result on all ranks; rank 0 handles a failure
