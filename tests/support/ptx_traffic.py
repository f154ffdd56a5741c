"""Counts the accesses of a step's kernels to shared memory, without a GPU, in a table.

    python -m tests.support.ptx_traffic 90 [CASE ..]

Weights and caches have the shapes of one of R1's eight ranks, with fewer columns and experts where
a program's work is the same. It runs in a process of its own, because Triton's interpreter must be
off.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

# Wavefronts per byte at 80 % of the bandwidth, if each multiprocessor has one per cycle. An H100
# has 132 of them at 1.755 GHz for 2.68e12 bytes per second, a B200 148 at 1.85 for 6.4e12.
ALLOWED = {90: 132 * 1.755e9 / 2.68e12, 100: 148 * 1.85e9 / 6.4e12}
HEADER = "| case | kernel | target | wavefronts per KiB | of those allowed |\n" + "|---" * 5 + "|"


def launches(architecture: int) -> Iterator[tuple[str, Any, int]]:
    """Yield launches with values, and the bytes of weights or cache that each reads once."""
    import torch

    from mtpbuild.plugins.launch import cdiv
    from mtpbuild.plugins.matmul_scaled.triton import product_launch
    from mtpbuild.plugins.mla_attention.triton import mla_attention_launches
    from mtpbuild.plugins.moe.triton import moe_launches
    from tests.support.kernel_resources import SHARED
    from tests.support.kernels import random_scaled

    g, bf16 = torch.Generator().manual_seed(0), torch.bfloat16
    hidden, inner, chosen, columns = 7168, 256, 8, 2304

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, generator=g).to(bf16)

    ids = torch.arange(chosen, dtype=torch.int32)[None]  # for one token
    for form in ("plain", "fp8", "nvfp4"):
        sizes = (chosen, hidden, 2 * inner), (chosen, inner, hidden)
        product: tuple[Any, ...]
        up: tuple[Any, ...]
        down: tuple[Any, ...]
        if form == "plain":
            product = drawn(hidden, columns), None, None
            up, down = ((drawn(*size), None, None) for size in sizes)
        else:
            product = random_scaled(g, form, hidden, columns)
            up, down = (random_scaled(g, form, *size) for size in sizes)
        yield f"product {form}", product_launch(drawn(4, hidden), *product), product[0].nbytes
        others = (*up[1:], *down[1:])
        weights = torch.rand(1, chosen, generator=g)
        made = moe_launches(drawn(1, hidden), weights, ids, up[0], down[0], *others)
        for launch, weight in zip(made.each, (up, down), strict=True):
            yield f"experts {form}", launch, weight[0].nbytes
    # Rows for 171 and for 64 splits, and a part of 16,384 rows, which would have 66 splits.
    for tokens, rows, splits in ((1, 4096, None), (4, 4096, None), (4, 992, 4)):
        cache, slots = drawn(1, 1, rows, 576), torch.zeros(1, dtype=torch.int64)
        made = mla_attention_launches(
            *(drawn(1, 16, tokens, 576), cache, drawn(1, 1, tokens, 576)),
            *(slots + rows - tokens, slots + rows - tokens, 0.1, 512),
            splits=splits,
            shared=SHARED[architecture],
        )
        each = cdiv(rows - tokens, made.each[0].grid[2])
        case = f"attention bf16, {tokens} tokens, {each} rows a split"
        yield case, made.each[0], cache.nbytes


def main(architecture: int, *wanted: str) -> None:
    from tests.support.ptx_machine import Traffic, run_launch

    print(HEADER)
    for case, launch, streamed in launches(architecture):
        traffic = Traffic()
        if not wanted or case.startswith(wanted):
            run_launch(launch, architecture, traffic=traffic)  # `down` reads gate and up
            per_byte = traffic.wavefronts / streamed
            print(
                f"| {case} | {launch.kernel.__name__} | sm_{architecture} | {1024 * per_byte:.1f}"
                f" | {per_byte / ALLOWED[architecture]:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(int(sys.argv[1]), *sys.argv[2:])
