"""embedding_nbits as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.contrib import BYTES, HALVES, INTS
from mtpbuild.plugins.cpu.onnx import operator

Embedding = operator("Embedding", {"tokens": INTS, "values": BYTES, "scales": HALVES})


def embedding_nbits_cpu(tokens: Any, values: Any, scales: Any) -> Any:
    return Embedding(tokens, values, scales)
