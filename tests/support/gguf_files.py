"""Writes GGUF files of checkpoints with the changes that llama.cpp's converters make."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type

from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.files import open_checkpoint
from tests.support.families import make_config, make_family
from tests.support.scripts import benchmark

convert = benchmark("gguf_convert")

# Sizes with which rows are whole blocks of 32.
HYBRID: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_value_heads": 6,
    "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
GLM = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
LATENT = GLM | {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "gigachat": LATENT,
    "glm-flash": LATENT,
    "deepseek-v3.2": LATENT | {"index_head_dim": 32},
    "glm-5": LATENT | {"index_head_dim": 32},
    "glm-air": GLM,
    "glm-4.6": GLM
    | {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}},
    "qwen3.5-moe": HYBRID | EXPERTS,
    "qwen3-next": HYBRID | EXPERTS | {"mlp_only_layers": []},
}
SIZES = {"qwen3.5": HYBRID} | OTHERS
WIDE = {  # rows of a hybrid that are whole blocks of 256
    "hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "linear_num_value_heads": 8,
    "num_hidden_layers": 2, "full_attention_interval": 2,
}  # fmt: skip
Array = npt.NDArray[np.float32]
Read = Callable[[str], Array]  # a tensor of the checkpoint, by name
TypeOf = Callable[[str, Array], Type]


def converted(c: dict[str, Any], names: set[str], read: Read) -> Iterator[tuple[str, Array]]:
    """Yield all tensors as a converter gives them; names: of the checkpoint's tensors."""
    modules = convert.count_modules(c)
    tensors = convert.convert_tensors(
        c, sorted(names), lambda name: torch.from_numpy(read(name)), modules
    )
    for name, value in tensors:
        yield name, value.contiguous().numpy()


def random_tensors(name: str, **overrides: Any) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the configuration and the converted tensors of a random model of a family."""
    sizes = SIZES[name] | overrides
    c, stored = make_config(name, **sizes), make_family(name, **sizes).state_dict()
    return c, dict(converted(c, {*stored}, lambda key: stored[key].float().numpy()))


def split_head(tensors: dict[str, Array], layers: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the trunk's tensors, and the head's with those that head files repeat."""
    own = f"blk.{layers}."
    trunk = {name: value for name, value in tensors.items() if not name.startswith(own)}
    top = {name: value for name, value in tensors.items() if not name.startswith("blk.")}
    return trunk, top | {n: v for n, v in tensors.items() if n.startswith(own)}


def write_sizes(writer: gguf.GGUFWriter, raw: dict[str, Any], layers: int) -> None:
    """Write the keys of a dense head's sizes; raw: its config.json."""
    writer.add_block_count(layers)
    writer.add_vocab_size(raw["vocab_size"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_value_length(raw["head_dim"])
    writer.add_rope_dimension_count(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])


def usual(main: Type) -> TypeOf:
    """Return the types of a file of type `main`: vectors, routers and convolutions in fp32."""

    def type_of(name: str, value: Array) -> Type:
        block, _ = gguf.GGML_QUANT_SIZES[main]
        plain = value.ndim < 2 or re.search("ffn_gate_inp|ssm_conv1d|ssm_ba", name)
        return Type.F32 if plain or value.shape[-1] % block else main

    return type_of


def raw_blocks(value: Array, kind: Type, seed: int) -> npt.NDArray[np.uint8]:
    """Quantises, or draws blocks of a type that the package can't quantise."""
    try:
        return gguf.quants.quantize(value, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        draw, rows = np.random.default_rng(seed), int(np.prod(value.shape)) // block
        blocks = draw.integers(0, 256, (rows, size), dtype=np.uint8)
        scale = np.array([2e-4 if "K" in kind.name else 1e-3], np.float16).view(np.uint8)
        places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
        for place in places.get(kind.name, (0,)):
            blocks[:, place : place + 2] = scale
        return blocks.reshape(*value.shape[:-1], -1)


def write_gguf(
    path: Path,
    c: dict[str, Any],
    tensors: dict[str, Array],
    type_of: TypeOf,
    *,
    more: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write converted tensors; return the path."""
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, convert.ARCHITECTURES[c["model_type"]])
    convert.write_keys(writer, c, convert.count_modules(c))
    if more is not None:
        more(writer)
    write_tensors(writer, tensors, type_of)
    return path


def write_tensors(writer: gguf.GGUFWriter, tensors: dict[str, Any], type_of: TypeOf) -> None:
    """Write tensors after the keys that a writer has, and close it."""
    for number, (name, value) in enumerate(tensors.items()):
        kind = type_of(name, value)
        if value.dtype.kind == "i":  # ids
            writer.add_tensor(name, value)
        elif kind == Type.F32:
            writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
        elif kind == Type.F16:
            writer.add_tensor(name, value.astype(np.float16))
        else:
            writer.add_tensor(name, raw_blocks(value, kind, number), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def dequantised(path: Path) -> dict[str, Array]:
    """Return every tensor of a file as the package dequantises it."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        values = tensor.data
        if tensor.tensor_type != Type.I32:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = values.astype(np.float32).reshape(shape)
    return found


def write_hybrid(path: Path, kind: str, **overrides: Any) -> Path:
    """Write a random hybrid in one type."""
    c, tensors = random_tensors("qwen3.5", **overrides)
    return write_gguf(path, c, tensors, usual(Type[kind]))


def open_gguf(path: Path) -> Checkpoint:
    """Open and check a file; it must have everything that its configuration wants."""
    folder = find_model(str(path)).folder
    checkpoint = open_checkpoint(folder)
    checkpoint.check(checkpoint.settle(load_config(folder)))
    return checkpoint


def assert_equal_weights(path: Path, c: dict[str, Any], checkpoint: Checkpoint) -> None:
    """Check that what the checkpoint reads, converted, is what the package reads, to the bit."""
    parts = ("weight_scale", "weight_minimum")
    names = {n for n in checkpoint.tensors if not n.endswith(parts)}
    found = dict(converted(c, names, lambda name: checkpoint.read(name).numpy()))
    wanted = dequantised(path)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
