"""AOTInductor programs on a GPU: state stays in its memory, a step is one CUDA graph.

An engine may have several ranks, with attention-DP or not.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import WEIGHTS, Manifest, TensorSpec
from mtpbuild.runtime.contract.programs import MIXED, PLAIN, PREFILL, Bools, Ints, StepOutput
from mtpbuild.runtime.contract.state import StateSpec
from mtpbuild.runtime.errors import EngineError, take_first_line
from mtpbuild.runtime.gpu.torch_cuda import Gpu, Wait, Work
from mtpbuild.runtime.group.channel import Channel, silence
from mtpbuild.runtime.group.nccl import Peers, connect, share_memory, watch
from mtpbuild.runtime.programs.aot_package import Opener
from mtpbuild.runtime.programs.attention_dp import AttentionDP
from mtpbuild.runtime.programs.device_slots import DeviceSlots, check_gpu
from mtpbuild.runtime.programs.host_slots import round_up_rows
from mtpbuild.runtime.programs.slots import JUDGED, Arrays, list_result_specs, make_step_output

T = TypeVar("T")
AHEAD = 2  # calls that may be queued on a GPU before the host waits for the oldest
ALIGNMENT = 16  # bytes; compiled code assumes it of its inputs' addresses


class Report:
    """The tensors that a step reports to the host, adjacent in memory so that one copy suffices.

    There are two pages on the host, so that a step can fill one while the other is read.
    """

    def __init__(self, gpu: Gpu, specs: Iterable[StateSpec | TensorSpec], slots: int) -> None:
        self._gpu = gpu
        sizes = [(s.name, s.dtype, (slots, *map(int, s.shape[1:]))) for s in specs]
        layout = np.dtype(sizes, align=True)
        self._memory = gpu.zeros((layout.itemsize,), "uint8")
        self.tensors = {}
        for name, dtype, shape in sizes:
            at = cast(Any, layout.fields)[name][1]  # offset in bytes
            piece = self._memory[at : at + layout[name].itemsize]
            self.tensors[name] = piece.view(getattr(torch, dtype)).view(shape)
        self._pages = [gpu.pinned(layout.itemsize) for _ in range(2)]
        records = [page.numpy().view(layout) for page in self._pages]
        self._arrays = [{name: record[name][0] for name in self.tensors} for record in records]
        self._turn = 0

    def send(self) -> Arrays:
        """Queue the copy to the next page and return its arrays."""
        self._turn = 1 - self._turn
        self._gpu.copy(self._memory, self._pages[self._turn])
        return self._arrays[self._turn]


class CudaPrograms(DeviceSlots):
    """An engine's programs on a GPU; the host queues work and waits only for reports.

    Kernels read each slot's length on the GPU, and only that many cache rows. So a step's graph
    depends only on its program and the number of slots.
    """

    def __init__(
        self, manifest: Manifest, gpu: Gpu, opener: Opener, *, graphs: bool = True
    ) -> None:
        super().__init__(manifest, gpu)
        self.features |= {Feature.OVERLAP}
        self._gpu, programs = gpu, manifest.programs
        self._active_now = np.zeros(self._batch, np.bool_)  # the GPU's current `active`
        judged = [s for s in manifest.state if s.name in JUDGED]
        self._reports = {
            name: Report(gpu, [*judged, *list_result_specs(programs[name])], self._batch)
            for name in (PLAIN, MIXED)
        }
        opened = opener(str(gpu.device))
        self._packages = {name: opened(name) for name in programs}
        self._sizes = [*(1 << i for i in range((self._batch - 1).bit_length())), self._batch]
        self._steps = self._prepare_all(graphs)

    def _run_prefill(self, slot: int, start: int, chunk: int) -> dict[str, Tensor]:
        rows = round_up_rows(start + chunk, self._capacity)
        caches = self._caches.tensors.items()
        self._fill_rows({name: cache[slot, 0, :rows][None, None] for name, cache in caches}, chunk)
        return {name: self._prompt[name] for name in self._prompt.keys() & self._state.keys()}

    def _fill_rows(self, caches: dict[str, Tensor], chunk: int) -> None:
        """Queue prefill of a chunk of a prompt, with caches [1, 1, rows, C]."""
        tensors = self._prompt | caches
        tensors["tokens"] = tensors["tokens"][:, :chunk]
        inputs = assert_aligned([tensors[spec.name] for spec in self._programs[PREFILL].inputs])
        self._gpu.run(partial(self._packages[PREFILL].run, inputs))

    def step(self, active: Bools, rows: int) -> StepOutput:
        return self.launch(active, rows)()

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        self._fit(rows)
        program, needed = self._choose(active, self._mixed)
        slots = next(size for size in self._sizes if size >= needed)
        if not np.array_equal(active, self._active_now):
            self._gpu.copy(active, self._active)
            self._active_now[:] = active
        self._steps[program, slots]()
        arrays = self._reports[program].send()
        mark = self._gpu.mark()

        def read_output() -> StepOutput:
            self._wait(mark)
            return make_step_output(arrays, slots)

        return read_output

    def _wait(self, mark: Wait) -> None:
        mark()

    def _settle(self) -> None:
        self._wait(self._gpu.mark())

    def _make_work(self, program: str, slots: int) -> Work:
        """Return a function that queues a step of the first slots and fills in its report."""
        package, report = self._packages[program], self._reports[program]
        spec = self._programs[program]
        inputs = assert_aligned([self._given[t.name][:slots] for t in spec.inputs])
        outputs = [report.tensors[t.name] for t in list_result_specs(spec)]
        judged = [(self._state[name], report.tensors[name]) for name in JUDGED]

        def work() -> None:
            for tensor, copy in judged:  # before the step overwrites them
                copy.copy_(tensor)
            for output, result in zip(outputs, package.run(inputs), strict=True):
                output[:slots].copy_(result)

        return work

    def _prepare_all(self, graphs: bool) -> dict[tuple[str, int], Work]:
        """Return the function that queues a step, by its program and number of slots."""
        return {
            (name, slots): self._prepare(self._make_work(name, slots), graphs)
            for name in (PLAIN, MIXED)
            for slots in self._sizes
        }

    def _prepare(self, work: Work, graphs: bool) -> Work:
        """Return a function that queues the work, as a CUDA graph if `graphs`.

        The run before the capture changes nothing, since no slot is active.
        """
        if not graphs:
            return partial(self._gpu.run, work)
        self._gpu.run(work)
        self._wait(self._gpu.mark())
        return self._gpu.capture(work)


class CudaRankPrograms(CudaPrograms):
    """The programs of one rank on a GPU.

    NCCL's collectives are captured with the steps. NCCL requires that all ranks capture and launch
    the same collectives in the same order on a communicator. This holds because ranks make the same
    calls, on one stream each. Rank 0 decides whether steps are captured at all.
    """

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
        self._channel, self._peers = channel, connect(gpu, channel, peers)
        self._queued = deque[Wait]()
        if manifest.target.allreduce_strategy is not None:
            opener = partial(opener, peers=share_memory(gpu, channel, self._peers))
        channel.leaving.append(partial(_finish_queued_work, gpu, channel, self._peers))
        super().__init__(manifest, gpu, opener, graphs=graphs)

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self._queue_bounded(partial(super().prefill, slot, start, tokens))

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        return self._queue_bounded(partial(super().launch, active, rows))

    def _queue_bounded(self, work: Callable[[], T]) -> T:
        """Queue a call's work; if more than AHEAD are queued, wait for the oldest."""
        with self._channel.unbroken(), silence:
            queued = work()
            self._queued.append(self._gpu.mark())
            while len(self._queued) > AHEAD:
                self._wait(self._queued.popleft())
            return queued

    def _wait(self, mark: Wait) -> None:
        with self._channel.unbroken():
            mark(watch(self._channel, self._peers))

    def _prepare_all(self, graphs: bool) -> dict[tuple[str, int], Work]:
        with self._channel.unbroken(), silence:
            dist.barrier()  # the first run needs all ranks, and some may still read their weights
            return super()._prepare_all(self._channel.share(graphs))


class CudaAttentionDPPrograms(AttentionDP, CudaRankPrograms):
    """The programs of one attention-DP rank on a GPU; results are gathered when they are read."""

    def _allocate_padding(self) -> None:
        rows = round_up_rows(self._prompt["tokens"].shape[1], self._capacity)
        self._padding_caches = {
            spec.name: self._gpu.zeros((1, 1, rows, spec.sizes["width"]), spec.dtype)
            for spec in self._caches.specs
        }

    def launch(self, active: Bools, rows: int) -> Callable[[], StepOutput]:
        read_output = super().launch(self._find_own_active(active), rows)
        return lambda: self._gather(read_output())

    def _prefill_padding(self, chunk: int) -> None:
        self._gpu.copy(np.zeros(1, np.int64), self._prompt["start"])
        rows = round_up_rows(chunk, self._capacity)
        caches = {name: cache[:, :, :rows] for name, cache in self._padding_caches.items()}
        self._queue_bounded(lambda: self._fill_rows(caches, chunk))


def _finish_queued_work(gpu: Gpu, channel: Channel, peers: Peers) -> None:
    """Wait for a step that all ranks have launched and not read."""
    with contextlib.suppress(EngineError, RuntimeError):  # a lost rank: nobody reads the step
        gpu.settle(watch(channel, peers))


def assert_aligned(inputs: list[Tensor]) -> list[Tensor]:
    """Assert aligned addresses: AOTInductor copies other inputs, so writes to them are lost."""
    assert not any(tensor.data_ptr() % ALIGNMENT for tensor in inputs), "a program would copy it"
    return inputs


def load(
    folder: Path,
    manifest: Manifest,
    gpu: Gpu,
    opener: Opener,
    make: Callable[[Manifest, Gpu, Opener], CudaPrograms] = CudaPrograms,
) -> CudaPrograms:
    """Load an engine's programs; raise EngineError for a wrong GPU or too little memory."""
    size = manifest.files[WEIGHTS].size
    check_gpu(folder, manifest, gpu, "build it on this machine", "weights", size)
    try:
        return make(manifest, gpu, opener)
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"{folder}: the GPU's memory is too small ({take_first_line(error)}); build with a "
            "smaller max_batch or max_seq_len"
        ) from None
