"""Both TensorRT targets: what can't run here, and which programs run an engine that can."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.runtime.contract.manifest import WEIGHTS, Manifest
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.group.start import own_gpu
from mtpbuild.runtime.programs import cuda
from mtpbuild.runtime.programs.cuda import Device
from mtpbuild.runtime.programs.device_slots import check_gpu
from mtpbuild.runtime.programs.tensorrt_api import tensorrt_api
from mtpbuild.runtime.programs.tensorrt_engines import TensorRtPrograms

if TYPE_CHECKING:
    from mtpbuild.runtime.group.channel import Channel


def visible_gpus() -> int:
    """How many GPUs the ranks of an engine can take here."""
    return cuda.visible_gpus("tensorrt")


def load(
    folder: Path,
    manifest: Manifest,
    threads: int | None,
    channel: "Channel | None" = None,
    *,
    nccl: Callable[[], object] | None = None,
) -> TensorRtPrograms:
    """The programs of an engine that was checked, or of one rank; refuses what can't run here.

    channel: between the ranks that share an engine, whose folder and manifest are then this rank's.
    nccl: gives NCCL's library, if it is not this machine's.
    """
    target = manifest.target
    trt = tensorrt_api(target.name)
    built = target.versions[target.name]
    if trt.__version__ != built:
        raise EngineError(
            f"{folder}: built by {target.name} {built}, this is {trt.__version__}; rebuild the "
            f"engine, or install that version"
        )
    device = Device(target.name, 0 if channel is None else own_gpu())
    weights = manifest.files[WEIGHTS].size if WEIGHTS in manifest.files else 0  # in each program
    size = sum(manifest.files[p.file].size + weights for p in manifest.programs.values())
    check_gpu(folder, manifest, device, "build with another --compute-capability", "programs", size)
    if channel is None:
        return TensorRtPrograms(folder, manifest, trt, device)
    from mtpbuild.runtime.group.communicator import nccl_library  # with torch.distributed
    from mtpbuild.runtime.programs import tensorrt_ranks

    kinds = tensorrt_ranks.RankPrograms, tensorrt_ranks.AttentionDPPrograms
    make = kinds[manifest.build.attention_dp]
    return make(channel, folder, manifest, trt, device, nccl or nccl_library)
