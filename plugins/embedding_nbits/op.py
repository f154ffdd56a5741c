"""embedding_nbits: look up rows of an embedding in integers, or of a packed head's weight."""

import torch
from torch import Tensor

from mtpbuild.plugins.cpu.layout import bits_of, dequantise
from mtpbuild.plugins.definition import Node, define
from mtpbuild.plugins.product_packed.op import unpacked


@define(
    lambda tokens, values: values.new_empty(
        *tokens.shape,
        values.shape[1] * (1 if values.dtype == torch.float32 else 32),
        dtype=torch.float32,
    ),
    Node("Embedding", {"packed": "N"}),
)
def embedding_nbits(
    tokens: Tensor, values: Tensor, scales: Tensor | None, packed: int = 0
) -> Tensor:
    """Look up tokens [..] in an embedding [V, K] and return their rows in fp32 [.., K].

    Values are uint8 [V, K / 32, 32] with zero at 128, or nibbles [V, K / 32, 16] with zero at 8;
    scales fp16 [V, K / 32]. packed: V, if it is the weight of a product with V outputs
    (`product_packed`); else 0.
    """
    if packed:
        return unpacked(values, scales, packed)[tokens]
    ids = tokens.flatten()  # index_select is one Gather in ONNX
    assert scales is not None
    rows = values.index_select(0, ids), scales.index_select(0, ids)
    return dequantise(*rows, bits=bits_of(values.shape[-1])).unflatten(0, tokens.shape)
