"""Programs of an `inductor` engine's rank with attention-DP, on a CPU or a GPU."""

from collections.abc import Callable

import numpy as np
import torch

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import PREFILL, Bools, Ints, StepOutput, host_type
from mtpbuild.runtime.gpu.torch_cuda import Gpu
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.nccl import Peers
from mtpbuild.runtime.programs.aot_package import Opener
from mtpbuild.runtime.programs.attention_dp import AttentionDP
from mtpbuild.runtime.programs.host_slots import rounded
from mtpbuild.runtime.programs.inductor_cpu import shared
from mtpbuild.runtime.programs.inductor_ranks import CpuRankPrograms, CudaRankPrograms


class CpuAttentionDPPrograms(AttentionDP, CpuRankPrograms):
    """The programs of one attention-DP rank on a CPU."""

    def __init__(
        self, channel: Channel, manifest: Manifest, threads: int | None, opener: Opener
    ) -> None:
        super().__init__(channel, manifest, threads, opener)
        self._join(channel, manifest)

    def step(self, active: Bools, rows: int) -> StepOutput:
        return self._gathered(super().step(self._own(active), rows))

    def _fill_own(self, slot: int, start: int, tokens: Ints) -> None:
        CpuRankPrograms.prefill(self, slot, start, tokens)

    def _fill_nothing(self, chunk: int) -> None:
        sizes = {"chunk": chunk, "rows": rounded(chunk, self._capacity)}
        inputs = list[torch.Tensor]()
        for spec in self._programs[PREFILL].inputs:
            shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
            inputs.append(shared(np.zeros(shape, host_type(spec.dtype)), spec))
        self._run(PREFILL, inputs)


class CudaAttentionDPPrograms(AttentionDP, CudaRankPrograms):
    """The programs of one attention-DP rank on a GPU; results are gathered when they are read."""

    def __init__(
        self,
        channel: Channel,
        peers: type[Peers],
        manifest: Manifest,
        gpu: Gpu,
        opener: Opener,
        *,
        graphs: bool = True,
    ) -> None:
        self._join(channel, manifest)
        most = manifest.build.prefill_chunk
        rows = rounded(most, manifest.build.capacity)
        self._nowhere = {  # the caches of a padding prefill, which belongs to no request
            s.name: gpu.zeros((1, 1, rows, s.sizes["width"]), s.dtype)
            for s in manifest.state
            if s.role == "rows"
        }
        super().__init__(channel, peers, manifest, gpu, opener, graphs=graphs)

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        land = super().launch(self._own(active), rows)
        return lambda: self._gathered(land())

    def _fill_own(self, slot: int, start: int, tokens: Ints) -> None:
        CudaRankPrograms.prefill(self, slot, start, tokens)

    def _fill_nothing(self, chunk: int) -> None:
        self._gpu.copy(np.zeros(1, np.int64), self._prompt["start"])
        rows = rounded(chunk, self._capacity)
        caches = {name: cache[:, :, :rows] for name, cache in self._nowhere.items()}
        self._in_turn(lambda: self._fill_rows(caches, chunk))
