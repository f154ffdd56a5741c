"""The number formats by name, and how a stored weight shows which one it is in."""

from collections.abc import Mapping

from mtpbuild.builder.quantize.format import Format, Shape
from mtpbuild.builder.quantize.fp8 import Fp8
from mtpbuild.builder.quantize.integers import Integers
from mtpbuild.builder.quantize.nvfp4 import Nvfp4
from mtpbuild.plugins.matmul_nbits.op import BLOCK

FP8, NVFP4, INT8, INT4 = Fp8(), Nvfp4(), Integers(8), Integers(4)
FORMATS: dict[str, Format] = {f.name: f for f in (FP8, NVFP4, INT8, INT4)}
DTYPES = ("BF16", "F16", "F32")  # of weights that are not quantised
SUPPORTED = f"{', '.join(DTYPES)}, FP8 with its weight_scale_inv, NVFP4 or int with weight_scale"


def stored_format(
    name: str, dtypes: Mapping[str, str], shapes: Mapping[str, Shape]
) -> Format | None:
    """The format of the weight `name`, told by its scale as exclude lists are not reliable.

    None: not quantised, or not in a way that is known.
    """
    kind, scale = dtypes[name], dtypes.get(f"{name}_scale")
    if kind == "F8_E4M3" and f"{name}_scale_inv" in dtypes:
        return FP8
    if kind != "U8" or scale is None:
        return None
    if scale == "F8_E4M3":
        return NVFP4
    return INT4 if shapes[name][-1] == BLOCK // 2 else INT8
