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
from functools import partial
from math import prod
from pathlib import Path

import gguf
import numpy as np
from gguf_keys import DECAY, Config
from gguf_writer import BLOCKS, Array, Shape, stored_shape, write_file

# Standard deviation of a block's values without its scale, an fp16 number at its beginning.
SPREADS = {"q4_0": 4.61, "q8_0": 73.9}


def values(name: str, shape: Shape, kind: str, rng: np.random.Generator) -> Array:
    """Make a tensor in its stored form: norms are 1, biases 0, everything else is random."""
    if len(shape) == 1:
        value = -1.0 if name.endswith(DECAY) else 0.0 if name.endswith("bias") else 1.0
        return np.full(shape, value, np.float32)
    deviation = 1.0 if name.startswith("token_embd") else shape[-1] ** -0.5
    if kind == "f32":
        return rng.standard_normal(shape, np.float32) * np.float32(deviation)
    size, spread = BLOCKS[kind], SPREADS[kind]
    stored = stored_shape(shape, kind)
    words = rng.integers(0, 2**64, -(-prod(stored) // 8), np.uint64)
    blocks = words.view(np.uint8)[: prod(stored)].reshape(-1, size)
    # Scales have either sign, as a quantiser's do: otherwise all values would be biased to one
    # side.
    signs = 1 - 2 * (blocks[:, 0] & 1).astype(np.float16)
    blocks[:, :2] = (signs * np.float16(deviation / spread))[:, None].view(np.uint8)
    return blocks.reshape(stored)


def write(c: Config, out: Path, wanted: str, *, module: bool = False) -> dict[str, int]:
    """Write the file; return the bytes of each tensor."""
    rng = np.random.Generator(np.random.SFC64(0))
    texts = partial(write_texts, size=c["vocab_size"]) if module else None
    return write_file(c, out, wanted, partial(values, rng=rng), texts, module=module)


def write_texts(writer: gguf.GGUFWriter, size: int) -> None:
    """Make a text for each id; prompts of ids do not need a tokenizer's merges."""
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
    parser.add_argument("--type", choices=("f32", *BLOCKS), default="q4_0")
    parser.add_argument("--module", action="store_true")
    arguments = parser.parse_args()
    c = json.loads(arguments.config.read_text(encoding="utf-8"))
    print(json.dumps(write(c, arguments.out, arguments.type, module=arguments.module)))


if __name__ == "__main__":
    main()
