"""Medusa's typical acceptance, as a package of its own would bring it: all of it is this file."""

from dataclasses import dataclass
from typing import Any

from mtpbuild.runtime.checks import check_number
from mtpbuild.runtime.contract.rules import Rule
from mtpbuild.runtime.contract.settings import Control, setting

FLOAT = Control("float32")


@dataclass(frozen=True)
class Settings:
    """A draft stands if its probability is at least min(epsilon, delta exp(-entropy))."""

    typical_epsilon: float = setting(
        0.3, check_number(0, 1), "Typical: a probability that is enough.", control=FLOAT
    )
    typical_delta: float = setting(
        0.09, check_number(0, 10), "Typical: share of exp(-entropy).", control=FLOAT
    )


def keeps(judged: Any) -> Any:
    p = judged.p
    entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)  # [B, T]
    epsilon, delta = (judged.controls[f"typical_{name}"][:, None] for name in ("epsilon", "delta"))
    return judged.p_draft >= (delta * (-entropy).exp()).minimum(epsilon)


TYPICAL = Rule("typical", keeps, Settings, kernel=keeps)
