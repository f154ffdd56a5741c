"""The plain model of DeepSeek-V4: whole sequences, no caches, under the names of transformers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpbuild.builder.checkpoint.config import RopeConfig
from mtpbuild.builder.models.common.plain import PlainLM, make_norm, weigh_by_expert
from mtpbuild.builder.models.common.rope import compute_inverse_frequencies, compute_table_scale
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config, DSparkConfig


def turn_end(x: Tensor, positions: Tensor, rope: RopeConfig, size: int, sign: int = 1) -> Tensor:
    """Rotate the last `size` numbers of x [B, T, .., D] in neighbouring pairs by positions [T]."""
    angles = positions.float()[:, None] * compute_inverse_frequencies(rope, size)
    angles = angles.reshape(len(positions), *(1 for _ in x.shape[3:]), size // 2)
    pairs = torch.complex(x[..., -size::2].float(), x[..., -size + 1 :: 2].float())
    factors = torch.polar(torch.full_like(angles, compute_table_scale(rope)), sign * angles)
    turned = torch.view_as_real(pairs * factors).flatten(-2)
    return torch.cat([x[..., :-size], turned], dim=-1)


def norm_freely(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class PlainMixer(nn.Module):
    """The weights of residual streams before and after a branch (arXiv:2512.24880)."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        N = c.hc_mult
        self.config = c
        self.fn = nn.Parameter(torch.empty(N * (N + 2), N * c.hidden_size))
        self.base, self.scale = nn.Parameter(torch.empty(N * (N + 2))), nn.Parameter(torch.empty(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c, N = self.config, self.config.hc_mult
        numbers = norm_freely(x.flatten(2), c.rms_norm_eps) @ self.fn.T
        pre = (numbers[..., :N] * self.scale[0] + self.base[:N]).sigmoid() + c.hc_eps
        post = 2 * (numbers[..., N : 2 * N] * self.scale[1] + self.base[N : 2 * N]).sigmoid()
        comb = numbers[..., 2 * N :] * self.scale[2] + self.base[2 * N :]
        comb = comb.unflatten(-1, (N, N)).softmax(-1) + c.hc_eps
        for i in range(c.hc_sinkhorn_iters):
            if i:
                comb = comb / (comb.sum(-1, keepdim=True) + c.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        return torch.einsum("btn,btne->bte", pre, x), post, comb


class PlainStreamHead(nn.Module):
    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        N = c.hc_mult
        self.config = c
        self.hc_fn = nn.Parameter(torch.empty(N, N * c.hidden_size))
        self.hc_base, self.hc_scale = nn.Parameter(torch.empty(N)), nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        numbers = norm_freely(x.flatten(2), self.config.rms_norm_eps) @ self.hc_fn.T
        pre = (numbers * self.hc_scale + self.hc_base).sigmoid() + self.config.hc_eps
        return torch.einsum("btn,btne->bte", pre, x)


class PlainCompressor(nn.Module):
    """The rows that windows of tokens are compressed to, and which of them a token sees."""

    def __init__(self, c: DeepseekV4Config, layer: int, width: int) -> None:
        super().__init__()
        self.config, self.ratio = c, c.ratio(layer)
        self.windows = 1 + c.chooses(layer)
        self.kv_proj = nn.Linear(c.hidden_size, self.windows * width, bias=False)
        self.gate_proj = nn.Linear(c.hidden_size, self.windows * width, bias=False)
        self.position_bias = nn.Parameter(torch.empty(self.ratio, self.windows * width))
        self.kv_norm = make_norm(c, width)

    def make_rows(self, x: Tensor) -> Tensor:
        """Return the rows [B, n, width] of the whole windows of x [B, T, E]."""
        c, r = self.config, self.ratio
        windows = x[:, : x.shape[1] // r * r].unflatten(1, (-1, r))
        values, gates = self.kv_proj(windows), self.gate_proj(windows) + self.position_bias
        if self.windows == 2:  # the later half of a window's own, the earlier of the one before
            values, gates = join_earlier(values, 0), join_earlier(gates, float("-inf"))
        rows = self.kv_norm((values * gates.softmax(2)).sum(2))
        return turn_end(rows, torch.arange(rows.shape[1]) * r, c.row_rope, c.qk_rope_head_dim)


def join_earlier(x: Tensor, first: float) -> Tensor:
    """Join each window's later half of x [B, n, r, 2 D] to the earlier half of the one before.

    first: what the first window has before it.
    """
    earlier, later = x.chunk(2, -1)
    return torch.cat([F.pad(earlier, (0, 0, 0, 0, 1, 0), value=first)[:, :-1], later], 2)


class PlainScorer(nn.Module):
    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        self.weights_proj = nn.Linear(c.hidden_size, c.index_n_heads, bias=False)


class PlainRowIndexer(PlainCompressor):
    """The rows by whose scores compressed rows are chosen."""

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__(c, layer, c.index_head_dim)
        heads = c.index_n_heads * c.index_head_dim
        self.q_b_proj = nn.Linear(c.q_lora_rank, heads, bias=False)
        self.scorer = PlainScorer(c)

    def choose(self, x: Tensor, latent: Tensor, seen: Tensor) -> Tensor:
        """Return which of the rows that are seen [B, T, n] are chosen."""
        c, T = self.config, x.shape[1]
        q = self.q_b_proj(latent).unflatten(-1, (c.index_n_heads, -1))
        q = turn_end(q, torch.arange(T), c.row_rope, c.qk_rope_head_dim)
        weights = self.scorer.weights_proj(x) * c.index_n_heads**-0.5
        products = torch.einsum("bthd,bnd->bthn", q, self.make_rows(x)).relu()
        scores = torch.einsum("bth,bthn->btn", weights, products * c.index_head_dim**-0.5)
        scores = scores.masked_fill(~seen, float("-inf"))
        # Of equal scores, often zeros, the lowest position wins.
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : c.index_topk]
        return torch.zeros_like(seen).scatter(-1, best, True) & seen


class PlainRows(PlainCompressor):
    """The compressed rows that attention reads."""

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__(c, layer, c.head_dim)
        if c.chooses(layer):
            self.indexer = PlainRowIndexer(c, layer)


class PlainStreamAttention(nn.Module):
    """Attention to a window and to compressed rows, with a sink for each head."""

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        E, H, D = c.hidden_size, c.num_attention_heads, c.head_dim
        self.config, self.ratio = c, c.ratio(layer)
        self.q_a_proj = nn.Linear(E, c.q_lora_rank, bias=False)
        self.q_a_norm = make_norm(c, c.q_lora_rank)
        self.q_b_proj = nn.Linear(c.q_lora_rank, H * D, bias=False)
        self.kv_proj, self.kv_norm = nn.Linear(E, D, bias=False), make_norm(c, D)
        self.sinks = nn.Parameter(torch.empty(H))
        self.compressor = PlainRows(c, layer) if self.ratio else None
        self.o_a_proj = nn.Linear(H * D // c.o_groups, c.o_groups * c.o_lora_rank, bias=False)
        self.o_b_proj = nn.Linear(c.o_groups * c.o_lora_rank, E, bias=False)

    def turn(self, x: Tensor, place: Tensor, sign: int = 1) -> Tensor:
        c = self.config
        rope = c.row_rope if self.ratio else c.rope
        return turn_end(x, place, rope, c.qk_rope_head_dim, sign)

    def make_rows(self, x: Tensor, place: Tensor) -> Tensor:
        """Return the rows [B, T, D], keys that are values, of x [B, T, E] at positions [T]."""
        return self.turn(self.kv_norm(self.kv_proj(x)), place)

    def forward(self, x: Tensor) -> Tensor:
        c, T = self.config, x.shape[1]
        place, latent = torch.arange(T), self.q_a_norm(self.q_a_proj(x))
        rows = self.make_rows(x, place)
        ahead = place[:, None] - place
        seen = ((ahead >= 0) & (ahead < c.sliding_window)).expand(x.shape[0], -1, -1)
        if self.compressor is not None:
            entries = self.compressor.make_rows(x)
            complete = torch.arange(entries.shape[1]) < ((place + 1) // self.ratio)[:, None]
            complete = complete.expand(x.shape[0], -1, -1)
            if hasattr(self.compressor, "indexer"):
                complete = self.compressor.indexer.choose(x, latent, complete)
            rows, seen = torch.cat([rows, entries], 1), torch.cat([seen, complete], -1)
        return self.attend(latent, place, rows, seen)

    def attend(self, latent: Tensor, place: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
        """Attend to the rows that are seen [B, T, n] from the queries' latent at positions [T]."""
        c = self.config
        q = self.q_b_proj(latent).unflatten(-1, (c.num_attention_heads, -1))
        q = self.turn(norm_freely(q, c.rms_norm_eps), place)
        scores = torch.einsum("bthd,bnd->bhtn", q, rows) * c.head_dim**-0.5
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        sinks = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        o = self.turn(torch.einsum("bhtn,bnd->bthd", weights, rows), place, -1)
        products = self.o_a_proj.weight.unflatten(0, (c.o_groups, -1))
        groups = o.unflatten(2, (c.o_groups, -1)).flatten(3)
        return self.o_b_proj(torch.einsum("btgd,grd->btgr", groups, products).flatten(2))


class PlainClampedMLP(nn.Module):
    def __init__(self, c: DeepseekV4Config, inner: int) -> None:
        super().__init__()
        self.limit = c.swiglu_limit
        self.gate_proj = nn.Linear(c.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        return self.down_proj(F.silu(gate) * self.up_proj(x).clamp(-self.limit, self.limit))


class PlainStreamRouter(nn.Module):
    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        self.config, self.hashed = c, c.is_hashed(layer)
        self.weight = nn.Parameter(torch.empty(c.n_routed_experts, c.hidden_size))
        if self.hashed:
            table = torch.zeros(c.vocab_size, c.num_experts_per_tok, dtype=torch.int64)
            self.register_buffer("tid2eid", table)
        else:
            self.register_buffer("e_score_correction_bias", torch.zeros(c.n_routed_experts))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the experts' weights [B, T, experts]: 0 if not chosen."""
        c = self.config
        scores = F.softplus(x @ self.weight.T).sqrt()
        if self.hashed:
            chosen = self.get_buffer("tid2eid")[tokens].long()
        else:
            biased = scores + self.get_buffer("e_score_correction_bias")
            chosen = biased.topk(c.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        return torch.zeros_like(scores).scatter(-1, chosen, weights)


class PlainClampedMoE(nn.Module):
    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        inner = c.moe_intermediate_size
        self.gate = PlainStreamRouter(c, layer)
        self.experts = nn.ModuleList(PlainClampedMLP(c, inner) for _ in range(c.n_routed_experts))
        self.shared_experts = PlainClampedMLP(c, inner * c.n_shared_experts)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return weigh_by_expert(self.experts, x, self.gate(x, tokens)) + self.shared_experts(x)


class PlainStreamLayer(nn.Module):
    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__()
        self.attn_hc, self.ffn_hc = PlainMixer(c), PlainMixer(c)
        self.input_layernorm, self.post_attention_layernorm = make_norm(c), make_norm(c)
        self.self_attn = PlainStreamAttention(c, layer)
        self.mlp = PlainClampedMoE(c, layer)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        y, post, comb = self.attn_hc(x)
        x = mix(x, self.self_attn(self.input_layernorm(y)), post, comb)
        y, post, comb = self.ffn_hc(x)
        return mix(x, self.mlp(self.post_attention_layernorm(y), tokens), post, comb)


def mix(x: Tensor, branch: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return torch.einsum("btk,bte->btke", post, branch) + torch.einsum("btjk,btje->btke", comb, x)


class PlainStreamModule(PlainStreamLayer):
    """The MTP module: its layer's streams are the trunk's, each with the token's embedding."""

    def __init__(self, c: DeepseekV4Config, layer: int) -> None:
        super().__init__(c, layer)
        self.enorm, self.hnorm, self.norm = make_norm(c), make_norm(c), make_norm(c)
        self.e_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.h_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)
        self.hc_head = PlainStreamHead(c)

    def draft(self, embedding: Tensor, streams: Tensor, tokens: Tensor) -> Tensor:
        x = self.h_proj(self.hnorm(streams)) + self.e_proj(self.enorm(embedding))[..., None, :]
        return self(x, tokens)


class PlainMarkovHead(nn.Module):
    """A bias of a draft's logits by the token before it."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def forward(self, token: Tensor) -> Tensor:
        bias: Tensor = self.markov_w2(self.markov_w1(token))
        return bias


class PlainStage(PlainStreamLayer):
    """A layer of a DSpark head; the first one makes the context, the last one has the outputs."""

    def __init__(self, c: DSparkConfig, stage: int) -> None:
        super().__init__(c, c.num_hidden_layers + stage)
        self.config = c
        if stage == 0:
            self.main_proj = nn.Linear(len(c.taps) * c.hidden_size, c.hidden_size, bias=False)
            self.main_norm = make_norm(c)
        if stage == c.stages - 1:
            self.norm, self.hc_head = make_norm(c), PlainStreamHead(c)
            self.markov_head = PlainMarkovHead(c.vocab_size, c.markov_rank)

    def run_block(self, x: Tensor, context: Tensor) -> Tensor:
        """Run a block's streams [B, k, N, E] after the context [B, p, E] of all tokens before."""
        at, (p, k) = self.self_attn, (context.shape[1], x.shape[1])
        y, post, comb = self.attn_hc(x)
        y, place = self.input_layernorm(y), torch.arange(p, p + k)
        rows = torch.cat([at.make_rows(context, torch.arange(p)), at.make_rows(y, place)], 1)
        rows = rows[:, -(self.config.sliding_window + k) :]  # all of the block sees these
        seen = torch.ones(x.shape[0], k, rows.shape[1], dtype=torch.bool)
        latent = at.q_a_norm(at.q_a_proj(y))
        x = mix(x, at.attend(latent, place, rows, seen), post, comb)
        y, post, comb = self.ffn_hc(x)
        none = torch.zeros(x.shape[:2], dtype=torch.int64)  # no router reads the token
        return mix(x, self.mlp(self.post_attention_layernorm(y), none), post, comb)


class PlainStreamTrunk(nn.Module):
    """The modules under the checkpoint's `model.` prefix."""

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(PlainStreamLayer(c, i) for i in range(c.num_hidden_layers))
        self.hc_head, self.norm = PlainStreamHead(c), make_norm(c)


class PlainDeepseekV4(PlainLM):
    """Trunk and modules; hidden states [B, T, N E] are the streams, one after another."""

    config: DeepseekV4Config

    def __init__(self, c: DeepseekV4Config) -> None:
        super().__init__()
        self.config = c
        self.model = PlainStreamTrunk(c)
        L, count, head = c.num_hidden_layers, c.num_nextn_predict_layers, c.head
        modules = nn.ModuleList(PlainStreamModule(c, L + j) for j in range(0 if head else count))
        if isinstance(head, DSparkConfig):
            modules = nn.ModuleList(PlainStage(head, i) for i in range(head.stages))
        self._modules["mtp"] = modules  # `mtp` is a method, too
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def main(self, tokens: Tensor) -> Tensor:
        return self.run(tokens)[-1].flatten(2)

    def run(self, tokens: Tensor) -> list[Tensor]:
        """Return the streams [B, T, N, E] that enter each layer, and those after the last one."""
        streams = [self.open_streams(tokens)]
        for layer in self.model.layers:
            streams.append(layer(streams[-1], tokens))
        return streams

    def open_streams(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.model.embed_tokens(tokens)
        return x[..., None, :].expand(-1, -1, self.config.hc_mult, -1)

    def apart(self, hidden: Tensor) -> Tensor:
        return hidden.unflatten(-1, (self.config.hc_mult, -1))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.model.norm(self.model.hc_head(self.apart(hidden))))

    def module(self, k: int) -> Any:
        modules: Any = self._modules["mtp"]
        return modules[k - 1]

    def mtp(self, k: int, tokens: Tensor, hidden: Tensor, later: int = 0) -> Tensor:
        embedding = self.model.embed_tokens(tokens)
        y: Tensor = self.module(k).draft(embedding, self.apart(hidden), tokens)
        return y.flatten(2)

    def draft_logits(self, k: int, hidden: Tensor) -> Tensor:
        module = self.module(k)
        return self.lm_head(module.norm(module.hc_head(self.apart(hidden))))

    def draft_block(
        self, tokens: list[int], nextn: int, drafts: Sequence[int] = ()
    ) -> list[Tensor]:
        """Compute the logits [V] of each of a DSpark head's drafts after the known tokens.

        drafts: those that were drawn from them; without them a draft is their argmax.
        """
        streams = self.run(torch.tensor([tokens[:-1]]))
        biased, token = list[Tensor](), tokens[-1]
        for k, logits in enumerate(self.run_block(streams, torch.tensor([token]), nextn)[0]):
            biased.append(logits + self.stages[-1].markov_head(torch.tensor(token)))
            token = drafts[k] if drafts else int(biased[-1].argmax())
        return biased

    @property
    def stages(self) -> Any:
        """The layers of a DSpark head."""
        return self._modules["mtp"]

    def run_block(self, streams: Sequence[Tensor], tokens: Tensor, count: int) -> Tensor:
        """Return the logits [B, count, V] of a block that begins with tokens [B].

        streams: those of all tokens before, as `run` returns them. The Markov head's are left out.
        """
        head: Any = self.config.head
        first, last = self.stages[0], self.stages[-1]
        taps = [streams[i].mean(2) for i in head.taps]
        context = first.main_norm(first.main_proj(torch.cat(taps, -1)))
        masks = torch.full((len(tokens), count - 1), head.mask_token_id)
        x = self.open_streams(torch.cat([tokens[:, None], masks], 1))
        for stage in self.stages:
            x = stage.run_block(x, context)
        logits: Tensor = self.lm_head(last.norm(last.hc_head(x)))
        return logits
