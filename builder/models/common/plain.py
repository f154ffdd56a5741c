"""The families' plain model in PyTorch: whole sequences, no caches, the checkpoints' names.

It is the oracle of the tests and of `mtpbuild verify`. This module has the parts that families
share; a family adds its attention if it differs. The step program computes the same with caches.
In docstrings g_{k,p} is module k's hidden state at position p, and g_{0,p} the trunk's.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.checkpoint.config import ModelConfig, MoEConfig
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.builder.models.common.rope import compute_rope_tables, rotate


class PlainLM(nn.Module):
    """A model over whole sequences without caches; its state_dict has the checkpoint's names."""

    config: ModelConfig
    lm_head: nn.Linear

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the first layer's input [B, T, ..]."""
        raise NotImplementedError

    def run_layer(self, i: int, x: Tensor) -> Tensor:
        """Run main layer i alone on x [B, T, ..]: hidden states, and what its family adds."""
        raise NotImplementedError

    def head_input(self, hidden: Tensor) -> Tensor:
        """Return what the head multiplies, from the result of `main`."""
        return hidden

    def main(self, tokens: Tensor) -> Tensor:
        """Compute the hidden states [B, T, hidden] that modules read, from tokens [B, T]."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [B, T, V] from the result of `main`; position p predicts t_{p+1}."""
        return self.lm_head(hidden)

    def module(self, k: int) -> nn.Module:
        """Return module k, from 1."""
        raise NotImplementedError

    def mtp(self, k: int, tokens: Tensor, hidden: Tensor, later: int = 0) -> Tensor:
        """Run module k, from 1, at all positions: tokens[:, p] is t_{p+k}, hidden[:, p] g_{k-1,p}.

        later: how many of the last positions are drafts after a step's first one. Returns g_{k,p}
        [B, T, hidden], as the next module takes it.
        """
        raise NotImplementedError

    def draft_logits(self, k: int, hidden: Tensor) -> Tensor:
        """Compute logits [B, T, V] from module k's result; position p predicts t_{p+k+1}."""
        return self.lm_head(hidden)


class PlainRMSNorm(nn.Module):
    """An RMSNorm; minus_one: its stored weight is the factor minus 1."""

    def __init__(self, size: int, eps: float, minus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.minus_one = eps, minus_one

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        if self.minus_one:
            return (y * (1 + self.weight.float())).type_as(x)
        return self.weight * y.type_as(x)


def make_norm(c: ModelConfig, size: int = 0) -> PlainRMSNorm:
    """Make a norm over the hidden size, or over another one."""
    return PlainRMSNorm(size or c.hidden_size, c.rms_norm_eps, c.norms_minus_one)


class PlainMLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainRouter(nn.Module):
    """A sigmoid router: biased scores select, unbiased ones weigh (DeepSeek's noaux_tc)."""

    def __init__(self, c: MoEConfig) -> None:
        super().__init__()
        self.config = c
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))
        self.e_score_correction_bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' weights [..., experts] for x [..., hidden]: 0 if not chosen."""
        c = self.config
        scores = (x.float() @ self.weight.float().T).sigmoid()
        biased = scores + self.e_score_correction_bias
        groups = biased.unflatten(-1, (c.n_group, -1))
        group_scores = groups.topk(2, dim=-1).values.sum(-1)
        best = group_scores.topk(c.topk_group, dim=-1).indices
        keep = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, best, True)
        biased = groups.masked_fill(~keep[..., None], float("-inf")).flatten(-2)
        chosen = biased.topk(c.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return torch.zeros_like(scores).scatter(-1, chosen, weights * c.routed_scaling_factor)


class PlainMoE(nn.Module):
    """The routed experts, each for the tokens that chose it, and the shared expert."""

    def __init__(self, c: MoEConfig) -> None:
        super().__init__()
        self.gate = PlainRouter(c)
        self.experts = nn.ModuleList(
            PlainMLP(c.hidden_size, c.moe_intermediate_size) for _ in range(c.n_routed_experts)
        )
        inner = c.moe_intermediate_size * c.n_shared_experts
        self.shared_experts = PlainMLP(c.hidden_size, inner) if inner else None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).type_as(x)
        y = weigh_by_expert(self.experts, x, weights)
        return y if self.shared_experts is None else self.shared_experts(x) + y


def weigh_by_expert(experts: nn.ModuleList, x: Tensor, weights: Tensor) -> Tensor:
    """Return the weighed sum [.., E] of experts for x [.., E]; weights [.., experts], many 0."""
    y = torch.zeros_like(x)
    for weight, expert in zip(weights.unbind(-1), experts, strict=True):
        chosen = weight != 0
        if chosen.any():
            y[chosen] += weight[chosen][:, None] * expert(x[chosen])
    return y


class PlainAttention(nn.Module):
    """The part that all attentions share: what they compute from queries, keys and values."""

    # Whoever trains a module on its own results puts an attention to earlier passes here.
    attend: Callable[..., Tensor] = staticmethod(F.scaled_dot_product_attention)


class PlainGroupedAttention(PlainAttention):
    """Grouped-query attention that repeats keys and values for each query head.

    With `output_gate` a gate beside each head's query multiplies the head's output.
    """

    def __init__(self, c: GroupedConfig) -> None:
        super().__init__()
        E, H, G, D = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.config, self.scale = c, 1 / math.sqrt(D)
        self.q_proj = nn.Linear(E, (2 if c.output_gate else 1) * H * D, bias=c.attention_bias)
        self.k_proj = nn.Linear(E, G * D, bias=c.attention_bias)
        self.v_proj = nn.Linear(E, G * D, bias=c.attention_bias)
        self.o_proj = nn.Linear(H * D, E, bias=False)
        if c.use_qk_norm:
            self.q_norm, self.k_norm = make_norm(c, D), make_norm(c, D)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, H, D = self.config, self.config.num_attention_heads, self.config.head_dim
        q, *gates = self.q_proj(x).unflatten(-1, (H, -1)).split(D, dim=-1)
        k, v = (p(x).unflatten(-1, (-1, D)) for p in (self.k_proj, self.v_proj))
        if c.use_qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (self.rotate_heads(part.transpose(1, 2), cos, sin) for part in (q, k))
        times = H // c.num_key_value_heads
        k, v = k.repeat_interleave(times, 1), v.transpose(1, 2).repeat_interleave(times, 1)
        o = self.attend(q, k, v, None, is_causal=True, scale=self.scale)
        o = o.transpose(1, 2).flatten(2)
        for gate in gates:
            o = o * gate.flatten(2).sigmoid()
        return self.o_proj(o)

    def rotate_heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first rotary_dim values of x [B, heads, T, D], in the layout of halves."""
        a, rest = x.split([self.config.rotary_dim, x.shape[-1] - self.config.rotary_dim], dim=-1)
        return torch.cat([rotate(a, cos, sin, interleave=False), rest], dim=-1).type_as(x)


class PlainDecoderLayer(nn.Module):
    def __init__(self, c: ModelConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = make_norm(c)
        self.kind = "self_attn" if isinstance(attention, PlainAttention) else "linear_attn"
        self.add_module(self.kind, attention)
        self.post_attention_layernorm = make_norm(c)
        self.mlp = mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attention = self.get_submodule(self.kind)
        x = x + attention(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainMTPModule(nn.Module):
    """An MTP module: a decoder layer whose input a token's embedding and a hidden state make.

    It has an embedding or a head of its own where the checkpoint's differs from the trunk's.
    """

    def __init__(self, c: ModelConfig, layer: PlainDecoderLayer, j: int) -> None:
        super().__init__()
        self.names = c.module_names
        self.rules = c.mtp
        self.layer = (layer,)  # in a tuple, as its name is not registered
        if self.names.own_prefix:
            self.layers = nn.ModuleList(self.layer)
        else:
            for name, part in layer.named_children():
                self.add_module(name, part)
        self.hold(self.names.embedding_norm, make_norm(c))
        self.hold(self.names.hidden_norm, make_norm(c))
        self.hold(self.names.input_proj, nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False))
        self.hold(self.names.head_norm, make_norm(c))
        if j in c.own_embeddings:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        if j in c.own_heads:
            self.hold("shared_head.head", nn.Linear(c.hidden_size, c.vocab_size, bias=False))

    def hold(self, name: str, part: nn.Module) -> None:
        """Add a part under a name that may have a dot."""
        parent, _, leaf = name.rpartition(".")
        if parent and parent not in dict(self.named_children()):
            self.add_module(parent, nn.Module())
        self.get_submodule(parent).add_module(leaf, part)

    def own(self, name: str) -> nn.Module | None:
        """Return the module's own `embed_tokens` or `head`, if it has one."""
        return dict(self.named_modules()).get("shared_head.head" if name == "head" else name)

    def draft(self, embedding: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute the unnormalised output at each position p from Emb(t_{p+k}) and g_{k-1,p}."""
        halves = [
            self.get_submodule(self.names.embedding_norm)(embedding),
            self.get_submodule(self.names.hidden_norm)(hidden),
        ]
        x = torch.cat(halves[::-1] if self.rules.hidden_first else halves, dim=-1)
        y: Tensor = self.layer[0](self.get_submodule(self.names.input_proj)(x), cos, sin)
        return y

    def normed(self, x: Tensor) -> Tensor:
        y: Tensor = self.get_submodule(self.names.head_norm)(x)
        return y


class PlainTrunk(nn.Module):
    """The modules under the checkpoint's `model.` prefix."""

    def __init__(self, c: ModelConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = make_norm(c)


class PlainCausalLM(PlainLM):
    """Trunk and MTP modules over whole sequences; attention(i) makes that of layer i."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, c: ModelConfig, attention: Callable[[int], nn.Module], rotary_dim: int
    ) -> None:
        super().__init__()
        self.config = c
        L = c.num_hidden_layers
        layers = [
            PlainDecoderLayer(c, attention(i), self.make_feed_forward(i))
            for i in range(L + c.num_nextn_predict_layers)
        ]
        trunk = layers[:L]
        modules = [PlainMTPModule(c, layer, j) for j, layer in enumerate(layers[L:])]
        prefix = c.module_names.prefix
        self.model = PlainTrunk(c, trunk if prefix else [*trunk, *modules])
        if c.module_names.own_prefix:
            for module in modules:  # one at most; `mtp` is a method, too
                self._modules["mtp"] = module
        elif prefix:
            self.model.add_module(prefix.split(".")[1], nn.ModuleList(modules))
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        cos, sin = compute_rope_tables(c.rope, rotary_dim, c.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def make_feed_forward(self, layer: int) -> nn.Module:
        c = self.config
        if isinstance(c, MoEConfig) and c.is_moe(layer):
            return PlainMoE(c)
        return PlainMLP(c.hidden_size, c.intermediate_size)

    def module(self, k: int) -> PlainMTPModule:
        modules = [part for part in self.modules() if isinstance(part, PlainMTPModule)]
        return modules[k - 1]

    def main(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for i in range(self.config.num_hidden_layers):
            x = self.run_layer(i, x)
        return self.model.norm(x) if self.config.mtp.trunk_normed else x

    def embed(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.model.embed_tokens(tokens)
        return x

    def run_layer(self, i: int, x: Tensor) -> Tensor:
        y: Tensor = self.model.layers[i](x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])
        return y

    def head_input(self, hidden: Tensor) -> Tensor:
        return hidden if self.config.mtp.trunk_normed else self.model.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.head_input(hidden))

    def mtp(self, k: int, tokens: Tensor, hidden: Tensor, later: int = 0) -> Tensor:
        module = self.module(k)
        T = tokens.shape[1]
        embedding = (module.own("embed_tokens") or self.model.embed_tokens)(tokens)
        y = module.draft(embedding, hidden, self.cos[:T], self.sin[:T])
        return module.normed(y) if self.config.mtp.recycles_normed else y

    def draft_logits(self, k: int, hidden: Tensor) -> Tensor:
        module = self.module(k)
        normed = hidden if self.config.mtp.recycles_normed else module.normed(hidden)
        logits = (module.own("head") or self.lm_head)(normed)
        if ids := self.config.draft_ids:
            others = torch.ones(self.config.vocab_size, dtype=torch.bool)
            others[list(ids)] = False
            logits = logits.masked_fill(others, float("-inf"))
        return logits


def make_plain_grouped(c: GroupedConfig) -> PlainCausalLM:
    return PlainCausalLM(c, lambda layer: PlainGroupedAttention(c), c.rotary_dim)
