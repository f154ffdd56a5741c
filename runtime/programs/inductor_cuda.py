"""Runs an engine's AOTInductor programs on a GPU: state stays there, a step is one CUDA graph."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from mtpbuild.runtime.controls import GREEDY, Controls
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.manifest import Manifest, StateSpec, TensorSpec
from mtpbuild.runtime.programs.base import MIXED, PLAIN, Bools, Ints, StepOutput, host_type
from mtpbuild.runtime.programs.inductor import WEIGHTS, Package
from mtpbuild.runtime.programs.slots import ROW_STEP, padded
from mtpbuild.runtime.programs.torch_cuda import Gpu, Work

JUDGED = ("window", "num_drafts")  # of the state that a step was given, what it reports


class Report:
    """What the host is told of a step: tensors one behind the other, which one copy brings over.

    It has two pages on the host, so that a step can fill one while the other is read.
    """

    def __init__(self, gpu: Gpu, specs: Iterable[StateSpec | TensorSpec], slots: int) -> None:
        self._gpu = gpu
        places, size = [], 0
        for spec in specs:
            shape = (slots, *map(int, spec.shape[1:]))
            nbytes = math.prod(shape) * np.dtype(spec.dtype).itemsize
            places.append((spec, shape, slice(size, size + nbytes)))
            size += -(-nbytes // 8) * 8
        self._memory = gpu.zeros((size,), torch.uint8)
        self.tensors = {
            spec.name: self._memory[at].view(getattr(torch, spec.dtype)).view(shape)
            for spec, shape, at in places
        }
        self._pages = [gpu.pinned(size) for _ in range(2)]
        self._arrays = [
            {s.name: page.numpy()[at].view(s.dtype).reshape(shape) for s, shape, at in places}
            for page in self._pages
        ]
        self._turn = 0

    def send(self) -> dict[str, NDArray[Any]]:
        """Queue the copy to the next page, and give its arrays."""
        self._turn = 1 - self._turn
        self._gpu.copy(self._memory, self._pages[self._turn])
        return self._arrays[self._turn]


class CudaPrograms:
    """The programs that advance slots. The host queues work and waits for nothing but reports.

    Caches keep their place and size: how much of them a step reads is decided on the GPU, by each
    slot's length. So a step's graph depends on its program and the number of slots alone.
    """

    def __init__(self, folder: Path, manifest: Manifest, gpu: Gpu, *, graphs: bool = True) -> None:
        self.lookahead = manifest.lookahead
        self._gpu, self._programs = gpu, manifest.programs
        self._slots, self._capacity = manifest.build.max_batch, manifest.state[0].shape[2]
        self._state = {s.name: gpu.zeros(s.shape, getattr(torch, s.dtype)) for s in manifest.state}
        self._caches = [s.name for s in manifest.state if s.kind == "cache"]
        self._controls = dict(self._given_tensors(MIXED))
        self._active = self._controls.pop("active")
        self._active_now = np.zeros(self._slots, np.bool_)  # as the host last said
        self._mixed = np.zeros(self._slots, np.bool_)  # slots that the plain program can't serve
        self._prompt = self._prompt_tensors(manifest)
        judged = [s for s in manifest.state if s.name in JUDGED]
        self._reports = {
            name: Report(gpu, [*judged, *_own(manifest.programs[name].outputs)], self._slots)
            for name in (PLAIN, MIXED)
        }
        device = str(self._active.device)
        weights = load_file(folder / WEIGHTS, device=device)
        self._packages = {
            name: Package(folder / spec.file, weights, device, manifest.rank or 0)
            for name, spec in manifest.programs.items()
        }
        self._steps = {
            (name, slots): self._prepare(self._work(name, slots), graphs)
            for name in (PLAIN, MIXED)
            for slots in _sizes(self._slots)
        }

    def _given_tensors(self, program: str) -> Iterator[tuple[str, Tensor]]:
        """Inputs of a step that are not state, for all slots."""
        for spec in self._programs[program].inputs:
            if spec.name not in self._state:
                shape = (self._slots, *map(int, spec.shape[1:]))
                yield spec.name, self._gpu.zeros(shape, getattr(torch, spec.dtype))

    def _prompt_tensors(self, manifest: Manifest) -> dict[str, Tensor]:
        """Prefill's inputs but the caches: a chunk, and copies of what its slot carries.

        (A slot's own place in a carry is not aligned as the compiled code wants it.)
        """
        sizes = {"chunk": manifest.build.prefill_chunk}
        return {
            spec.name: self._gpu.zeros(
                tuple(d if isinstance(d, int) else sizes[d] for d in spec.shape),
                getattr(torch, spec.dtype),
            )
            for spec in self._programs["prefill"].inputs
            if spec.name not in self._caches
        }

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        chunk, own, copy = len(tokens) - self.lookahead, self._prompt, self._gpu.copy
        prompt = {"tokens": own["tokens"][:, :chunk]}
        copy(torch.from_numpy(tokens[None, :chunk]), prompt["tokens"])
        copy(torch.tensor([start]), own["start"])
        if self.lookahead:
            copy(torch.from_numpy(tokens[None, chunk:]), own["ahead"])
        rows = min(-(-(start + chunk) // ROW_STEP) * ROW_STEP, self._capacity)
        caches = {name: self._state[name][slot, 0, :rows][None, None] for name in self._caches}
        carried = [name for name in own if name in self._state]
        for name in carried:
            copy(self._state[name][slot : slot + 1], own[name])
        given = own | prompt | caches
        inputs = [given[spec.name] for spec in self._programs["prefill"].inputs]
        self._gpu.run(partial(self._packages["prefill"].run, inputs))
        for name in carried:
            copy(own[name], self._state[name][slot : slot + 1])

    def begin(self, slot: int, length: int, newest: int, controls: Controls = GREEDY) -> None:
        window = np.zeros(self._state["window"].shape[1], np.int64)
        window[0] = newest
        first = {
            "lengths": length,
            "num_drafts": 0,
            "window": window,
            "thinking": controls.thinking,
        }
        for name, value in first.items():
            self._gpu.copy(torch.as_tensor(value), self._state[name][slot])
        self._mixed[slot] = not controls.plain
        for name, tensor in self._controls.items():  # a plain slot may share a mixed step
            if name != "uniforms":
                row = padded(getattr(controls, name), tuple(tensor.shape[1:]))
                self._gpu.copy(torch.as_tensor(row, dtype=tensor.dtype), tensor[slot])
            elif not controls.plain:
                numbers = controls.uniforms(tensor.shape[2], tensor.shape[1])
                self._gpu.copy(torch.from_numpy(numbers), tensor[slot])

    def move(self, source: int, target: int) -> None:
        for tensor in (*self._state.values(), *self._controls.values()):
            self._gpu.copy(tensor[source], tensor[target])
        self._mixed[target] = self._mixed[source]

    def step(self, active: Bools, rows: int) -> StepOutput:
        return self.launch(active, rows)()

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        if rows > self._capacity:
            raise EngineError(f"internal: {rows} cache rows asked for, {self._capacity} allocated")
        program = MIXED if (self._mixed & active).any() else PLAIN
        needed = len(active) - int(active[::-1].argmax())
        slots = next(size for size in _sizes(self._slots) if size >= needed)
        if not np.array_equal(active, self._active_now):
            self._gpu.copy(torch.from_numpy(active), self._active)
            self._active_now[:] = active
        self._steps[program, slots]()
        arrays = self._reports[program].send()
        wait = self._gpu.mark()

        def land() -> StepOutput:
            wait()
            arrays["tokens"][slots:], arrays["num_tokens"][slots:] = -1, 0
            return StepOutput(**arrays)

        return land

    def _work(self, program: str, slots: int) -> Work:
        """A step of the first slots, and its report on the GPU."""
        package, report = self._packages[program], self._reports[program].tensors
        given = self._state | self._controls | {"active": self._active}
        inputs = [given[spec.name][:slots] for spec in self._programs[program].inputs]
        outputs = [spec.name for spec in _own(self._programs[program].outputs)]
        judged = {name: self._state[name] for name in JUDGED}

        def work() -> None:
            for name, tensor in judged.items():  # the step writes over them
                report[name].copy_(tensor)
            for name, result in zip(outputs, package.run(inputs), strict=True):
                report[name][:slots].copy_(result)

        return work

    def _prepare(self, work: Work, graphs: bool) -> Work:
        """How to queue it. The run before the capture changes nothing: no slot is active yet."""
        if not graphs:
            return partial(self._gpu.run, work)
        self._gpu.run(work)
        self._gpu.synchronise()
        return self._gpu.capture(work)

    @property
    def state(self) -> dict[str, NDArray[Any]]:
        """The state tensors, for tests and tools; copies, where the host can't see them."""
        self._gpu.synchronise()
        bits = {torch.bfloat16: torch.uint16}  # as the host holds it
        return {
            name: tensor.cpu().view(bits.get(tensor.dtype, tensor.dtype)).numpy()
            for name, tensor in self._state.items()
        }


def _own(outputs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """A program's outputs but the state."""
    return [spec for spec in outputs if not spec.name.endswith(".out")]


def _sizes(slots: int) -> list[int]:
    """Numbers of slots that have a graph: 1, 2, 4, .., and all."""
    return [*(1 << i for i in range((slots - 1).bit_length())), slots]


def load(
    folder: Path,
    manifest: Manifest,
    gpu: Gpu | None = None,
    make: Callable[[Path, Manifest, Gpu], CudaPrograms] = CudaPrograms,
) -> CudaPrograms:
    """Called by `programs/inductor.py` for an engine that was built for a GPU."""
    gpu = gpu or Gpu()
    built, here = manifest.target.compute_capabilities, gpu.compute_capability
    if here not in built:
        raise EngineError(
            f"{folder}: built for an {manifest.target.hardware}, this one has {here}; build it on "
            "this machine (--force)"
        )
    _check_memory(folder, manifest, gpu)
    try:
        return make(folder, manifest, gpu)
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise EngineError(
            f"{folder}: the GPU's memory is too small ({reason}); build with a smaller --max-batch "
            "or --max-seq-len"
        ) from None


def _check_memory(folder: Path, manifest: Manifest, gpu: Gpu) -> None:
    """What is known before loading; the programs' intermediate results come on top."""
    weights = manifest.files[WEIGHTS].size
    slots, mixed = manifest.build.max_batch, manifest.programs[MIXED].inputs
    carried = {s.name: s.shape for s in manifest.state}
    shapes = [carried.get(t.name) or (slots, *map(int, t.shape[1:])) for t in mixed]
    state = sum(
        math.prod(shape) * host_type(t.dtype).itemsize
        for t, shape in zip(mixed, shapes, strict=True)
    )
    free = gpu.free_memory()
    if weights + state > free:
        raise EngineError(
            f"{folder}: needs more than {(weights + state) / 1e9:.2f} GB of GPU memory (weights "
            f"{weights / 1e9:.2f}, caches and state {state / 1e9:.2f}), {free / 1e9:.2f} GB are "
            "free; build with a smaller --max-batch or --max-seq-len"
        )
