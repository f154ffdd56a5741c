"""A rank's model of random weights, in the dtypes and formats of `mtpbuild build`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models.common.blocks import ScaledWeight
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.rope import compute_inverse_frequencies
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config
from mtpbuild.builder.program.opened_model import make_model
from mtpbuild.builder.targets.inductor.pipeline import INDUCTOR_CUDA
from mtpbuild.builder.weights.quantised_view import format_by
from mtpbuild.builder.weights.scheme import SCHEMES
from mtpbuild.builder.weights.table import WeightTable, choose_formats, make_family_table
from mtpbuild.runtime.group.channel import use_in_programs
from mtpbuild.runtime.group.start import GROUP
from on_gpu.slices import Slice

ONE = 0x38  # 1.0 in e4m3
TYPICAL_E2M1 = 2.9  # root of the mean square of its sixteen values
SMALL_E4M3 = (0x28, 0x40)  # codes of 0.25 to 1.875, whose mean square is about 0.9


def meta_model(case: Slice) -> CausalLM:
    """Make the model without memory for its weights."""
    return make_model(table_of(case), style_of(case), "meta")


def empty_model(case: Slice, device: str) -> CausalLM:
    """Make the model with uninitialised weights, for compiling but not for running."""
    model = meta_model(case).to_empty(device=device)
    return with_frequencies(model, case, device)


def with_frequencies(model: CausalLM, case: Slice, device: str) -> CausalLM:
    c: Any = case.config
    model.rope.inv_freq = compute_inverse_frequencies(c.rope, c.qk_rope_head_dim).to(device)
    if isinstance(c, DeepseekV4Config):
        far = compute_inverse_frequencies(c.row_rope, c.qk_rope_head_dim)
        model.rope.get_submodule("far").register_buffer("inv_freq", far.to(device), False)
    return model.eval()


def random_model(case: Slice, device: str) -> CausalLM:
    """Make a model in which products keep their input's scale, and no expert is preferred."""
    config: Any = case.config
    model = meta_model(case)
    inside = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, ScaledWeight)
        for part, _ in module.named_parameters()
    }
    for module in list(model.modules()):
        if isinstance(module, ScaledWeight):
            fill_scaled(module, device)
    for name, weight in list(model.named_parameters()):
        if name in inside:
            continue
        values = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        if weight.dim() > 1:
            values.normal_(std=weight.shape[-2] ** -0.5)
        else:
            values.fill_(0 if name.endswith(("_bias", ".rank")) or name == "rank" else 1)
        if name.endswith(".gate.table"):  # experts of each token
            values.random_(0, config.n_routed_experts)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(values, requires_grad=False))
    return with_frequencies(model, case, device)


def table_of(case: Slice) -> WeightTable:
    """Return the weights as a GPU engine holds them, of a checkpoint in the format case.weights."""
    table, scheme = make_family_table(case.config, case.ranks), SCHEMES[case.weights]
    return choose_formats(table, lambda w: format_by(scheme, case.config, w), style_of(case))


def style_of(case: Slice) -> GraphStyle:
    formats = ("fp8", "nvfp4")
    return GraphStyle(for_gpu=True, pipeline=INDUCTOR_CUDA, formats=formats, dtype=case.dtype)


def fill_scaled(weight: ScaledWeight, device: str) -> None:
    """Fill a weight with random codes, none of them NaN, such that products keep their scale."""

    def fill(name: str, low: int, high: int) -> Tensor:
        old: Tensor = getattr(weight, name)
        values = torch.empty(old.shape, dtype=old.dtype, device=device)
        if high > low:
            values.random_(low, high)
        setattr(weight, name, nn.Parameter(values, requires_grad=False))
        return values

    if weight.scales_2 is None:
        values = fill("values", *SMALL_E4M3)
        values += values.new_empty(values.shape).random_(0, 2) << 7  # the sign
        fill("scales", 0, 0).fill_(values.shape[-2] ** -0.5)
        return
    inputs = 2 * fill("values", 0, 256).shape[-2]
    fill("scales", ONE, ONE + 1)
    fill("scales_2", 0, 0).fill_(inputs**-0.5 / TYPICAL_E2M1)


def pretend_ranks(ranks: int) -> None:
    """Let the model's sums run as rank 0 of a group whose other ranks contribute nothing.

    It uses torch's own stand-in, which does not communicate, so no figure includes communication.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    assert dist.group.WORLD is not None
    use_in_programs(dist.group.WORLD)


def forget_ranks() -> None:
    c10d._unregister_process_group(GroupName(GROUP))
