"""Slots in a GPU's memory. Their addresses are fixed, so a step's program is bound to them once."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import MIXED, PREFILL, Ints, host_type
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.programs.slots import Array, Caches, Memory, Slots


class DeviceSlots(Slots):
    """Slots of a target that runs on a GPU."""

    def __init__(self, manifest: Manifest, memory: Memory) -> None:
        caches = Caches(manifest.state, memory)
        super().__init__(manifest, memory, caches)
        self._state: dict[str, Array] = caches.tensors | self._carries[0]
        self._given = self._state | self._controls | {"active": self._active}  # a step's inputs
        # Prefill gets copies of its slot's carried state, as views of one slot may be unaligned.
        self._prompt: dict[str, Array] = {}
        sizes = {"chunk": manifest.build.prefill_chunk}
        for t in self._programs[PREFILL].inputs:
            if t.name not in caches.tensors:
                shape = (d if isinstance(d, int) else sizes[d] for d in t.shape)
                self._prompt[t.name] = memory.zeros((*shape,), t.dtype)

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        chunk, copy = len(tokens) - self.lookahead, self._memory.copy
        inputs = self._make_prompt_inputs(start, tokens)
        padded = np.zeros(self._prompt["tokens"].shape, np.int64)
        padded[:, :chunk] = inputs["tokens"]
        inputs["tokens"] = padded
        for name, target in self._prompt.items():
            copy(inputs[name] if name in inputs else self._state[name][slot : slot + 1], target)
        for name, result in self._run_prefill(slot, start, chunk).items():
            copy(result, self._state[name][slot : slot + 1])

    def _run_prefill(self, slot: int, start: int, chunk: int) -> Mapping[str, Array]:
        """Queue the program on the inputs in `_prompt`; return the slot's new carried state."""
        raise NotImplementedError


class GpuMemory(Protocol):
    """The part of a GPU that is checked before an engine is loaded."""

    @property
    def compute_capability(self) -> str: ...
    def free_memory(self) -> int: ...


def check_gpu(
    folder: Path, manifest: Manifest, gpu: GpuMemory, advice: str, held: str, size: int
) -> None:
    """Raise EngineError if an engine is for another GPU or needs more memory than is free.

    advice: how to build for this GPU. held: the name, for the message, of the `size` bytes that are
    needed besides caches, state and intermediate results.
    """
    target, here = manifest.target, gpu.compute_capability
    if here not in target.compute_capabilities:
        built = f"{folder}: built for an {target.hardware}"
        raise EngineError(f"{built}, this one has {here}; {advice}")
    shapes, slots = {s.name: s.shape for s in manifest.state}, manifest.build.max_batch
    state, free = 0, gpu.free_memory()
    for t in manifest.programs[MIXED].inputs:
        shape = shapes.get(t.name) or (slots, *map(int, t.shape[1:]))
        state += math.prod(shape) * host_type(t.dtype).itemsize
    scratch = max(program.temporary for program in manifest.programs.values())
    if size + state + scratch > free:
        raise EngineError(
            f"{folder}: needs about {(size + state + scratch) / 1e9:.2f} GB of GPU memory ({held} "
            f"{size / 1e9:.2f}, caches and state {state / 1e9:.2f}, intermediate results "
            f"{scratch / 1e9:.2f}), {free / 1e9:.2f} GB are free; build with a smaller "
            "`--max-batch` or `--max-seq-len`"
        )
