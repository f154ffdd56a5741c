"""Modules that hold weights in an engine's form: `x @ weight` works as with a parameter."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mtpbuild.builder.formats.integers import Integers, MixedIntegers
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.builder.models.common.weight import Layout, Share, Weight
from mtpbuild.plugins import (
    embedding_nbits,
    experts,
    experts_packed,
    gated_packed,
    gated_product,
    matmul_scaled,
    product_packed,
)
from mtpbuild.plugins.cpu.layout import BLOCK, PANEL, count_panels
from mtpbuild.plugins.gelu_gate.op import apply_gate
from mtpbuild.plugins.moe.op import NO_EXPERT, run_experts
from mtpbuild.plugins.product_packed.op import multiply_groups

Parts = tuple[Tensor, Tensor | None, Tensor | None]


class PackedWeight(nn.Module):
    """Weights [.., in, out] in the layout of the CPU's kernels; fp32 if format is None."""

    def __init__(self, shape: tuple[int, ...], format: Integers | None) -> None:
        super().__init__()
        *stack, inputs, self.outputs = shape
        self.scales: nn.Parameter | None = None
        if format is None:
            self.values = parameter(*stack, count_panels(self.outputs), inputs, PANEL)
            return
        count = count_panels(self.outputs)
        blocks, width = inputs // BLOCK, PANEL * BLOCK * format.bits // 8
        eights = format.eights if isinstance(format, MixedIntegers) else 0  # last ones of int4
        places = count + count_panels(eights)
        self.values = parameter(*stack, places, blocks, width, dtype=torch.uint8)
        halves = {"powers": 1, None: 2, "zeros": 3, "minima": 4}  # of 16
        wide = PANEL // 2 * halves[format.offsets]
        self.scales = parameter(*stack, count, blocks, wide, dtype=torch.float16)


class PackedBlocks(PackedWeight):
    """A packed product [in, out], or a stack [H, in, out] of one product for each head."""

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return product_packed(x, self.values, self.scales, self.outputs)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the weights [.., in] of the outputs `tokens` [..], in fp32."""
        return embedding_nbits(tokens, self.values, self.scales, self.outputs)

    def gated(self, x: Tensor, gelu: bool, limit: float) -> Tensor:
        """Return silu(gate) * up, or gelu(gate) * up, [.., out / 2] of x [.., in]."""
        if self.outputs % (2 * PANEL):  # the gates don't fill panels
            return gate_halves(x @ self, gelu, limit)
        return gated_packed(x, self.values, self.scales, self.outputs, gelu, limit)


class EmbeddingBlocks(nn.Module):
    """An embedding [V, E] of integers in blocks of 32; a lookup dequantises the rows."""

    def __init__(self, vocabulary: int, width: int, bits: int) -> None:
        super().__init__()
        size = BLOCK * bits // 8
        self.values = parameter(vocabulary, width // BLOCK, size, dtype=torch.uint8)
        self.scales = parameter(vocabulary, width // BLOCK, dtype=torch.float16)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens [..] in fp32 [.., E]."""
        return embedding_nbits(tokens, self.values, self.scales)


def look_up(weight: Tensor | EmbeddingBlocks | PackedBlocks, tokens: Tensor) -> Tensor:
    """Return the rows [.., E] of tokens [..] in an embedding, plain or in blocks."""
    if isinstance(weight, Tensor):
        return nn.functional.embedding(tokens, weight)
    return weight.look_up(tokens)


class PackedExperts(PackedWeight):
    """Packed weights [X, in, out] of experts; gates and ups are each padded to whole panels."""

    def weighed(
        self,
        down: "PackedExperts",
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gelu: bool,
        limit: float,
    ) -> Tensor:
        """Return the weighed sum [.., E] of experts: x [.., E], weights and ids [.., k].

        This module holds the experts' gate and up weights, `down` their down weights. gelu: of the
        gates, in place of silu.
        """
        parts = self.values, self.scales, down.values, down.scales
        return experts_packed(x, weights, ids, *parts, gelu=gelu, limit=limit)


class ExpertRows(nn.Module):
    """Experts' float weights [X, in, out], stored as [X, out, in] for the op `experts`."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        count, inputs, outputs = weight.shape
        self.rows = parameter(count, outputs, inputs, dtype=weight.dtype)

    def weighed(
        self,
        down: "ExpertRows",
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gelu: bool,
        limit: float,
    ) -> Tensor:
        """Do the same as `PackedExperts.weighed`."""
        weights = torch.where(ids == NO_EXPERT, 0.0, weights)
        repeated = x.unsqueeze(-2).expand(*ids.shape, -1).flatten(0, -2)
        chosen = ids.clamp(min=0).flatten().long()
        y = experts(repeated, chosen, self.rows, down.rows, gelu, limit)
        return cast((y.reshape(*ids.shape, -1) * weights[..., None]).sum(-2), x.dtype)


class ScaledWeight(nn.Module):
    """An fp8 or nvfp4 weight [in, out], or experts [X, in, out], for `matmul_scaled`.

    group: number of inputs that share a scale. scales_2: the shape of nvfp4's second scales without
    the experts; None for fp8.
    """

    by_kernel_of_few = ("values", "scales", "scales_2")  # weights that it reads in small steps

    def __init__(
        self, shape: tuple[int, ...], group: int, scales_2: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        *stack, K, N = shape
        packed = K if scales_2 is None else K // 2
        self.values = parameter(*stack, packed, N, dtype=torch.uint8)
        scale_type = torch.float32 if scales_2 is None else torch.uint8
        self.scales = parameter(*stack, K // group, N, dtype=scale_type)
        second = None if scales_2 is None else parameter(*stack, *scales_2, dtype=torch.float32)
        self.scales_2 = second

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return matmul_scaled(x, self.values, self.scales, self.scales_2)

    @property
    def parts(self) -> Parts:
        return self.values, self.scales, self.scales_2


def make_weight_module(weight: Weight, parameter: Tensor, share: Share) -> nn.Module:
    """Return a module that holds a weight as the engine does, to replace the parameter."""
    format = weight.format
    shape = tuple(parameter.shape)
    *stack, inputs, outputs = shape
    if weight.layout is Layout.ROWS:
        return ExpertRows(parameter)
    if weight.packed:
        if weight.paired:
            outputs = 2 * PANEL * count_panels(outputs // 2)
        kind = PackedExperts if stack and not weight.per_head else PackedBlocks
        assert format is None or isinstance(format, Integers)
        return kind((*stack, inputs, outputs), format)
    assert format is not None
    if weight.looked_up:  # its rows are tokens
        assert isinstance(format, Integers)
        return EmbeddingBlocks(inputs, outputs, format.bits)
    return ScaledWeight(
        shape, weight.scale_group(share), format.shape_second_scales(shape, weight.concat_axis)
    )


def multiply_by_group(x: Tensor, weight: "Tensor | PackedBlocks", groups: int) -> Tensor:
    """Multiply each group of x [.., groups in] by its own group of a weight's outputs [in, out]."""
    if isinstance(weight, PackedBlocks):
        return product_packed(x, weight.values, weight.scales, weight.outputs, groups)
    return multiply_groups(x, weight, groups)


def multiply_gated(
    x: Tensor,
    weight: "Tensor | PackedBlocks | ScaledWeight",
    gelu: bool = False,
    limit: float = 0.0,
) -> Tensor:
    """Compute silu(gate) * up, or gelu(gate) * up, of x [.., E] -> [.., I].

    The weight's outputs are gates, then ups. limit: as `apply_gate` has it.
    """
    if isinstance(weight, PackedBlocks):
        return weight.gated(x, gelu, limit)
    if isinstance(weight, Tensor) and not gelu:
        return gated_product(x, weight, limit)
    return gate_halves(x @ weight, gelu, limit)


def gate_halves(y: Tensor, gelu: bool, limit: float) -> Tensor:
    """Compute silu(gate) * up, or gelu(gate) * up, of y [.., 2 I], the gates first."""
    gate, up = y.chunk(2, dim=-1)
    return apply_gate(gate, up, gelu, limit)


def weigh_chosen(
    gate_up: "Tensor | PackedExperts | ExpertRows | ScaledWeight",
    down: "Tensor | PackedExperts | ExpertRows | ScaledWeight",
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gelu: bool = False,
    limit: float = 0.0,
) -> Tensor:
    """Return the weighed sum [.., E] of the experts ids [.., k] for x [.., E]; weights [.., k].

    gelu: of their gates, in place of silu. limit: as `apply_gate` has it.
    """
    if isinstance(gate_up, PackedExperts | ExpertRows):
        weighed: Callable[..., Tensor] = gate_up.weighed
        return weighed(down, x, weights, ids, gelu, limit)
    assert isinstance(down, Tensor | ScaledWeight)
    flat = (operand.flatten(0, -2) for operand in (x, weights, ids.int()))
    (first, *scales), (second, *down_scales) = (
        w.parts if isinstance(w, ScaledWeight) else (w, None, None) for w in (gate_up, down)
    )
    weights_of_all = (first, second, *scales, *down_scales)
    return run_experts(*flat, *weights_of_all, gelu=gelu, limit=limit).reshape(x.shape)


def replace_parameter(model: nn.Module, name: str, weight: nn.Module) -> None:
    """Replace the parameter of this name by a module."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    delattr(module, leaf)
    module.add_module(leaf, weight)
