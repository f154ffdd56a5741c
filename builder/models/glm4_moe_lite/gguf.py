"""GGUF files of GLM-4.7-Flash: DeepSeek-V3's architecture with GLM's tokenizer."""

from dataclasses import replace

from mtpbuild.builder.gguf.tensors import Architecture
from mtpbuild.builder.models.deepseek_v3 import gguf as deepseek_v3


def list_architectures() -> tuple[Architecture, ...]:
    (dense,) = deepseek_v3.list_architectures()
    return (replace(dense, tokenizer="glm"),)
