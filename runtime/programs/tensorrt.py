"""Loading of engines of both TensorRT targets, after a check that they can run here."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.runtime.contract.manifest import CONSTANTS, WEIGHTS, Manifest
from mtpbuild.runtime.errors import EngineError
from mtpbuild.runtime.gpu import cuda
from mtpbuild.runtime.gpu.cuda import Device
from mtpbuild.runtime.group.start import find_own_gpu
from mtpbuild.runtime.programs.device_slots import check_gpu
from mtpbuild.runtime.programs.mapped_weights import map_tensors
from mtpbuild.runtime.programs.tensorrt_api import list_shared_weights, tensorrt_api
from mtpbuild.runtime.programs.tensorrt_engines import TensorRtPrograms

if TYPE_CHECKING:
    from mtpbuild.runtime.group.channel import Channel


def visible_gpus() -> int:
    """Count the GPUs that an engine's ranks can use here."""
    return cuda.visible_gpus("tensorrt")


def held_bytes(folder: Path, manifest: Manifest) -> int:
    """Return the bytes of programs and weights on the GPU; shared weights count once."""
    weights = map_tensors(folder / WEIGHTS) if WEIGHTS in manifest.files else {}
    total, size, shared = sum(w.nbytes for w in weights.values()), 0, set[str]()
    for name, program in manifest.programs.items():
        size += manifest.files[program.file].size
        names = list_shared_weights(folder, name)
        if CONSTANTS.format(name) in manifest.files:  # refit restores its other weights
            size += total - sum(weights[weight].nbytes for weight in names)
        shared |= set(names)
    return size + sum(weights[weight].nbytes for weight in shared)


def load(
    folder: Path,
    manifest: Manifest,
    threads: int | None,
    channel: "Channel | None" = None,
    *,
    nccl: Callable[[], object] | None = None,
) -> TensorRtPrograms:
    """Load the programs of a checked engine, or of one rank; raises EngineError if it can't run.

    channel: between the ranks of an engine; folder and manifest are then this rank's. nccl: loads
    NCCL's library, for tests.
    """
    target = manifest.target
    trt = tensorrt_api(target.name)
    built = target.versions[target.name]
    if trt.__version__ != built:
        raise EngineError(
            f"{folder}: built by {target.name} {built}, this is {trt.__version__}; rebuild the "
            f"engine, or install that version"
        )
    device = Device(target.name, 0 if channel is None else find_own_gpu())
    size = held_bytes(folder, manifest)
    check_gpu(
        folder, manifest, device, "build with another `--compute-capability`", "programs", size
    )
    if channel is None:
        return TensorRtPrograms(folder, manifest, trt, device)
    from mtpbuild.runtime.group.communicator import load_nccl  # with torch.distributed
    from mtpbuild.runtime.programs import tensorrt_ranks

    kinds = tensorrt_ranks.TensorRtRankPrograms, tensorrt_ranks.TensorRtAttentionDPPrograms
    make = kinds[manifest.build.attention_dp]
    return make(channel, folder, manifest, trt, device, nccl or load_nccl)
