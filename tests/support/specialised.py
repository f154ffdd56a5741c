"""Compiles a launch as Triton's JIT would for one GPU; plugins are compiled for any."""

from typing import Any

from mtpbuild.plugins.launch import Launch
from mtpbuild.plugins.ptx import compile_kernel, signature_of


def compile_specialised(launch: Launch, architecture: int) -> Any:
    """Compile for sizes that are 1 or divisible by 16, and with the GPU's own instructions."""
    from mtpbuild.plugins.codes import assembly_for

    signature, constants = signature_of(launch)
    if "ASSEMBLY" in constants:
        constants["ASSEMBLY"] = assembly_for(architecture)
    sizes = dict(zip(launch.kernel.arg_names[len(launch.inputs) :], launch.sizes, strict=False))
    ones = {name: 1 for name, size in sizes.items() if size == 1}
    sixteens = {name for name, size in sizes.items() if size % 16 == 0}
    signature |= dict.fromkeys(ones, "constexpr")
    return compile_kernel(launch, architecture, signature, constants | ones, sixteens)
