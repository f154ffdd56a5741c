"""What the operators share that call another package's attention: `--attention-backend`.

Each has a module of its own, which only engines whose manifest names it import. None was ever run
on a GPU (docs/gpu-kernels.md).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mtpbuild.runtime.errors import EngineError, MissingDependencyError

PAGE = 64  # rows; a cache has whole pages

KEPT: dict[tuple[Any, ...], Any] = {}  # from call to call: a CUDA graph holds addresses


@dataclass(frozen=True)
class Library:
    """Describes the function of another package that an operator calls, by what it is given."""

    name: str
    flag: str  # of --attention-backend
    function: str  # behind its module
    install: str  # what pip is told
    version: str  # one that takes all of it
    given: tuple[str, ...]

    def find(self) -> Any:
        module, _, name = self.function.rpartition(".")
        return getattr(import_module(module), name)

    def check(self, folder: Path) -> None:
        """Raise an EngineError unless the package is here, with the function that is called."""
        try:
            function = self.find()
        except (ImportError, OSError, RuntimeError) as error:  # also of what it loads itself
            raise MissingDependencyError(
                f"{folder}: its attention is {self.name}'s ({error}): pip install {self.install}, "
                f"or build without --attention-backend {self.flag}"
            ) from None
        known = inspect.signature(function).parameters
        missing = [name for name in self.given if name not in known]
        if missing:
            raise EngineError(
                f"{folder}: this {self.name}'s {function.__name__} has no "
                f"{', '.join(missing)}; {self.version} has"
            )


def module_of(flag: str) -> ModuleType:
    """Returns the backend's module: importing it registers what programs call."""
    return import_module(f"{__package__}.{flag.replace('-', '_')}_attention")


def kept(key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
    """Returns a tensor that is made once."""
    if key not in KEPT:
        KEPT[key] = make()
    result: Tensor = KEPT[key]
    return result


def table_of(cache: Tensor) -> Tensor:
    """Returns each slot's pages [slots, pages of a slot] int32: one behind the other."""
    (B, _, S, _), device = cache.shape, cache.device
    pages = B * S // PAGE
    return kept(
        ("table", device, B, S),
        lambda: torch.arange(pages, dtype=torch.int32, device=device).view(B, -1),
    )


def stream_of(cache: Tensor) -> int:
    """Identifies the stream on which a cache's kernels are queued."""
    on_gpu = cache.device.type == "cuda"
    return torch.cuda.current_stream(cache.device).cuda_stream if on_gpu else 0
