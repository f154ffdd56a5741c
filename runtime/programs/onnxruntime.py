"""Runs an engine's ONNX programs; caches are in place, one buffer bound as input and output.

On CUDA the caches stay on the device; what a step takes and gives besides (window, lengths, one
hidden row per slot) is a few kB, which onnxruntime copies there and back.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # on by default, and read at import
import numpy as np
import onnxruntime as ort

from mtpbuild.runtime.errors import EngineError, MissingDependencyError, UsageError
from mtpbuild.runtime.manifest import Manifest
from mtpbuild.runtime.programs.base import MIXED, Bools, Ints, StepOutput
from mtpbuild.runtime.programs.device_caches import DeviceCaches
from mtpbuild.runtime.programs.host_slots import Caches, HostSlots, MakeCaches
from mtpbuild.runtime.programs.slots import PREFILL, reported

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


class OnnxPrograms(HostSlots):
    """The sessions that advance slots; a step reads one copy of the carries, fills the other."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        threads: int | None,
        provider: str = "cpu",
        caches: MakeCaches = Caches,
    ) -> None:
        super().__init__(manifest, copies=2, caches=caches)
        self._folder, self._threads, self._provider = folder, threads, provider
        names = [name for name in self._programs if not name.startswith(MIXED)]
        with ThreadPoolExecutor() as pool:  # onnxruntime prepares a graph on one core
            self._sessions = dict(zip(names, pool.map(self._session, names), strict=True))
        self._slots = 0  # of the last step; from there on both copies are equal

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self._fit_prompt(start + len(tokens) - self.lookahead)
        binding = self._sessions[PREFILL].io_binding()
        carries = {k: v[slot : slot + 1] for k, v in self._carries[self._now].items()}
        given = carries | self._prompt_inputs(start, tokens)
        names = [t.name for t in self._programs[PREFILL].inputs if t.name in given]
        self._bind_caches(binding, slot, 1)
        for name in names:
            binding.bind_cpu_input(name, np.ascontiguousarray(given[name]))
        produced = [name for name in names if name in carries]
        for name in produced:
            binding.bind_output(name + ".out", "cpu")
        self._sessions[PREFILL].run_with_iobinding(binding)
        results = binding.get_outputs()[len(self._caches.views()) :]  # in the order of binding
        for name, result in zip(produced, results, strict=True):
            for copy in self._carries:
                copy[name][slot] = result.numpy()[0]

    def step(self, active: Bools, rows: int) -> StepOutput:
        self._fit(rows)
        program, slots = self._activate(active)
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
        T = outputs["tokens"].shape[1]
        judged = {"num_drafts": np.minimum(before["num_drafts"], T - 1)}
        return reported(judged | {"window": before["window"][:, :T]} | outputs, slots)

    def _bind(self, program: str, now: int, slots: int) -> Any:
        if program not in self._sessions:  # a mixed program is loaded by who first needs it
            self._sessions[program] = self._session(program)
        binding = self._sessions[program].io_binding()
        self._bind_caches(binding, 0, slots)
        controls = self._controls if program.startswith(MIXED) else {}
        for name, array in (self._carries[now] | controls | {"active": self._active}).items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array[:slots]))
        outputs = {f"{k}.out": v for k, v in self._carries[1 - now].items()}
        outputs |= self._outputs[program]
        for name, array in outputs.items():
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array[:slots]))
        return binding

    def _bind_caches(self, binding: Any, first: int, count: int) -> None:
        """Some slots' rows in use, where they are: the graph writes over what it reads."""
        pointers, device = self._caches.pointers(), self._caches.device
        for name, view in self._caches.views(first, count).items():
            start = pointers[name] + first * view[0].nbytes
            place = device, 0, view.dtype, view.shape, start
            binding.bind_input(name, *place)
            binding.bind_output(name + ".out", *place)

    def _session(self, program: str) -> Any:
        path = self._folder / self._programs[program].file
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if self._threads:
            options.intra_op_num_threads = self._threads
        # Each session has threads of its own. After a run they would spin for some 50 ms, in the
        # way of the next session's: a prompt's behind its first steps.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        names = dict.fromkeys([PROVIDERS[self._provider], PROVIDERS["cpu"]])
        try:
            session = ort.InferenceSession(path, options, providers=list(names))
        except Exception as error:  # onnxruntime raises its own C++ exception types
            reason = str(error).splitlines()[0]
            raise EngineError(
                f"{path}: onnxruntime can't load it ({reason}); rebuild the engine"
            ) from None
        if PROVIDERS[self._provider] not in session.get_providers():  # it only warns
            raise EngineError(
                f"onnxruntime finds no GPU that it can use: --provider {self._provider} needs the "
                "NVIDIA driver, CUDA and cuDNN that its release names"
            )
        return session


def load(
    folder: Path, manifest: Manifest, threads: int | None, provider: str = "cpu"
) -> OnnxPrograms:
    """The programs of an engine that was checked; provider: a key of PROVIDERS."""
    if provider not in PROVIDERS:
        raise UsageError(f"provider {provider} is unknown; known: {', '.join(PROVIDERS)}")
    if PROVIDERS[provider] not in ort.get_available_providers():
        raise MissingDependencyError(
            f"--provider {provider} needs onnxruntime-gpu in place of onnxruntime: "
            "pip uninstall onnxruntime; pip install 'mtpbuild[cuda]'"
        )
    caches = Caches if provider == "cpu" else partial(DeviceCaches, device=provider)
    return OnnxPrograms(folder, manifest, threads, provider, caches)
