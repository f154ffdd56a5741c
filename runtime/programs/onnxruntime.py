"""ONNX programs of an engine; caches are updated in place, bound as both input and output.

On CUDA the caches stay on the device. A step's other inputs and outputs (window, lengths, one
hidden row per slot) are a few kB, which onnxruntime copies to the device and back.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # on by default; read at import
import numpy as np
import onnxruntime as ort

from mtpbuild.runtime.contract.manifest import (
    MANIFEST,
    WEIGHTS,
    Dimension,
    Manifest,
    ProgramSpec,
)
from mtpbuild.runtime.contract.programs import HIDDEN, MIXED, SCORE, Bools, StepOutput
from mtpbuild.runtime.contract.state import StateSpec
from mtpbuild.runtime.cpu_library import find_library_for
from mtpbuild.runtime.errors import (
    EngineError,
    EngineFormatError,
    MissingDependencyError,
    UsageError,
    advise_install,
    take_first_line,
)
from mtpbuild.runtime.programs.host_slots import HostSlots, PackedCaches
from mtpbuild.runtime.programs.mapped_weights import map_tensors
from mtpbuild.runtime.programs.slots import (
    Arrays,
    list_result_specs,
    make_step_output,
    name_outputs,
)
from mtpbuild.runtime.threads import choose_default_threads

BFLOAT16 = 16  # ONNX's number of the type; NumPy arrays hold its bits
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class DeviceCaches(PackedCaches):
    """Caches on a device, with arrays on the host in which slots are moved.

    onnxruntime's Python API copies only whole tensors, and only between host and device. So moving
    a slot copies all caches to the host and back. With several slots this happens when a request
    begins or ends beside another request or outgrows the layout; with a prefix cache, whenever rows
    are saved or loaded.
    """

    def __init__(self, state: Sequence[StateSpec], device: str) -> None:
        super().__init__(state)
        self.device = device
        self._values: dict[str, Any] = {}
        try:
            for name, flat in self._flat.items():
                self._values[name] = ort.OrtValue.ortvalue_from_numpy(flat, device, 0)
        except Exception as error:  # onnxruntime raises its own C++ exception types
            size = sum(flat.nbytes for flat in self._flat.values()) / 1e6
            raise EngineError(
                f"onnxruntime can't hold the caches, {size:,.0f} MB, on {device} "
                f"({take_first_line(error)}): provider {device} needs a GPU with its driver, and "
                "that much of its memory free"
            ) from None

    def pointers(self) -> dict[str, int]:
        return {name: value.data_ptr() for name, value in self._values.items()}

    def arrays(self) -> Arrays:
        self._download()
        return super().arrays()

    def read(self, slot: int, start: int, stop: int) -> Arrays:
        self._download()
        return super().read(slot, start, stop)

    def _reserve(self, rows: int) -> None:
        """Do nothing: a step does not write to the host's arrays."""

    @contextlib.contextmanager
    def _on_host(self) -> Iterator[None]:
        self._download()
        yield
        self._upload()

    def _download(self) -> None:
        for name, value in self._values.items():
            self._flat[name][:] = value.numpy()

    def _upload(self) -> None:
        for name, value in self._values.items():
            value.update_inplace(self._flat[name])


class OnnxPrograms(HostSlots):
    """An engine's sessions; a step reads one copy of the carried state and writes the other."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        caches: PackedCaches,
        threads: int | None,
        provider: str = "cpu",
        huge_pages: bool = False,
    ) -> None:
        super().__init__(manifest, caches, copies=2)
        self._folder, self._provider = folder, provider
        self._threads = threads or choose_default_threads()
        layout = manifest.build.cpu_layout
        self._library = None if layout is None else find_library_for(layout, folder)
        # All sessions share one mapping; onnxruntime itself would map the file for each session.
        self._weights = {} if layout is None else _load_weights(folder / WEIGHTS, huge_pages)
        names = [name for name in self._programs if not name.startswith((MIXED, SCORE))]
        with ThreadPoolExecutor() as pool:  # onnxruntime uses one core to prepare a graph
            self._sessions = dict(zip(names, pool.map(self._open_session, names), strict=True))
        self._slots = 0  # the last step's number of slots; both copies are equal from there on

    def _run_chunk(self, program: str, slot: int, inputs: Arrays) -> Arrays:
        names = {t.name for t in self._programs[program].inputs} & self._carries[0].keys()
        before, after = (
            {name: self._carries[i][name][slot : slot + 1] for name in names}
            for i in (self._now, 1 - self._now)
        )
        chunk = inputs["tokens"].shape[1]
        outputs = {
            t.name: np.zeros((1, chunk, *map(int, t.shape[2:])), t.dtype)
            for t in list_result_specs(self._programs[program])
        }
        results = name_outputs(after) | outputs
        self._run(self._bind(program, slot, 1, before | inputs, results), program)
        for name, array in after.items():
            before[name][:] = array
        return outputs

    def step(self, active: Bools, rows: int) -> StepOutput:
        program, slots = self._begin_step(active, rows)
        before, after = self._carries[self._now], self._carries[1 - self._now]
        if slots < self._slots:
            for name, array in before.items():
                after[name][slots : self._slots] = array[slots : self._slots]
        self._slots = slots
        outputs = self._outputs[program]
        T = outputs["tokens"].shape[1]
        key = program, self._now, slots
        if key not in self._bindings:
            inputs = before | self._controls | {"active": self._active}
            results = name_outputs(after) | outputs
            self._bindings[key] = self._bind(program, 0, slots, inputs, results)
        self._run(self._bindings[key], program)
        self._now = 1 - self._now
        judged = {"num_drafts": np.minimum(before["num_drafts"], T - 1)}
        arrays = judged | {"window": before["window"][:, :T]} | outputs
        if (hidden := arrays.pop(HIDDEN, None)) is not None:
            for slot in np.flatnonzero(active):
                missed = int(before["window"][slot, 0]), hidden[slot, 0].copy()
                self._missed[slot].append(missed)
        return make_step_output(arrays, slots)

    def _run(self, binding: Any, program: str) -> None:
        self._sessions[program].run_with_iobinding(binding)

    def _bind(
        self,
        program: str,
        first: int,
        count: int,
        arrays: Arrays,
        results: Arrays,
    ) -> Any:
        """Bind the slots' caches, the program's inputs from `arrays`, and its `results`."""
        if program not in self._sessions:  # rarely needed programs are loaded at their first use
            self._sessions[program] = self._open_session(program)
        binding = self._sessions[program].io_binding()
        inputs = {t.name for t in self._programs[program].inputs}
        for name in arrays.keys() & inputs:
            value = ort.OrtValue.ortvalue_from_numpy(arrays[name][:count])
            binding.bind_ortvalue_input(name, value)
        # A step without drafts passes on no `draft_probs`, since nobody reads them after it.
        for name in results.keys() & {t.name for t in self._programs[program].outputs}:
            array = results[name]
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array[:count]))
        # The rows in use are bound as input and output: the graph updates them in place.
        pointers, device = self._caches.pointers(), self._caches.device
        for name, view in self._caches.views(first, count).items():
            if name not in inputs:
                continue
            start = pointers[name] + self._caches.start(first, name) * view[0, 0, 0].nbytes
            buffer: dict[str, Any] = {
                "device_type": device,
                "device_id": 0,
                "element_type": BFLOAT16 if view.dtype == np.uint16 else view.dtype,
                "shape": view.shape,
                "buffer_ptr": start,
            }
            binding.bind_input(name, **buffer)
            binding.bind_output(name + ".out", **buffer)
        return binding

    def _open_session(self, program: str) -> Any:
        path = self._folder / self._programs[program].file
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors are raised, so do not log them as well
        # Rows and slots vary from step to step. A memory plan for each shape makes no step faster
        # and takes 0.15 GB more with 8 requests of 8,192 tokens.
        options.enable_mem_pattern = False
        if self._library is not None:
            options.register_custom_ops_library(str(self._library))
        for name, value in self._weights.items():
            options.add_initializer(name, value)
        options.intra_op_num_threads = self._threads
        # Each session has its own threads. After a run they would spin for some 50 ms and slow down
        # the next session: the first steps after a prompt.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        names = dict.fromkeys([PROVIDERS[self._provider], PROVIDERS["cpu"]])
        try:
            session = ort.InferenceSession(path, options, providers=list(names))
        except Exception as error:  # onnxruntime raises its own C++ exception types
            raise EngineError(
                f"{path}: onnxruntime can't load it ({take_first_line(error)}); rebuild the engine"
            ) from None
        if not _are_listed(self._programs[program], session):
            raise EngineFormatError(
                f"{self._folder / MANIFEST}: inputs or outputs of {program} are not those of "
                f"{path.name}; rebuild the engine"
            )
        if PROVIDERS[self._provider] not in session.get_providers():  # onnxruntime only warns
            raise EngineError(
                f"onnxruntime finds no GPU that it can use: provider {self._provider} needs the "
                "NVIDIA driver, CUDA and cuDNN that its release names"
            )
        return session


def _are_listed(spec: ProgramSpec, session: ort.InferenceSession) -> bool:
    """Return whether a program's tensors in the manifest are those of its graph."""
    inputs = {t.name: t for t in session.get_inputs()}
    return (
        {t.name for t in spec.outputs} == {t.name for t in session.get_outputs()}
        and inputs.keys() == {t.name for t in spec.inputs}
        and all(_has_shape(t.shape, inputs[t.name].shape) for t in spec.inputs)
    )


def _has_shape(shape: tuple[Dimension, ...], actual: list[Any]) -> bool:
    """Return whether a shape is this one, as far as both have numbers."""
    numbers = zip(shape, actual, strict=False)
    return len(shape) == len(actual) and all(
        a == b for a, b in numbers if isinstance(a, int) and isinstance(b, int)
    )


def _load_weights(path: Path, huge_pages: bool) -> dict[str, Any]:
    """Map or copy an engine's weights; return them by their names in the graphs."""
    arrays = map_tensors(path, huge_pages).items()
    return {f"model.{name}": ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays}


def load(
    folder: Path,
    manifest: Manifest,
    threads: int | None,
    provider: str | None = None,
    huge_pages: bool = False,
) -> OnnxPrograms:
    """Load the programs of a checked engine; provider: a key of PROVIDERS, by default cpu.

    huge_pages: copy the weights into memory that asks for huge pages.
    """
    provider = provider or "cpu"
    if provider not in PROVIDERS:
        raise UsageError(f"provider {provider} is unknown; known: {', '.join(PROVIDERS)}")
    if PROVIDERS[provider] not in ort.get_available_providers():
        raise MissingDependencyError(
            f"provider {provider} needs onnxruntime-gpu in place of onnxruntime: "
            f"pip uninstall onnxruntime; {advise_install('onnxruntime-gpu')}"
        )
    on_host, state, build = provider == "cpu", manifest.state, manifest.build
    if build.cpu_layout is not None and not on_host:
        raise EngineError(
            f"{folder}: this engine runs on CPUs only; for provider {provider} build it as portable"
        )
    if build.cpu_layout is None and build.block_size is not None:
        raise EngineError(
            f"{folder}: its {build.weights} products are by operators of onnxruntime, which this "
            "mtpbuild does not use: build it again"
        )
    if huge_pages and build.cpu_layout is None:
        raise UsageError(f"{folder}: huge_pages is for engines on our CPU kernels: it is portable")
    if not on_host:
        with contextlib.redirect_stdout(sys.stderr):  # it prints what is missing
            ort.preload_dlls()  # of pip's packages of CUDA and cuDNN, if they are there
    caches = PackedCaches(state) if on_host else DeviceCaches(state, provider)
    return OnnxPrograms(folder, manifest, caches, threads, provider, huge_pages)
