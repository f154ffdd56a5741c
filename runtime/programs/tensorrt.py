"""Runs an engine's TensorRT programs: all state stays on the GPU, a decode step is one launch."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime.controls import GREEDY, Controls
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.manifest import Manifest, ProgramSpec
from mtpbuild.runtime.programs.base import MIXED, PLAIN, Bools, Ints, StepOutput
from mtpbuild.runtime.programs.cuda import Device, DeviceArray
from mtpbuild.runtime.programs.slots import padded
from mtpbuild.runtime.programs.tensorrt_api import errors_of, tensorrt_api
from mtpbuild.runtime.programs.tensorrt_refit import WEIGHTS, refit

PREFILL = "prefill"
JUDGED = ("window", "num_drafts")  # of the state that a step was given, what it reports


class Compiled:
    """One program: a TensorRT engine, its execution context and where its tensors are."""

    def __init__(self, trt: ModuleType, runtime: Any, path: Path, spec: ProgramSpec) -> None:
        log = errors_of(trt)
        log.errors.clear()
        self._engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise EngineError(f"{path}: TensorRT can't load it ({log.first()}); rebuild the engine")
        self._path = path
        if (path.parent / WEIGHTS).exists():
            refit(trt, self._engine, path.parent, path.stem)
        self._check(trt, spec)
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._context = self._engine.create_execution_context(strategy)
        self.scratch = int(self._engine.device_memory_size_v2)

    def _check(self, trt: ModuleType, spec: ProgramSpec) -> None:
        """The manifest's tensors and no others; caches are written where they are read."""
        engine, tensors = self._engine, (*spec.inputs, *spec.outputs)
        wanted = {
            t.name: (np.dtype(t.dtype), tuple(d if isinstance(d, int) else -1 for d in t.shape))
            for t in tensors
        }
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        found = {
            name: (
                np.dtype(trt.nptype(engine.get_tensor_dtype(name))),
                tuple(engine.get_tensor_shape(name)),
            )
            for name in names
        }
        differing = sorted(n for n in wanted | found if wanted.get(n) != found.get(n))
        differing += [
            t.name
            for t in spec.outputs
            if _is_cache(t.name) and engine.get_aliased_input_tensor(t.name) != _before(t.name)
        ]
        if differing:
            raise EngineError(
                f"{self._path}: {differing[0]} is not what engine.json says; rebuild the engine"
            )

    def share(self, scratch: DeviceArray) -> None:
        """Memory for intermediate results; programs run one after another, so one piece does."""
        self._context.set_device_memory(scratch.address, scratch.nbytes)

    def bind(self, tensors: Mapping[str, DeviceArray]) -> None:
        for name, array in tensors.items():
            if not self._context.set_tensor_address(name, array.address):
                raise self._failed(f"refuses the memory of {name}")

    def resize(self, name: str, shape: tuple[int, ...]) -> None:
        if not self._context.set_input_shape(name, shape):
            raise self._failed(f"takes no {name} of {list(shape)}")

    def enqueue(self, device: Device) -> None:
        if not self._context.execute_async_v3(device.stream):
            raise self._failed("could not be started")

    def _failed(self, what: str) -> EngineError:
        return EngineError(f"{self._path.name} {what}")


class TensorRtPrograms:
    """The programs that advance slots, and what the slots hold, on the GPU.

    A step is captured once: what the host gives, the program, its results as the next step's
    state, what the host is told. So between steps nothing moves but a few words.
    """

    def __init__(self, folder: Path, manifest: Manifest, trt: ModuleType, device: Device) -> None:
        self.lookahead = manifest.lookahead
        self._device, self._capacity = device, manifest.state[0].shape[2]
        self._allocate(manifest)
        self._runtime = trt.Runtime(errors_of(trt))  # outlives its engines
        self._programs = {
            name: Compiled(trt, self._runtime, folder / spec.file, spec)
            for name, spec in manifest.programs.items()
        }
        scratch = device.zeros((max(p.scratch for p in self._programs.values()),), np.uint8)
        for name, program in self._programs.items():
            program.share(scratch)
            program.bind(self._tensors[name])
        self._launch = {}
        for name in (PLAIN, MIXED):
            self._queue_step(name)  # warm-up: with no active slot a step changes nothing
            device.synchronise()
            self._launch[name] = device.capture(lambda name=name: self._queue_step(name))  # type: ignore[misc]

    def _allocate(self, manifest: Manifest) -> None:
        """Caches once; what is carried twice, before and after a step; the host's side pinned."""
        device, state = self._device, {s.name: s for s in manifest.state}
        self._state = {name: device.zeros(s.shape, s.dtype) for name, s in state.items()}
        carries = [s for s in manifest.state if s.kind == "carry"]
        self._after = {s.name: device.zeros(s.shape, s.dtype) for s in carries}
        self._caches = [s.name for s in manifest.state if s.kind == "cache"]
        self._judged = {
            name: device.pinned(state[name].shape, state[name].dtype) for name in JUDGED
        }
        self._active = device.pinned((manifest.build.max_batch,), np.bool_)
        self._mixed = np.zeros(manifest.build.max_batch, np.bool_)
        self._results: dict[str, dict[str, NDArray[Any]]] = {}
        self._tensors: dict[str, dict[str, DeviceArray]] = {}
        for name, spec in manifest.programs.items():
            if name == PREFILL:
                self._tensors[name] = self._one_slot(spec, manifest.build.prefill_chunk)
                continue
            given = {t.name: t for t in (*spec.inputs, *spec.outputs)}
            own = [t for n, t in given.items() if _before(n) not in state]
            tensors = {t.name: device.zeros(_numbers(t.shape), t.dtype) for t in own}
            tensors |= {n: self._state[n] for n in state}
            tensors |= {f"{n}.out": self._after.get(n, self._state[n]) for n in state}
            self._tensors[name] = tensors
            self._results[name] = {
                t.name: device.pinned(_numbers(t.shape), t.dtype)
                for t in spec.outputs
                if _before(t.name) not in state
            }
        held = {*state, "active", *self._results[MIXED]}
        self._controls = {n: t for n, t in self._tensors[MIXED].items() if _before(n) not in held}

    def _one_slot(self, spec: ProgramSpec, chunk: int) -> dict[str, DeviceArray]:
        """Prefill's own tensors: the prompt's chunk, and copies of what the slot carries."""
        return {
            t.name: self._device.zeros(_numbers(t.shape, chunk), t.dtype)
            for t in (*spec.inputs, *spec.outputs)
            if not _is_cache(t.name)
        }

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        program, own, copy = self._programs[PREFILL], self._tensors[PREFILL], self._device.copy
        chunk = len(tokens) - self.lookahead
        given = {"tokens": tokens[:chunk], "ahead": tokens[chunk:], "start": np.array([start])}
        program.resize("tokens", (1, chunk))
        for name, cache in ((name, self._state[name].slot(slot)) for name in self._caches):
            program.bind({name: cache, f"{name}.out": cache})
        carried = [name for name in self._after if name in own]
        for name, array in given.items():
            if name in own:
                copy(np.ascontiguousarray(array, np.int64), own[name])
        for name in carried:
            copy(self._state[name].slot(slot), own[name])
        program.enqueue(self._device)
        for name in carried:
            copy(own[f"{name}.out"], self._state[name].slot(slot))
        self._device.synchronise()

    def begin(self, slot: int, length: int, newest: int, controls: Controls = GREEDY) -> None:
        first = {
            "lengths": length,
            "num_drafts": 0,
            "window": newest,
            "thinking": controls.thinking,
        }
        for name, value in first.items():
            row = np.zeros(self._state[name].shape[1:], self._state[name].dtype)
            row.flat[0] = value
            self._device.copy(row, self._state[name].slot(slot))
        self._mixed[slot] = not controls.plain
        for name, array in self._controls.items():  # a plain slot may share a mixed step
            if name != "uniforms":
                row = padded(getattr(controls, name), array.shape[1:]).astype(array.dtype)
                self._device.copy(row, array.slot(slot))
            elif not controls.plain:
                numbers = controls.uniforms(array.shape[2], array.shape[1])
                self._device.copy(numbers, array.slot(slot))
        self._device.synchronise()

    def move(self, source: int, target: int) -> None:
        for array in (*self._state.values(), *self._controls.values()):
            self._device.copy(array.slot(source), array.slot(target))
        self._mixed[target] = self._mixed[source]

    def step(self, active: Bools, rows: int) -> StepOutput:
        if rows > self._capacity:
            raise EngineError(f"internal: {rows} cache rows asked for, {self._capacity} allocated")
        program = MIXED if (self._mixed & active).any() else PLAIN
        self._active[:] = active
        self._launch[program]()
        self._device.synchronise()
        return StepOutput(**self._judged, **self._results[program])

    def _queue_step(self, name: str) -> None:
        copy, tensors = self._device.copy, self._tensors[name]
        copy(self._active, tensors["active"])
        for state, array in self._judged.items():
            copy(self._state[state], array)
        self._programs[name].enqueue(self._device)
        for state, after in self._after.items():
            copy(after, self._state[state])
        for output, array in self._results[name].items():
            copy(tensors[output], array)

    @property
    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of the state tensors, for tests and tools."""
        arrays = {name: np.empty(a.shape, a.dtype) for name, a in self._state.items()}
        for name, array in arrays.items():
            self._device.copy(self._state[name], array)
        self._device.synchronise()
        return arrays


def _is_cache(name: str) -> bool:
    return _before(name).rpartition(".")[0] in ("kv", "mtp_kv")


def _before(name: str) -> str:
    """The state tensor whose new value is called `name`."""
    return name.removesuffix(".out")


def _numbers(shape: tuple[int | str, ...], chunk: int = 1) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else chunk for size in shape)


def load(folder: Path, manifest: Manifest, threads: int | None) -> TensorRtPrograms:
    """Entry point named in `runtime/programs/__init__.py`; refuses what can't run here."""
    target = manifest.target
    trt = tensorrt_api(target.name)
    built = target.versions[target.name]
    if trt.__version__ != built:
        raise EngineError(
            f"{folder}: built by {target.name} {built}, this is {trt.__version__}; rebuild the "
            f"engine, or install that version"
        )
    device = Device(target.name)
    if device.compute_capability not in target.compute_capabilities:
        raise EngineError(
            f"{folder}: built for an {target.hardware}, this one has {device.compute_capability}; "
            "build with another --compute-capability"
        )
    _check_memory(folder, manifest, device)
    return TensorRtPrograms(folder, manifest, trt, device)


def _check_memory(folder: Path, manifest: Manifest, device: Device) -> None:
    """Programs hold their weights; what they need for intermediate results comes on top."""
    weights = manifest.files[WEIGHTS].size if WEIGHTS in manifest.files else 0  # of each program
    files = sum(manifest.files[p.file].size + weights for p in manifest.programs.values())
    state = sum(math.prod(s.shape) * np.dtype(s.dtype).itemsize for s in manifest.state)
    free = device.free_memory()
    if files + state > free:
        raise EngineError(
            f"{folder}: needs more than {(files + state) / 1e9:.2f} GB of GPU memory (programs "
            f"{files / 1e9:.2f}, caches and state {state / 1e9:.2f}), {free / 1e9:.2f} GB are "
            "free; build with a smaller --max-batch or --max-seq-len"
        )
