"""The AOT plugin contract of every kernel's PTX, and the graph that AOTInductor is given.

Compiling needs no GPU, but a process in which Triton's interpreter is off.
"""

import json
import os
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild.plugins.launch import AOT_SHARED
from mtpbuild.plugins.matmul_scaled.triton import product_launch
from mtpbuild.plugins.ptx import compile_kernel, compile_launch, signature_of
from tests.support.compiling import run
from tests.support.kernel_launches import ARCHITECTURES, SHAPES, launches

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
pytestmark = pytest.mark.xdist_group("ptx")  # one worker has the cache of compiled kernels

KERNELS = "best_of_block best_rows down draw_of_row gate_and_up kv_copy law_of_row mla_combine "
KERNELS += "mla_partial rest_of_block route scaled_product score_rows shape_block share_of_block "
KERNELS += "try_thresholds verdict_of_mixed_slot verdict_of_slot"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


def compiled(shape: str, architecture: int, cache: Path) -> list[dict[str, Any]]:
    arguments = ("--shape", shape, "--architectures", str(architecture), "--json")
    lines = run("-m", "tests.support.kernel_launches", *arguments, cache=cache).splitlines()
    return [json.loads(line) for line in lines]


def check(
    kernels: list[dict[str, Any]], architecture: int, folder: Path, later: tuple[int, ...] = ()
) -> None:
    """later: architectures on which PTX of sm_80 is assembled too."""
    assert " ".join(sorted({kernel["name"] for kernel in kernels})) == KERNELS
    for kernel in kernels:
        inputs, sizes, outputs = kernel["arguments"]
        pointer, integer = ".u64", ".u32"
        assert kernel["parameters"] == [pointer] * inputs + [integer] * sizes + [pointer] * outputs
        assert kernel["threads"] % 32 == 0
        assert kernel["shared"] <= AOT_SHARED
        assert kernel["text"].count(".visible .entry") == 1
        assert kernel["text"].count("// .globl") == 1  # nothing else can be launched
    target = "sm_80" if architecture == 80 else f"sm_{architecture}a"
    assert {kernel["target"] for kernel in kernels} == {target}
    for each in (target, *(f"sm_{number}" for number in later)):
        assemble(kernels, each, folder)


def assemble(kernels: list[dict[str, Any]], target: str, folder: Path) -> None:
    """Check that the text without Triton's own parameters is PTX that the driver would take."""
    from triton import knobs

    blackwell = int("".join(filter(str.isdigit, target))) >= 100
    tool = knobs.nvidia.ptxas_blackwell if blackwell else knobs.nvidia.ptxas
    files = []
    for i, kernel in enumerate(kernels):
        files.append(folder / f"{i}.ptx")
        files[-1].write_text(kernel["text"], encoding="utf-8")
    for file in files:
        command = [tool.path, f"--gpu-name={target}", "-o", os.devnull, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{file}: {done.stderr}"


@pytest.mark.full
def test_the_contract(cache: Path, tmp_path: Path) -> None:
    check(compiled("small", 80, cache), 80, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shape", ["deepseek-v3", "deepseek-v3-fp32"])
def test_the_contract_in_full(shape: str, architecture: int, tmp_path: Path) -> None:
    """sm_80's PTX runs on every later GPU."""
    later = (90, 120) if architecture == 80 else ()
    check(compiled(shape, architecture, tmp_path), architecture, tmp_path, later)


def test_the_interpreters_process_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compile_launch(launches(SHAPES["small"])[0], 80)


TRACE = """
from mtpbuild.plugins import ptx
from tests.support.kernel_launches import SHAPES, launches

ptx.AOT_SHARED = 1000
try:
    ptx.compile_launch(launches(SHAPES["small"])[1], 80)
except ValueError as error:
    print(error)

import torch
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mtpbuild.plugins import CUDA, accept_rewind, facets, kv_write, matmul_scaled, mla_attention
from mtpbuild.plugins import matmul_wide, moe, moe_route


class Pretended:  # a GPU, for what is asked while tracing
    def get_current_target(self):
        return GPUTarget("cuda", 80, 32)


driver.set_active(Pretended())


class Step(torch.nn.Module):
    def forward(
        self, q, cache, fresh, base, logits, window, active, x, scores, bias, up, down, codes, by,
        narrow, fp8, fp8_by, fp4, fp4_by, second, head,
    ):
        cache = kv_write(cache, fresh, base)
        o = mla_attention(q, cache, fresh, base, torch.zeros_like(base), 0.1, 16)
        weights, ids = moe_route(scores, bias, 2, 1, 2, True, 2.5)
        y = matmul_scaled(moe(x, weights, ids, up, down), codes, by)
        words = matmul_scaled(narrow, fp8, fp8_by), matmul_scaled(narrow, fp4, fp4_by, second)
        y = y, *words, matmul_wide(narrow, head)
        return o, cache, y, accept_rewind(logits, window, base, base, active)


B, T = 2, 3
base = torch.zeros(B, dtype=torch.int64)
example = (
    torch.randn(B, 4, T, 24), torch.randn(B, 1, 64, 24), torch.randn(B, 1, T, 24), base,
    torch.randn(B, T, 99), torch.zeros(B, T, dtype=torch.int64), torch.ones(B, dtype=torch.bool),
    torch.randn(6, 20), torch.randn(6, 8), torch.randn(8), torch.randn(8, 20, 24),
    torch.randn(8, 12, 20), torch.zeros(20, 10, dtype=torch.uint8), torch.randn(5, 10),
    torch.randn(6, 32).bfloat16(), torch.zeros(32, 12, dtype=torch.uint8), torch.randn(2, 12),
    torch.zeros(16, 12, dtype=torch.uint8), torch.zeros(2, 12, dtype=torch.uint8),
    torch.randn(1, 12), torch.randn(32, 12).bfloat16(),
)
exported = torch.export.export(Step(), example).run_decompositions(facets(CUDA))
module = exported.module()
graph = make_fx(dispatch_functionalize(lambda *inputs: module(*inputs)), tracing_mode="fake")
for node in graph(*example).graph.nodes:
    if "mtpbuild" in str(node.target):
        print("left", node.target)
    if str(node.target) == "triton_kernel_wrapper_functional":
        print(*node.kwargs["tensors_to_clone"])
"""


@pytest.mark.full
def test_too_much_shared_memory_is_refused_and_export_sees_the_kernels(cache: Path) -> None:
    """AOTInductor is given launches, not opaque ops; each writes its outputs alone.

    One process shows both: most of its time goes into starting it.
    """
    refused, *written = run("-W", "ignore", "-c", TRACE, cache=cache).splitlines()
    assert refused.startswith("mla_partial: ")
    assert refused.endswith(" bytes of shared memory > 1000")
    assert sorted(written) == sorted(
        [
            "cache",  # kv_copy
            "out lse",  # mla_partial
            "out",  # mla_combine
            "weights ids",  # route
            "sums",  # gate_and_up
            "inner parts",  # down
            *["parts"] * 4,  # scaled_product
            "best",  # best_of_block
            "tokens num_tokens new_lengths logprobs margins",  # verdict_of_slot
        ]
    )


def test_launches_are_checked_against_their_kernel() -> None:
    from mtpbuild.plugins.ptx import signature_of

    launch = launches(SHAPES["small"])[0]
    signature, constants = signature_of(launch)
    assert list(signature.values()) == ["*fp32", "*i64", "i32", "i32", "i32", "*fp32", "constexpr"]
    assert constants == {"BLOCK": 1024}
    with pytest.raises(AssertionError):
        signature_of(replace(launch, sizes=(1, 2)))
    with pytest.raises(KeyError):
        signature_of(replace(launch, outputs=(torch.empty(1, dtype=torch.float64),)))


def test_what_is_known_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and caches lie at multiples of 16; TensorRT promises it of no other tensor."""
    import triton

    attributes = dict[str, set[str]]()

    def note(source: Any, **how: Any) -> None:
        names = list(source.signature)
        attributes[source.name] = {names[i] for (i,) in source.attrs}
        raise KeyError

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton, "compile", note)
    launch = product_launch(torch.empty(4, 64), torch.empty(64, 32))
    signature, constants = signature_of(launch)
    plain = partial(compile_kernel, launch, 80, signature, constants)
    for compiling, names in (
        (partial(compile_launch, launch, 80), {"values"}),
        (plain, {"x", "values", "parts"}),
    ):
        with pytest.raises(KeyError):
            compiling()
        assert attributes["scaled_product"] == names
