"""Rank 0 leads: what is called of its programs, the other ranks' programs do too."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mtpbuild.runtime.controls import GREEDY, Controls
from mtpbuild.runtime.errors import EngineError, UsageError
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.start import own_folders, own_rank
from mtpbuild.runtime.manifest import Manifest, check_files
from mtpbuild.runtime.programs.base import Bools, Ints, Programs, StepOutput

LoadRank: TypeAlias = Callable[..., Programs]  # of a rank's folder, manifest, and `channel`


class LeadingPrograms:
    """Rank 0's programs; each call is told to the other ranks first."""

    def __init__(self, own: Programs, channel: Channel) -> None:
        self.lookahead = own.lookahead
        self._own, self._channel = own, channel
        channel.ready()
        self._end = weakref.finalize(self, channel.close)  # at the latest

    def close(self) -> None:
        self._end()

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self._call("prefill", slot, start, tokens)

    def begin(self, slot: int, length: int, newest: int, controls: Controls = GREEDY) -> None:
        self._call("begin", slot, length, newest, controls)

    def move(self, source: int, target: int) -> None:
        self._call("move", source, target)

    def step(self, active: Bools, rows: int) -> StepOutput:
        output: StepOutput = self._call("step", active, rows)
        return output

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._channel.unbroken():
            self._channel.send(name, *arguments)
            result = getattr(self._own, name)(*arguments)
            if name == "step":
                self._channel.note(result)
            return result


def lead(folder: Path, manifest: Manifest, load: LoadRank) -> LeadingPrograms:
    """Rank 0's programs, of an engine whose files were checked."""
    if rank := own_rank(folder, manifest):
        raise EngineError(f"this is rank {rank}: it follows rank 0 (mtpbuild.runtime.follow)")
    *_, (own_folder, own) = own_folders(folder, manifest)
    channel = Channel(0, manifest.build.tp)
    try:
        return LeadingPrograms(load(own_folder, own, channel=channel), channel)
    except BaseException:
        channel.close()
        raise


def follow(folder: Path, manifest: Manifest, load: LoadRank) -> None:
    """Do what rank 0 does, from beginning to end."""
    rank = own_rank(folder, manifest)
    if rank == 0:
        raise UsageError("rank 0 is the engine: Engine.load")
    channel = Channel(rank, manifest.build.tp)
    try:
        for own_folder, own in own_folders(folder, manifest):  # in the group: a failure is noticed
            check_files(own_folder, own)
        _repeat(load(own_folder, own, channel=channel), channel)
    finally:
        channel.close()


def _repeat(own: Programs, channel: Channel) -> None:
    """Make the calls that rank 0 makes, until it ends."""
    channel.ready()
    while (call := channel.receive())[0] != "end":
        match call:
            case "prefill", [slot, start, tokens]:
                own.prefill(slot, start, np.array(tokens, np.int64))
            case "begin", [slot, length, newest, controls]:
                own.begin(slot, length, newest, _controls(controls))
            case "move", [source, target]:
                own.move(source, target)
            case "step", [active, rows]:
                channel.note(own.step(np.array(active, np.bool_), rows))


def _controls(fields: dict[str, Any]) -> Controls:
    """Controls as they were before JSON made lists of tuples."""
    values: dict[str, Any]
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return Controls(**values)
