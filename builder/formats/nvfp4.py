"""ModelOpt's NVFP4."""

from collections.abc import Iterable, Mapping

from mtpbuild.builder.formats.format import Entry, Format, FormatModule, Settings, Shape
from mtpbuild.builder.formats.fp8 import LARGEST
from mtpbuild.builder.lazy_torch import Tensor, torch

GROUP = 16
LEAST = 2.0**-9  # smallest positive e4m3 value
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 codes 0..7; bit 3 is the sign


class Nvfp4(Format):
    """ModelOpt's NVFP4: e2m1 values, an e4m3 scale per 16 columns, an fp32 scale per weight.

    W = value * weight_scale * weight_scale_2; a byte has two values, the even column in its low
    nibble.
    """

    name, bits, block = "nvfp4", 4, GROUP
    suffixes: tuple[str, ...] = ("", "_scale", "_scale_2")
    needs_amax = True

    def fits(self, shape: Shape) -> bool:
        return shape[1] % GROUP == 0

    def parts(self, shape: Shape) -> dict[str, Entry]:
        rows, columns = shape
        return {
            "": Entry("U8", (rows, columns // 2)),
            "_scale": Entry("F8_E4M3", (rows, columns // GROUP)),
            "_scale_2": Entry("F32", ()),
        }

    def engine_entries(self, shape: Shape, group: int, joined: int | None) -> Iterable[Entry]:
        parts = NVFP4.parts(shape)
        second = self.shape_second_scales((shape[1], shape[0]), joined)
        return parts[""], parts["_scale"], Entry("F32", second)

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        values = unpack(parts[""]).unflatten(1, (-1, GROUP))
        scaled = values * parts["_scale"].float()[..., None]  # exact: 2 times 4 bits
        return (scaled * parts["_scale_2"]).flatten(1)

    def encode(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        assert amax is not None
        second = torch.where(amax > 0, amax / (MAGNITUDES[-1] * LARGEST), 1.0)
        groups = weight.unflatten(1, (-1, GROUP))
        largest = groups.abs().amax(-1)
        scales = (largest / (MAGNITUDES[-1] * second)).clamp(LEAST, LARGEST)
        scales = torch.where(largest > 0, scales, 1.0).to(torch.float8_e4m3fn)
        values = (groups / (scales.float() * second)[..., None]).flatten(1)
        return {"": pack(values), "_scale": scales, "_scale_2": second}

    def rows(self, suffix: str, part: Tensor, shape: Shape, group: int) -> Tensor:
        """Return values and scales as bytes, and the second scale once for each scale."""
        if suffix == "_scale_2":
            return part.expand(shape[0], shape[1] // GROUP)
        return part.view(torch.uint8)

    def finish(self, suffix: str, part: Tensor, joined: int | None) -> Tensor:
        """Keep one second scale per group of inputs if inputs were joined, else per output."""
        if suffix != "_scale_2":
            return part
        return part[..., :1] if joined == 1 else part[..., :1, :]

    def shape_second_scales(self, shape: Shape, joined: int | None) -> tuple[int, int]:
        return (shape[-2] // GROUP, 1) if joined == 1 else (1, shape[-1])


class CompressedTensorsNvfp4(Nvfp4):
    """compressed-tensors' NVFP4, whose second scale divides: it is the reciprocal of ModelOpt's.

    W = value * (weight_scale / weight_global_scale), rounded as that package does. Engines hold
    the same values and scales, and the reciprocal in fp32: the last bit of a weight may differ.
    """

    suffixes = ("", "_scale", "_global_scale")

    @property
    def engine_format(self) -> Nvfp4:
        return NVFP4

    def to_engine_format(self, name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        second = 1 / parts["_global_scale"].reshape(())
        return {"": parts[""], "_scale": parts["_scale"], "_scale_2": second}

    def fault(self, parts: Mapping[str, Tensor]) -> str | None:
        return None if parts["_global_scale"].all() else "is divided by a global scale of 0"

    def parts(self, shape: Shape) -> dict[str, Entry]:
        usual = super().parts(shape)
        return {"": usual[""], "_scale": usual["_scale"], "_global_scale": Entry("F32", (1,))}

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        scales = parts["_scale"].float() / parts["_global_scale"]
        return (unpack(parts[""]).unflatten(1, (-1, GROUP)) * scales[..., None]).flatten(1)


def unpack(packed: Tensor) -> Tensor:
    """Decode uint8 codes [N, K/2] to fp32 values [N, K]."""
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1)
    return values[codes.int()].flatten(1)


def pack(values: Tensor) -> Tensor:
    """Round fp32 values [N, K] to the nearest codes, ties to even codes: uint8 [N, K/2]."""
    steps = torch.tensor(MAGNITUDES)
    middles = (steps[1:] + steps[:-1]) / 2
    size = values.abs()
    codes = torch.bucketize(size, middles)  # a tie goes to the lower code, even or odd
    codes += torch.isin(size, middles[1::2])
    codes += 8 * values.signbit()
    pairs = codes.to(torch.uint8).unflatten(1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


NVFP4 = Nvfp4()
WITH_DIVISOR = CompressedTensorsNvfp4()


def find_format(name: str, entries: Mapping[str, Entry], settings: Settings) -> Format | None:
    scale = entries.get(f"{name}_scale")
    if entries[name].dtype != "U8" or scale is None or scale.dtype != "F8_E4M3":
        return None
    return WITH_DIVISOR if f"{name}_global_scale" in entries else NVFP4


MODULE = FormatModule(find=find_format, formats=(NVFP4,))
