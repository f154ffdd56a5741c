"""A traced program as AOTInductor takes it for a GPU: no branches, on the device, with kernels."""

from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from mtpbuild.builder.targets.passes.branches import without_branches
from mtpbuild.plugins import accept_rewind, cuda_facets, matmul_scaled, mla_attention, moe

KERNELS = (accept_rewind, matmul_scaled, mla_attention, moe)  # kv_write copies the cache first


def for_gpu(exported: ExportedProgram, device: str = "cuda") -> ExportedProgram:
    """Before: ops and torch.cond on the CPU. After: Triton launches, both sides of a branch.

    A branch would be decided by the host, which a CUDA graph can't ask. `exported` is spent.
    """
    without_branches(exported)
    moved = move_to_device_pass(exported, device)
    facets = cuda_facets()
    return moved.run_decompositions({op._opoverload: facets[op._opoverload] for op in KERNELS})
