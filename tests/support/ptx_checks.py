"""Runs the kernels' checks on the PTX that a GPU would get, and prints a line of JSON for each.

    python -m tests.support.ptx_checks 90 [CHECK or MISTAKE ..]
    python -m tests.support.ptx_checks plugin      # as TensorRT gets it, for sm_80

The checks are in `kernels.py` and `step_kernels.py`. They must find mistakes that are planted in
the PTX. They run in a process of their own, because Triton's interpreter must be off.
"""

import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

Check = Callable[[], Any]
# Name -> check, pattern in the PTX, replacement
MISTAKES = {
    "no barrier": ("product bfloat16 in nvfp4", r"bar\.sync\s+0;", ""),
    "nobody waits for copies": (
        "product bfloat16 in nvfp4", r"cp\.async\.wait_group\s+\d+;", "cp.async.wait_group 99;",
    ),
    "no mask": ("product bfloat16 in nvfp4 of 70 columns", r"@%p\d+ (ld\.global)", r"\1"),
    "no mask of copies": (
        "product bfloat16 in nvfp4 with edges", r"(cp\.async\.ca.* 0x4), %r\d+;", r"\1;",
    ),
    "another scale": ("product bfloat16 in fp8", "0x7b807b80", "0x7b007b80"),
}  # fmt: skip


def checks(shared: int) -> Iterator[tuple[str, Check]]:
    """Yield each check with its name; "R1" stands for the shapes of one rank of eight.

    shared: bytes of shared memory that a program may have.
    """
    import torch

    from tests.support import gpu_steps, kernels, sparse_kernels, step_kernels
    from tests.support.kernels import Attention, Experts, Product
    from tests.support.sparse_kernels import Choice, Chosen
    from tests.support.step_kernels import Latents

    wide, narrow = torch.float32, torch.bfloat16
    for dtype in (wide, narrow):
        kind = str(dtype).removeprefix("torch.")
        small = Attention(3, 3, 4, 6, 24, 2, 80, dtype, 5, 1 << 20, 20, 7)
        yield f"attention {kind}", partial(kernels.check_attention, small, "cpu")
        r1 = Attention(2, 16, 4, 4, 512, 64, 600, dtype, None, shared, 64, 3)
        yield f"attention {kind} R1", partial(kernels.check_attention, r1, "cpu")
        plugin = Attention(1, 8, 1, 3, 130, 16, 90, dtype, 2, 48 << 10, 1, 4)
        yield f"attention {kind} of a plugin", partial(kernels.check_attention, plugin, "cpu")
        chosen = Chosen(2, 18, 2, 4, 24, 8, 60, 40, dtype, 3, 1 << 20)
        yield f"chosen rows {kind}", partial(sparse_kernels.check_chosen, chosen, "cpu")
        choice = Choice(2, 2, 150, 3, 20, dtype=dtype, sizes=(20, 24, 2))
        yield f"choice {kind}", partial(sparse_kernels.check_choice, choice, "cpu")
    v32 = Chosen(1, 16, 2, 2, 512, 64, 300, 128, narrow, None, shared)
    yield "chosen rows bfloat16 R1", partial(sparse_kernels.check_chosen, v32, "cpu")
    many = Choice(1, 1, 4500, 1, 2048, 4, True, narrow, (64, 64, 32))  # sums are exact
    yield "choice bfloat16 of many rows", partial(sparse_kernels.check_choice, many, "cpu")
    yield "a choice with NaN", partial(sparse_kernels.check_nan, "cpu")
    yield "chosen rows of an idle slot", partial(sparse_kernels.check_idle, "cpu")
    yield "kv_write", partial(kernels.check_kv_write, 3, "cpu")
    yield "greedy acceptance", partial(kernels.check_greedy, 3, 4500, 3, "cpu")
    mixed = kernels.random_mixed(2, 70, 2)
    yield "mixed acceptance", partial(kernels.check_mixed, mixed, "cpu")
    larger = kernels.random_mixed(4, 5000, 3, slots=3)
    yield "mixed acceptance of many tokens", partial(kernels.check_mixed, larger, "cpu")
    yield "rows of NaN", partial(kernels.check_rows_of_nan, 4500, "cpu")
    yield "routes of NaN", partial(kernels.check_routes_of_nan, "cpu")
    yield "laws", partial(kernels.check_shaped_probs, 5, 700, 2, "cpu")
    for dtype in (wide, narrow):
        kind = str(dtype).removeprefix("torch.")
        experts = Experts(17, 12, 4, 2, 3, 70, 66, 0.5, dtype, 11)
        yield f"experts {kind}", partial(kernels.check_moe, experts, "cpu")
        for forms in (("fp8", "nvfp4"), ("nvfp4", "fp8"), ("nvfp4", "plain")):
            name = f"experts {kind} in {forms[0]} and {forms[1]}"
            yield name, partial(kernels.check_scaled_moe, 1, forms, dtype, "cpu", 17)
        for form, columns in itertools.product(("fp8", "nvfp4"), (128, 70)):  # with words, without
            product = Product(form, 17, 512, columns, columns == 70, dtype, 5)
            name = f"product {kind} in {form}" + (" of 70 columns" if columns == 70 else "")
            yield name, partial(kernels.check_product, product, "cpu")
        layer = Latents(2, 4, 3, 16, 20, 130, 70, 24, True, dtype, 9)
        yield f"latents {kind}", partial(step_kernels.check_latents, layer, "cpu")
        halves = Latents(1, 1, 3, 70, 2, 16, 4, None, False, dtype, 10)
        yield f"latents {kind} in halves", partial(step_kernels.check_latents, halves, "cpu")
    edges = Product("nvfp4", 17, 144, 300, True, narrow, 5)  # tiles are 256 columns wide
    yield "product bfloat16 in nvfp4 with edges", partial(kernels.check_product, edges, "cpu")
    for form in ("fp8", "nvfp4"):
        product = Product(form, 3, 7168, 2112, False, narrow, 5)
        yield f"product bfloat16 in {form} R1", partial(kernels.check_product, product, "cpu")
    layer = Latents(1, 4, 16, 128, 64, 512, 128, 1536, True, narrow, 9)
    yield "latents bfloat16 R1", partial(step_kernels.check_latents, layer, "cpu")
    yield "a wide head", partial(kernels.check_wide_product, 0, "cpu")
    for seed in (0, 1, 5):
        yield f"places {seed}", partial(step_kernels.check_places, seed, "cpu")
    yield "shared routes", partial(step_kernels.check_shared_routes, 1, "cpu")
    yield "a whole step", partial(gpu_steps.check_fused_step, 3)
    yield "gated product", partial(step_kernels.check_gated, 2, 5, 70, 40, "cpu")


def plant(pattern: str, other: str, places: list[int], text: str) -> str:
    """Replace the pattern everywhere, and note in how many places."""
    planted, count = re.subn(pattern, other, text)
    places.append(count)
    return planted


def main(form: str, *wanted: str) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    from mtpbuild.plugins.launch import AOT_SHARED, Launch
    from tests.support.kernel_resources import SHARED
    from tests.support.ptx_machine import run_launch, run_plugin

    plugin = form == "plugin"
    architecture, shared = (80, AOT_SHARED) if plugin else (int(form), SHARED[int(form)])
    edit: Callable[[str], str] | None = None

    def run(launch: Launch) -> Any:
        if not any(isinstance(output, FakeTensor) for output in launch.outputs):  # not a trace
            (run_plugin if plugin else run_launch)(launch, architecture, edit)
        return launch.outputs

    torch.set_num_threads(1)
    Launch.run = run  # type: ignore[assignment, method-assign]
    known = dict(checks(shared))
    for name in wanted or known:
        edit, check, places = None, name, list[int]()
        if name in MISTAKES:
            check, pattern, other = MISTAKES[name]
            edit = partial(plant, pattern, other, places)
        begin, said = time.perf_counter(), "passed"
        try:
            known[check]()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        if edit is not None and not any(places):
            said = "the PTX has no place for the mistake"
        seconds = round(time.perf_counter() - begin, 2)
        print(json.dumps({"check": name, "said": said, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(*sys.argv[1:])
