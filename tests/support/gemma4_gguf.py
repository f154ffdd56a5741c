"""Writes GGUF files of Gemma-4 and its assistant with the names that two converters give."""

import re
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Type

from tests.support.gguf_files import Array, usual, write_tensors
from tests.support.scripts import benchmark

names = benchmark("gguf_gemma4")


def spell(text: Any) -> dict[str, Any]:
    """Return transformers' configuration as published ones are spelled."""
    near, full = (text.per_layer_config[f"{kind}_attention"] for kind in ("sliding", "full"))
    sizes = {"global_head_dim": full.head_dim, "head_dim": near.head_dim}
    sizes["num_global_key_value_heads"] = full.num_key_value_heads
    return text.to_dict() | sizes | {"num_key_value_heads": near.num_key_value_heads}


def convert(model: Any, text: Any) -> dict[str, Array]:
    """Return a model's tensors under llama.cpp's names."""
    stored = model.state_dict()
    tensors = names.convert_tensors(spell(text), stored, lambda name: stored[name].float())
    return {name: value.numpy() for name, value in tensors}


def write(
    path: Path, name: str, keys: dict[str, Any], tensors: dict[str, Array], kind: Type
) -> Path:
    """Write a file of architecture `name`."""
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, name)
    names.write_keys(writer, keys)
    write_tensors(writer, tensors, usual(kind))
    return path


def write_trunk(
    path: Path,
    model: Any,
    kind: Type = Type.F32,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, Array] | None = None,
) -> Path:
    """Write a trunk; keys and tensors: what is added, or put in the place of others."""
    written = names.list_keys(spell(model.config)) | (keys or {})
    return write(path, "gemma4", written, convert(model, model.config) | (tensors or {}), kind)


def write_head(
    path: Path,
    model: Any,
    kind: Type = Type.F32,
    *,
    others: bool = False,
    tensors: dict[str, Array] | None = None,
) -> Path:
    """Write an assistant as llama.cpp does, or as ik_llama.cpp does."""
    text = model.config.text_config
    width = model.config.backbone_hidden_size
    raw = {"text_config": spell(text), "backbone_hidden_size": width}
    keys, values = names.list_keys(raw), convert(model, text) | (tensors or {})
    if not others:
        return write(path, names.HEAD, keys, values, kind)
    keys |= {"backbone_embedding_length": width}
    del keys["embedding_length_out"], keys["nextn_predict_layers"]
    del values["rope_freqs.weight"]
    for dropped in ("shared_kv_layers", "embedding_length_per_layer_input"):
        keys = {key: value for key, value in keys.items() if not key.endswith(dropped)}
    renamed = (
        (re.sub(r"nextn\.(\w+)_projection", r"mtp_\1_proj", name), value)
        for name, value in values.items()
    )
    return write(path, "gemma4_mtp", keys, dict(renamed), kind)
