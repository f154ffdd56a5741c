"""A lossless rule with a token of its own after a rejection, as a package of its own brings it.

A draft that rejection would keep with probability min(1, p / q) is kept with min(1, share p / q).
The token after a rejection is drawn from what p has beyond the drafts that were kept.
"""

from dataclasses import dataclass
from typing import Any

from mtpbuild.runtime.checks import check_number
from mtpbuild.runtime.contract.rules import Rule
from mtpbuild.runtime.contract.settings import Control, setting


@dataclass(frozen=True)
class Settings:
    thrifty_share: float = setting(
        0.5,
        check_number(0, 1),
        "Thrifty: share of the drafts that are kept.",
        control=Control("float32"),
    )


def kept_mass(judged: Any) -> Any:
    """Return the probability [B, K, V] with which each token is drafted and kept."""
    K = judged.draft_probs.shape[1]
    share = judged.controls["thrifty_share"][:, None, None]
    return judged.draft_probs.minimum(share * judged.p[:, :K])


def keeps(judged: Any) -> Any:
    import torch

    drafts = judged.drafts[:, : judged.draft_probs.shape[1], None]
    kept, q = (x.gather(-1, drafts)[..., 0] for x in (kept_mass(judged), judged.draft_probs))
    passed = judged.numbers[:, :-1] * q < kept
    return torch.cat([passed, torch.zeros_like(passed[:, :1])], 1)


def chooses(judged: Any, numbers: Any) -> Any:
    import torch

    from mtpbuild.plugins import draw

    rest = (judged.p[:, :-1] - kept_mass(judged)).clamp(min=0)
    return draw(torch.cat([rest, judged.p[:, -1:]], 1) + 1e-30, numbers)


THRIFTY = Rule("thrifty", keeps, Settings, chooses=chooses, lossless=True)
