"""GGUF files of DeepSeek-V3.2: V3's, with an indexer in each layer."""

from dataclasses import replace

from mtpbuild.builder.gguf.configs import Config
from mtpbuild.builder.gguf.container import GgufFile
from mtpbuild.builder.gguf.tensors import Architecture
from mtpbuild.builder.models.deepseek_v3 import gguf as deepseek_v3

INDEXER = {
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
}


def list_architectures() -> tuple[Architecture, ...]:
    (dense,) = deepseek_v3.list_architectures()
    return (
        replace(
            dense,
            name="deepseek32",
            config=lambda file: read_sparse(file) | deepseek_v3.read_unsaid_groups(file),
            tensors={**dense.tensors, **INDEXER},
        ),
    )


def read_sparse(file: GgufFile) -> Config:
    """Return the config.json of sparse attention; a layer without indexer tensors shares one."""
    types = file.key("attention.indexer.types", [])[: file.layers]
    if not types:
        types = [f"blk.{i}.indexer.attn_k.weight" in file.tensors for i in range(file.layers)]
    named = {True: "full", False: "shared"}
    return {
        **deepseek_v3.read_latent(file),
        "index_n_heads": file.key("attention.indexer.head_count"),
        "index_head_dim": file.key("attention.indexer.key_length"),
        "index_topk": file.key("attention.indexer.top_k"),
        "indexer_types": [named.get(kind, kind) for kind in types],
    }
