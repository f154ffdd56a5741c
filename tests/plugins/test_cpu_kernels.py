"""The CPU's kernels, through onnxruntime: their arithmetic to the bit, and what they refuse."""

import hashlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mtpbuild.lab.verify.checks import LACKS_ISA
from mtpbuild.plugins.cpu import onnx
from mtpbuild.plugins.mla_attention.op import FLOOR
from mtpbuild.runtime.cpu_library import DOMAIN, ISAS, LAYOUT
from tests.support import cpu_kernels, exact
from tests.support.cpu_kernels import (
    HOST,
    SANITIZED,
    SOURCE,
    attended,
    compiled,
    load_backend,
)
from tests.support.isas import isas

Arrays = Mapping[str, NDArray[Any]]
F = np.float32


def run(op: str, given: Arrays, threads: int = 1, **attributes: Any) -> NDArray[np.float32]:
    [y] = cpu_kernels.run(op, given, (np.float32,), threads, **attributes)
    return y


def same_everywhere(
    monkeypatch: pytest.MonkeyPatch, op: str, given: Arrays, **attributes: Any
) -> NDArray[np.float32]:
    """Run on every instruction set and with one thread and two; all must agree to the bit."""
    results = []
    for isa in isas():
        monkeypatch.setenv("MTPBUILD_CPU_ISA", isa)
        results += [run(op, given, threads, **attributes) for threads in (1, 2)]
    monkeypatch.delenv("MTPBUILD_CPU_ISA")
    results.append(run(op, given, **attributes))
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.int32), results[0].view(np.int32))
    return results[0]


@pytest.mark.parametrize("size", [16, 192, 100, 7])
def test_norm(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(size)
    given = {"x": rng.standard_normal((5, size), np.float32)}
    given["w"] = rng.standard_normal(size, np.float32)
    got = same_everywhere(monkeypatch, "Norm", given, epsilon=1e-6)
    np.testing.assert_array_equal(got, exact.norm(given["x"], given["w"], 1e-6))
    wanted = torch.nn.functional.rms_norm(
        torch.from_numpy(given["x"]), (size,), torch.from_numpy(given["w"]), 1e-6
    )
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-5, atol=1e-6)


LATENT = {"groups": 1, "values": 0, "latent": 8, "written": 0}


def attention_operands(
    rng: np.random.Generator, B: int, H: int, T: int, C: int, S: int, fresh: int
) -> dict[str, NDArray[Any]]:
    return {
        "q": rng.standard_normal((B, H, T, C), np.float32),
        "cache": rng.standard_normal((B, 1, S, C), np.float32),
        "fresh": rng.standard_normal((B, 1, fresh, C), np.float32),
        "base": rng.integers(0, S - fresh, B),
        "first": np.zeros(B, np.int64),
    }


@pytest.mark.parametrize(
    ("B", "H", "T", "C", "latent", "S"),
    [
        (1, 8, 4, 80, 64, 200),
        (2, 3, 2, 20, 13, 100),
        (1, 16, 1, 24, 16, 1300),
        (1, 4, 9, 12, 8, 70),
    ],
)
def test_attention(
    B: int, H: int, T: int, C: int, latent: int, S: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh rows beside the cache or in it, tokens together or each alone."""
    given = attention_operands(np.random.default_rng(S), B, H, T, C, S, T)
    given["base"][0] = S - T
    attributes: dict[str, Any] = {"scale": 0.3, **LATENT, "latent": latent}
    got = same_everywhere(monkeypatch, "Attention", given, **attributes)
    np.testing.assert_array_equal(got, attended(given, 0.3, latent))

    written = {name: array.copy() for name, array in given.items()}
    for b, base in enumerate(given["base"]):
        written["cache"][b, 0, base : base + T] = given["fresh"][b, 0]
    in_cache = run("Attention", written, **attributes | {"written": 1})
    np.testing.assert_array_equal(in_cache, got)

    for t in range(T):
        alone = dict(written, q=given["q"][:, :, t : t + 1].copy(), base=given["base"] + t)
        one = run("Attention", alone, threads=2, **attributes | {"written": 1})
        np.testing.assert_array_equal(one, got[:, :, t : t + 1])


def test_attention_by_definition() -> None:
    given = attention_operands(np.random.default_rng(1), 1, 8, 3, 80, 700, 3)
    got = run("Attention", given, scale=0.1, **LATENT | {"latent": 64})
    from mtpbuild.plugins import mla_attention

    operands = [torch.from_numpy(given[name]) for name in ("q", "cache", "fresh", "base", "first")]
    wanted = mla_attention(*operands, 0.1, 64)
    np.testing.assert_allclose(got, wanted.numpy(), atol=2e-6)


@pytest.mark.parametrize(
    ("H", "G", "T", "S"), [(8, 2, 3, 90), (6, 6, 1, 40), (32, 4, 2, 600), (8, 4, 1, 2700)]
)
def test_grouped_attention(H: int, G: int, T: int, S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group's heads attend to its own keys and values."""
    D, rng = 12, np.random.default_rng(S)
    given = attention_operands(rng, 2, H, T, 2 * G * D, S, T)
    given["q"] = given["q"][..., :D].copy()
    given["base"][0] = S - T
    sizes = {"groups": G, "values": G * D, "latent": D, "written": 0}
    got = same_everywhere(monkeypatch, "Attention", given, scale=0.4, **sizes)
    per_group = H // G
    for g in range(G):  # as latent attention over the group's values, then its keys
        heads = slice(g * per_group, (g + 1) * per_group)
        own = [*range((G + g) * D, (G + g + 1) * D), *range(g * D, (g + 1) * D)]
        rows = {name: given[name][..., own].copy() for name in ("cache", "fresh")}
        queries = np.concatenate([np.zeros_like(given["q"]), given["q"]], axis=-1)[:, heads]
        wanted = attended(dict(given, q=queries, **rows), 0.4, D)
        np.testing.assert_array_equal(got[:, heads], wanted)
    from mtpbuild.plugins import grouped_attention

    operands = [torch.from_numpy(given[name]) for name in ("q", "cache", "fresh", "base", "first")]
    by_definition = grouped_attention(*operands, 0.4, G).numpy()
    np.testing.assert_allclose(got, by_definition, atol=2e-6)


def test_an_idle_slot_reads_nothing_outside() -> None:
    """Its base may be anything."""
    given = attention_operands(np.random.default_rng(2), 3, 2, 2, 16, 40, 2)
    given["base"][:] = 20, 1 << 40, -5
    given["first"][:] = 0, 1 << 40, -(1 << 40)
    for written in (0, 1):
        got = run("Attention", given, scale=1.0, **LATENT | {"written": written})
        assert np.isfinite(got).all()


@pytest.mark.parametrize("name", ["Cos", "Sin"])
def test_circle(name: str) -> None:
    """Right to the last digit but one, wherever an angle stands."""
    positions = np.arange(0, 5000, 7, dtype=np.float32)[:, None]
    x = positions * np.array([1, 0.3, 1e-3, 1e-5, 200], np.float32)
    x[0] = 0, -1.5, np.pi / 4, -np.pi / 2, np.pi
    got = run(name, {"x": x})
    wanted = (np.cos if name == "Cos" else np.sin)(x.astype(np.float64))
    np.testing.assert_allclose(got, wanted, rtol=1.3e-7, atol=1e-9)
    for i in (0, 5, 60):
        np.testing.assert_array_equal(run(name, {"x": x[i : i + 1, :3]}), got[i : i + 1, :3])


CALLS: dict[str, tuple[str, Arrays, dict[str, Any]]] = {
    "norm": ("Norm", {"x": np.zeros((2, 32), F), "w": np.zeros(32, F)}, {"epsilon": 1e-6}),
    "attention": (
        "Attention",
        attention_operands(np.random.default_rng(0), 2, 2, 1, 16, 40, 1),
        {"scale": 1.0, **LATENT},
    ),
}
SHAPES: dict[str, dict[str, list[tuple[int, ...]]]] = {
    "norm": {"w": [(31,)]},
    "attention": {
        **{"q": [(2, 2, 1, 17)], "cache": [(2, 2, 40, 16)], "fresh": [(1, 1, 1, 16)]},
        **{"base": [(1,)], "first": [(2, 1)]},
    },
}
NUMBERS: dict[str, dict[str, list[int]]] = {
    "attention": {"latent": [0, 17, -1, 1 << 62], "groups": [0, 2, -1], "values": [-1, 9, 1 << 62]},
}


@pytest.mark.parametrize("call", CALLS)
def test_damaged_operands(call: str) -> None:
    op, given, how = CALLS[call]
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (dict(given) | {name: np.zeros(shape, given[name].dtype)}, how)
        for name, shapes in SHAPES[call].items()
        for shape in shapes
    ]
    numbers = NUMBERS.get(call, {})
    wrong += [(given, how | {name: n}) for name, values in numbers.items() for n in values]
    for operands, attributes in wrong:
        with pytest.raises(Exception, match=f"mtpbuild {op}: "):
            run(op, operands, **attributes)


def test_a_missing_attribute() -> None:
    given = {"x": np.zeros((1, 32), F), "w": np.zeros((1, 32, 32), F)}
    with pytest.raises(Exception, match="attribute N is missing"):
        run("GatedProduct", given)


def test_an_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTPBUILD_CPU_ISA", "mmx")
    given = {"x": np.zeros((1, 32), F), "w": np.zeros((1, 32, 32), F)}
    with pytest.raises(Exception, match=f"MTPBUILD_CPU_ISA is mmx{LACKS_ISA}plain"):
        run("Product", given, N=32)


def test_sources_are_formatted() -> None:
    tool = Path(sys.executable).with_name("clang-format")
    if not tool.exists():
        pytest.skip("clang-format is not installed")
    files = [*SOURCE.glob("*.h"), *SOURCE.glob("*.cpp"), HOST]
    style = f"--style=file:{SOURCE / '.clang-format'}"
    command = [str(tool), style, "--dry-run", "-Werror", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:2000]


def test_constants_are_those_of_python() -> None:
    floor = re.search(r"LOG_FLOOR = (.*)f;", (SOURCE / "maths.h").read_text())
    assert floor is not None
    assert F(floor[1]) == F(math.log(FLOOR)) == exact.FLOOR
    operators = (SOURCE / "ops.cpp").read_text()
    assert f'DOMAIN[] = "{DOMAIN}"' in operators
    assert f'requested + "{LACKS_ISA}" +' in operators
    assert DOMAIN == onnx.DOMAIN


def test_engines_name_the_operators_that_they_need() -> None:
    """LAYOUT counts up with the operators, so that an older library refuses an engine in a line."""
    attribute = r"from\.\w+(?:<\w+>)?\(\"\w+\""
    operator = r"static constexpr (?:const char\*|Operand) .*?;"
    declared = re.compile(f"{operator}|{attribute}", re.DOTALL)
    files = sorted(SOURCE.glob("*_ops.*"))
    found = [" ".join(x.split()) for file in files for x in declared.findall(file.read_text())]
    digest = hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
    assert (LAYOUT, len(found), digest) == ("panels32.13", 157, "88e71a63386a9608")


def test_instruction_sets_share_no_function() -> None:
    """The linker keeps one copy of a library's inline function, maybe one for AVX-512."""
    intrinsics = ("immintrin.h", "arm_neon.h")
    for isa in ISAS:
        files, seen = [f"{isa}.cpp"], set[str]()
        while files:
            text = (SOURCE / files.pop()).read_text()
            seen |= set(re.findall(r"#include <(.*)>", text))
            files += re.findall(r'#include "(.*)"', text)
        assert seen <= {"cmath", "cstddef", "cstdint", "cstring", *intrinsics}


@pytest.mark.full
@pytest.mark.skipif(SANITIZED is not None, reason="it is about the sources")
@pytest.mark.parametrize("name", load_backend().list_files(SOURCE, "x86_64"))
def test_warnings_are_errors(name: str, tmp_path: Path) -> None:
    backend = load_backend()
    source, to = str(SOURCE / name), str(tmp_path / "o")
    command = [
        "g++",
        *backend.COMMON,
        *backend.list_files(SOURCE, "x86_64")[name],
        "-Werror",
        "-c",
        source,
        "-o",
        to,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]


@pytest.mark.full
@pytest.mark.skipif(SANITIZED is not None, reason="it is this test that runs the others")
def test_sanitizers(tmp_path: Path) -> None:
    """All of these tests, with every access and every operation of integers looked at."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    library = compiled(SOURCE, tmp_path / "sanitized.so", *flags, level="-O1")
    runtimes = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
        for name in ("libasan.so", "libubsan.so")
    ]
    preload = " ".join(each.stdout.strip() for each in runtimes)
    environment = os.environ | {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    tests = sorted(map(str, Path(__file__).parent.glob("test_cpu_*.py")))
    command = [sys.executable, "-m", "pytest", "-xsq", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(
        command,
        env=environment | {"SANITIZED_CPU_LIBRARY": str(library)},
        capture_output=True,
        text=True,
        cwd=SOURCE.parents[2],
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
