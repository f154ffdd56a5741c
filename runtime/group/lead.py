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
from typing import Any, TypeAlias, cast

import numpy as np

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest, check_files
from mtpbuild.runtime.contract.programs import (
    Bools,
    Overlapping,
    PrefixCaching,
    Programs,
    StepOutput,
)
from mtpbuild.runtime.errors import (
    EngineError,
    RankError,
    RequestFailedError,
    StepError,
    UsageError,
)
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.start import find_own_folders, find_own_rank

# What rank 0 forwards: the methods of the protocols, but those for files of rows.
CALLS = {name for kind in (Programs, PrefixCaching) for name in vars(kind) if name[0] != "_"}
CALLS -= {"features", "saved", "adopt"}
RUNS = frozenset({"prefill", "step", "launch", "land"})  # calls that run programs
DONE, REFUSED, FAILED = range(3)  # how host work ended; REFUSED: with False, FAILED: by raising

LoadRank: TypeAlias = Callable[..., Programs]  # (rank's folder, manifest, channel=..) -> Programs


class Calls:
    """Calls of a rank's own programs by name, on rank 0 and on the ranks that repeat its calls.

    Besides the calls of `Programs` there are `launch`, which numbers its step, and `land`, which
    reads the output of a numbered step. So steps overlap in the same way on all ranks.
    """

    def __init__(self, programs: Programs, channel: Channel) -> None:
        self._programs, self._channel = programs, channel
        self._launched = dict[int, Callable[[], StepOutput]]()  # steps that are not read yet

    def run_program(self, name: str, arguments: Sequence[Any]) -> Any:
        """Make a call that runs a program; store the checksum of a step's tokens."""
        if name == "launch":
            number, active, rows = arguments
            self._launched.pop(number - 2, None)  # this launch reuses its arrays
            self._launched[number] = cast(Overlapping, self._programs).launch(active, rows)
            return None
        if name == "land":
            result = self._launched.pop(*arguments)()
        else:
            result = getattr(self._programs, name)(*arguments)
        if name in ("step", "land"):
            self._channel.digest = zlib.crc32(result.tokens.tobytes())
        return result

    def do_host_work(self, name: str, arguments: Sequence[Any]) -> Exception | bool:
        """Do host work on all ranks; return an error if it failed on any rank.

        Otherwise return False if any rank returned False, else True.
        """
        failure = None
        try:
            ending = REFUSED if getattr(self._programs, name)(*arguments) is False else DONE
        except (RankError, StepError):  # StepError: the work ran programs, as attention-DP's does
            raise
        except Exception as error:
            ending, failure = FAILED, error
        endings = self._channel.gather(np.array([ending], np.uint8))[:, 0].tolist()
        if failure is None and FAILED in endings:
            rank = endings.index(FAILED)
            failure = RequestFailedError(f"the request failed: rank {rank} failed to {name}")
        return failure or REFUSED not in endings


class LeadingPrograms:
    """Rank 0's programs; each call in CALLS is sent to the other ranks first."""

    def __init__(self, programs: Programs, channel: Channel) -> None:
        self.lookahead = programs.lookahead
        known = {Feature.PREFIX_CACHE, Feature.OVERLAP}
        self.features = programs.features & known | {Feature.SHARE}
        self._channel, self._calls = channel, Calls(programs, channel)
        self._numbers = itertools.count()
        channel.ready()
        self.close = weakref.finalize(self, channel.close)  # garbage collection calls it too

    @property
    def failure(self) -> str | None:
        return self._channel.failure

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)
        return partial(self._call, name)

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
                return self._calls.run_program(name, arguments)
            result = self._calls.do_host_work(name, arguments)
        if isinstance(result, Exception):
            raise result
        return result


def lead(folder: Path, manifest: Manifest, load: LoadRank) -> Programs:
    """Load rank 0's programs of an engine whose files were checked."""
    if rank := find_own_rank(folder, manifest):
        raise EngineError(
            f"this is rank {rank}: it follows rank 0 (mtpbuild.runtime.programs.follow)"
        )
    *_, (rank_folder, rank_manifest) = find_own_folders(folder, manifest)
    channel = Channel(0, manifest.build.tp)
    try:
        programs = load(rank_folder, rank_manifest, channel=channel)
        return cast(Programs, LeadingPrograms(programs, channel))
    except BaseException:
        channel.close()
        raise


def repeat_calls(folder: Path, manifest: Manifest, load: LoadRank) -> None:
    """Load another rank's programs and repeat rank 0's calls until it ends."""
    rank = find_own_rank(folder, manifest)
    if rank == 0:
        raise UsageError("rank 0 follows nobody: load the engine there with Engine.load")
    channel = Channel(rank, manifest.build.tp)
    try:
        for rank_folder, rank_manifest in find_own_folders(folder, manifest):
            check_files(rank_folder, rank_manifest)  # other ranks notice a failure
        calls = Calls(load(rank_folder, rank_manifest, channel=channel), channel)
        channel.ready()
        while (call := channel.receive())[0] != "end":
            if call[0] in RUNS:
                calls.run_program(*call)
            elif call[0] != "wait":
                calls.do_host_work(*call)  # gathers the result; rank 0 handles a failure
    finally:
        channel.close()
