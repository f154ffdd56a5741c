"""Compilation of kernels by Triton without a GPU, to the PTX that TensorRT's AOT plugins launch.

The process must not run Triton's interpreter (TRITON_INTERPRET).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtpbuild.plugins.launch import AOT_SHARED, Launch

PTX_VERSION = 87  # for plugins: Triton's default is too new for drivers of CUDA 12.8
TYPES = {  # a tensor's dtype -> its names in Triton and in TensorRT
    torch.bool: ("i1", "BOOL"),
    torch.int32: ("i32", "INT32"),
    torch.int64: ("i64", "INT64"),
    torch.bfloat16: ("bf16", "BF16"),
    torch.float32: ("fp32", "FLOAT"),
    torch.uint8: ("u8", "FP8"),  # TensorRT has no constants of bytes; kernels read FP8 as bytes
    torch.float8_e4m3fn: ("fp8e4nv", "FP8"),
}


# Parameters of kernels that are weights or caches, which lie at multiples of 16 bytes. Nothing
# promises this of a network's intermediate tensors.
ALIGNED = (
    *("bias", "cache", "down_proj", "gate_up_proj", "kv_norm", "q_norm", "scales", "scales_2"),
    *("values", "w_uk", "w_uv"),
)


class ContractError(ValueError):
    """The error for a kernel that TensorRT can't launch as an AOT plugin."""


@dataclass(frozen=True)
class Ptx:
    """A compiled kernel; `parameters` are PTX types in the order of the launch's arguments."""

    name: str
    text: str
    target: str  # sm_80 runs on every later GPU, sm_90a only on that one
    parameters: tuple[str, ...]
    threads: int
    shared: int  # bytes


def compile_launch(launch: Launch, architecture: int) -> Ptx:
    """Compile the launch's kernel for its dtypes and constants; the tensors may be meta tensors.

    Raises ContractError if it needs scratch memory, or more shared memory than a plugin has.
    """
    signature, constants = signature_of(launch)
    if "ASSEMBLY" in constants:
        constants["ASSEMBLY"] = 80  # for every GPU
    how: dict[str, Any] = {"ptx_version": PTX_VERSION, "aligned": ALIGNED}
    built = compile_kernel(launch, architecture, signature, constants, **how)
    needs = built.metadata
    if needs.global_scratch_size or needs.profile_scratch_size:
        raise ContractError(f"{needs.name} needs scratch memory")
    if needs.shared > AOT_SHARED:
        raise ContractError(f"{needs.name}: {needs.shared} bytes of shared memory > {AOT_SHARED}")
    return _remove_scratch(built.asm["ptx"], needs.name, needs.shared)


def compile_kernel(
    launch: Launch,
    architecture: int,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    sixteens: Collection[str] = (),
    ptx_version: int | None = None,
    aligned: Collection[str] | None = None,
) -> Any:
    """Compile for tensors that are aligned to 16 bytes, as all allocations are.

    sixteens: names of sizes divisible by 16. aligned: names of tensors that are so; None: all.
    Raises RuntimeError if Triton's interpreter is on.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: compile kernels in another process")
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if name in sixteens or (kind.startswith("*") and (aligned is None or name in aligned))
    }
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    how = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
    gpu = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=gpu, options=how | {"ptx_version": ptx_version})


def signature_of(launch: Launch) -> tuple[dict[str, str], dict[str, Any]]:
    """Return each parameter's Triton type, "constexpr" for constants, and the constants' values."""
    values = (*launch.inputs, *launch.sizes, *launch.outputs)
    names = launch.kernel.arg_names
    arguments = dict(zip(names, values, strict=False)) | dict(launch.constants)
    assert len(arguments) == len(names) == len(values) + len(launch.constants), "its arguments"
    signature = {}
    for name in names:
        value = arguments[name]
        if isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype][0]
        else:
            constant = value is None or name in launch.constants
            signature[name] = "constexpr" if constant else "i32"
    return signature, {
        name: arguments[name] for name, kind in signature.items() if kind == "constexpr"
    }


def _remove_scratch(text: str, name: str, shared: int) -> Ptx:
    """Remove the two scratch pointers that Triton adds after the arguments: TensorRT has none."""
    entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)", text, re.DOTALL)
    assert entry is not None, "Triton writes one entry point"
    parameters = [line.strip() for line in entry[2].strip().split(",\n")]
    for i in (len(parameters) - 1, len(parameters) - 2):
        if len(re.findall(rf"\b{name}_param_{i}\b", text)) != 1:
            raise ContractError(f"{name} reads its scratch pointers")
    kept = parameters[:-2]
    body = "\n" + ",\n".join(f"\t{line}" for line in kept) + "\n"
    text = text[: entry.start(2)] + body + text[entry.end(2) :]
    (target,), (threads,) = (re.findall(rf"\.{name} (\w+)", text) for name in ("target", "reqntid"))
    kinds = tuple(line.split()[1] for line in kept)
    return Ptx(entry[1], text, target, kinds, int(threads), shared)
