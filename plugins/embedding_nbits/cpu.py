"""embedding_nbits as an operator of the CPU's library."""

from typing import Any

from mtpbuild.plugins.cpu.onnx import Embedding


def embedding_nbits_cpu(tokens: Any, values: Any, scales: Any) -> Any:
    return Embedding(tokens, values, scales)
