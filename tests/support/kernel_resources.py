"""Reads each kernel's needs from its compiled code, without a GPU.

    python -m tests.support.kernel_resources [--architectures 90,100]

A multiprocessor issues 4 instructions of a warp per cycle. An H100 (132 of them, 1.755 GHz) thus
issues 927e9 per second, and reads 3.35e12 bytes: to read at 80 % of that, a loop may take
927e9 / 2.68e12 = 0.346 instructions per byte. A B200 (148, 1.85 GHz, 8e12 bytes) may take 0.171.
"""

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtpbuild.plugins.launch import Launch, Launches
from tests.support.kernel_launches import FORMS, empty
from tests.support.specialised import compile_specialised

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}  # bytes of a program
SPILLS = ("LDL", "STL")
PRODUCTS = ("HMMA", "HGMMA", "UTCHMMA")


@dataclass(frozen=True)
class Resources:
    """One launch's needs; `steps` counts instructions per iteration of its longest loop.

    `per_byte` is all warps' instructions over the bytes of weights or cache that the iteration
    reads, or 0 without such a loop. `spills` counts loads and stores of the stack in any loop.
    """

    case: str
    kernel: str
    architecture: int
    programs: int
    registers: int
    stack: int
    spills: int
    shared: int
    tensor_memory: int
    product: str
    copies: int  # asynchronous copies to shared memory in loops
    steps: int
    per_byte: float

    def row(self) -> str:
        shown = {"architecture": f"sm_{self.architecture}", "per_byte": f"{self.per_byte:.3f}"}
        cells = vars(self) | shown
        return f"| {' | '.join(map(str, cells.values()))} |"


HEADER = (
    "| case | kernel | target | programs | registers | stack | spills | shared | tensor memory"
    " | product | copies | steps | per byte |\n" + "|---" * 13 + "|"
)


def resources(case: str, launch: Launch, architecture: int) -> Resources:
    """Compile a launch and read its needs from the cubin."""
    built = compile_specialised(launch, architecture)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(built.asm["cubin"])
        usage, sass = _dump("-res-usage", file), _dump("-sass", file)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, "cuobjdump says what a kernel uses"
    loops = [Counter(ops) for ops in _loops(sass)]
    most = max(map(_products, loops), default=0)
    main = Counter[str]()  # the innermost with the products, else the longest
    if loops:
        main = min(
            (ops for ops in loops if _products(ops) == most),
            key=lambda ops: ops.total() if most else -ops.total(),
        )
    copies = sum(ops["LDGSTS"] + ops["UTMALDG"] for ops in loops)
    once = _iterations(main, built.asm["ptx"])
    streamed = streamed_bytes(launch)
    steps = main.total() // once
    return Resources(
        case,
        launch.kernel.__name__,
        architecture,
        torch.Size(launch.grid).numel(),
        int(found[1]),
        int(found[2]),
        sum(ops[name] for ops in loops for name in SPILLS),
        built.metadata.shared,
        getattr(built.metadata, "tmem_size", None) or 0,
        next((name for name in PRODUCTS[::-1] if main[name]), "-"),
        copies,
        steps,
        steps * launch.warps / streamed if streamed and _products(main) else 0.0,
    )


def _dump(what: str, file: Path) -> str:
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, what, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _loops(sass: str) -> Iterator[list[str]]:
    """Yield the opcodes of each loop, which lie between a backward branch and its target."""
    found = re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?([^;]*);", sass)
    at = {int(place, 16): i for i, (place, _) in enumerate(found)}
    for i, (place, text) in enumerate(found):
        target = re.match(r"BRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < int(place, 16) and int(target[1], 16) in at:
            body = found[at[int(target[1], 16)] : i + 1]
            yield [re.split(r"[.\s]", instruction)[0] for _, instruction in body]


def _products(ops: Mapping[str, int]) -> int:
    return sum(ops[name] for name in PRODUCTS)


def _iterations(loop: Mapping[str, int], ptx: str) -> int:
    """Count how often the assembler unrolled a loop, by its products: PTX has each only once."""
    products = len(re.findall(r"mma\.sync\.aligned|wgmma\.mma_async|tcgen05\.mma\.", ptx))
    return max(1, _products(loop) // max(1, products))


def streamed_bytes(launch: Launch) -> int:
    """Count the bytes of weights, without scales, or of cache that an iteration reads, or 0."""
    sizes = launch.constants
    named = dict(zip(launch.kernel.arg_names, launch.inputs, strict=False))
    if launch.kernel.__name__ == "mla_partial":
        width = sizes["RANK"] + sizes["ROPE"]
        return int(sizes["BLOCK_N"] * width * _tensor(named["cache"]).itemsize)
    weights = {"scaled_product": "values", "gate_and_up": "gate_up_proj", "down": "down_proj"}
    if launch.kernel.__name__ not in weights:
        return 0
    weight = _tensor(named[weights[launch.kernel.__name__]])
    packed = 2 if named.get("scales_2") is not None else 1
    return int(sizes["BLOCK_K"] * sizes["BLOCK_N"] * weight.itemsize // packed)


def _tensor(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


@dataclass(frozen=True)
class Sizes:
    """The sizes of one rank of a model."""

    heads: int
    nope: int
    rank: int
    rope: int
    hidden: int
    inner: int
    experts: int
    chosen: int
    projection: int  # outputs of a product with a weight [hidden, projection]
    head: int  # tokens of the vocabulary
    capacity: int
    computed: torch.dtype


MODELS = {  # of R1, one of eight ranks
    "r1": Sizes(16, 128, 512, 64, 7168, 256, 256, 8, 2112, 16160, 4096, torch.bfloat16),
    "deepseek-tiny": Sizes(4, 32, 64, 16, 192, 64, 8, 2, 176, 4096, 512, torch.float32),
}


def cases(s: Sizes, architecture: int) -> Iterator[tuple[str, Launch]]:
    """Yield the launches of a step with the tiles that are chosen for this GPU."""
    from mtpbuild.plugins.matmul_scaled.triton import product_launch

    shared = SHARED[architecture]
    for name, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
        for tokens in (1, 4):
            for launch in _attention(s, tokens, dtype, shared).each:
                yield f"attention {name}, {tokens} tokens", launch
    for launch in _attention(s, 4, s.computed, 48 << 10).each:
        yield "attention of 48 KB, 4 tokens", launch
    for dtype in (torch.bfloat16, torch.float32):
        for launch in _chosen(s, dtype, shared):
            yield f"chosen rows {str(dtype).removeprefix('torch.')}, 4 tokens", launch
    yield from _around_attention(s)
    for form in ("fp8", "nvfp4"):
        yield from _products_of(s, form)
    given = empty(4, s.hidden, dtype=s.computed), empty(s.hidden, s.head, dtype=s.computed)
    yield "head, 4 tokens", product_launch(*given, None, None)
    for tokens in (1, 4):
        for launch in _experts(s, tokens, None).each:
            yield f"experts, {tokens} tokens", launch


def _attention(s: Sizes, tokens: int, dtype: torch.dtype, shared: int) -> Launches:
    from mtpbuild.plugins.mla_attention.triton import mla_attention_launches

    width, slots = s.rank + s.rope, empty(1, dtype=torch.int64)
    return mla_attention_launches(
        empty(1, s.heads, tokens, width, dtype=dtype),
        empty(1, 1, s.capacity, width, dtype=dtype),
        empty(1, 1, tokens, width, dtype=dtype),
        *(slots, slots, 0.1, s.rank),
        shared=shared,
    )


def _chosen(s: Sizes, dtype: torch.dtype, shared: int) -> Iterator[Launch]:
    """Yield the launches of DeepSeek-V3.2's choice and attention, of a context of 160k."""
    from mtpbuild.plugins.mla_attention.triton import mla_attention_launches
    from mtpbuild.plugins.sparse_rows.triton import choose_rows_launches

    heads, key, count, width = 64, 128, 2048, s.rank + s.rope
    rows = (empty(1, 1, n, width + key, dtype=dtype) for n in (160 << 10, 4))
    slots = empty(1, dtype=torch.int64)
    place, turns = (*rows, slots, slots), empty(1, 4, s.rope // 2)
    scored = empty(1, 4, heads * key, dtype=dtype), empty(1, 4, heads), turns, turns
    yield from choose_rows_launches(*scored, *place, count, False).each
    query = empty(1, s.heads, 4, width, dtype=dtype)
    chosen = empty(1, 4, count, dtype=torch.int64)
    yield from mla_attention_launches(query, *place, 0.1, s.rank, chosen, shared=shared).each


def _around_attention(s: Sizes) -> Iterator[tuple[str, Launch]]:
    """Yield the ops that read unquantised products, or parts of fp8 ones, and mla_values."""
    from mtpbuild.plugins.matmul_scaled.triton import product_launch
    from mtpbuild.plugins.mla_heads.triton import mla_queries_launches, mla_values_launches
    from mtpbuild.plugins.mla_rows.triton import mla_rows_launches

    query, width = s.projection - s.rank - s.rope, s.heads * (s.nope + s.rope)
    turns = empty(1, 4, s.rope // 2), empty(1, 4, s.rope // 2)
    norms = empty(query, dtype=s.computed), empty(s.rank, dtype=s.computed)
    w_uk = empty(s.heads, s.nope, s.rank, dtype=s.computed)
    for form in ("plain", "fp8"):

        def product(inputs: int, outputs: int, form: str = form) -> Tensor:
            x = empty(1, 4, inputs, dtype=s.computed)
            if form == "plain":
                return empty(1, 4, outputs, dtype=s.computed)
            (parts,) = product_launch(x, *FORMS[form](inputs, outputs)).outputs
            return parts.unflatten(1, (1, 4))

        (rows,) = mla_rows_launches(
            product(s.hidden, s.projection), *norms, *turns, 1e-6, True
        ).each
        yield f"rows of {form}, 4 tokens", rows
        (queries,) = mla_queries_launches(product(query, width), w_uk, *turns, True).each
        yield f"queries of {form}, 4 tokens", queries
    mixed = empty(1, s.heads, 4, s.rank, dtype=s.computed)
    (values,) = mla_values_launches(mixed, w_uk.transpose(1, 2).contiguous()).each
    yield "values, 4 tokens", values


def _products_of(s: Sizes, form: str) -> Iterator[tuple[str, Launch]]:
    from mtpbuild.plugins.matmul_scaled.triton import product_launch

    weight = FORMS[form](s.hidden, s.projection)
    yield f"product {form}, 4 tokens", product_launch(empty(4, s.hidden, dtype=s.computed), *weight)
    for tokens in (1, 4, 64, 256) if form == "nvfp4" else (1, 4):
        for launch in _experts(s, tokens, form).each:
            yield f"experts {form}, {tokens} tokens", launch


def _experts(s: Sizes, tokens: int, form: str | None) -> Launches:
    from mtpbuild.plugins.moe.triton import moe_launches

    ids = empty(tokens, s.chosen, dtype=torch.int32)
    sizes = (s.hidden, 2 * s.inner), (s.inner, s.hidden)
    given: Any
    if form is None:
        given = [empty(s.experts, *size, dtype=s.computed) for size in sizes]
    else:
        (up, *scales), (down, *others) = (FORMS[form](*size, s.experts) for size in sizes)
        given = (up, down, *scales, *others)
    x = empty(tokens, s.hidden, dtype=s.computed)
    return moe_launches(x, empty(tokens, s.chosen), ids, *given)


def main() -> None:
    parser = argparse.ArgumentParser(description="What kernels of R1 and deepseek-tiny need.")
    parser.add_argument("--architectures", default="90,100")
    options = parser.parse_args()
    print(HEADER)
    for model, sizes in MODELS.items():
        for architecture in map(int, options.architectures.split(",")):
            for case, launch in cases(sizes, architecture):
                print(resources(f"{model}: {case}", launch, architecture).row(), flush=True)


if __name__ == "__main__":
    main()
