"""Runs an engine's ONNX programs; caches are in place, one buffer bound as input and output."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # on by default, and read at import
try:
    import onnxruntime as ort
except ImportError as error:
    from mtpbuild.runtime.errors import MissingDependencyError

    raise MissingDependencyError(
        "this engine needs onnxruntime: pip install 'mtpbuild[cpu]' (or 'mtpbuild[cuda]')"
    ) from error

from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.manifest import Manifest, StateSpec, TensorSpec
from mtpbuild.runtime.programs.base import GREEDY, Bools, Controls, Ints, StepOutput

ROW_STEP = 128  # a step's caches are bound in multiples of this many rows


PLAIN, MIXED = "decode", "decode_mixed"


class OnnxPrograms:
    """The state of B slots, and the sessions that advance it."""

    def __init__(self, folder: Path, manifest: Manifest, threads: int | None) -> None:
        self.lookahead = manifest.lookahead
        self._files = {name: folder / spec.file for name, spec in manifest.programs.items()}
        self._threads = threads
        self._sessions = {name: _session(self._files[name], threads) for name in ("prefill", PLAIN)}
        self._prefill_inputs = [t.name for t in manifest.programs["prefill"].inputs]
        self._caches = Caches([s for s in manifest.state if s.kind == "cache"])
        # Two copies of the small tensors: a step reads one and writes the other.
        carries = [s for s in manifest.state if s.kind == "carry"]
        self._carries = [{s.name: np.zeros(s.shape, s.dtype) for s in carries} for _ in range(2)]
        self._now = 0
        B = manifest.build.max_batch
        self._slots = 0  # of the last step; from there on both copies are equal
        self._active = np.zeros(B, np.bool_)
        self._mixed = np.zeros(B, np.bool_)  # slots that the plain program can't serve
        self._controls = _controls(manifest)
        self._outputs = {name: _outputs(manifest, name) for name in (PLAIN, MIXED)}
        self._bindings: dict[tuple[str, int, int], Any] = {}

    @property
    def state(self) -> dict[str, NDArray[Any]]:
        """The state tensors as they are, for tests and tools; caches show the rows in use."""
        return self._caches.views() | self._carries[self._now]

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        chunk = len(tokens) - self.lookahead
        others = self._caches.rows if len(self._active) > 1 else 0  # they may hold more rows
        self._fit(max(start + chunk, others))
        binding = self._sessions["prefill"].io_binding()
        carries = {k: v[slot : slot + 1] for k, v in self._carries[self._now].items()}
        prompt = {"tokens": tokens[None, :chunk], "ahead": tokens[None, chunk:]}
        given = carries | prompt | {"start": np.array([start], np.int64)}
        for name, cache in self._caches.views(slot, 1).items():
            value = ort.OrtValue.ortvalue_from_numpy(cache)
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name + ".out", value)
        for name in self._prefill_inputs:
            if name in given:
                binding.bind_cpu_input(name, np.ascontiguousarray(given[name]))
        produced = [name for name in carries if name in self._prefill_inputs]
        for name in produced:
            binding.bind_output(name + ".out", "cpu")
        self._sessions["prefill"].run_with_iobinding(binding)
        results = binding.get_outputs()[len(self._caches.views()) :]  # in the order of binding
        for name, result in zip(produced, results, strict=True):
            for copy in self._carries:
                copy[name][slot] = result.numpy()[0]

    def begin(self, slot: int, length: int, newest: int, controls: Controls = GREEDY) -> None:
        for copy in self._carries:
            copy["lengths"][slot] = length
            copy["num_drafts"][slot] = 0
            copy["window"][slot] = 0
            copy["window"][slot, 0] = newest
            copy["thinking"][slot] = controls.thinking
        self._mixed[slot] = not controls.plain
        for name, array in self._controls.items():  # a plain slot may share a mixed step
            if name != "uniforms":
                array[slot] = _padded(getattr(controls, name), array.shape[1:])
            elif not controls.plain:
                array[slot] = controls.uniforms(array.shape[2], array.shape[1])

    def move(self, source: int, target: int) -> None:
        carries = self._carries[self._now]
        rows = int(carries["lengths"][source])
        for cache in self._caches.views().values():
            cache[target, :, :rows] = cache[source, :, :rows]
        for name, array in carries.items():
            for copy in self._carries:
                copy[name][target] = array[source]
        for array in (*self._controls.values(), self._mixed):
            array[target] = array[source]

    def step(self, active: Bools, rows: int) -> StepOutput:
        self._fit(rows)
        self._active[:] = active
        program = MIXED if (self._mixed & active).any() else PLAIN
        # Exactly up to the last active slot, not in buckets of 1, 2, 4, 8: nothing is compiled or
        # tuned for a shape here, so a slot more would only cost its computation.
        slots = len(active) - int(active[::-1].argmax())
        before, after = self._carries[self._now], self._carries[1 - self._now]
        if slots < self._slots:
            for name, array in before.items():
                after[name][slots : self._slots] = array[slots : self._slots]
        self._slots = slots
        key = program, self._now, slots
        if key not in self._bindings:
            self._bindings[key] = self._bind(*key)
        self._sessions[program].run_with_iobinding(self._bindings[key])
        self._now = 1 - self._now
        outputs = self._outputs[program]
        outputs["tokens"][slots:], outputs["num_tokens"][slots:] = -1, 0
        return StepOutput(window=before["window"], num_drafts=before["num_drafts"], **outputs)

    def _fit(self, rows: int) -> None:
        if self._caches.fit(rows):
            self._bindings.clear()

    def _bind(self, program: str, now: int, slots: int) -> Any:
        if program not in self._sessions:  # the mixed program is loaded by who first needs it
            self._sessions[program] = _session(self._files[program], self._threads)
        binding = self._sessions[program].io_binding()
        for name, cache in self._caches.views(0, slots).items():
            value = ort.OrtValue.ortvalue_from_numpy(cache)  # no copy: the graph writes the array
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name + ".out", value)
        controls = self._controls if program == MIXED else {}
        for name, array in (self._carries[now] | controls | {"active": self._active}).items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array[:slots]))
        outputs = {f"{k}.out": v for k, v in self._carries[1 - now].items()}
        outputs |= self._outputs[program]
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array[:slots]))
        return binding


def _controls(manifest: Manifest) -> dict[str, NDArray[Any]]:
    """The mixed program's inputs that a request sets: everything but the state and `active`."""
    others = {s.name for s in manifest.state} | {"active"}
    inputs = manifest.programs[MIXED].inputs
    return _zeros([t for t in inputs if t.name not in others], manifest.build.max_batch)


def _outputs(manifest: Manifest, program: str) -> dict[str, NDArray[Any]]:
    """A program's outputs but the state."""
    outputs = manifest.programs[program].outputs
    own = [t for t in outputs if not t.name.endswith(".out")]
    return _zeros(own, manifest.build.max_batch)


def _zeros(tensors: Iterable[TensorSpec], slots: int) -> dict[str, NDArray[Any]]:
    """For all slots, whatever number of them a step takes."""
    return {t.name: np.zeros((slots, *t.shape[1:]), t.dtype) for t in tensors}  # type: ignore[arg-type]


def _padded(value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """A number as it is; a list with -1 behind it."""
    values = np.asarray(value)
    return np.pad(values, (0, shape[0] - len(values)), constant_values=-1) if shape else values


class Caches:
    """Latent caches [B, 1, S, C] laid out for the rows in use, so that a step reads only those.

    A graph takes contiguous tensors, so the first `rows` rows of every slot are kept adjacent in
    one allocation of B * S rows; slots move when `rows` changes (not if B = 1: it is a view).
    """

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self._batch, _, self._capacity, _ = specs[0].shape
        self.rows = 0
        # Zeros: a masked row weighs 0, and 0 times an uninitialised NaN would not be 0.
        self._flat = {
            s.name: np.zeros((self._batch * self._capacity, s.shape[3]), s.dtype) for s in specs
        }

    def views(self, first: int = 0, count: int | None = None) -> dict[str, NDArray[Any]]:
        """Each cache [B, 1, rows, C], or `count` slots of it from `first` on, sharing memory."""
        R, count = self.rows, self._batch if count is None else count
        return {
            name: flat[first * R : (first + count) * R].reshape(count, 1, R, flat.shape[1])
            for name, flat in self._flat.items()
        }

    def fit(self, rows: int) -> bool:
        """Make room for `rows` rows per slot; True if the layout, and so every view, changed."""
        if rows > self._capacity:
            raise EngineError(f"internal: {rows} cache rows asked for, {self._capacity} allocated")
        wanted = min(-(-rows // ROW_STEP) * ROW_STEP, self._capacity)
        if self._batch > 1:  # moving slots costs: grow by doubling, shrink late
            if wanted > self.rows:
                wanted = min(max(wanted, 2 * self.rows), self._capacity)
            elif wanted * 4 > self.rows:
                wanted = self.rows
        if wanted == self.rows:
            return False
        old, new = self.rows, wanted
        order = range(self._batch) if new < old else reversed(range(self._batch))
        keep = min(old, new)
        for b in order if self._batch > 1 else ():
            for flat in self._flat.values():
                flat[b * new : b * new + keep] = flat[b * old : b * old + keep]
        self.rows = new
        return True


def _session(path: Path, threads: int | None) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if threads:
        options.intra_op_num_threads = threads
    try:
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises its own C++ exception types
        reason = str(error).splitlines()[0]
        raise EngineError(
            f"{path}: onnxruntime can't load it ({reason}); rebuild the engine"
        ) from None


def load(folder: Path, manifest: Manifest, threads: int | None) -> OnnxPrograms:
    """Entry point named in `runtime/programs/__init__.py`."""
    return OnnxPrograms(folder, manifest, threads)
