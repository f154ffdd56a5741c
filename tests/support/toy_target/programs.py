"""The run time's side of target toy: torch runs an exported program."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mtpbuild.runtime.contract.manifest import Manifest, ProgramSpec
from mtpbuild.runtime.programs.inductor_cpu import InductorPrograms


class Exported:
    """A program that overwrites its state, as a compiled one does."""

    def __init__(self, path: Path, spec: ProgramSpec, log: Path | None) -> None:
        self._spec, self._module = spec, torch.export.load(path).module()
        self._log = log

    @torch.no_grad()
    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        if self._log is not None:
            with self._log.open("a") as file:
                print(self._spec.file, file=file)
        given = {t.name: tensor for t, tensor in zip(self._spec.inputs, inputs, strict=True)}
        carried = [t.name.removesuffix(".out") for t in self._spec.outputs]
        state = {name: given.pop(name) for name in carried if name in given}
        results = pytree.tree_leaves(self._module(state, *given.values()))
        for tensor, result in zip(state.values(), results, strict=False):
            tensor.copy_(result)
        return results[len(state) :]


def load(
    folder: Path, manifest: Manifest, threads: int | None, toy_log: Path | None = None
) -> InductorPrograms:
    """Load a checked engine's programs; toy_log gets the name of each one that runs."""

    def opener(name: str) -> Exported:
        spec = manifest.programs[name]
        return Exported(folder / spec.file, spec, toy_log)

    return InductorPrograms(manifest, threads, lambda device: opener)
