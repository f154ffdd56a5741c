"""Programs that AOTInductor compiled: how one is opened and run, and the machine it needs."""

import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from mtpbuild.runtime.contract.manifest import CONSTANTS, WEIGHTS, Manifest
from mtpbuild.runtime.contract.sums import PEERS
from mtpbuild.runtime.errors import EngineError

HARDWARE = "x86-64 CPU with AVX2"  # all that the compiled code needs
TORCH = ".".join(torch.__version__.split(".")[:2])  # AOTInductor packages are bound to it


class Runner(Protocol):
    """Declares a program that can be run."""

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Take inputs in the manifest's order and write over the state; return other outputs."""
        ...


# A device, and `peers` for one-shot sums -> name -> program.
Opener: TypeAlias = Callable[..., Callable[[str], Runner]]


class Package:
    """Is one compiled program, with the constants of its own and the weights that it shares.

    device: such as cuda:0. rank: which one of the ranks that share a model runs it. peers: what
    its one-shot sums are told.
    """

    def __init__(
        self,
        path: Path,
        weights: Mapping[str, torch.Tensor],
        device: str,
        rank: int = 0,
        peers: torch.Tensor | None = None,
    ) -> None:
        # Kept: the runner holds pointers to them, and they are never copied.
        self._weights = weights
        try:
            # One caller at a time: no pool of runners, no locks.
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
            runner.load_constants(wanted, False, True, True)  # all, and managed by us
        except (RuntimeError, SafetensorError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise EngineError(f"{path}: torch can't load it ({reason}); rebuild it") from None
        self._runner = runner

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._runner.run(inputs)


def open_packages(folder: Path, manifest: Manifest) -> Opener:
    """Give what loads an engine's weights onto a device, and then opens programs by name."""

    def on(device: str, peers: torch.Tensor | None = None) -> Callable[[str], Runner]:
        weights = load_file(folder / WEIGHTS, device=device)  # memory-mapped on a CPU
        programs, rank = manifest.programs, manifest.rank or 0
        return lambda name: Package(folder / programs[name].file, weights, device, rank, peers)

    return on


def this_machine() -> str:
    """Names this hardware, which an engine's `target.hardware` must equal to run here."""
    if platform.machine() != "x86_64":
        return f"{platform.machine()} CPU"
    return HARDWARE if torch.cpu.get_capabilities()["avx2"] else "x86-64 CPU without AVX2"
