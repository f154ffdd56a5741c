"""Choose the target of a model for GPUs by what this machine has."""

import contextlib
from typing import Any

from mtpbuild.builder.plan.recipe import choose_default_target, find_recipe
from mtpbuild.builder.targets import load_target
from mtpbuild.builder.targets.capability import dotted, explain_capability
from mtpbuild.builder.targets.inductor import Inductor, describe_this_gpu
from mtpbuild.builder.targets.tensorrt import TensorRt
from mtpbuild.runtime.errors import MtpbuildError, UsageError
from mtpbuild.runtime.gpu.cuda import Device

TENSORRT, INDUCTOR = TensorRt.name, Inductor.name
FOR_GPUS = {"device": "cuda", "dtype": "bfloat16"}  # options of target inductor


def choose_target(
    model: str, options: dict[str, Any], rank: int | None = None
) -> tuple[str, dict[str, Any], str | None]:
    """Return a model's target if none is named, its options, and why if the machine decides.

    Raises UsageError for a rank that is built alone: machines may choose differently.
    """
    recipe = find_recipe(model)
    if recipe is None or not isinstance(load_target(recipe.target), TensorRt):
        return choose_default_target(model), options, None
    if rank is not None:
        raise UsageError(
            f"--rank {rank}: name the --target, {TENSORRT} or {INDUCTOR}: ranks that are built "
            "apart must have the same one"
        )
    here, named = find_capability(), options.get("compute_capability")
    capability = here if named is None else dotted(named)
    if capability is None:  # `check_machine` refuses to build, and a dry run assumes a GPU
        return TENSORRT, options, None
    why_not = explain_capability([recipe.layout.partition("-")[0]], (capability,))
    if why_not is None and here != capability:
        why_not = f"it compiles on the GPU itself, and none of {capability} is here"
    if why_not is None:
        from mtpbuild.builder.targets.tensorrt.lowering import list_missing_packages

        why_not = next(list_missing_packages(), None)
    if why_not is None:
        rest = {name: value for name, value in options.items() if name != "compute_capability"}
        return TENSORRT, rest, f"it is installed, and GPUs of {capability} have its formats"
    return INDUCTOR, FOR_GPUS | options, f"not {TENSORRT}: {why_not}"


def find_capability() -> str | None:
    """Return the compute capability of this machine's GPU, by CUDA's package or by PyTorch."""
    with contextlib.suppress(MtpbuildError):
        return Device(TENSORRT).compute_capability
    with contextlib.suppress(MtpbuildError):
        return describe_this_gpu().compute_capability
    return None
