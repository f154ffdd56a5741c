"""Runs an engine's AOTInductor programs; all state is in place, weights are shared by them."""

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.errors import EngineError, MissingDependencyError
from mtpbuild.runtime.manifest import Manifest, TensorSpec
from mtpbuild.runtime.programs.base import PLAIN, Bools, Ints, StepOutput
from mtpbuild.runtime.programs.slots import Slots

try:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file
except ImportError as error:
    raise MissingDependencyError(
        "this engine needs torch: pip install 'mtpbuild[inductor]'"
    ) from error

if TYPE_CHECKING:
    from mtpbuild.runtime.group.lead import LeadingPrograms
    from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms

HARDWARE = "x86-64 CPU with AVX2"  # all that the compiled code needs
TORCH = ".".join(torch.__version__.split(".")[:2])  # AOTInductor packages are bound to it
WEIGHTS, CONSTANTS = "weights.safetensors", "{}.constants.safetensors"  # of the program named


class Package:
    """One compiled program, with the constants of its own and the weights that it shares.

    device: such as cuda:0. rank: of the ranks that share a model, which one runs it.
    """

    def __init__(
        self, path: Path, weights: Mapping[str, torch.Tensor], device: str, rank: int = 0
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
            named = {f"model.{name}": weight for name, weight in weights.items()} | self._own
            wanted = {name: named[name] for name in runner.get_constant_fqns()}
            runner.load_constants(wanted, False, True, True)  # all, and managed by us
        except (RuntimeError, SafetensorError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise EngineError(f"{path}: torch can't load it ({reason}); rebuild it") from None
        self._runner = runner

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs in the manifest's order, state written over; returns the other outputs."""
        return self._runner.run(inputs)


class InductorPrograms(Slots):
    """The compiled programs that advance the slots; each writes its results over the state."""

    def __init__(self, folder: Path, manifest: Manifest, threads: int | None) -> None:
        super().__init__(manifest, copies=1)
        self._folder, self._programs = folder, manifest.programs
        self._rank = manifest.rank or 0
        self._threads = threads or torch.get_num_threads()
        self._weights = load_file(folder / WEIGHTS)  # memory-mapped
        self._packages = {name: self._load(name) for name in ("prefill", PLAIN)}
        self._bindings: dict[tuple[str, int], list[torch.Tensor]] = {}
        judged = ("window", "num_drafts")
        self._judged = {name: np.zeros_like(self._carries[0][name]) for name in judged}

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        chunk = len(tokens) - self.lookahead
        self._fit(self._prefill_rows(start + chunk))
        prompt = {"tokens": tokens[None, :chunk], "ahead": tokens[None, chunk:]}
        given = prompt | {"start": np.array([start], np.int64)}
        self._run("prefill", self._bind("prefill", slot, 1, given))

    def step(self, active: Bools, rows: int) -> StepOutput:
        self._fit(rows)
        program, slots = self._activate(active)
        for name, array in self._judged.items():  # the step writes over them
            array[:] = self._carries[0][name]
        if (program, slots) not in self._bindings:
            given = {"active": self._active[:slots]}
            given |= {name: array[:slots] for name, array in self._controls.items()}
            self._bindings[program, slots] = self._bind(program, 0, slots, given)
        results = self._run(program, self._bindings[program, slots])
        outputs = self._outputs[program]
        outputs["tokens"][slots:], outputs["num_tokens"][slots:] = -1, 0
        for array, result in zip(outputs.values(), results, strict=True):
            array[:slots] = result.numpy()
        return StepOutput(**self._judged, **outputs)

    def _fit(self, rows: int) -> None:
        if self._caches.fit(rows):
            self._bindings.clear()

    def _bind(
        self, program: str, first: int, slots: int, given: dict[str, NDArray[Any]]
    ) -> list[torch.Tensor]:
        """The program's inputs in order: the state of some slots, sharing memory, and `given`."""
        carries = {name: array[first : first + slots] for name, array in self._carries[0].items()}
        arrays = self._caches.views(first, slots) | carries | given
        return [shared(arrays[spec.name], spec) for spec in self._programs[program].inputs]

    def _run(self, program: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if program not in self._packages:  # the mixed program is loaded by who first needs it
            self._packages[program] = self._load(program)
        torch.set_num_threads(self._threads)  # each thread that calls has a number of its own
        return self._packages[program].run(inputs)

    def _load(self, program: str) -> Package:
        file = self._programs[program].file
        return Package(self._folder / file, self._weights, "cpu", self._rank)


def shared(array: NDArray[Any], spec: TensorSpec) -> torch.Tensor:
    """The same memory as torch sees it."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if spec.dtype == "bfloat16" else tensor


def this_machine() -> str:
    """What `target.hardware` of an engine must be for it to run here."""
    if platform.machine() != "x86_64":
        return f"{platform.machine()} CPU"
    return HARDWARE if torch.cpu.get_capabilities()["avx2"] else "x86-64 CPU without AVX2"


def visible_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def load(
    folder: Path, manifest: Manifest, threads: int | None
) -> "InductorPrograms | CudaPrograms | LeadingPrograms":
    """Entry point named in `runtime/programs/__init__.py`; refuses what can't run here.

    threads: of the CPU's programs.
    """
    target = manifest.target
    if target.versions.get("torch") != TORCH:
        built = target.versions.get("torch")
        raise EngineError(
            f"{folder}: built for torch {built}, this is torch {TORCH}; rebuild the engine, or "
            f"pip install 'torch=={built}.*'"
        )
    on_gpu = bool(target.compute_capabilities)
    if on_gpu and not manifest.split:
        from mtpbuild.runtime.programs import inductor_cuda

        return inductor_cuda.load(folder, manifest)
    if not on_gpu and target.hardware != this_machine():
        raise EngineError(f"{folder}: built for an {target.hardware}, this is an {this_machine()}")
    if manifest.split:
        from mtpbuild.runtime.group import lead

        return lead.load(folder, manifest, threads)
    return InductorPrograms(folder, manifest, threads)
