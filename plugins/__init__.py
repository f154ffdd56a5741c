"""The step program's own ops: each one a reference, and a facet per target.

Importing this package registers the ops under `torch.ops.mtpbuild`. A new plugin is a folder with
`op.py` (signature, shapes and plain PyTorch reference) and one file per target (`onnx.py`, ...).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mtpbuild.plugins.accept_rewind.mixed_op import accept_mixed_op, shaped_probs_op
from mtpbuild.plugins.accept_rewind.op import accept_rewind
from mtpbuild.plugins.experts_nbits.op import experts_nbits
from mtpbuild.plugins.kv_write.op import kv_write
from mtpbuild.plugins.matmul_nbits.op import matmul_nbits
from mtpbuild.plugins.matmul_scaled.op import dequantise_scaled, matmul_scaled
from mtpbuild.plugins.mla_attention.op import mla_attention
from mtpbuild.plugins.moe.op import moe, moe_route
from mtpbuild.plugins.rope.op import rope

if TYPE_CHECKING:
    from torch._ops import OpOverload

__all__ = [
    "accept_mixed_op",
    "accept_rewind",
    "cuda_facets",
    "dequantise_scaled",
    "experts_nbits",
    "inductor_facets",
    "kv_write",
    "matmul_nbits",
    "matmul_scaled",
    "mla_attention",
    "moe",
    "moe_route",
    "onnx_facets",
    "rope",
    "shaped_probs_op",
    "tensorrt_converters",
    "tensorrt_decompositions",
]


def onnx_facets() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Torch op -> the function that writes it in ONNX operators; needs onnxscript."""
    import torch

    from mtpbuild.plugins.accept_rewind.onnx import accept_rewind_onnx
    from mtpbuild.plugins.experts_nbits.onnx import experts_nbits_onnx
    from mtpbuild.plugins.kv_write.onnx import kv_write_onnx
    from mtpbuild.plugins.matmul_nbits.onnx import matmul_nbits_onnx
    from mtpbuild.plugins.mla_attention.onnx import mla_attention_onnx
    from mtpbuild.plugins.rope.onnx import rope_onnx

    ops = torch.ops.mtpbuild
    return {
        ops.accept_rewind.default: accept_rewind_onnx,
        ops.experts_nbits.default: experts_nbits_onnx,
        ops.kv_write.default: kv_write_onnx,
        ops.matmul_nbits.default: matmul_nbits_onnx,
        ops.mla_attention.default: mla_attention_onnx,
        ops.rope.default: rope_onnx,
    }


def inductor_facets() -> "dict[OpOverload[..., Any], Callable[..., Any]]":
    """Torch op -> PyTorch operators for AOTInductor to compile; where it can, the reference."""
    from mtpbuild.plugins.kv_write.inductor import kv_write_inductor
    from mtpbuild.plugins.mla_attention.inductor import mla_attention_inductor

    references = (
        *(accept_mixed_op, accept_rewind, shaped_probs_op, rope),
        *(dequantise_scaled, experts_nbits, matmul_nbits, matmul_scaled, moe, moe_route),
    )
    plain = {op._opoverload: op._init_fn for op in references}
    return plain | {
        kv_write._opoverload: kv_write_inductor,
        mla_attention._opoverload: mla_attention_inductor,
    }


def tensorrt_converters() -> "dict[OpOverload[..., Any], Callable[..., Any]]":
    """Torch op -> its converter for Torch-TensorRT; needs triton, and tensorrt when called."""
    from mtpbuild.plugins.accept_rewind.tensorrt import (
        accept_mixed_tensorrt,
        accept_rewind_tensorrt,
        shaped_probs_tensorrt,
    )
    from mtpbuild.plugins.kv_write.tensorrt import kv_write_tensorrt
    from mtpbuild.plugins.matmul_scaled.tensorrt import matmul_scaled_tensorrt
    from mtpbuild.plugins.mla_attention.tensorrt import mla_attention_tensorrt
    from mtpbuild.plugins.moe.tensorrt import moe_tensorrt

    return {
        accept_mixed_op._opoverload: accept_mixed_tensorrt,
        accept_rewind._opoverload: accept_rewind_tensorrt,
        kv_write._opoverload: kv_write_tensorrt,
        matmul_scaled._opoverload: matmul_scaled_tensorrt,
        mla_attention._opoverload: mla_attention_tensorrt,
        moe._opoverload: moe_tensorrt,
        shaped_probs_op._opoverload: shaped_probs_tensorrt,
    }


def tensorrt_decompositions() -> "dict[OpOverload[..., Any], Callable[..., Any]]":
    """Of the other ops: PyTorch operators that Torch-TensorRT converts itself."""
    own = tensorrt_converters()
    return {op: facet for op, facet in inductor_facets().items() if op not in own}


def cuda_facets() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Torch op -> its Triton kernels in a form that export can trace; needs triton."""
    from mtpbuild.plugins.accept_rewind.triton import accept_rewind_triton
    from mtpbuild.plugins.kv_write.triton import kv_write_triton
    from mtpbuild.plugins.matmul_scaled.triton import matmul_scaled_cuda
    from mtpbuild.plugins.mla_attention.triton import mla_attention_triton
    from mtpbuild.plugins.moe.triton import moe_route_triton, moe_triton

    return {
        accept_rewind._opoverload: accept_rewind_triton,
        kv_write._opoverload: kv_write_triton,
        matmul_scaled._opoverload: matmul_scaled_cuda,
        mla_attention._opoverload: mla_attention_triton,
        moe._opoverload: moe_triton,
        moe_route._opoverload: moe_route_triton,
    }
