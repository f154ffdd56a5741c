"""The interface of drafters, and the built-in ones: Eagle, vanilla, assistant, block, and idle.

Eagle runs one module K times, vanilla runs K modules; docs/architecture.md has the derivation. A
module's input at slot p joins Emb(t_{p+k}) and the hidden state of slot p; the family decides
whether hidden states are normed (`ModuleInputs`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtpbuild.builder.models.common.block_head import BlockHead
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.layers import Choice, Positions, State
from mtpbuild.builder.models.common.precision import cast
from mtpbuild.builder.program.window import make_positions
from mtpbuild.plugins import take_rows
from mtpbuild.runtime.contract.state import StateSpec, name_module_rows
from mtpbuild.runtime.errors import BuildError


@dataclass(frozen=True)
class AcceptedTokens:
    """The results of a step before it drafts; T = K + 1."""

    hidden: Tensor  # [B, T, E] of the main model, one per window token; valid up to n
    tokens: Tensor  # [B, T] n emitted tokens, then any ids of the vocabulary
    n: Tensor  # [B] how many were emitted; 0 in an inactive slot
    lengths: Tensor  # [B] M, after this step: t_M is the newest token
    active: Tensor  # [B] bool
    rows: Positions  # positions of the window
    choose: Callable[[Tensor, int], Tensor]  # logits [B, 1, V], k from 1 -> draft k [B, 1]
    draft: Callable[[int, Tensor, int], Tensor]  # j, hidden [B, 1, E] of module j, k -> draft k


class Drafter:
    """A way to draft K = nextn tokens per step; its record declares its modules and states.

    Records are in runtime/contract/drafters.py. `state` has the engine's states by name. A drafter
    returns the new rows of all its modules and all the states that its record declares.
    """

    def __init__(self, nextn: int) -> None:
        self.nextn = nextn

    def __call__(self, model: CausalLM, state: State, step: AcceptedTokens) -> tuple[Tensor, State]:
        """Draft K tokens after the newest one; return int64 [B, K] and the new states.

        Each draft is chosen from its logits by `step.choose`, or from a module's hidden state by
        `step.draft`, so that sampled drafts follow the request's distribution.
        """
        raise NotImplementedError

    def prefill(
        self, model: CausalLM, state: State, tokens: Tensor, hidden: Tensor, rows: Positions
    ) -> State:
        """Return the new states after a chunk: tokens [1, T + lookahead], hidden [1, T, E]."""
        return {}


class Eagle(Drafter):
    """MTP Eagle: module 0 runs over the window, then once per further draft on its own output."""

    def __call__(self, model: CausalLM, state: State, step: AcceptedTokens) -> tuple[Tensor, State]:
        module = model.module(0)
        # Slot p of the window joins the main hidden h_p and the emitted token t_{p+1}. Only these
        # rows stay in the cache; the next step's window covers the slots of the passes below.
        at = (step.n - 1).clamp(min=0)
        rows = replace(model.place_drafts(step.rows), choice=Choice())  # not the trunk's choice
        x = model.draft_input(0, step.tokens, step.hidden, rows)
        x, cache = module.forward_last(x, state[name_module_rows(0)], rows, at)
        choice = replace(rows.choice, stays=model.config.mtp.shares_choice)
        hidden = module.compute_next_hidden(x)
        drafts = [step.draft(0, hidden, 1)]
        side = None
        for k in range(1, self.nextn):
            rows = model.draft_rope(step.lengths, 1, step.active, offset=k - 1)
            rows = replace(rows, choice=replace(choice))
            x = model.draft_input(0, drafts[-1], hidden, rows)
            x, side = module.forward_uncached(x, cache, side, rows)
            hidden = module.compute_next_hidden(x)
            drafts.append(step.draft(0, hidden, k + 1))
        return torch.cat(drafts, dim=1), {name_module_rows(0): cache}

    def prefill(
        self, model: CausalLM, state: State, tokens: Tensor, hidden: Tensor, rows: Positions
    ) -> State:
        module = model.module(0)
        rows = model.place_drafts(rows)
        x = model.draft_input(0, tokens[:, 1:], hidden, rows)
        return {name_module_rows(0): module.fill(x, state[name_module_rows(0)], rows)}


class Assistant(Drafter):
    """A head that attends to the trunk's rows, and has none: no step takes a row of its back.

    All drafts of a step see the same rows, those up to the last accepted token, and have the
    position of the newest one.
    """

    def __call__(self, model: CausalLM, state: State, step: AcceptedTokens) -> tuple[Tensor, State]:
        at = (step.n - 1).clamp(min=0)
        hidden = take_rows(step.hidden, at, 1)
        token = take_rows(step.tokens, at, 1)
        rows = model.place_head(step.rows, step.lengths, at, step.active)
        drafts = list[Tensor]()
        for k in range(1, self.nextn + 1):
            x, hidden = model.run_head(model.embed(token), hidden, rows)
            token = step.draft(0, x, k)
            drafts.append(token)
        return torch.cat(drafts, dim=1), {}


class BlockDrafter(Drafter):
    """DFlash and DSpark: a head that drafts all tokens in one pass over a block of tokens.

    The block is the newest token and masks; only the trunk's tokens make cache rows. Without
    DSpark's bias each draft is chosen for itself.
    """

    def __call__(self, model: CausalLM, state: State, step: AcceptedTokens) -> tuple[Tensor, State]:
        head = find_block_head(model)
        new = self.prefill(model, state, step.tokens, step.hidden, step.rows)
        token = take_rows(step.tokens, (step.n - 1).clamp(min=0), 1)
        size = self.nextn + (not head.block.from_anchor)
        mask = torch.full_like(token, head.block.mask_token_id)
        x = model.embed(torch.cat([token, *[mask] * (size - 1)], dim=1))
        hidden = head(x, new, model.draft_rope(step.lengths, size, step.active))
        logits = model.draft_logits(0, hidden[:, size - self.nextn :])
        drafts = list[Tensor]()
        for k, part in enumerate(logits.split(1, dim=1), 1):
            row = part.clone(memory_format=torch.contiguous_format)  # branches need equal strides
            token = step.choose(head.add_bias(model, row, token), k)
            drafts.append(token)
        return torch.cat(drafts, dim=1), new

    def prefill(
        self, model: CausalLM, state: State, tokens: Tensor, hidden: Tensor, rows: Positions
    ) -> State:
        head = find_block_head(model)
        context = hidden[..., -head.block.added_width :]
        return head.write(context, state, model.place_drafts(rows))


def find_block_head(model: CausalLM) -> BlockHead:
    head = model.mtp[0]
    assert isinstance(head, BlockHead)
    return head


class Vanilla(Drafter):
    """MTP vanilla: module k drafts token k, and recomputes the newest T = K + 1 slots.

    K slots are not exact: after a step that accepted all drafts, slots from M - (K + 1) on were
    computed with drafts, if at all (docs/architecture.md). `past_hidden` and `past_tokens` are the
    hidden states and tokens of the K slots before the main model's window.
    """

    def __init__(self, nextn: int) -> None:
        super().__init__(nextn)
        self.slots = nextn + 1

    def __call__(self, model: CausalLM, state: State, step: AcceptedTokens) -> tuple[Tensor, State]:
        K, T, M = self.nextn, self.slots, step.lengths
        # Slots (M - n) - K .. (M - n) + K: the hidden state of each, and the token after it.
        hiddens = torch.cat([state["past_hidden"], step.hidden], dim=1)
        following = torch.cat([state["past_tokens"], step.tokens], dim=1)
        first = (M - T).clamp(min=0)  # first slot of the window
        offset = (first - M + step.n + K).clamp(min=0)
        last = (M - 1 - first).clamp(min=0)  # the newest slot's index in the window
        hidden = take_rows(hiddens, offset, T)
        tokens = torch.nn.functional.pad(take_rows(following, offset, T), (0, K))
        rows = make_positions(model, first, T, step.active, state[name_module_rows(0)].shape[2])

        drafts, caches = [], {}
        index = torch.arange(T + K, device=M.device)
        for k in range(1, K + 1):
            module = model.module(k - 1)
            name = name_module_rows(k - 1)
            x = model.draft_input(k - 1, tokens[:, k - 1 : k - 1 + T], hidden, rows)
            if k < K:
                x, caches[name] = module(x, state[name], rows)
                hidden = module.compute_next_hidden(x)
                newest = take_rows(hidden, last, 1)
            else:  # only the newest slot of the last module is read
                x, caches[name] = module.forward_last(x, state[name], rows, last)
                newest = module.compute_next_hidden(x)
            drafts.append(step.draft(k - 1, newest, k))
            tokens = torch.where(index == last[:, None] + k, drafts[-1], tokens)
        past = {
            "past_hidden": take_rows(hiddens, step.n, K),
            "past_tokens": take_rows(following, step.n, K),
        }
        return torch.cat(drafts, dim=1), caches | past

    def prefill(
        self, model: CausalLM, state: State, tokens: Tensor, hidden: Tensor, rows: Positions
    ) -> State:
        K, T = self.nextn, hidden.shape[1]
        caches, g = {}, hidden
        for k in range(1, K + 1):
            module = model.module(k - 1)
            name = name_module_rows(k - 1)
            x = model.draft_input(k - 1, tokens[:, k : T + k], g, rows)
            if k < K:
                x, caches[name] = module(x, state[name], rows)
                g = module.compute_next_hidden(x)
            else:
                caches[name] = module.fill(x, state[name], rows)
        past_hidden = torch.cat([state["past_hidden"], hidden], dim=1)[:, -K:]
        past_tokens = torch.cat([state["past_tokens"], tokens[:, 1 : T + 1]], dim=1)[:, -K:]
        return caches | {"past_hidden": past_hidden, "past_tokens": past_tokens}


class IdleDrafter(Drafter):
    """A drafter that runs no module, with which benchmarks measure verification alone.

    Its logits are all zero, so that greedy drafts are token 0.
    """

    def __call__(self, model: CausalLM, state: State, step: AcceptedTokens) -> tuple[Tensor, State]:
        zeros = step.hidden.new_zeros(step.hidden.shape[0], 1, model.config.vocab_size)
        logits = cast(zeros, torch.float32)
        drafts = [step.choose(logits, k) for k in range(1, self.nextn + 1)]
        return torch.cat(drafts, dim=1), {}


class ReadableStates(dict[str, Tensor]):
    """The states that a drafter may read; any other name raises BuildError."""

    def __init__(self, state: State, drafter: str) -> None:
        super().__init__(state)
        self.drafter = drafter

    def __missing__(self, name: str) -> Tensor:
        raise BuildError(f"drafter {self.drafter}: its program finds no state {name} to read")


class CheckedDrafter(Drafter):
    """A drafter that raises BuildError if its new states differ from those of its record.

    rows: the names of its modules' rows. states: its other states.
    """

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        nextn: int,
        rows: Iterable[str],
        states: Iterable[StateSpec],
    ) -> None:
        super().__init__(nextn)
        self.name, self.drafter = name, drafter
        self.states = {spec.name: spec for spec in states}
        self.names = {*rows, *self.states}

    def __call__(self, model: CausalLM, state: State, step: AcceptedTokens) -> tuple[Tensor, State]:
        drafts, new = self.drafter(model, ReadableStates(state, self.name), step)
        self._compare("drafts", drafts, torch.int64, (self.nextn,))
        return drafts, self._check_state(new)

    def prefill(
        self, model: CausalLM, state: State, tokens: Tensor, hidden: Tensor, rows: Positions
    ) -> State:
        return self._check_state(
            self.drafter.prefill(model, ReadableStates(state, self.name), tokens, hidden, rows)
        )

    def _check_state(self, new: State) -> State:
        for name in sorted(self.names ^ new.keys()):
            fault = "leaves out" if name in self.names else "does not declare"
            raise BuildError(f"drafter {self.name}: its program {fault} state {name}")
        for name, spec in self.states.items():
            dtype = getattr(torch, spec.dtype)
            self._compare(f"state {name}", new[name], dtype, spec.shape[1:])
        return new

    def _compare(self, what: str, x: Tensor, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        """Raise BuildError for a tensor of another type, or of other sizes after the batch."""
        if x.dtype != dtype or tuple(x.shape[1:]) != sizes:
            actual = f"{x.dtype} {[*x.shape[1:]]}".removeprefix("torch.")
            wanted = f"{dtype} {[*sizes]}".removeprefix("torch.")
            raise BuildError(
                f"drafter {self.name}: {what} of a slot is {actual}, declared {wanted}"
            )
