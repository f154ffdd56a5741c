"""The tokens of each slot that one step verifies: they are a chain.

Only this module assumes that each token of the window follows the one before it. A tree of drafts
would need positions and a mask of its own in `rows`, and the accepted path in place of a prefix in
`newest` and in the operators that judge (`accept_rewind`, `accept_mixed`). It would also move that
path's cache rows together, where a chain's rewind only drops the rows after it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import Positions, State
from mtpbuild.plugins import take_rows


def make_positions(
    model: CausalLM, start: Tensor, tokens: int, active: Tensor, bound: int
) -> Positions:
    """Return the positions of `tokens` tokens of each active slot, from start [B] on.

    An inactive slot computes too: it reads no rows, and writes its rows at the end of the `bound`
    rows, which no occupied slot has reached. active [B] bool.
    """
    return model.rope(start, tokens, active, bound - tokens)


@dataclass(frozen=True)
class Window:
    """The newest token of each slot and the nextn drafts after it; T = nextn + 1.

    In an adaptive engine the state has places for more drafts than a program of smaller nextn
    judges. The values there are passed on unread, as `num_drafts` does not count them.
    """

    state: State  # cut to the places that this program judges
    unused: tuple[Tensor, ...] = ()  # the window's other places [B, ..], if there are any

    @classmethod
    def of(cls, state: State, nextn: int) -> "Window":
        stored = state["window"]
        if stored.shape[1] == nextn + 1:
            return cls(state)
        narrowed = {
            "window": stored[:, : nextn + 1],
            "num_drafts": state["num_drafts"].clamp(max=nextn),
        }
        if nextn:
            narrowed["draft_probs"] = state["draft_probs"][:, :nextn]
        return cls(state | narrowed, (stored[:, nextn + 1 :],))

    @property
    def tokens(self) -> Tensor:
        return self.state["window"]

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def rows(self, model: CausalLM, active: Tensor) -> Positions:
        """Return the window's positions M .. M + nextn; each attends to those up to itself."""
        bound = model.count_bound_rows(self.state)
        return make_positions(model, self.state["lengths"], self.size, active, bound)

    @staticmethod
    def newest(tokens: Tensor, n: Tensor) -> Tensor:
        """Return the last of n [B] emitted tokens [B, T] as [B, 1]; the first n rows are kept."""
        return take_rows(tokens, (n - 1).clamp(min=0), 1)

    def make_next_window(self, newest: Tensor, drafts: Tensor) -> Tensor:
        """Return the next step's window, from newest [B, 1] and drafts [B, nextn]."""
        return torch.cat([newest, drafts, *self.unused], 1)
