"""Target inductor: what can't run here, and which programs run an engine that can."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import Programs
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.group.channel import Channel
from mtpbuild.runtime.group.nccl import Peers
from mtpbuild.runtime.group.start import own_gpu
from mtpbuild.runtime.programs import inductor_cuda
from mtpbuild.runtime.programs.aot_package import TORCH, Opener, open_packages, this_machine
from mtpbuild.runtime.programs.inductor_cpu import InductorPrograms
from mtpbuild.runtime.programs.inductor_cuda import CudaPrograms
from mtpbuild.runtime.programs.inductor_dp import AttentionDPPrograms, CudaAttentionDPPrograms
from mtpbuild.runtime.programs.inductor_ranks import CudaRankPrograms, RankPrograms
from mtpbuild.runtime.programs.torch_cuda import Gpu
from mtpbuild.runtime.programs.torch_cuda import visible_gpus as visible_gpus


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
    """Loads the programs of a checked engine, or of one rank; refuses what can't run here.

    threads: of the CPU's programs. channel: between the ranks that share an engine, whose folder
    and manifest are then this rank's. no_cuda_graphs: a GPU's steps are launched kernel by kernel;
    of ranks, as rank 0 says. The others are the machine, and a test has its own: what opens
    programs, finds a GPU by its number, and joins the ranks' GPUs.
    """
    target = manifest.target
    if (built := target.versions.get("torch")) != TORCH:
        raise EngineError(
            f"{folder}: built for torch {built}, this is torch {TORCH}; rebuild the engine, or "
            f"pip install 'torch=={built}.*'"
        )
    if not target.compute_capabilities and target.hardware != this_machine():
        raise EngineError(f"{folder}: built for an {target.hardware}, this is an {this_machine()}")
    opener, apart = open_programs(folder, manifest), manifest.build.attention_dp
    if target.compute_capabilities:
        make: Callable[..., CudaPrograms] = CudaPrograms
        if channel is not None:
            of_rank = CudaAttentionDPPrograms if apart else CudaRankPrograms
            make = partial(of_rank, channel, peers)
        gpu = find_gpu(0 if channel is None else own_gpu())
        graphs = not no_cuda_graphs
        return inductor_cuda.load(folder, manifest, gpu, opener, partial(make, graphs=graphs))
    if no_cuda_graphs:
        raise EngineError(f"{folder}: built for a CPU, which has no CUDA graphs to switch off")
    if channel is None:
        return InductorPrograms(manifest, threads, opener)
    of_rank_on_cpu = AttentionDPPrograms if apart else RankPrograms
    return of_rank_on_cpu(channel, manifest, threads, opener)
