"""Launches every Triton kernel at a model's sizes, on tensors without memory.

    python -m tests.support.kernel_launches [--shape deepseek-v3] [--architectures 80,90] [--json]

prints the resources that each kernel needs as an AOT plugin of TensorRT.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor

from mtpbuild.plugins.control_tensors import name_controls
from mtpbuild.plugins.launch import Launch
from mtpbuild.plugins.ptx import compile_launch
from mtpbuild.runtime.contract.controls import CORE_CONTROLS, list_control_shapes

ARCHITECTURES = (80, 90, 100, 120)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def fp8(K: int, N: int, *stack: int) -> tuple[Any, ...]:
    """Make a weight [K, N] in the layout of matmul_scaled, or a stack of weights."""
    scales = empty(*stack, K // gcd(128, K), N)
    return empty(*stack, K, N, dtype=torch.uint8), scales, None


def nvfp4(K: int, N: int, *stack: int) -> tuple[Any, ...]:
    scales = empty(*stack, K // 16, N, dtype=torch.uint8)
    return empty(*stack, K // 2, N, dtype=torch.uint8), scales, empty(*stack, 1, N)


FORMS: dict[str, Callable[..., tuple[Any, ...]]] = {"fp8": fp8, "nvfp4": nvfp4}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model for which its kernels are compiled."""

    batch: int
    tokens: int
    heads: int
    rank: int
    rope: int
    vocab: int
    hidden: int
    inner: int
    experts: int
    groups: int
    kept_groups: int
    chosen: int
    dtype: torch.dtype
    scorers: int = 64  # heads of an indexer, values of its keys, and rows that it chooses
    key: int = 128
    rows: int = 2048


DEEPSEEK = Shape(8, 4, 16, 512, 64, 129280, 7168, 256, 256, 8, 4, 8, torch.bfloat16)  # 1 of 8 ranks
SHAPES = {
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3-fp32": replace(DEEPSEEK, dtype=torch.float32),
    "small": Shape(2, 3, 4, 40, 8, 1000, 48, 32, 8, 4, 2, 2, torch.float32, 3, 16, 20),
}


def launches(s: Shape) -> tuple[Launch, ...]:
    """Yield every kernel's launch on meta tensors, one for each format of weights it takes."""
    from mtpbuild.plugins.accept_mixed.triton import accept_mixed_launches
    from mtpbuild.plugins.accept_rewind.triton import accept_rewind_launches
    from mtpbuild.plugins.kv_write.triton import kv_launch
    from mtpbuild.plugins.matmul_scaled.triton import product_launch
    from mtpbuild.plugins.mla_attention.triton import mla_attention_launches
    from mtpbuild.plugins.moe.triton import moe_launches, moe_route_launches
    from mtpbuild.plugins.shaped_probs.op import list_shaping
    from mtpbuild.plugins.shaped_probs.triton import shaped_probs_launches
    from mtpbuild.plugins.sparse_rows.triton import choose_rows_launches

    B, T, V = s.batch, s.tokens, s.vocab
    width = s.rank + s.rope
    slots, on = empty(B, dtype=torch.int64), empty(B, dtype=torch.int32)
    cache = empty(B, 1, 4096, width, dtype=s.dtype)
    fresh = empty(B, 1, T, width, dtype=s.dtype)
    query = empty(B, s.heads, T, width, dtype=s.dtype)
    attended = query, cache, fresh, slots, slots
    wide = (empty(B, 1, rows, width + s.key, dtype=s.dtype) for rows in (4096, T))
    place, turns = (*wide, slots, slots), empty(B, T, s.rope // 2)
    chosen = empty(B, T, s.rows, dtype=torch.int64)
    chooses = empty(B, T, s.scorers * s.key, dtype=s.dtype), empty(B, T, s.scorers), turns, turns
    window, shapes = empty(B, T, dtype=torch.int64), list_control_shapes(T - 1, 4096)
    flags = {"bool": torch.int32}  # plugins take no bool
    asked = [
        empty(B, *shapes[c.name], dtype=flags.get(c.dtype) or getattr(torch, c.dtype))
        for c in CORE_CONTROLS
    ]
    logits, probs = empty(B, T, V), empty(B, T - 1, V)
    N, X = B * T, s.experts
    ids = empty(N, s.chosen, dtype=torch.int32)
    sizes = (s.hidden, 2 * s.inner), (s.inner, s.hidden)  # of an expert's two products
    experts = (empty(X, *size, dtype=s.dtype) for size in sizes)
    x, shares = empty(N, s.hidden, dtype=s.dtype), empty(N, s.chosen)

    def scaled(form: Callable[..., tuple[Any, ...]]) -> Iterator[Launch]:
        (gate_up, *scales), (down, *others) = (form(*size, X) for size in sizes)
        yield product_launch(x, *form(*sizes[0]))
        yield from moe_launches(x, shares, ids, gate_up, down, *scales, *others).each

    return (
        kv_launch(cache, fresh, slots),
        *mla_attention_launches(*attended, 0.1, s.rank, splits=4).each,
        mla_attention_launches(query, *place, 0.1, s.rank, chosen, splits=4).each[0],
        *choose_rows_launches(*chooses, *place, s.rows, False).each,
        *accept_rewind_launches(logits, window, slots, slots, on).each,
        *accept_mixed_launches(logits, window, slots, slots, on, on, probs, asked).each,
        *shaped_probs_launches(logits, *list_shaping(name_controls(asked))).each,
        *moe_route_launches(
            empty(N, X), empty(X), s.groups, s.kept_groups, s.chosen, True, 2.5
        ).each,
        *scaled(fp8),
        *scaled(nvfp4),
        product_launch(x, empty(s.hidden, 1000, dtype=s.dtype), None, None),
        *moe_launches(x, shares, ids, *experts).each,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What each kernel needs as an AOT plugin.")
    parser.add_argument("--shape", choices=SHAPES, default="deepseek-v3")
    parser.add_argument("--architectures", default=",".join(map(str, ARCHITECTURES)))
    parser.add_argument("--json", action="store_true", help="with the PTX")
    options = parser.parse_args()
    for architecture in options.architectures.split(","):
        for launch in launches(SHAPES[options.shape]):
            ptx = compile_launch(launch, int(architecture))
            inputs = sum(operand is not None for operand in launch.inputs)
            if options.json:
                counts = (inputs, len(launch.sizes), len(launch.outputs))
                print(json.dumps(asdict(ptx) | {"arguments": counts}))
            else:
                print(
                    f"{ptx.target:8}{ptx.name:24}{ptx.threads:5} threads{ptx.shared:7} bytes shared"
                    f"{inputs:4} inputs {len(launch.sizes)} sizes {len(launch.outputs)} outputs"
                )


if __name__ == "__main__":
    main()
