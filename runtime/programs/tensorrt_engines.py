"""TensorRT programs of an engine: all state stays on the GPU, a decode step is one launch."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.contract.manifest import CONSTANTS, WEIGHTS, Manifest, ProgramSpec
from mtpbuild.runtime.contract.programs import (
    MIXED,
    PLAIN,
    PREFILL,
    WEIGHT,
    Bools,
    Ints,
    StepOutput,
    host_type,
)
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.gpu.cuda import Device, DeviceArray
from mtpbuild.runtime.programs.device_slots import DeviceSlots
from mtpbuild.runtime.programs.mapped_weights import map_tensors
from mtpbuild.runtime.programs.slots import (
    JUDGED,
    list_result_specs,
    make_step_output,
    name_outputs,
)
from mtpbuild.runtime.programs.tensorrt_api import (
    list_shared_weights,
    make_error_logger,
    name_dtype,
    refit,
)


class CompiledProgram:
    """One program: a TensorRT engine and its execution context, bound to tensors.

    caches: names of the tensors that are updated in place. weights: the shared weights by name.
    """

    def __init__(
        self,
        trt: ModuleType,
        runtime: Any,
        path: Path,
        spec: ProgramSpec,
        caches: Collection[str],
        weights: Mapping[str, DeviceArray],
    ) -> None:
        log = make_error_logger(trt)
        log.errors.clear()
        self._engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise EngineError(f"{path}: TensorRT can't load it ({log.first()}); rebuild the engine")
        self._path = path
        if (path.parent / CONSTANTS.format(path.stem)).exists():  # compiled without its weights
            refit(trt, self._engine, path.parent, path.stem)
        names = {WEIGHT.format(name) for name in list_shared_weights(path.parent, path.stem)}
        shared = {name: array for name, array in weights.items() if name in names}
        self._check(trt, spec, caches, shared)
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._context = self._engine.create_execution_context(strategy)
        self.scratch = int(self._engine.device_memory_size_v2)
        self.bind(shared)

    def _check(
        self,
        trt: ModuleType,
        spec: ProgramSpec,
        caches: Collection[str],
        weights: Mapping[str, DeviceArray],
    ) -> None:
        """Raise EngineError unless the tensors are those of the manifest and the shared weights.

        Caches must be updated in place: their outputs must be aliases of their inputs.
        """
        engine, aliases = self._engine, {f"{name}.out": name for name in caches}
        wanted, actual = dict[str, Any](), dict[str, Any]()
        for t in (*spec.inputs, *spec.outputs):
            shape = tuple(d if isinstance(d, int) else -1 for d in t.shape)
            wanted[t.name] = t.dtype, shape, aliases.get(t.name)
        for name, array in weights.items():
            wanted[name] = array.dtype.itemsize, array.shape, None
        for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
            dtype: Any = name_dtype(trt, engine.get_tensor_dtype(name))
            if name in weights:
                dtype = host_type(dtype).itemsize
            alias = engine.get_aliased_input_tensor(name) if name in aliases else None
            actual[name] = dtype, tuple(engine.get_tensor_shape(name)), alias
        if differing := sorted(n for n in wanted | actual if wanted.get(n) != actual.get(n)):
            raise EngineError(
                f"{self._path}: {differing[0]} is not what engine.json says; rebuild the engine"
            )

    def share(self, scratch: DeviceArray) -> None:
        """Set the memory for intermediate results; all programs use it, as they run in turn."""
        self._context.set_device_memory(scratch.address, scratch.nbytes)

    def bind(self, tensors: Mapping[str, DeviceArray]) -> None:
        for name, array in tensors.items():
            done = self._context.set_tensor_address(name, array.address)
            self._require(done, f"refuses the memory of {name}")

    def resize(self, name: str, shape: tuple[int, ...]) -> None:
        done = self._context.set_input_shape(name, shape)
        self._require(done, f"takes no {name} of {list(shape)}")

    def join(self, device: Device, communicator: object) -> None:
        """Set the NCCL communicator, a PyCapsule, for the program's collectives.

        TensorRT does this with all other ranks together, so it waits for them.
        """
        device.use()
        self._require(self._context.set_communicator(communicator), "refuses NCCL's communicator")

    def enqueue(self, device: Device) -> None:
        device.use()
        self._require(self._context.execute_async_v3(device.stream), "could not be started")

    def _require(self, done: bool, failure: str) -> None:
        if not done:
            raise EngineError(f"{self._path.name} {failure}")


class TensorRtPrograms(DeviceSlots):
    """An engine's programs, with the slots' caches and state on the GPU.

    A step is captured once: a copy of the host's inputs, the program, and copies of its results to
    the next step's state and to the host. So a step transfers only a few words.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        trt: ModuleType,
        device: Device,
        connect: Callable[[Collection["CompiledProgram"]], None] = lambda programs: None,
    ) -> None:
        """connect: connects the loaded programs with those of other ranks, if there are any."""
        super().__init__(manifest, device)
        self._device, specs = device, manifest.programs
        self._after = _allocate_like(device, self._carries[0])  # a step's new state
        carried = self._prompt.keys() & self._state.keys()
        self._filled = _allocate_like(device, {name: self._prompt[name] for name in carried})
        results = self._allocate_zeros(list_result_specs(specs[MIXED]))
        reported_arrays = {name: self._state[name] for name in JUDGED} | results
        self._pages = {name: device.pinned(a.shape, a.dtype) for name, a in reported_arrays.items()}
        self._pinned_active = device.pinned((self._batch,), np.bool_)
        tensors = self._given | results | name_outputs(self._caches.tensors | self._after)
        self._runtime = trt.Runtime(make_error_logger(trt))  # outlives its engines
        weights = on_device(device, folder, specs)
        self._compiled = {
            name: CompiledProgram(
                trt, self._runtime, folder / spec.file, spec, self._caches.tensors, weights
            )
            for name, spec in specs.items()
        }
        scratch = device.zeros((max(p.scratch for p in self._compiled.values()),), "uint8")
        for program in self._compiled.values():
            program.share(scratch)
        connect(self._compiled.values())
        for name, program in self._compiled.items():
            prompt = self._prompt | name_outputs(self._filled) | self._find_caches(0)
            bound = prompt if name == PREFILL else tensors
            tensor_specs = (*specs[name].inputs, *specs[name].outputs)
            program.bind({t.name: bound[t.name] for t in tensor_specs})
        self._results, self._launch = dict[str, dict[str, DeviceArray]](), {}
        for name in (PLAIN, MIXED):
            self._results[name] = {t.name: results[t.name] for t in list_result_specs(specs[name])}
            work = partial(self._queue_step, name)
            work()  # warm-up: without active slots a step changes nothing
            self._wait()
            self._launch[name] = device.capture(work)

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self._compiled[PREFILL].resize("tokens", (1, len(tokens) - self.lookahead))
        super().prefill(slot, start, tokens)
        self._wait()

    def _run_prefill(self, slot: int, start: int, chunk: int) -> dict[str, DeviceArray]:
        self._compiled[PREFILL].bind(self._find_caches(slot))
        self._compiled[PREFILL].enqueue(self._device)
        return self._filled

    def _find_caches(self, slot: int) -> dict[str, DeviceArray]:
        """Return a slot's caches as prefill's inputs and outputs, since it works in place."""
        caches = {name: cache[slot : slot + 1] for name, cache in self._caches.tensors.items()}
        return caches | name_outputs(caches)

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
        super().begin(slot, length, newest, controls)
        self._device.synchronise()

    def step(self, active: Bools, rows: int) -> StepOutput:
        self._fit(rows)
        self._pinned_active[:] = active
        program, _ = self._choose(active, self._mixed)
        self._launch[program]()
        self._wait()
        names = (*JUDGED, *self._results[program])
        return make_step_output({name: self._pages[name] for name in names}, self._batch)

    def _wait(self) -> None:
        """Wait for the queued programs."""
        self._device.synchronise()

    def _queue_step(self, name: str) -> None:
        copy = self._device.copy
        copy(self._pinned_active, self._active)
        for judged in JUDGED:
            copy(self._state[judged], self._pages[judged])
        self._compiled[name].enqueue(self._device)
        for state, after in self._after.items():
            copy(after, self._state[state])
        for output, result in self._results[name].items():
            copy(result, self._pages[output])


def on_device(device: Device, folder: Path, programs: Collection[str]) -> dict[str, DeviceArray]:
    """Copy the weights that programs share to the GPU; return them by input name."""
    arrays = dict[str, DeviceArray]()
    names = sorted({name for program in programs for name in list_shared_weights(folder, program)})
    held = map_tensors(folder / WEIGHTS) if names else {}
    for name in names:
        if name not in held:
            raise EngineError(f"{folder / WEIGHTS}: has no {name}; rebuild the engine")
        array = arrays[WEIGHT.format(name)] = device.zeros(held[name].shape, held[name].dtype)
        device.copy(held[name], array)
    return arrays


def _allocate_like(device: Device, arrays: Mapping[str, DeviceArray]) -> dict[str, DeviceArray]:
    """Allocate arrays of the same shapes and types."""
    return {name: device.zeros(array.shape, array.dtype) for name, array in arrays.items()}
