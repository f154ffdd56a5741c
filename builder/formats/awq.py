"""AutoAWQ's integers in its layout `gemm`."""

from collections.abc import Mapping
from typing import Any

from mtpbuild.builder.formats.format import Entry, Format, Shape
from mtpbuild.builder.formats.gptq import WORD, PackedWords, infer_format, unpack_words
from mtpbuild.builder.lazy_torch import Tensor

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the numbers of 8 outputs lie in a word


class Awq(PackedWords):
    """AWQ: a word holds the 4-bit numbers of 8 outputs, of one input or of one group."""

    method = "awq"

    def packed(self, shape: Shape) -> tuple[int, ...]:
        return shape[:1]

    def words(self, shape: Shape) -> Shape:
        return shape[1], shape[0] * self.bits // WORD

    def codes(self, words: Tensor) -> Tensor:
        return unpack_words(words, self.bits)[..., ORDER].flatten(1).T

    def zeros(self, words: Tensor) -> Tensor:
        return self.codes(words).short()


def find_format(
    name: str, entries: Mapping[str, Entry], settings: Mapping[str, Any]
) -> Format | None:
    if entries[name].dtype != "I32" or not is_awq(settings):
        return None
    return infer_format(Awq, name, entries, settings)


def is_awq(settings: Mapping[str, Any]) -> bool:
    method = settings.get("quant_method")
    return method == "awq" or (
        method == "auto-round" and "awq" in str(settings.get("packing_format"))
    )


def find_unread_awq(settings: Mapping[str, Any]) -> str | None:
    """Return the first setting of this method that is not read; None if all are."""
    said = (settings.get(key) for key in ("version", "format", "checkpoint_format"))
    if (layout := str(next(filter(None, said), "gemm")).lower()) != "gemm":
        return f"awq in the layout {layout}"
    bits = settings.get("bits", settings.get("w_bit", 4))
    return None if bits == 4 else f"awq with {bits} bits"


METHODS = {"awq": find_unread_awq}
READS = "AWQ in the layout gemm"
