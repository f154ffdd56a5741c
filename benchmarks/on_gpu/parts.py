"""The parts of a step as separate programs, on a model of random weights, and their costs.

E hidden size, T tokens, V the rank's part of the vocabulary; one request.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtpbuild.builder.models import find_family_of
from mtpbuild.builder.models.common.blocks import ScaledWeight
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.collectives import gather_best
from mtpbuild.builder.models.common.layers import DecoderLayer
from mtpbuild.builder.models.common.moe import GatheredMoE
from mtpbuild.builder.program.programs import Program
from mtpbuild.lab.forecast.step import count_distinct_experts
from mtpbuild.plugins import accept_best, accept_rewind
from mtpbuild.plugins.accept_rewind.op import best_token
from on_gpu.machine import Machine

State = dict[str, Tensor]
MTP_CACHE = "mtp_kv.0"


class OfModel(nn.Module):
    """A module that computes a part of a model's step, with the model's weights."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model


class Layer(OfModel):
    """One layer of the main model; x [1, T, E], start [1]."""

    def __init__(self, model: CausalLM, index: int) -> None:
        super().__init__(model)
        self.index = index

    def forward(self, state: State, x: Tensor, start: Tensor) -> tuple[State, State]:
        name, rows = f"kv.{self.index}", self.model.rope(start, x.shape[1])
        y, cache = self.model.layers[self.index](x, state[name], rows)
        return {name: cache}, {"y": y}


def own(logits: Tensor, rank: Tensor, ranks: int) -> Tensor:
    """Return this rank's logits without joining them with the other ranks'."""
    return logits


class Head(OfModel):
    """The rank's logits from the last layer's output x [1, T, E]."""

    def forward(self, state: State, x: Tensor) -> tuple[State, State]:
        hidden = self.model.norm(x)
        return {}, {"hidden": hidden, "logits": self.model.logits(hidden, own)}


class Accept(OfModel):
    """The acceptance of drafts: logits [1, T, V], window [1, T]; the others [1].

    With several ranks it reads the best logits of each block, as a step does.
    """

    def forward(
        self,
        state: State,
        logits: Tensor,
        window: Tensor,
        num_drafts: Tensor,
        lengths: Tensor,
        active: Tensor,
    ) -> tuple[State, State]:
        slots, ranks = (window, num_drafts, lengths, active), self.model.ranks.parts
        if ranks == 1:
            tokens, n, _, logprobs, _ = accept_rewind(logits, *slots)
        else:
            best = gather_best(logits, self.model.rank, ranks)
            tokens, n, _, logprobs, _ = accept_best(best, *slots)
        return {}, {"tokens": tokens, "num_tokens": n, "logprobs": logprobs}


class FirstDraft(OfModel):
    """The module's pass over the window: emitted [1, T] tokens, hidden [1, T, E]."""

    def forward(
        self, state: State, emitted: Tensor, hidden: Tensor, start: Tensor, at: Tensor
    ) -> tuple[State, State]:
        module = self.model.module(0)
        rows = self.model.rope(start, hidden.shape[1])
        x = self.model.draft_input(0, emitted, hidden, rows)
        x, cache = module.forward_last(x, state[MTP_CACHE], rows, at)
        return {MTP_CACHE: cache}, {"hidden": module.compute_next_hidden(x)}


class FurtherDraft(OfModel):
    """The module's pass for a further draft, at position `start` + `side`'s rows; draft [1, 1].

    side [1, 1, k, C]: rows of the drafts before this one, C values each; `cache` is not written.
    """

    def forward(
        self,
        state: State,
        cache: Tensor,
        draft: Tensor,
        hidden: Tensor,
        start: Tensor,
        side: Tensor,
    ) -> tuple[State, State]:
        module, before = self.model.module(0), side.shape[2]
        rows = self.model.rope(start, 1, offset=before)
        x = self.model.draft_input(0, draft, hidden, rows)
        x, side = module.forward_uncached(x, cache, side, rows)
        return {}, {"hidden": module.compute_next_hidden(x), "side": side}


class DraftHead(OfModel):
    """The draft [1, 1] from hidden [1, 1, E], which the module has normalised."""

    def forward(self, state: State, hidden: Tensor) -> tuple[State, State]:
        if self.model.ranks.parts == 1:
            return {}, {"draft": self.model.logits(hidden).argmax(-1)}
        return {}, {"draft": best_token(self.model.logits(hidden, gather_best))}


@dataclass(frozen=True)
class Cost:
    """The bytes that a part reads, and its operations."""

    nbytes: float
    operations: float

    def bound(self, machine: Machine) -> float:
        """Return the least microseconds that the bytes or the operations take."""
        return 1e6 * max(self.nbytes / machine.bandwidth, self.operations / machine.rate)


@dataclass(frozen=True)
class Part:
    """A program for T tokens; its random operands serve for timing and comparison."""

    name: str
    tokens: int
    program: Program
    cost: Cost


class Parts:
    """The parts of one model's step after `context` cached tokens."""

    def __init__(self, model: CausalLM, context: int) -> None:
        self.model, self.context = model, context
        self.vocabulary = model.config.vocab_size // model.ranks.parts
        assert model.embed_tokens is not None  # GPUs' engines have it beside the head
        self.embedding = model.embed_tokens
        self.device = self.embedding.device
        self.start = torch.tensor([context], device=self.device)

    def layer(self, name: str, index: int, tokens: int) -> Part:
        arguments = {"x": self._hidden(tokens), "start": self.start}
        kv = (f"kv.{index}",)
        return self._part(name, tokens, Layer(self.model, index), arguments, ("y",), kv)

    def head(self, tokens: int) -> Part:
        outputs = ("hidden", "logits")
        return self._part("head", tokens, Head(self.model), {"x": self._hidden(tokens)}, outputs)

    def acceptance(self, tokens: int) -> Part:
        """Make the part that accepts drafts, over the rank's logits."""
        arguments = {
            "logits": torch.randn(1, tokens, self.vocabulary, device=self.device),
            "window": self._tokens(tokens),
            "num_drafts": torch.tensor([tokens - 1], device=self.device),
            "lengths": self.start,
            "active": torch.ones(1, dtype=torch.bool, device=self.device),
        }
        outputs = ("tokens", "num_tokens", "logprobs")
        return self._part("acceptance", tokens, Accept(self.model), arguments, outputs)

    def first_draft(self, tokens: int) -> Part:
        arguments = {
            "emitted": self._tokens(tokens),
            "verified": self._hidden(tokens),  # `hidden` would be a prompt's, of varying length
            "start": self.start,
            "at": torch.tensor([tokens - 1], device=self.device),
        }
        module = FirstDraft(self.model)
        return self._part("first draft", tokens, module, arguments, ("hidden",), (MTP_CACHE,))

    def further_draft(self, cache: Tensor) -> Part:
        """Make the part for the second draft, which has one row besides the cache."""
        arguments = {
            "cache": cache,
            "draft": self._tokens(1),
            "verified": self._hidden(1),
            "start": self.start,
            "side": cache[:, :, :1].clone(),
        }
        module = FurtherDraft(self.model)
        return self._part("further draft", 1, module, arguments, ("hidden", "side"))

    def draft_head(self) -> Part:
        arguments = {"hidden": self._hidden(1)}
        return self._part("head of a draft", 1, DraftHead(self.model), arguments, ("draft",))

    def _part(
        self,
        name: str,
        tokens: int,
        module: nn.Module,
        arguments: State,
        outputs: tuple[str, ...],
        state: tuple[str, ...] = (),
    ) -> Part:
        program = Program(name.replace(" ", "_"), module, state, arguments, outputs, whole=True)
        return Part(name, tokens, program, self._cost(module, tokens))

    def _hidden(self, tokens: int) -> Tensor:
        size, dtype = self.model.config.hidden_size, self.embedding.dtype
        return torch.randn(1, tokens, size, device=self.device, dtype=dtype)

    def _tokens(self, count: int) -> Tensor:
        high = self.embedding.shape[0]
        return torch.randint(0, high, (1, count), device=self.device)

    def _cost(self, module: nn.Module, tokens: int) -> Cost:
        if isinstance(module, Layer):
            layer = self.model.layers[module.index]
            assert isinstance(layer, DecoderLayer)
            return self._layer_cost(layer, tokens)
        if isinstance(module, FirstDraft | FurtherDraft):
            return self._layer_cost(self.model.module(0), tokens, last=True)
        if isinstance(module, Accept):
            return Cost(4.0 * tokens * self.vocabulary, 0.0)
        head = self.model.lm_head
        return Cost(head.nbytes, 2.0 * head.numel() * tokens)

    def _layer_cost(self, layer: DecoderLayer, tokens: int, last: bool = False) -> Cost:
        """Count one read of the cache and weights, with experts that random tokens choose.

        last: only the last token goes through the experts.
        """
        c, nbytes, operations = self.model.config, 0.0, 0.0
        family = find_family_of(c)
        costs, width = (
            family.costs(c, self.model.ranks),
            family.cache_widths(c, self.model.ranks)[0],
        )
        for name, weight in layer.named_parameters():
            read = used = 1.0
            routed = name.startswith(("mlp.gate_up_proj", "mlp.down_proj"))
            if isinstance(layer.mlp, GatheredMoE) and routed:
                always: int = (
                    layer.mlp.gate.num_shared_in_stack
                )  # shared experts follow the routed ones
                choosing = 1 if last else tokens
                read = (count_distinct_experts(costs, choosing) + always) / (costs.experts + always)
                used = (costs.chosen + always) / (costs.experts + always) * choosing / tokens
            nbytes += read * weight.nbytes
            operations += used * 2 * self._values(layer, name, weight) * tokens
        nbytes += self.context * width * self.embedding.element_size()
        return Cost(nbytes, operations + tokens * self.context * costs.row_operations)

    def _values(self, layer: DecoderLayer, name: str, weight: Tensor) -> int:
        """Count the values of a weight in a stored tensor: two per byte in nvfp4."""
        owner, _, leaf = name.rpartition(".")
        module = layer.get_submodule(owner)
        if not isinstance(module, ScaledWeight):
            return weight.numel()
        return weight.numel() * (1 if module.scales_2 is None else 2) if leaf == "values" else 0
