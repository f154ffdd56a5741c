"""The controls of a step's slots as tensors; `CONTROLS` is their only list.

In Python they go by name. An op's schema has no mappings: there the `CORE_CONTROLS` are one list of
tensors in the table's order, which only the two functions here make and read.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mtpbuild.runtime.contract.controls import CORE_CONTROLS, Control

Asked = Mapping[str, Tensor]  # a control's name -> [B, *its shape]


def in_order(asked: Asked) -> list[Tensor]:
    """The list that an op takes. Raises ValueError if a control is missing, unknown or wrong."""
    if unknown := asked.keys() ^ {control.name for control in CORE_CONTROLS}:
        raise ValueError(f"not the table's controls: {', '.join(sorted(unknown))}")
    tensors = [asked[control.name] for control in CORE_CONTROLS]
    named(tensors)
    return tensors


def named(tensors: Sequence[Tensor], table: Sequence[Control] = CORE_CONTROLS) -> dict[str, Tensor]:
    """The mapping behind such a list. Raises ValueError if number, dtypes or ranks are wrong.

    table: the controls that the tensors stand for, in order; by default an op's.
    """
    asked = {}
    for control, tensor in zip(table, tensors, strict=True):
        kinds = {getattr(torch, control.dtype)}
        if control.dtype == "bool":
            kinds.add(torch.int32)  # how TensorRT gives a kernel its flags
        if tensor.dtype not in kinds or tensor.ndim != 1 + len(control.shape):
            raise ValueError(f"{control.name} can't be {tensor.dtype} {list(tensor.shape)}")
        asked[control.name] = tensor
    return asked
