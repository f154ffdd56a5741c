"""Codes of fp8 (e4m3) and nvfp4 (e2m1) as numbers, in Triton: exactly, subnormal codes included.

For bf16, codes are taken as words of 32 bits with four columns each, and expanded two at a time by
inline assembly; each of the four columns is a tensor of its own. ASSEMBLY says which instructions
it may have: those of sm_80 and all later GPUs move a code's bits to where bf16 has its own, those
of sm_100 and later convert. 0 is for Triton's interpreter, which has no assembly: the same numbers
are made by Triton's own operations.
"""

import torch
import triton
import triton.language as tl
from triton import knobs

CONVERTING_PTXAS = 13, 2  # CUDA's, the first whose PTX (9.2) converts codes to bf16


def _moved(selector: int, of: str, left: int, mask: int, *factors: str) -> str:
    """Move the bits of two bytes of `of` to where bf16 has its own; multiply them by registers.

    `prmt` selects the bytes, and fills the bits above each with its sign. The bits are
    2^-120 (e4m3) or 2^-126 (e2m1) of the value; a subnormal code is a subnormal number.
    """
    moved = f"prmt.b32 t, {of}, {selector:#x}; shl.b32 t, t, {left}; and.b32 t, t, {mask:#x};"
    return moved + "".join(f" fma.rn.bf16x2 t, t, {by}, none;" for by in factors)


def _moved_e4m3(selector: int, of: str, *factors: str) -> str:
    return _moved(selector, of, 4, 0x87F087F0, *factors)


CONSTANTS = {"none": 0x80008000, "size": 0x7B807B80, "large": 0x7B007B00}  # -0, 2^120, 2^119


def _text(*lines: str) -> tl.constexpr:
    """Write assembly with its registers; of CONSTANTS it has those that it uses."""
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
# Byte j of the word $4 as bf16, in both halves of a register: MOVED times 2^119, CONVERTED times
# 2^-7, as what follows needs them.
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
# Both nibbles of byte j of the word $4, times the register $(5 + j): 2^-7 of the products.
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
# Four e4m3 of a cache in one register, NaN among them: from sm_89 on by fp16 and fp32.
WIDENED_CACHE = tl.constexpr(
    "{ .reg .b16 a, b, c, d; .reg .b32 low, high; .reg .f32 p, q, r, s;"
    " mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 low, a; cvt.rn.f16x2.e4m3x2 high, b;"
    " mov.b32 {a, b}, low; mov.b32 {c, d}, high;"
    " cvt.f32.f16 p, a; cvt.f32.f16 q, b; cvt.f32.f16 r, c; cvt.f32.f16 s, d;"
    " cvt.rn.bf16x2.f32 $0, q, p; cvt.rn.bf16x2.f32 $1, s, r; }"
)
CONVERTED_CACHE = _text(
    "mov.b32 {a, b}, $2; cvt.rn.bf16x2.e4m3x2 $0, a; cvt.rn.bf16x2.e4m3x2 $1, b;"
)
SMALLER = tl.constexpr(128.0)  # 2^7, for the sums of products with `e2m1_of_words`


def assembly_for(architecture: int, ptxas: str | None = None) -> int:
    """Choose ASSEMBLY for a GPU, such as 90 for sm_90, and a version of CUDA's assembler.

    ptxas: "13.2"; Triton's own if it is not given.
    """
    if architecture < 100:
        return 80
    if ptxas is None:
        tool = getattr(knobs.nvidia, "ptxas_blackwell", None)
        ptxas = "0" if tool is None else tool.version
    return 100 if tuple(map(int, ptxas.split("."))) >= CONVERTING_PTXAS else 80


def assembly_on(device: torch.device) -> int:
    """Choose ASSEMBLY for tensors on that device; if it is no GPU, what every GPU can run."""
    if knobs.runtime.interpret:
        return 0
    if device.type != "cuda" or not torch.cuda.is_available():
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return assembly_for(10 * major + minor)


@triton.jit
def float_of(codes, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Make fp32 of the lowest bits of integers, which are e4m3 or e2m1 codes."""
    bits: tl.constexpr = EXPONENT + MANTISSA
    bias: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    codes = codes.to(tl.int32)
    size = (codes << (23 - MANTISSA)) & (((1 << bits) - 1) << (23 - MANTISSA))
    sign = (codes << (31 - bits)) & -2147483648
    # A subnormal code makes a subnormal number here: the product is exact for both.
    return (size | sign).to(tl.float32, bitcast=True) * 2.0 ** (127 - bias)


@triton.jit
def e4m3_of_words(words, ASSEMBLY: tl.constexpr):
    """Make bf16 of e4m3 codes, four in each word: as many tensors, lowest byte first."""
    if ASSEMBLY:
        a, b, c, d = tl.inline_asm_elementwise(
            CONVERTED_E4M3 if ASSEMBLY == 100 else MOVED_E4M3,
            "=r,=r,=r,=r,r,r",
            [words],
            [tl.bfloat16] * 4,
            is_pure=True,
            pack=2,
        )
    else:
        a = float_of(words, 4, 3).to(tl.bfloat16)
        b = float_of(words >> 8, 4, 3).to(tl.bfloat16)
        c = float_of(words >> 16, 4, 3).to(tl.bfloat16)
        d = float_of(words >> 24, 4, 3).to(tl.bfloat16)
    return a, b, c, d


@triton.jit
def scales_of_words(words, ASSEMBLY: tl.constexpr):
    """Make of e4m3 scales, four in each word, what `e2m1_of_words` takes: bf16, twice in a word."""
    if ASSEMBLY:
        a, b, c, d = tl.inline_asm_elementwise(
            CONVERTED_SCALES if ASSEMBLY == 100 else MOVED_SCALES,
            "=r,=r,=r,=r,r",
            [words],
            [tl.int32] * 4,
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = e4m3_of_words(words, 0)
        a, b, c, d = _joined(a, a), _joined(b, b), _joined(c, c), _joined(d, d)
    return a, b, c, d


@triton.jit
def e2m1_of_words(words, a, b, c, d, ASSEMBLY: tl.constexpr):
    """Make 1 / SMALLER of values times scales, of words of four bytes and their scales.

    Returns four words, lowest byte first: low and high nibble as bf16, which `halves` takes apart.
    A product has 2 + 4 bits, and its exponent is within bf16's.
    """
    if ASSEMBLY:
        a, b, c, d = tl.inline_asm_elementwise(
            CONVERTED_E2M1 if ASSEMBLY == 100 else MOVED_E2M1,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, a, b, c, d],
            [tl.int32] * 4,
            is_pure=True,
            pack=1,
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
    """Take words apart into two bf16, low and high."""
    low = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def bf16_of_e4m3(tile, ASSEMBLY: tl.constexpr):
    """Make bf16 of e4m3 numbers, once for all that read them: as if the assembly had side effects.

    Triton would rather convert a tile apart for each product, from single bytes of shared memory.
    """
    if ASSEMBLY:
        codes = tile.to(tl.uint8, bitcast=True)
        tile = tl.inline_asm_elementwise(
            CONVERTED_CACHE if ASSEMBLY == 100 else WIDENED_CACHE,
            "=r,=r,r",
            [codes],
            tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    return tile.to(tl.bfloat16)
