"""The controls of a step's slots as tensors: a mapping by name, or the list that ops take.

An op's schema has no mappings, so an op gets the `CORE_CONTROLS` as a list of tensors in the
table's order. Only the two functions here convert between mapping and list.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mtpbuild.runtime.contract.controls import CORE_CONTROLS, Control

Controls = Mapping[str, Tensor]  # a control's name -> [B, *its shape]


def list_controls(controls: Controls) -> list[Tensor]:
    """Return the list that ops take; raises ValueError if a control is missing or wrong."""
    if unknown := controls.keys() ^ {control.name for control in CORE_CONTROLS}:
        raise ValueError(f"not the table's controls: {', '.join(sorted(unknown))}")
    tensors = [controls[control.name] for control in CORE_CONTROLS]
    name_controls(tensors)
    return tensors


def name_controls(
    tensors: Sequence[Tensor], table: Sequence[Control] = CORE_CONTROLS
) -> dict[str, Tensor]:
    """Return tensors by their controls' names; raises ValueError for a wrong number, dtype or rank.

    table: the controls in the order of the tensors.
    """
    controls = {}
    for control, tensor in zip(table, tensors, strict=True):
        kinds = {getattr(torch, control.dtype)}
        if control.dtype == "bool":
            kinds.add(torch.int32)  # TensorRT passes flags to kernels as int32
        if tensor.dtype not in kinds or tensor.ndim != 1 + len(control.shape):
            raise ValueError(f"{control.name} can't be {tensor.dtype} {list(tensor.shape)}")
        controls[control.name] = tensor
    return controls
