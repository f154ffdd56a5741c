"""Compilation of a kernel with Triton for a GPU that need not be present.

The process must not run Triton's interpreter (TRITON_INTERPRET).
"""

from typing import Any

import torch
from torch import Tensor

from mtpbuild.plugins.launch import Launch

PTX_VERSION = 87  # for plugins: Triton's default is too new for drivers of CUDA 12.8
TYPES = {
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
}


def compiled(launch: Launch, architecture: int, specialised: bool = False) -> Any:
    """Compile for a plugin or, if `specialised`, for this architecture alone, as Triton's JIT does.

    A specialised kernel is compiled for sizes that are 1 or divisible by 16, and with the GPU's own
    instructions. Raises RuntimeError if Triton's interpreter is on.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mtpbuild.plugins.codes import assembly_for

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: compile kernels in another process")
    signature, constants = signature_of(launch)
    if "ASSEMBLY" in constants:
        constants["ASSEMBLY"] = assembly_for(architecture if specialised else 80)
    aligned = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    if specialised:
        sizes = dict(zip(launch.kernel.arg_names[len(launch.inputs) :], launch.sizes, strict=False))
        ones = {name: 1 for name, size in sizes.items() if size == 1}
        signature |= dict.fromkeys(ones, "constexpr")
        constants |= ones
        sixteens = {name for name, size in sizes.items() if size % 16 == 0}
        aligned += [i for i, name in enumerate(signature) if name in sixteens]
    source = ASTSource(
        launch.kernel,
        signature,
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},  # as all allocations are
    )
    options = {
        "num_warps": launch.warps,
        "num_stages": launch.stages,
        "ptx_version": None if specialised else PTX_VERSION,
        "enable_fp_fusion": True,
    }
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def signature_of(launch: Launch) -> tuple[dict[str, str], dict[str, Any]]:
    """Return each parameter's Triton type, "constexpr" for constants, and the constants' values."""
    values = (*launch.inputs, *launch.sizes, *launch.outputs)
    names = launch.kernel.arg_names
    given = dict(zip(names, values, strict=False)) | dict(launch.constants)
    assert len(given) == len(names) == len(values) + len(launch.constants), "its arguments"
    signature = {}
    for name in names:
        value = given[name]
        if isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
        else:
            constant = value is None or name in launch.constants
            signature[name] = "constexpr" if constant else "i32"
    return signature, {name: given[name] for name, kind in signature.items() if kind == "constexpr"}
