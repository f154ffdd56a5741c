"""Writes a GGUF file for llama.cpp, of a checkpoint or, with random blocks, of a shape.

    python gguf_file.py CHECKPOINT OUT [--type f32|q8_0] [--module] [--tokenizer]
    python gguf_file.py CONFIG.json OUT [--type f32|q8_0|q4_0] [--module] [--trunk CONFIG.json]

The second form needs no checkpoint: weights have the scale that keeps activations at their size. In
a quantised file embedding, head, `attn_k_b` and `attn_v_b` (the halves of `kv_b_proj`) are in Q8_0;
norms, biases and routers are in fp32, as llama.cpp requires. --module adds the MTP modules, which
only llama.cpp's server runs, and only those of Qwen3.5, and made-up texts, which it wants. --trunk
is for the configuration of a head in a file of its own. --tokenizer makes a server read and write
text, split by GPT-2's pattern, which is not quite the model's; without it there are token ids only.
One tensor is in memory at a time. The script prints the bytes of each tensor as JSON.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf_convert import Config, convert_tensors, count_modules, find_architecture, write_keys
from safetensors import safe_open

from mtpbuild.builder.checkpoint.config import HEAD
from mtpbuild.builder.models import find_family
from mtpbuild.builder.models.common.weight import WHOLE
from mtpbuild.builder.models.heads import join_config
from mtpbuild.builder.weights.table import list_weights

BLOCK = 32  # numbers that share a scale
BLOCKS = {"q4_0": 18, "q8_0": 34}  # bytes of a block
ENDS = ("token_embd.weight", "output.weight")
HALVES = ("attn_k_b.weight", "attn_v_b.weight")
PLAIN = ("ffn_gate_inp", "ssm_conv1d")  # in fp32, whatever the others' type
# Standard deviation of a block's values without its scale, an fp16 number at its beginning.
SPREADS = {"q4_0": 4.61, "q8_0": 73.9}

Shape = tuple[int, ...]
Array = npt.NDArray[Any]
Values = Callable[[str, Shape, str], Array]  # a tensor in its stored form: name, shape, type
Texts = Callable[[gguf.GGUFWriter], None]


def make_shapes(c: Config, trunk: Config | None = None) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors by name, without values; trunk: a head's."""
    family = find_family(trunk or c)
    config = family.config.parse(trunk or c)
    with torch.device("meta"):
        if trunk is None:
            return family.reference(config).state_dict()
        rows = list_weights(join_config(config, c), WHOLE)
        stored = {source.name: source.shape for row in rows for source in row.stored}
        at = f"{HEAD}."
        return {
            name.removeprefix(at): torch.empty(shape)
            for name, shape in stored.items()
            if name.startswith(at)
        }


def find_shapes(c: Config, modules: int, trunk: Config | None = None) -> dict[str, Shape]:
    """Return every tensor of the file with its shape."""
    stored = make_shapes(c, trunk)
    named = convert_tensors(c, stored, stored.__getitem__, modules)
    return {name: tuple(value.shape) for name, value in named}


def write_file(
    c: Config,
    out: Path,
    wanted: str,
    values: Values,
    modules: int,
    texts: Texts | None = None,
    trunk: Config | None = None,
) -> dict[str, int]:
    """Write a model in type `wanted`; return the bytes of each tensor.

    texts: writes the tokenizer; by default the file has token ids alone. trunk: a head's.
    """
    writer = gguf.GGUFWriter(out, find_architecture(c))
    write_keys(writer, c, modules)
    if texts is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        texts(writer)
    shapes, sizes = find_shapes(c, modules, trunk), dict[str, int]()
    kinds = {name: find_kind(name, shape, wanted) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        kind, stored = kinds[name], stored_shape(shape, kinds[name])
        raw = np.dtype(np.float32 if kind == "f32" else np.uint8)
        sizes[name] = prod(stored) * raw.itemsize
        dtype = gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor_info(name, stored, raw, sizes[name], raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in shapes.items():
        writer.write_tensor_data(values(name, shape, kinds[name]))
    writer.close()
    return sizes


def find_kind(name: str, shape: Shape, wanted: str) -> str:
    """Return the type of a tensor in a file of type `wanted`."""
    if len(shape) == 1 or any(part in name for part in PLAIN) or wanted == "f32":
        return "f32"
    return "q8_0" if name in ENDS or name.endswith(HALVES) else wanted


def stored_shape(shape: Shape, kind: str) -> Shape:
    """Return the shape of the stored array, of floats or of bytes."""
    if kind == "f32":
        return shape
    count, rest = divmod(shape[-1], BLOCK)
    if rest:
        raise SystemExit(f"{kind}: {shape[-1]} columns do not split into blocks of {BLOCK}")
    return (*shape[:-1], count * BLOCKS[kind])


def draw_values(
    name: str, shape: Shape, kind: str, rng: np.random.Generator, biases: list[float] | None
) -> Array:
    """Draw a tensor in its stored form: norms are 1, biases 0, everything else is random.

    biases: those of every router, if they are not 0.
    """
    if biases and name.endswith("exp_probs_b.bias"):
        return np.array(biases, np.float32)
    if len(shape) == 1:
        value = -1.0 if name.endswith("ssm_a") else 0.0 if name.endswith("bias") else 1.0
        return np.full(shape, value, np.float32)
    deviation = 1.0 if name.startswith("token_embd") else shape[-1] ** -0.5
    if kind == "f32":
        return rng.standard_normal(shape, np.float32) * np.float32(deviation)
    size, spread, stored = BLOCKS[kind], SPREADS[kind], stored_shape(shape, kind)
    words = rng.integers(0, 2**64, -(-prod(stored) // 8), np.uint64)
    blocks = words.view(np.uint8)[: prod(stored)].reshape(-1, size)
    # Scales have either sign, as a quantiser's do, or all values would be biased to one side.
    signs = 1 - 2 * (blocks[:, 0] & 1).astype(np.float16)
    blocks[:, :2] = (signs * np.float16(deviation / spread))[:, None].view(np.uint8)
    return blocks.reshape(stored)


def write_random(
    c: Config, out: Path, wanted: str, *, served: bool = False, trunk: Config | None = None
) -> dict[str, int]:
    """Write a file with random blocks; return the bytes of each tensor.

    served: with MTP modules and made-up texts. trunk: the configuration of a head's trunk.
    """
    rng = np.random.Generator(np.random.SFC64(0))
    size = c.get("text_config", c)["vocab_size"]
    texts = partial(write_made_up_texts, size=size) if served else None
    modules = count_modules(c) if served else 0
    values = partial(draw_values, rng=rng, biases=c.get("random_router_bias"))
    return write_file(c, out, wanted, values, modules, texts, trunk)


def write_checkpoint(
    folder: Path, out: Path, wanted: str, modules: int, *, tokenizer: bool
) -> dict[str, int]:
    """Write a checkpoint's values; return the bytes of each tensor."""
    c: Config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with safe_open(folder / "model.safetensors", "pt") as stored:
        read = lambda name: stored.get_tensor(name).float()  # noqa: E731
        named = convert_tensors(c, make_shapes(c), read, modules)

        def convert(name: str, shape: Shape, kind: str) -> Array:
            converted, value = next(named)
            assert (converted, tuple(value.shape)) == (name, shape)
            array: Array = value.contiguous().numpy()
            if kind == "f32":
                return array
            return gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind.upper()])

        texts = partial(write_tokenizer, folder=folder) if tokenizer else None
        return write_file(c, out, wanted, convert, modules, texts)


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Write the byte-level BPE of tokenizer.json."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    ids: Mapping[str, int] = vocabulary | {token["content"]: token["id"] for token in added}
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


def write_made_up_texts(writer: gguf.GGUFWriter, size: int) -> None:
    """Make a text for each id, without which llama.cpp's server does not answer prompts of ids."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"<{i}>" for i in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["< 0"])
    writer.add_eos_token_id(0)


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=("f32", *BLOCKS), default="f32")
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--trunk", type=Path)
    parser.add_argument("--tokenizer", action="store_true")
    args = parser.parse_args()
    config = args.source / "config.json" if args.source.is_dir() else args.source
    c = json.loads(config.read_text(encoding="utf-8"))
    trunk = None if args.trunk is None else json.loads(args.trunk.read_text(encoding="utf-8"))
    if args.source.is_dir():
        modules = count_modules(c) if args.module else 0
        sizes = write_checkpoint(
            args.source, args.out, args.type, modules, tokenizer=args.tokenizer
        )
    else:
        sizes = write_random(c, args.out, args.type, served=args.module, trunk=trunk)
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
