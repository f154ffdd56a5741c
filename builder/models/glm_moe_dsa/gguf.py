"""GGUF files of GLM-5: DeepSeek-V3.2's, which always say their groups of experts."""

from dataclasses import replace

from mtpbuild.builder.gguf.tensors import Architecture
from mtpbuild.builder.models.deepseek_v32 import gguf as deepseek_v32


def list_architectures() -> tuple[Architecture, ...]:
    (sparse,) = deepseek_v32.list_architectures()
    return (replace(sparse, name="glm-dsa", config=deepseek_v32.read_sparse),)
