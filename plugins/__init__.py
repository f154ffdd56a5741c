"""The step program's own ops: each one a reference, and a facet per target.

Importing this package registers the ops under `torch.ops.mtpbuild`. A new plugin is a folder with
`op.py` (signature, shapes and plain PyTorch reference) and one file per target (`onnx.py`, ...).
"""

from collections.abc import Callable
from typing import Any

from mtpbuild.plugins.accept_rewind.op import accept_rewind
from mtpbuild.plugins.kv_write.op import kv_write
from mtpbuild.plugins.mla_attention.op import mla_attention
from mtpbuild.plugins.rope.op import rope

__all__ = ["accept_rewind", "kv_write", "mla_attention", "onnx_facets", "rope"]


def onnx_facets() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Torch op -> the function that writes it in ONNX operators; needs onnxscript."""
    import torch

    from mtpbuild.plugins.accept_rewind.onnx import accept_rewind_onnx
    from mtpbuild.plugins.kv_write.onnx import kv_write_onnx
    from mtpbuild.plugins.mla_attention.onnx import mla_attention_onnx
    from mtpbuild.plugins.rope.onnx import rope_onnx

    ops = torch.ops.mtpbuild
    return {
        ops.accept_rewind.default: accept_rewind_onnx,
        ops.kv_write.default: kv_write_onnx,
        ops.mla_attention.default: mla_attention_onnx,
        ops.rope.default: rope_onnx,
    }
