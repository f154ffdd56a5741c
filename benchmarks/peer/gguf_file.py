"""Writes a checkpoint as GGUF, for llama.cpp's `deepseek2` (DeepSeek-V3's class) and `qwen35`.

    python gguf_file.py CHECKPOINT OUT [--type f32|q8_0] [--tokenizer]

The script needs `gguf`, but neither torch nor mtpbuild. Without --tokenizer the file has token ids
only; with it a server can read and write text, split by GPT-2's pattern, which is not quite the
model's. Qwen3.5's MTP module is written, too; only llama.cpp's server runs it (`--spec-type
draft-mtp`). DeepSeek-V3's modules are left out: this llama.cpp has none for that architecture.
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import gguf_hybrid
import numpy as np
from gguf.utility import SafetensorsLocal
from gguf_hybrid import Array, Reader
from gguf_keys import architecture
from gguf_writer import Shape, write_file

# Tensors of a layer: GGUF's name and the checkpoint's.
QUERIES = {"attn_q": "self_attn.q_proj"}  # without q_lora
LATENT_QUERIES = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
PROJECTIONS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def open_tensors(folder: Path) -> Reader:
    """Map each name in one safetensors file to its tensor in fp32."""
    path = folder / "model.safetensors"
    tensors = SafetensorsLocal(path).tensors

    def read(name: str) -> Array:
        tensor = tensors[name]
        raw = np.ascontiguousarray(tensor.mmap_bytes())
        if tensor.dtype == "BF16":
            found = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif tensor.dtype == "F32":
            found = raw.view(np.float32)
        else:
            raise SystemExit(f"{path}: {name} is {tensor.dtype}; expected BF16 or F32")
        return found.reshape(tensor.shape)

    return read


def latent_tensors(c: dict[str, Any], read: Reader) -> Iterator[tuple[str, Array]]:
    """Yield GGUF's names and their values."""
    yield "token_embd.weight", read("model.embed_tokens.weight")
    yield "output_norm.weight", read("model.norm.weight")
    yield "output.weight", read("lm_head.weight")
    heads, nope = c["num_attention_heads"], c["qk_nope_head_dim"]
    attention = ATTENTION | (QUERIES if c["q_lora_rank"] is None else LATENT_QUERIES)
    for i in range(c["num_hidden_layers"]):
        ours, theirs = f"model.layers.{i}", f"blk.{i}"
        for name, source in attention.items():
            yield f"{theirs}.{name}.weight", read(f"{ours}.{source}.weight")
        kv_b = read(f"{ours}.self_attn.kv_b_proj.weight").reshape(heads, -1, c["kv_lora_rank"])
        yield f"{theirs}.attn_k_b.weight", kv_b[:, :nope].transpose(0, 2, 1)
        yield f"{theirs}.attn_v_b.weight", kv_b[:, nope:]
        if i < c["first_k_dense_replace"]:
            for name, source in PROJECTIONS.items():
                yield f"{theirs}.ffn_{name}.weight", read(f"{ours}.mlp.{source}.weight")
            continue
        yield f"{theirs}.ffn_gate_inp.weight", read(f"{ours}.mlp.gate.weight")
        yield f"{theirs}.exp_probs_b.bias", read(f"{ours}.mlp.gate.e_score_correction_bias")
        for name, source in PROJECTIONS.items():
            experts = (f"{ours}.mlp.experts.{e}.{source}" for e in range(c["n_routed_experts"]))
            yield (
                f"{theirs}.ffn_{name}_exps.weight",
                np.stack([read(f"{e}.weight") for e in experts]),
            )
            yield (
                f"{theirs}.ffn_{name}_shexp.weight",
                read(f"{ours}.mlp.shared_experts.{source}.weight"),
            )


TENSORS = {"deepseek2": latent_tensors, "qwen35": gguf_hybrid.tensors}


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Write the byte-level BPE of tokenizer.json."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    ids = vocabulary | {token["content"]: token["id"] for token in added}
    special = {token["id"] for token in added if token["special"]}
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types(
        [kinds.CONTROL if i in special else kinds.NORMAL for i in sorted(ids.values())]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)


def convert(folder: Path, out: Path, kind: str, *, tokenizer: bool = False) -> None:
    """Write matrices in `kind`; norms, biases and the router in fp32, as llama.cpp requires."""
    c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = architecture(c)
    if model not in TENSORS:
        raise SystemExit(f"{model}: expected {' or '.join(TENSORS)}")
    found = dict(TENSORS[model](c, open_tensors(folder)))

    def values(name: str, shape: Shape, kind: str) -> Array:
        stored = np.ascontiguousarray(found.pop(name), np.float32)
        assert stored.shape == shape, name
        if kind == "f32":
            return stored
        packed: Array = gguf.quants.quantize(stored, gguf.GGMLQuantizationType[kind.upper()])
        return packed

    texts = partial(write_tokenizer, folder=folder) if tokenizer else None
    write_file(c, out, kind, values, texts, module=model == "qwen35")
    assert not found, f"left out: {', '.join(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=("f32", "q8_0"), default="f32")
    parser.add_argument("--tokenizer", action="store_true")
    arguments = parser.parse_args()
    convert(arguments.checkpoint, arguments.out, arguments.type, tokenizer=arguments.tokenizer)


if __name__ == "__main__":
    main()
