"""embedding_nbits: look up rows of an int8 embedding."""

import torch
from torch import Tensor

from mtpbuild.plugins.cpu.layout import dequantise
from mtpbuild.plugins.definition import Node, define


@define(
    lambda tokens, values: values.new_empty(*tokens.shape, values[0].numel(), dtype=torch.float32),
    Node("Embedding"),
)
def embedding_nbits(tokens: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """Look up tokens [..] in an embedding [V, K] and return their rows in fp32 [.., K].

    Values are uint8 [V, K / 32, 32] with zero at 128, scales fp16 [V, K / 32].
    """
    ids = tokens.flatten()  # index_select is one Gather in ONNX
    rows = values.index_select(0, ids), scales.index_select(0, ids)
    return dequantise(*rows, bits=8).unflatten(0, tokens.shape)
