"""AOTInductor programs on a CPU. They update state in place and share the weights.

An engine may have several ranks, with attention-DP or not.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtpbuild.runtime.contract.manifest import Manifest, TensorSpec
from mtpbuild.runtime.contract.programs import PLAIN, PREFILL, Bools, StepOutput, host_type
from mtpbuild.runtime.group.channel import Channel, silence
from mtpbuild.runtime.group.start import count_ranks_on_machine
from mtpbuild.runtime.programs.aot_package import Opener
from mtpbuild.runtime.programs.attention_dp import AttentionDP
from mtpbuild.runtime.programs.host_slots import HostSlots, PackedCaches, round_up_rows
from mtpbuild.runtime.programs.slots import JUDGED, Arrays, list_result_specs, make_step_output
from mtpbuild.runtime.threads import choose_default_threads


class InductorPrograms(HostSlots):
    """An engine's compiled programs on a CPU, which update the slots' state in place."""

    def __init__(self, manifest: Manifest, threads: int | None, opener: Opener) -> None:
        super().__init__(manifest, PackedCaches(manifest.state))
        self._threads = threads or choose_default_threads()
        self._open = opener("cpu")
        self._packages = {name: self._open(name) for name in (PREFILL, PLAIN)}
        self._judged = {name: np.zeros_like(self._carries[0][name]) for name in JUDGED}

    def _run_chunk(self, program: str, slot: int, inputs: Arrays) -> Arrays:
        results = self._run(program, self._bind(program, slot, 1, inputs))
        outputs = list_result_specs(self._programs[program])
        return {t.name: array.numpy() for t, array in zip(outputs, results, strict=True)}

    def step(self, active: Bools, rows: int) -> StepOutput:
        program, slots = self._begin_step(active, rows)
        for name, array in self._judged.items():  # before the step overwrites them
            array[:] = self._carries[0][name]
        if (program, slots) not in self._bindings:
            inputs = self._controls | {"active": self._active}
            bound = {name: array[:slots] for name, array in inputs.items()}
            self._bindings[program, slots] = self._bind(program, 0, slots, bound)
        results = self._run(program, self._bindings[program, slots])
        outputs = self._outputs[program]
        for array, result in zip(outputs.values(), results, strict=True):
            array[:slots] = result.numpy()
        return make_step_output(self._judged | outputs, slots)

    def _bind(self, program: str, first: int, slots: int, inputs: Arrays) -> list[torch.Tensor]:
        """Return the program's inputs: views of the state of some slots, and `inputs`."""
        carries = {name: array[first : first + slots] for name, array in self._carries[0].items()}
        arrays = self._caches.views(first, slots) | carries | inputs
        return [view_as_tensor(arrays[spec.name], spec) for spec in self._programs[program].inputs]

    def _run(self, program: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if program not in self._packages:  # rarely needed programs are loaded at their first use
            self._packages[program] = self._open(program)
        torch.set_num_threads(self._threads)  # the setting is per calling thread
        return self._packages[program].run(inputs)


class CpuRankPrograms(InductorPrograms):
    """The programs of one rank on a CPU."""

    def __init__(
        self, channel: Channel, manifest: Manifest, threads: int | None, opener: Opener
    ) -> None:
        here = count_ranks_on_machine(manifest.build.tp)
        super().__init__(manifest, threads or max(1, choose_default_threads() // here), opener)
        self._channel = channel

    def _run(self, program: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._channel.unbroken(), silence:
            return super()._run(program, inputs)


class CpuAttentionDPPrograms(AttentionDP, CpuRankPrograms):
    """The programs of one attention-DP rank on a CPU."""

    def step(self, active: Bools, rows: int) -> StepOutput:
        return self._gather(super().step(self._find_own_active(active), rows))

    def _prefill_padding(self, chunk: int) -> None:
        sizes = {"chunk": chunk, "rows": round_up_rows(chunk, self._capacity)}
        inputs = list[torch.Tensor]()
        for spec in self._programs[PREFILL].inputs:
            shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
            inputs.append(view_as_tensor(np.zeros(shape, host_type(spec.dtype)), spec))
        self._run(PREFILL, inputs)


def view_as_tensor(array: NDArray[Any], spec: TensorSpec) -> torch.Tensor:
    """Return a tensor that shares the array's memory."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if spec.dtype == "bfloat16" else tensor
