"""DeepSeek's FP8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mtpbuild.builder.formats.format import Entry, Format, FormatModule, Settings, Shape
from mtpbuild.builder.lazy_torch import Tensor, torch

BLOCK = 128
LARGEST = 448.0  # largest e4m3 value


class Fp8(Format):
    """DeepSeek's FP8: e4m3 values, and one fp32 scale for each block of 128 x 128.

    W[n, k] = value[n, k] * weight_scale_inv[n // 128, k // 128]; the last blocks may be smaller.
    Scales in bf16 or fp16 become fp32 in engines, which changes none. compressed-tensors calls them
    weight_scale.
    """

    name, bits, block = "fp8", 8, BLOCK

    def __init__(self, scales: str = "F32", suffix: str = "_scale_inv") -> None:
        self.suffixes, self._scales = ("", suffix), scales

    @property
    def engine_format(self) -> Fp8:
        return FP8

    def to_engine_format(self, name: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"": parts[""], "_scale_inv": parts[self.suffixes[1]].float()}

    def parts(self, shape: Shape) -> dict[str, Entry]:
        scales = tuple(-(-size // BLOCK) for size in shape)
        return {"": Entry("F8_E4M3", shape), self.suffixes[1]: Entry(self._scales, scales)}

    def engine_entries(self, shape: Shape, group: int, joined: int | None) -> Iterable[Entry]:
        rows, columns = shape
        return Entry("F8_E4M3", shape), Entry("F32", (rows, columns // group))

    def decode(self, parts: Mapping[str, Tensor]) -> Tensor:
        values = parts[""].float()
        return values.mul_(spread(parts[self.suffixes[1]].float(), values.shape))

    def encode(self, weight: Tensor, amax: Tensor | None = None) -> dict[str, Tensor]:
        rows, columns = (-size % BLOCK for size in weight.shape)
        padded = torch.nn.functional.pad(weight, (0, columns, 0, rows))
        blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        largest = blocks.abs().amax(dim=(1, 3))
        scales = torch.where(largest > 0, largest / LARGEST, 1.0)
        values = (weight / spread(scales, weight.shape)).to(torch.float8_e4m3fn)
        return {"": values, "_scale_inv": scales}

    def rows(self, suffix: str, part: Tensor, shape: Shape, group: int) -> Tensor:
        """Return values as bytes, and scales repeated for each output and `group` inputs."""
        if suffix == "":
            return part.view(torch.uint8)
        return spread(part, (shape[0], shape[1] // group), BLOCK // group)


def spread(scales: Tensor, shape: Shape, times: int = BLOCK) -> Tensor:
    """Expand scales of blocks to `shape`: each is repeated for 128 rows and `times` columns."""
    rows, columns = shape
    wide = scales.repeat_interleave(times, dim=1)[:, :columns]
    return wide.repeat_interleave(BLOCK, dim=0)[:rows]


def find_unread(settings: Settings) -> str | None:
    """Return the first setting of this method that is not read; None if all are."""
    if (blocks := settings.get("weight_block_size")) == [BLOCK, BLOCK]:
        return None
    return f"fp8 with weight_block_size {blocks}" if blocks else "fp8 without blocks"


FP8 = Fp8()
NARROW = {scales: Fp8(scales) for scales in ("BF16", "F16")}


def find_format(name: str, entries: Mapping[str, Entry], settings: Settings) -> Format | None:
    scale = entries.get(f"{name}_scale_inv")
    if entries[name].dtype != "F8_E4M3" or scale is None:
        return None
    return NARROW.get(scale.dtype, FP8)


MODULE = FormatModule(
    find=find_format,
    formats=(FP8,),
    methods={"fp8": find_unread},
    reads="DeepSeek's fp8 with weight_block_size [128, 128]",
)
