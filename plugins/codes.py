"""Codes of fp8 (e4m3) and nvfp4 (e2m1) as numbers, in Triton: exactly, subnormal codes included.

For bf16, codes are taken as words of 32 bits, four columns each. A word's bytes become bf16 by
moving their bits, two at a time, in inline assembly that sm_80 and all later GPUs have. Each of
the four columns is a tensor of its own, so nothing moves between registers. Triton's interpreter
has no assembly: without ASSEMBLY the same numbers are made by Triton's own operations.
"""

import triton
import triton.language as tl


def _e4m3(to: str, *products: str) -> str:
    """Move a byte's bits to where bf16 has its own, then multiply by a register or several.

    The bits are then 2^-120 of the value; a subnormal code is a subnormal number. `prmt` takes byte
    j of both words, and fills the bits above with its sign.
    """
    return " ".join(
        f"prmt.b32 t, $4, $5, {0xC480 + 0x1111 * j}; shl.b32 t, t, 4; and.b32 t, t, 0x87F087F0; "
        + "".join(f"fma.rn.bf16x2 t, t, {by}, none; " for by in products)
        + f"mov.b32 {to}{j}, t;"
        for j in range(4)
    )


def _e2m1(j: int, nibble: int, first: str, second: str) -> str:
    """The same for a nibble of byte j; its bits are 2^-126 of the value."""
    return (
        f"prmt.b32 t, {first}, {second}, {0xC480 + 0x1111 * j}; shl.b32 t, t, 2;"
        f" and.b32 t, t, 0x81C081C0; fma.rn.bf16x2 ${2 * j + nibble}, t, ${10 + j}, none;"
    )


_NUMBERS = (
    "{ .reg .b32 t, u, v, size, large, none; mov.b32 none, 0x80008000;"  # -0: adds nothing
    " mov.b32 size, 0x7B807B80; mov.b32 large, 0x7B007B00; "  # 2^120 and 2^119
)
_NIBBLES = "shl.b32 u, $8, 4; shl.b32 v, $9, 4; " + " ".join(
    _e2m1(j, 0, "u", "v") + " " + _e2m1(j, 1, "$8", "$9") for j in range(4)
)
E4M3 = tl.constexpr(_NUMBERS + _e4m3("$", "size") + " }")
LARGE_E4M3 = tl.constexpr(_NUMBERS + _e4m3("$", "size", "large") + " }")  # times 2^119
E2M1 = tl.constexpr(_NUMBERS + _NIBBLES + " }")  # times scales of LARGE_E4M3: 2^-7 of the value
# Four e4m3 in one register, NaN among them; it needs sm_89.
CONVERTED = tl.constexpr(
    "{ .reg .b16 a, b, c, d; .reg .b32 low, high; .reg .f32 p, q, r, s;"
    " mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 low, a; cvt.rn.f16x2.e4m3x2 high, b;"
    " mov.b32 {a, b}, low; mov.b32 {c, d}, high;"
    " cvt.f32.f16 p, a; cvt.f32.f16 q, b; cvt.f32.f16 r, c; cvt.f32.f16 s, d;"
    " cvt.rn.bf16x2.f32 $0, q, p; cvt.rn.bf16x2.f32 $1, s, r; }"
)
SMALLER = tl.constexpr(128.0)  # 2^7, for the sums of products with E2M1


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
            E4M3, "=r,=r,=r,=r,r,r", [words], [tl.bfloat16] * 4, is_pure=True, pack=2
        )
    else:
        a = float_of(words, 4, 3).to(tl.bfloat16)
        b = float_of(words >> 8, 4, 3).to(tl.bfloat16)
        c = float_of(words >> 16, 4, 3).to(tl.bfloat16)
        d = float_of(words >> 24, 4, 3).to(tl.bfloat16)
    return a, b, c, d


@triton.jit
def scales_of_words(words, ASSEMBLY: tl.constexpr):
    """Make bf16 of e4m3 scales as `e4m3_of_words` does, as large as `e2m1_of_words` takes them."""
    if ASSEMBLY:
        a, b, c, d = tl.inline_asm_elementwise(
            LARGE_E4M3, "=r,=r,=r,=r,r,r", [words], [tl.bfloat16] * 4, is_pure=True, pack=2
        )
    else:
        a, b, c, d = e4m3_of_words(words, False)
    return a, b, c, d


@triton.jit
def e2m1_of_words(words, a, b, c, d, ASSEMBLY: tl.constexpr):
    """Make 1 / SMALLER of values times scales, of words of four bytes and their scales.

    Returns low and high nibbles of each byte, lowest byte first. A product has 2 + 4 bits, and its
    exponent is within bf16's.
    """
    if ASSEMBLY:
        a0, a1, b0, b1, c0, c1, d0, d1 = tl.inline_asm_elementwise(
            E2M1,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r",
            [words, a, b, c, d],
            [tl.bfloat16] * 8,
            is_pure=True,
            pack=2,
        )
    else:
        a0, a1 = _nibbles(words, a)
        b0, b1 = _nibbles(words >> 8, b)
        c0, c1 = _nibbles(words >> 16, c)
        d0, d1 = _nibbles(words >> 24, d)
    return a0, a1, b0, b1, c0, c1, d0, d1


@triton.jit
def _nibbles(bytes_, scale):
    by = scale.to(tl.float32) / SMALLER
    low = float_of(bytes_, 2, 1) * by
    high = float_of(bytes_ >> 4, 2, 1) * by
    return low.to(tl.bfloat16), high.to(tl.bfloat16)


@triton.jit
def bf16_of_e4m3(tile, ASSEMBLY: tl.constexpr):
    """Make bf16 of e4m3 numbers, once for all that read them: as if the assembly had side effects.

    Triton would rather convert a tile apart for each product, from single bytes of shared memory.
    """
    if ASSEMBLY:
        codes = tile.to(tl.uint8, bitcast=True)
        tile = tl.inline_asm_elementwise(
            CONVERTED, "=r,=r,r", [codes], tl.bfloat16, is_pure=False, pack=4
        )
    return tile.to(tl.bfloat16)
