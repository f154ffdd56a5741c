"""Packages compiled by AOTInductor: opening and running them, and the machine they need."""

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from mtpbuild.runtime.contract.manifest import CONSTANTS, WEIGHTS, Manifest
from mtpbuild.runtime.contract.sums import PEERS
from mtpbuild.runtime.errors import EngineError, take_first_line

HARDWARE = "x86-64 CPU with AVX2"  # what the compiled code needs
TORCH = ".".join(torch.__version__.split(".")[:2])  # AOTInductor packages are bound to it


class Runner(Protocol):
    """A program that can be run."""

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run on inputs in the manifest's order, update state in place, return other outputs."""
        ...


# (device, peers for one-shot sums) -> name -> program
Opener: TypeAlias = Callable[..., Callable[[str], Runner]]


class Package:
    """One compiled program, with its own constants and the weights that programs share.

    device: such as cuda:0. rank: this process's rank. peers: the constant for one-shot sums
    (`one_shot.share`).
    """

    def __init__(
        self,
        path: Path,
        weights: Mapping[str, torch.Tensor],
        device: str,
        rank: int = 0,
        peers: torch.Tensor | None = None,
    ) -> None:
        # Kept alive: the runner holds pointers to them.
        self._weights = weights
        try:
            # One single-threaded runner is enough, as there is one caller at a time.
            index = torch.device(device).index
            runner = torch._C._aoti.AOTIModelPackageLoader(
                str(path), "model", True, 1, -1 if index is None else index
            )
            self._own = load_file(path.with_name(CONSTANTS.format(path.stem)), device)
            for name in self._own:
                if name.endswith(".rank"):
                    self._own[name] = torch.tensor([rank], device=device)
                if name.endswith(f".{PEERS}") and peers is not None:
                    self._own[name] = peers
            named = {f"model.{name}": weight for name, weight in weights.items()} | self._own
            wanted = {name: named[name] for name in runner.get_constant_fqns()}
            runner.load_constants(wanted, False, True, True)  # check all; we own the memory
        except (RuntimeError, SafetensorError, KeyError) as error:
            why = take_first_line(error)
            raise EngineError(f"{path}: torch can't load it ({why}); rebuild it") from None
        self._runner = runner

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._runner.run(inputs)


def open_packages(folder: Path, manifest: Manifest) -> Opener:
    """Return an opener, which loads the weights onto a device and then opens programs by name."""

    def open_on(device: str, peers: torch.Tensor | None = None) -> Callable[[str], Runner]:
        weights = load_file(folder / WEIGHTS, device=device)  # memory-mapped on a CPU
        programs, rank = manifest.programs, manifest.rank or 0
        return lambda name: Package(folder / programs[name].file, weights, device, rank, peers)

    return open_on


def name_this_machine() -> str:
    """Return this hardware's name, which must equal an engine's `target.hardware`."""
    if platform.machine() != "x86_64":
        return f"{platform.machine()} CPU"
    return HARDWARE if torch.cpu.get_capabilities()["avx2"] else "x86-64 CPU without AVX2"
