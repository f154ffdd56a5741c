"""Exact conversion of fp8 (e4m3) and nvfp4 (e2m1) codes to floats in Triton, with subnormals.

For bf16, inline assembly reads 32-bit words of four columns and converts two codes at a time; each
column becomes a tensor of its own. ASSEMBLY selects the instructions. 80: a code's bits are moved
to their places in a bf16, on sm_80 and every later GPU. 100: the conversions of sm_100 and later.
0: Triton's own operations, with the same results, as Triton's interpreter has no assembly.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton import knobs

PTXAS = "TRITON_PTXAS_BLACKWELL_PATH"  # Triton's setting
CONVERTING_PTXAS = 13, 2  # the first CUDA whose PTX (9.2) converts codes to bf16


def _moved(selector: int, of: str, left: int, mask: int, *factors: str) -> str:
    """Write assembly that moves two bytes of `of` into two bf16, then multiplies by registers.

    `prmt` selects the bytes and fills the bits above each with its sign. The moved bits are the
    value times 2^-120 (e4m3) or 2^-126 (e2m1); a subnormal code becomes a subnormal number.
    """
    moved = f"prmt.b32 t, {of}, {selector:#x}; shl.b32 t, t, {left}; and.b32 t, t, {mask:#x};"
    return moved + "".join(f" fma.rn.bf16x2 t, t, {by}, none;" for by in factors)


def _moved_e4m3(selector: int, of: str, *factors: str) -> str:
    return _moved(selector, of, 4, 0x87F087F0, *factors)


CONSTANTS = {"none": 0x80008000, "size": 0x7B807B80, "large": 0x7B007B00}  # -0, 2^120, 2^119


def _text(*lines: str) -> tl.constexpr:
    """Return assembly that declares its registers and sets those that are named in CONSTANTS."""
    body = " ".join(lines)
    used = {name: value for name, value in CONSTANTS.items() if name in body}
    registers = ", ".join(("t", "u", *used))
    moves = "".join(f" mov.b32 {name}, {value:#x};" for name, value in used.items())
    halves = " .reg .b16 a, b, by; .reg .b8 b0, b1, b2, b3;"
    return tl.constexpr(f"{{ .reg .b32 {registers};{halves}{moves} {body} }}")


# Byte j of the words $4 and $5 as bf16.
MOVED_E4M3 = _text(
    *(f"{_moved_e4m3(0xC480 + 0x1111 * j, '$4, $5', 'size')} mov.b32 ${j}, t;" for j in range(4))
)
CONVERTED_E4M3 = _text(
    *(
        f"prmt.b32 t, $4, $5, {0x40 + 0x11 * j:#x}; mov.b32 {{a, b}}, t;"
        f" cvt.rn.bf16x2.e4m3x2 ${j}, a;"
        for j in range(4)
    )
)
# Byte j of the word $4 as bf16, in both halves of a register, times the factor that the product of
# e2m1 codes needs: 2^119 for MOVED_E2M1, 2^-7 for CONVERTED_E2M1.
MOVED_SCALES = _text(
    *(
        f"{_moved_e4m3(0x9180 + 0x2222 * i, '$4, $4', 'size', 'large')}"
        f" prmt.b32 ${2 * i}, t, t, 0x1010; prmt.b32 ${2 * i + 1}, t, t, 0x3232;"
        for i in range(2)
    )
)
CONVERTED_SCALES = _text(
    "mov.b32 {a, b}, $4; mov.b16 by, 0x7878;",
    *(
        f"cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2 t, {half}, by;"
        f" prmt.b32 ${2 * i}, t, t, 0x1010; prmt.b32 ${2 * i + 1}, t, t, 0x3232;"
        for i, half in enumerate("ab")
    ),
)
# Both nibbles of byte j of the word $4, times the register $(5 + j): 2^-7 times the true product.
MOVED_E2M1 = _text(
    "shl.b32 u, $4, 4;",
    *(
        f"{_moved(0xC480 + 0x1111 * j, 'u, $4', 2, 0x81C081C0, f'${5 + j}')} mov.b32 ${j}, t;"
        for j in range(4)
    ),
)
CONVERTED_E2M1 = _text(
    "mov.b32 {b0, b1, b2, b3}, $4;",
    *(f"cvt.rn.bf16x2.e2m1x2 t, b{j}; fma.rn.bf16x2 ${j}, t, ${5 + j}, none;" for j in range(4)),
)
SMALLER = tl.constexpr(128.0)  # 2^7: restores sums of products with results of `e2m1_of_words`


def assembly_for(architecture: int, ptxas: str | None = None) -> int:
    """Return the ASSEMBLY for a GPU architecture, such as 90 for sm_90.

    ptxas: the version of CUDA's assembler, such as "13.2"; by default that of Triton's assembler.
    """
    if architecture < 100:
        return 80
    if ptxas is None:
        use_assembler(wheels_assembler())
        tool = getattr(knobs.nvidia, "ptxas_blackwell", None)
        ptxas = "0" if tool is None else tool.version
    return 100 if tuple(map(int, ptxas.split("."))) >= CONVERTING_PTXAS else 80


def wheels_assembler() -> Path | None:
    """Return the path of `ptxas` in NVIDIA's wheel nvidia-cuda-nvcc, if it is installed."""
    nvidia = find_spec("nvidia")
    folders = (nvidia and nvidia.submodule_search_locations) or ()
    assemblers = (path for folder in folders for path in Path(folder).glob("cu*/bin/ptxas"))
    return next(assemblers, None)


def use_assembler(path: Path | None) -> None:
    """Set Triton's assembler for sm_100 and later, unless its own can convert codes.

    Triton 3.6 to 3.8 contain one that can't. A user's setting is kept.
    """
    tool = getattr(knobs.nvidia, "ptxas_blackwell", None)
    if path is None or tool is None or PTXAS in os.environ:
        return
    if tuple(map(int, tool.version.split("."))) < CONVERTING_PTXAS:
        os.environ[PTXAS] = str(path)


def assembly_on(device: torch.device) -> int:
    """Return the ASSEMBLY for tensors on a device; for a CPU, the one that runs on every GPU."""
    if knobs.runtime.interpret:
        return 0
    if device.type != "cuda" or not torch.cuda.is_available():
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return assembly_for(10 * major + minor)


@triton.jit
def float_of(codes, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Convert integers with e4m3 or e2m1 codes in their lowest bits to fp32."""
    bits: tl.constexpr = EXPONENT + MANTISSA
    bias: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    codes = codes.to(tl.int32)
    size = (codes << (23 - MANTISSA)) & (((1 << bits) - 1) << (23 - MANTISSA))
    sign = (codes << (31 - bits)) & -2147483648
    # A subnormal code gives a subnormal number here; the product below is exact all the same.
    return (size | sign).to(tl.float32, bitcast=True) * 2.0 ** (127 - bias)


@triton.jit
def e4m3_of_words(words, ASSEMBLY: tl.constexpr):
    """Convert words of four e4m3 codes to four bf16 tensors, from the lowest byte up."""
    if ASSEMBLY:
        text: tl.constexpr = CONVERTED_E4M3 if ASSEMBLY == 100 else MOVED_E4M3
        a, b, c, d = tl.inline_asm_elementwise(
            text, "=r,=r,=r,=r,r,r", [words], [tl.bfloat16] * 4, is_pure=True, pack=2
        )
    else:
        a = float_of(words, 4, 3).to(tl.bfloat16)
        b = float_of(words >> 8, 4, 3).to(tl.bfloat16)
        c = float_of(words >> 16, 4, 3).to(tl.bfloat16)
        d = float_of(words >> 24, 4, 3).to(tl.bfloat16)
    return a, b, c, d


@triton.jit
def scales_of_words(words, ASSEMBLY: tl.constexpr):
    """Convert words of four e4m3 scales to a to d of `e2m1_of_words`: bf16 in both halves."""
    if ASSEMBLY:
        text: tl.constexpr = CONVERTED_SCALES if ASSEMBLY == 100 else MOVED_SCALES
        a, b, c, d = tl.inline_asm_elementwise(
            text, "=r,=r,=r,=r,r", [words], [tl.int32] * 4, is_pure=True, pack=1
        )
    else:
        a, b, c, d = e4m3_of_words(words, 0)
        a, b, c, d = _joined(a, a), _joined(b, b), _joined(c, c), _joined(d, d)
    return a, b, c, d


@triton.jit
def e2m1_of_words(words, a, b, c, d, ASSEMBLY: tl.constexpr):
    """Convert words of eight e2m1 codes to code * scale / SMALLER; a to d are the bytes' scales.

    Returns four words, from the lowest byte up; each contains its byte's low and high nibble as
    bf16, for `halves`. The result is exact: a product has 2 + 4 bits, and its exponent fits bf16.
    """
    if ASSEMBLY:
        text: tl.constexpr = CONVERTED_E2M1 if ASSEMBLY == 100 else MOVED_E2M1
        a, b, c, d = tl.inline_asm_elementwise(
            text, "=r,=r,=r,=r,r,r,r,r,r", [words, a, b, c, d], [tl.int32] * 4, is_pure=True, pack=1
        )
    else:
        a, b = _nibbles(words, a), _nibbles(words >> 8, b)
        c, d = _nibbles(words >> 16, c), _nibbles(words >> 24, d)
    return a, b, c, d


@triton.jit
def _nibbles(bytes_, scale):
    low, high = float_of(bytes_, 2, 1), float_of(bytes_ >> 4, 2, 1)
    by = halves(scale)[0].to(tl.float32) / SMALLER
    return _joined((low * by).to(tl.bfloat16), (high * by).to(tl.bfloat16))


@triton.jit
def _joined(low, high):
    low, high = low.to(tl.int16, bitcast=True), high.to(tl.int16, bitcast=True)
    return (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)


@triton.jit
def halves(words):
    """Split words into two bf16 tensors, low and high."""
    low = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
