"""Writes a GGUF file of a model's shape with random blocks; it needs no checkpoint.

    python gguf_random.py CONFIG.json OUT [--type f32|q8_0|q4_0] [--module]

Matrices have the given type, except that in a quantised file embedding, head, `attn_k_b` and
`attn_v_b` (the halves of `kv_b_proj`) are in Q8_0; norms, biases and routers are in fp32. Weights
have the scale that keeps activations at their size. --module adds Qwen3.5's MTP module and made-up
texts for tokens, without which llama.cpp's server does not answer. The script prints the bytes of
each tensor as JSON. It needs `gguf`, and holds one tensor in memory at a time.
"""

import argparse
import json
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf_keys import DECAY, PLAIN, architecture, shapes, write_keys

BLOCK, Q8_0 = 32, "q8_0"
# Bytes of a block, which begins with an fp16 scale; standard deviation of its unscaled values.
KINDS = {"q4_0": (18, 4.61), Q8_0: (34, 73.9)}
ENDS = ("token_embd.weight", "output.weight")
HALVES = ("attn_k_b.weight", "attn_v_b.weight")

Shape = tuple[int, ...]
Array = npt.NDArray[Any]


def kind_of(name: str, shape: Shape, wanted: str) -> str:
    """Returns the type of a tensor in a file of type `wanted`."""
    if len(shape) == 1 or any(part in name for part in PLAIN) or wanted == "f32":
        return "f32"
    return Q8_0 if name in ENDS or name.endswith(HALVES) else wanted


def stored_shape(shape: Shape, kind: str) -> Shape:
    """Returns the shape of the stored array, of floats or of bytes."""
    if kind == "f32":
        return shape
    count, rest = divmod(shape[-1], BLOCK)
    if rest:
        raise SystemExit(f"{kind}: {shape[-1]} columns do not split into blocks of {BLOCK}")
    return (*shape[:-1], count * KINDS[kind][0])


def nbytes(shape: Shape, kind: str) -> int:
    return prod(stored_shape(shape, kind)) * (4 if kind == "f32" else 1)


def values(name: str, shape: Shape, kind: str, rng: np.random.Generator) -> Array:
    """Makes a tensor as it is stored: norms are 1, biases 0, everything else is random."""
    if len(shape) == 1:
        value = -1.0 if name.endswith(DECAY) else 0.0 if name.endswith("bias") else 1.0
        return np.full(shape, value, np.float32)
    deviation = 1.0 if name.startswith("token_embd") else shape[-1] ** -0.5
    if kind == "f32":
        return rng.standard_normal(shape, np.float32) * np.float32(deviation)
    size, spread = KINDS[kind]
    stored = stored_shape(shape, kind)
    words = rng.integers(0, 2**64, -(-prod(stored) // 8), np.uint64)
    blocks = words.view(np.uint8)[: prod(stored)].reshape(-1, size)
    # Scales have either sign, as a quantiser's do: otherwise all values would lean to one side.
    signs = 1 - 2 * (blocks[:, 0] & 1).astype(np.float16)
    blocks[:, :2] = (signs * np.float16(deviation / spread))[:, None].view(np.uint8)
    return blocks.reshape(stored)


def write(c: dict[str, Any], out: Path, wanted: str, *, module: bool = False) -> dict[str, int]:
    """Writes the file; returns the bytes of each tensor."""
    writer = gguf.GGUFWriter(out, architecture(c))
    write_keys(writer, c, module=module)
    if module:
        write_texts(writer, c["vocab_size"])
    else:
        writer.add_tokenizer_model("no_vocab")
    wanted_shapes = shapes(c, module=module)
    kinds = {name: kind_of(name, shape, wanted) for name, shape in wanted_shapes.items()}
    sizes = {name: nbytes(shape, kinds[name]) for name, shape in wanted_shapes.items()}
    for name, shape in wanted_shapes.items():
        raw = np.dtype(np.float32 if kinds[name] == "f32" else np.uint8)
        stored, quantised = stored_shape(shape, kinds[name]), kinds[name].upper()
        dtype = gguf.GGMLQuantizationType[quantised]
        writer.add_tensor_info(name, stored, raw, sizes[name], raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.Generator(np.random.SFC64(0))
    for name, shape in wanted_shapes.items():
        writer.write_tensor_data(values(name, shape, kinds[name], rng))
    writer.close()
    return sizes


def write_texts(writer: gguf.GGUFWriter, size: int) -> None:
    """Makes a text of each id; prompts of ids do not need a tokenizer's merges."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{i}>" for i in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["< 0"])
    writer.add_eos_token_id(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=("f32", *KINDS), default="q4_0")
    parser.add_argument("--module", action="store_true")
    arguments = parser.parse_args()
    c = json.loads(arguments.config.read_text(encoding="utf-8"))
    print(json.dumps(write(c, arguments.out, arguments.type, module=arguments.module)))


if __name__ == "__main__":
    main()
