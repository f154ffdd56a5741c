"""What requests ask of a step: by name in Python, one list in an op's schema, never by position."""

import pytest
import torch
from torch import Tensor

from mtpbuild.plugins.asked import in_order, named
from mtpbuild.runtime.contract.controls import CORE_CONTROLS, UNIFORMS
from tests.support.kernels import asked_of


def asked() -> dict[str, Tensor]:
    return asked_of(3, nextn=2, uniforms=torch.rand(3, 4, 20))


def test_there_and_back() -> None:
    given = asked()
    back = named(in_order(dict(reversed(given.items()))))
    assert list(back) == [control.name for control in CORE_CONTROLS]
    assert all(back[name] is tensor for name, tensor in given.items())


def test_flags_may_be_numbers() -> None:
    """TensorRT gives a kernel no bool."""
    given = asked() | {"rejection": torch.ones(3, dtype=torch.int32)}
    assert named(in_order(given))["rejection"] is given["rejection"]


def test_what_is_missing_or_unknown_is_refused() -> None:
    given = asked()
    del given["min_p"]
    with pytest.raises(ValueError, match="min_p"):
        in_order(given)
    with pytest.raises(ValueError, match="colour"):
        in_order(asked() | {"colour": torch.zeros(3)})
    with pytest.raises(ValueError, match="argument"):
        named(in_order(asked())[:-1])


@pytest.mark.parametrize("name", ["temperature", "top_k", "rejection", "thinking_ids", UNIFORMS])
def test_another_dtype_or_rank_is_refused(name: str) -> None:
    for wrong in (asked()[name].double(), asked()[name][0]):
        with pytest.raises(ValueError, match=f"{name} can't be"):
            in_order(asked() | {name: wrong})


def test_another_order_is_refused() -> None:
    temperature, top_k, *others = in_order(asked())
    with pytest.raises(ValueError, match="temperature can't be"):
        named([top_k, temperature, *others])
