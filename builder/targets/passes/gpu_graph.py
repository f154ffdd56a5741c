"""A traced program as AOTInductor takes it for a GPU: no branches, on the device, with kernels."""

from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from mtpbuild.builder.targets.passes.branches import without_branches
from mtpbuild.plugins import facets


def for_gpu(exported: ExportedProgram, device: str = "cuda") -> ExportedProgram:
    """Before: ops and torch.cond on the CPU. After: Triton launches, both sides of a branch.

    A branch would be decided by the host, which a CUDA graph can't ask. `exported` is spent.
    """
    without_branches(exported)
    return move_to_device_pass(exported, device).run_decompositions(facets("gpu"))
