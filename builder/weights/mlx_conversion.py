"""Weights that MLX's conversion changes: kv_b_proj in two, and Qwen's norms and convolutions."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtpbuild.builder.formats import Entry, Shape, find_stored_format
from mtpbuild.builder.formats.mlx import WORD
from mtpbuild.builder.lazy_torch import Tensor, torch

KEYS, VALUES = "embed_q.", "unembed_out."  # of kv_b_proj; each head's keys are transposed
FIRST = f"{KEYS}0.weight"
PLAIN = "linear_attn.norm.weight"  # the only norm of Qwen's that holds its factor in any file


@dataclass(frozen=True)
class ConvertedWeight:
    """A weight that is made from others: their shapes, and what makes it from their values."""

    name: str
    shape: Shape
    sources: Mapping[str, Shape]
    change: Callable[..., Tensor]


def convert_mlx_weights(
    tensors: Mapping[str, Entry], settings: Mapping[str, Any], factors: Collection[str]
) -> Iterator[ConvertedWeight]:
    """Yield the checkpoint's weights that MLX's conversion changed; none of other checkpoints.

    factors: the norms to which it added 1.
    """
    for name, entry in tensors.items():
        if is_turned(name, entry.shape):
            shape = entry.shape[0], 1, entry.shape[1]
            yield ConvertedWeight(
                name, shape, {name: entry.shape}, lambda taps: taps.swapaxes(1, 2)
            )
        elif name in factors:
            yield ConvertedWeight(name, entry.shape, {name: entry.shape}, lambda factor: factor - 1)
        elif name.endswith(FIRST):
            yield _join_kv_heads(name.removesuffix(FIRST), tensors, settings)


def is_turned(name: str, shape: Shape) -> bool:
    return name.endswith("conv1d.weight") and len(shape) == 3 and shape[1] > 1 == shape[2]


def is_norm(name: str) -> bool:
    return "norm" in name and name.endswith(".weight") and not name.endswith(PLAIN)


def _join_kv_heads(
    at: str, tensors: Mapping[str, Entry], settings: Mapping[str, Any]
) -> ConvertedWeight:
    """Return kv_b_proj [heads * (nope + v), latent]."""
    heads = 0
    while f"{at}{KEYS}{heads}.weight" in tensors:
        heads += 1
    names = (f"{at}{kind}{i}.weight" for kind in (KEYS, VALUES) for i in range(heads))
    sources = {name: _find_shape(name, tensors, settings) for name in names}
    (latent, nope), (rows, _) = (sources[f"{at}{kind}0.weight"] for kind in (KEYS, VALUES))
    return ConvertedWeight(
        f"{at}kv_b_proj.weight", (heads * (nope + rows), latent), sources, join_heads
    )


def _find_shape(name: str, tensors: Mapping[str, Entry], settings: Mapping[str, Any]) -> Shape:
    """Return the shape of a weight, by its format if it is quantised; (0, 0) if it is missing."""
    if name not in tensors:
        return (0, 0)
    rows, words = tensors[name].shape
    format = find_stored_format(name, tensors, settings)
    return rows, words if format is None else words * WORD // format.bits


def join_heads(*parts: Tensor) -> Tensor:
    """Join each head's keys [latent, nope] and values [v, latent]."""
    heads = len(parts) // 2
    pairs = zip(parts[:heads], parts[heads:], strict=True)
    return torch.cat([rows for keys, values in pairs for rows in (keys.T, values)])
