"""GGUF files of GLM-4.5, 4.6 and 4.7, and GLM's tokenizer."""

from mtpbuild.builder.gguf.configs import Config, read_experts, read_heads, read_sizes
from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.builder.gguf.tensors import LAYER, MODULE_LAYER, SHARED_EXPERTS, Architecture
from mtpbuild.builder.gguf.tokenizer import WordSplit, split_words

WORDS = split_words(r"\p{L}", r"\p{N}{1,3}")


def list_architectures() -> tuple[Architecture, ...]:
    return (
        Architecture(
            "glm4moe",
            read_gguf_config,
            LAYER | SHARED_EXPERTS | MODULE_LAYER,
            splits={"glm4": WordSplit((WORDS,)), "chatglm-bpe": WordSplit((WORDS,))},
        ),
    )


def read_gguf_config(file: GgufFile) -> Config:
    return {
        **read_sizes(file),
        **read_experts(file),
        **read_heads(file),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }
