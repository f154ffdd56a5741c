"""TensorRT programs of one of several ranks, whose GPUs NCCL connects."""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import PREFILL, Bools, Ints, StepOutput
from mtpbuild.runtime.gpu.cuda import Device
from mtpbuild.runtime.group.channel import Channel, silence
from mtpbuild.runtime.group.communicator import join
from mtpbuild.runtime.group.nccl import run_within, watch
from mtpbuild.runtime.programs.attention_dp import AttentionDP
from mtpbuild.runtime.programs.slots import name_outputs
from mtpbuild.runtime.programs.tensorrt_engines import CompiledProgram, TensorRtPrograms


class TensorRtRankPrograms(TensorRtPrograms):
    """The programs of one rank; a step is one CUDA graph that includes its collectives.

    All ranks load, warm up and capture the same programs in the same order, as NCCL requires on a
    communicator. Waiting for the GPU ends with an error if another rank is lost.
    """

    def __init__(
        self,
        channel: Channel,
        folder: Path,
        manifest: Manifest,
        trt: ModuleType,
        device: Device,
        library: Callable[[], Any],
    ) -> None:
        self._channel, self._peers = channel, join(device, channel, library)
        with channel.unbroken(), silence:
            super().__init__(folder, manifest, trt, device, self._connect)

    def _connect(self, programs: Collection[CompiledProgram]) -> None:
        """Set each program's communicator, once all ranks have loaded and within the time limit.

        TensorRT has no limit for this: a rank that failed to load would leave the others waiting.
        """
        self._channel.gather(np.zeros(1, np.uint8))  # fails if another rank could not load
        for program in programs:
            join_program = partial(program.join, self._device, self._peers.capsule)
            run_within(self._channel.patience, join_program)

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        with self._channel.unbroken(), silence:
            super().prefill(slot, start, tokens)

    def step(self, active: Bools, rows: int) -> StepOutput:
        with self._channel.unbroken(), silence:
            return super().step(active, rows)

    def _wait(self) -> None:
        self._device.settle(watch(self._channel, self._peers))


class TensorRtAttentionDPPrograms(AttentionDP, TensorRtRankPrograms):
    """The programs of one rank with attention-DP: each rank has its own requests."""

    def _allocate_padding(self) -> None:
        self._padding_caches = {
            name: self._device.zeros((1, *cache.shape[1:]), cache.dtype)
            for name, cache in self._caches.tensors.items()
        }

    def step(self, active: Bools, rows: int) -> StepOutput:
        return self._gather(super().step(self._find_own_active(active), rows))

    def _prefill_padding(self, chunk: int) -> None:
        with self._channel.unbroken(), silence:
            for array in self._prompt.values():
                self._device.copy(np.zeros(array.shape, array.dtype), array)
            program = self._compiled[PREFILL]
            program.resize("tokens", (1, chunk))
            program.bind(self._padding_caches | name_outputs(self._padding_caches))
            program.enqueue(self._device)
            self._wait()
