"""Time the stages of a build, and report each one to the user as it begins."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

Watch: TypeAlias = Callable[[str], None]  # is called with each stage's name as it begins


def ignore(stage: str) -> None:
    """Watch nothing."""


def say_time_left(start: float, made: int, left: int) -> str:
    """Say how long what is left will take, by what was made since `start`; "" if nothing was."""
    if not made:
        return ""
    seconds = (time.monotonic() - start) / made * left
    return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", {seconds:.0f} s left"


@dataclass
class Stages:
    """A timer of stages: `with stages(name)` passes the name to `watch`, then adds up seconds."""

    watch: Watch = ignore
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.watch(stage)
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
