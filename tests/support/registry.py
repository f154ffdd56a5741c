"""Changes a target's record while a block runs, and loads engines of fake programs."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Programs
from mtpbuild.runtime.contract.targets import find_target, register

_makers: list[Callable[[Manifest], Programs]] = []


@contextlib.contextmanager
def registered(name: str, **fields: Any) -> Iterator[None]:
    """Change these fields of a target's record while the block runs."""
    before = find_target(name)
    register(replace(before, **fields))
    try:
        yield
    finally:
        register(before)


@contextlib.contextmanager
def programs_by(make: Callable[[Manifest], Programs]) -> Iterator[None]:
    """Load engines of target onnxruntime, fake ones too, with the programs that `make` makes."""
    _makers.append(make)
    try:
        with registered("onnxruntime", programs=__name__):
            yield
    finally:
        _makers.pop()


def load(folder: Path, manifest: Manifest, threads: int | None, **options: Any) -> Programs:
    """Stand in for the target's `load`."""
    return _makers[-1](manifest)
