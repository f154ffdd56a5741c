"""Decompose a traced program into operators that have converters of Torch-TensorRT."""

from functools import lru_cache
from typing import TYPE_CHECKING

from torch.export import ExportedProgram

if TYPE_CHECKING:
    from mtpbuild.builder.program.trace import TracedProgram


def decompose(exported: ExportedProgram, traced: "TracedProgram") -> ExportedProgram:
    """Before: all operators of PyTorch. After: those with converters, the same for all ranks."""
    return _decompose_all(exported)


@lru_cache(maxsize=1)
def _decompose_all(exported: ExportedProgram) -> ExportedProgram:
    from mtpbuild.builder.targets.lower_tensorrt import lowering, settings

    exported = lowering().pre_export_lowering(exported, settings())
    return exported.run_decompositions(lowering().get_decompositions(False))
