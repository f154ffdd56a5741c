"""Loading of engines of target inductor, after a check that they can run here."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Programs
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.gpu.torch_cuda import Gpu
from mtpbuild.runtime.gpu.torch_cuda import visible_gpus as visible_gpus
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.nccl import Peers
from mtpbuild.runtime.group.start import find_own_gpu
from mtpbuild.runtime.programs import inductor_cuda
from mtpbuild.runtime.programs.aot_package import TORCH, Opener, name_this_machine, open_packages
from mtpbuild.runtime.programs.inductor_cpu import (
    CpuAttentionDPPrograms,
    CpuRankPrograms,
    InductorPrograms,
)
from mtpbuild.runtime.programs.inductor_cuda import (
    CudaAttentionDPPrograms,
    CudaPrograms,
    CudaRankPrograms,
)


def load(
    folder: Path,
    manifest: Manifest,
    threads: int | None,
    channel: Channel | None = None,
    *,
    no_cuda_graphs: bool = False,
    open_programs: Callable[[Path, Manifest], Opener] = open_packages,
    find_gpu: Callable[[int], Gpu] = Gpu,
    peers: type[Peers] = Peers,
) -> Programs:
    """Load the programs of a checked engine, or of one rank; raises EngineError if it can't run.

    threads: for programs on a CPU. channel: between the ranks of an engine; folder and manifest are
    then this rank's. no_cuda_graphs: launch a GPU's steps kernel by kernel; rank 0's choice holds
    for all ranks. The other arguments are for tests: they open programs, find a GPU by its index,
    and connect the ranks' GPUs.
    """
    target = manifest.target
    if (built := target.versions.get("torch")) != TORCH:
        raise EngineError(
            f"{folder}: built for torch {built}, this is torch {TORCH}; rebuild the engine, or "
            f"pip install 'torch=={built}.*'"
        )
    if not target.compute_capabilities and target.hardware != name_this_machine():
        raise EngineError(
            f"{folder}: built for an {target.hardware}, this is an {name_this_machine()}"
        )
    opener, attention_dp = open_programs(folder, manifest), manifest.build.attention_dp
    if target.compute_capabilities:
        make: Callable[..., CudaPrograms] = CudaPrograms
        if channel is not None:
            rank_class = CudaAttentionDPPrograms if attention_dp else CudaRankPrograms
            make = partial(rank_class, channel, peers)
        gpu = find_gpu(0 if channel is None else find_own_gpu())
        graphs = not no_cuda_graphs
        return inductor_cuda.load(folder, manifest, gpu, opener, partial(make, graphs=graphs))
    if no_cuda_graphs:
        raise EngineError(f"{folder}: built for a CPU, which has no CUDA graphs to switch off")
    if channel is None:
        return InductorPrograms(manifest, threads, opener)
    cpu_rank_class = CpuAttentionDPPrograms if attention_dp else CpuRankPrograms
    return cpu_rank_class(channel, manifest, threads, opener)
