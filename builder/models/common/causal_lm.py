"""A whole model with its MTP modules, as the step program calls it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.models.common.blocks import look_up
from mtpbuild.builder.models.common.collectives import all_gather, all_reduce, make_rank_constant
from mtpbuild.builder.models.common.layers import (
    Attention,
    DecoderLayer,
    DraftLayer,
    MTPModule,
    Positions,
    RecurrentLayer,
    RMSNorm,
    Rope,
    State,
    StateUpdates,
)
from mtpbuild.builder.models.common.moe import feed_forward
from mtpbuild.builder.models.common.precision import cast, parameter
from mtpbuild.plugins import matmul_wide
from mtpbuild.runtime.contract.state import name_layer_rows, name_layer_state
from mtpbuild.runtime.ranks import Ranks

# (this rank's logits, its number, the number of ranks) -> a tensor that is equal on all ranks.
GatherLogits = Callable[[Tensor, Tensor, int], Tensor]
MASKED_LOGIT = -1e30  # finite, so that it may be divided by a temperature


class CausalLM(nn.Module):
    """The trunk and the MTP modules; modules without embedding or head use the trunk's.

    With several ranks each holds its share. If the vocabulary is split, rank r holds part r of its
    rows.
    """

    def __init__(
        self,
        c: ModelConfig,
        layers: Iterable[DecoderLayer | RecurrentLayer],
        modules: Iterable[DraftLayer],
        rope: Rope,
        ranks: Ranks,
    ) -> None:
        super().__init__()
        V = c.vocab_size // ranks.parts
        self.config, self.ranks = c, ranks
        # None: the head's weight is the embedding, too
        self.embed_tokens: nn.Parameter | None = parameter(V, c.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        # An EAGLE-3 head, which takes the modules' place, sets these (`attach_head`).
        self.taps: tuple[int, ...] = ()  # layers whose inputs it reads
        self.join_taps: Callable[[list[Tensor], Tensor], Tensor] | None = None
        self.head_rope: Rope | None = None
        self.mtp = nn.ModuleList(modules)
        self.lm_head = parameter(c.hidden_size, V)
        self.rope = rope
        for j in c.own_embeddings:
            self.module(j).embed_tokens = parameter(V, c.hidden_size)
        drafted = len(c.draft_ids) or V
        for j in c.own_heads:
            self.module(j).lm_head = parameter(c.hidden_size, drafted)
        self.draft_head: nn.Parameter | None = None
        if c.draft_ids:
            self.draft_head = parameter(c.hidden_size, drafted)
            self.register_buffer("draft_ids", torch.tensor(c.draft_ids), persistent=False)
        self.draft_ids: Tensor
        for name, shape in c.drafter_weights:
            hold_parameter(self, name, shape)
        if ranks.parts > 1:
            self.rank = make_rank_constant()

    def place_head(self, rows: Positions, lengths: Tensor, last: Tensor, active: Tensor) -> Any:
        """Return what `run_head` needs: the window's rows, seen up to its token last [B]."""
        raise NotImplementedError

    def run_head(self, embedding: Tensor, hidden: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
        """Run a head without rows on a token's embedding and a hidden state, each [B, 1, E].

        Returns what `draft_logits` reads, and the next hidden state.
        """
        raise NotImplementedError

    def module(self, j: int) -> DraftLayer:
        module = self.mtp[j]
        assert isinstance(module, DraftLayer)
        return module

    def embed(self, tokens: Tensor, table: Tensor | None = None) -> Tensor:
        """Return the rows [.., E] of tokens [..] in the trunk's embedding, or in another table."""
        default = self.lm_head if self.embed_tokens is None else self.embed_tokens
        table = default if table is None else table
        if self.ranks.parts == 1:
            return look_up(table, tokens)
        rows = table.shape[0]
        is_here = (tokens // rows == self.rank)[..., None]
        x = nn.functional.embedding(tokens % rows, table)
        return all_reduce(torch.where(is_here, x, 0.0))

    def forward(self, tokens: Tensor, state: State, rows: Positions) -> tuple[Tensor, StateUpdates]:
        """Return the hidden states [B, T, E] that modules read, and new states; tokens [B, T].

        With an EAGLE-3 head its g [B, T, h] of these tokens comes after them.
        """
        taps = list[Tensor]()
        x, updates = self.run_layers(range(len(self.layers)), self.embed(tokens), state, rows, taps)
        hidden = self.norm(x) if self.config.mtp.trunk_normed else x
        if self.join_taps is None:
            return hidden, updates
        last = hidden if self.config.mtp.trunk_normed else self.norm(x)
        return torch.cat([hidden, self.join_taps(taps, last)], dim=-1), updates

    def fill(self, tokens: Tensor, state: State, rows: Positions) -> StateUpdates:
        """Compute only the new states, for an engine without drafts; tokens [B, T]."""
        last = len(self.layers) - 1
        layer = self.layers[last]
        name = name_layer_rows(last)
        if not isinstance(layer, DecoderLayer):
            return self(tokens, state, rows)[1]
        x, updates = self.run_layers(range(last), self.embed(tokens), state, rows)
        updates.written[name] = layer.fill(x, state[name], rows)
        return updates

    def run_layers(
        self,
        layers: range,
        x: Tensor,
        state: State,
        rows: Positions,
        taps: list[Tensor] | None = None,
    ) -> tuple[Tensor, StateUpdates]:
        """Run some layers on hidden states x [B, T, E]; return the last one's, and new states.

        taps: gets the inputs of the layers that an EAGLE-3 head reads, in their order.
        """
        updates = StateUpdates()
        inputs = dict[int, Tensor]()
        for i in layers:
            inputs[i] = x
            layer = self.layers[i]
            name = name_layer_rows(i)
            if isinstance(layer, RecurrentLayer):
                old = {
                    key: zero_new_slots(state[name_layer_state(key, i)], rows)
                    for key in layer.states
                }
                x, tokens = layer(x, old, rows)
                updates.deferred.append(partial(_advance_layer, layer, i, old, tokens))
            else:
                x, updates.written[name] = layer(x, state[name], rows)
        if taps is not None:
            inputs[len(self.layers)] = x
            taps += [inputs[i] for i in self.taps]
        return x, updates

    def count_bound_rows(self, state: State) -> int:
        """Return the number of rows of the bound caches; at least one layer has a cache."""
        names = map(name_layer_rows, range(len(self.layers)))
        return next(state[name].shape[2] for name in names if name in state)

    def logits(self, hidden: Tensor, gather: GatherLogits = all_gather) -> Tensor:
        """Return the trunk's logits [B, T, V] of the result of `forward`.

        gather: how to collect the parts of several ranks.
        """
        if self.join_taps is not None:
            hidden = hidden[..., : self.config.hidden_size]
        if not self.config.mtp.trunk_normed:
            hidden = self.norm(hidden)
        return self.head(hidden, self.lm_head, gather)

    def weights_read_by_kernels(self) -> dict[str, nn.Parameter]:
        """Return the weights that our kernels read on a GPU: experts, and heads in bf16."""
        experts = self._list_prefixes_of("by_kernels")
        return {
            name: weight
            for name, weight in self.named_parameters()
            if f"{name}.".startswith(experts)
            or (name.endswith("_head") and weight.dtype == torch.bfloat16)
        }

    def weights_read_by_step_kernels(self, *, few_tokens: bool) -> dict[str, nn.Parameter]:
        """Return the weights that our kernels read in steps, and PyTorch's operators in prompts.

        few_tokens: whether a step has few enough for the kernels of quantised and gated products.
        """
        names = self._list_prefixes_of("by_fused_kernels")
        names += self._list_prefixes_of("by_kernel_of_few") if few_tokens else ()
        others = self.weights_read_by_kernels()
        return {
            name: weight
            for name, weight in self.named_parameters()
            if f"{name}.".startswith(names) and name not in others
        }

    def _list_prefixes_of(self, attribute: str) -> tuple[str, ...]:
        """Return the name prefixes of the parameters that modules list in an attribute."""
        return tuple(
            f"{path}.{name}."
            for path, module in self.named_modules()
            for name in getattr(module, attribute, ())
        )

    @property
    def draft_rope(self) -> Rope:
        """The angles of drafts: the trunk's, or an EAGLE-3 head's own."""
        return self.rope if self.head_rope is None else self.head_rope

    def place_drafts(self, rows: Positions) -> Positions:
        """Return positions of the trunk's tokens, as a module has them that reads these tokens."""
        if self.head_rope is None:
            return rows
        own: Positions = self.head_rope(rows.positions[:, 0], rows.positions.shape[1])
        return replace(rows, cos=own.cos, sin=own.sin)

    def draft_input(self, j: int, tokens: Tensor, hidden: Tensor, rows: Positions) -> Tensor:
        """Return the input [B, T, E] of module j for tokens [B, T] and hidden states [B, T, E]."""
        module = self.module(j)
        return module.combine_inputs(self.embed(tokens, module.embed_tokens), hidden, rows)

    def draft_logits(self, j: int, hidden: Tensor, gather: GatherLogits = all_gather) -> Tensor:
        """Return the logits [B, T, V] of the output of module j.

        With a reduced draft vocabulary the head has only its rows; other tokens are never drafted.
        """
        module: Any = self.mtp[j]
        shared = self.lm_head if self.draft_head is None else self.draft_head
        head = shared if module.lm_head is None else module.lm_head
        logits = self.head(module.compute_head_input(hidden), head, gather)
        if not self.config.draft_ids:
            return logits
        every = logits.new_full((*logits.shape[:-1], self.config.vocab_size), MASKED_LOGIT)
        return every.scatter(-1, self.draft_ids.expand_as(logits), logits)

    def head(self, hidden: Tensor, weight: Tensor, gather: GatherLogits) -> Tensor:
        """Return logits in fp32 even with a head in bf16, as logits rounded to bf16 would tie."""
        if isinstance(weight, Tensor) and weight.dtype == torch.bfloat16:
            logits = matmul_wide(cast(hidden, torch.bfloat16), weight)
        else:
            logits = (cast(hidden, torch.float32) @ weight).float()
        return logits if self.ranks.parts == 1 else gather(logits, self.rank, self.ranks.parts)


def hold_parameter(module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Add a parameter without values; the parts of its name before the last become submodules."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, parameter(*shape))


class UniformLM(CausalLM):
    """A model whose layers all have attention, or the part of it that one of `ranks` computes.

    make_attention(i) makes that of layer i; MTP module j is layer num_hidden_layers + j.
    """

    def __init__(
        self,
        c: ModelConfig,
        make_attention: Callable[[int], Attention],
        rotary_dim: int,
        ranks: Ranks,
    ) -> None:
        def parts(i: int) -> tuple[ModelConfig, Attention, nn.Module, Ranks]:
            return c, make_attention(i), feed_forward(c, i, ranks), ranks

        L = c.num_hidden_layers
        layers = (DecoderLayer(*parts(i)) for i in range(L))
        modules = (MTPModule(*parts(L + j)) for j in range(c.num_nextn_predict_layers))
        super().__init__(c, layers, modules, Rope(c.rope, rotary_dim), ranks)


def zero_new_slots(state: Tensor, rows: Positions) -> Tensor:
    """Return a recurrent state [B, ..] before a pass, zeroed for slots whose request starts.

    An idle slot's start is never 0: it writes its rows at the end of the cache.
    """
    first = (rows.start == 0).reshape(-1, *[1] * (state.dim() - 1))
    return torch.where(first, 0.0, state)


def _advance_layer(
    layer: RecurrentLayer, index: int, old: State, tokens: State, n: Tensor, all_stay: bool
) -> State:
    new = (layer.advance_all if all_stay else layer.advance)(old, tokens, n)
    return {name_layer_state(key, index): tensor for key, tensor in new.items()}
