"""What requests ask of a step: by name in Python, one list in an op's schema, never by position."""

import pytest
import torch
from torch import Tensor

from mtpbuild.plugins.control_tensors import list_controls, name_controls
from mtpbuild.runtime.contract.controls import CORE_CONTROLS, UNIFORMS
from tests.support.kernels import asked_of


def asked() -> dict[str, Tensor]:
    return asked_of(3, nextn=2, uniforms=torch.rand(3, 4, 20))


def test_there_and_back() -> None:
    given = asked()
    back = name_controls(list_controls(dict(reversed(given.items()))))
    assert list(back) == [control.name for control in CORE_CONTROLS]
    assert all(back[name] is tensor for name, tensor in given.items())


def test_flags_may_be_numbers() -> None:
    """TensorRT gives a kernel no bool."""
    given = asked() | {"rejection": torch.ones(3, dtype=torch.int32)}
    assert name_controls(list_controls(given))["rejection"] is given["rejection"]


def test_what_is_missing_or_unknown_is_refused() -> None:
    given = asked()
    del given["min_p"]
    with pytest.raises(ValueError, match="min_p"):
        list_controls(given)
    with pytest.raises(ValueError, match="colour"):
        list_controls(asked() | {"colour": torch.zeros(3)})
    with pytest.raises(ValueError, match="argument"):
        name_controls(list_controls(asked())[:-1])


@pytest.mark.parametrize("name", ["temperature", "top_k", "rejection", "thinking_ids", UNIFORMS])
def test_another_dtype_or_rank_is_refused(name: str) -> None:
    for wrong in (asked()[name].double(), asked()[name][0]):
        with pytest.raises(ValueError, match=f"{name} can't be"):
            list_controls(asked() | {name: wrong})


def test_another_order_is_refused() -> None:
    temperature, top_k, *others = list_controls(asked())
    with pytest.raises(ValueError, match="temperature can't be"):
        name_controls([top_k, temperature, *others])
