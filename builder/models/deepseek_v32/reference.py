"""The plain model: latent attention over the rows that an indexer chooses for each token."""

import torch
from torch import Tensor, nn

from mtpbuild.builder.models.common.plain import PlainCausalLM
from mtpbuild.builder.models.common.rope import rotate
from mtpbuild.builder.models.deepseek_v3.reference import PlainLatentAttention
from mtpbuild.builder.models.deepseek_v32.config import DeepseekV32Config


class PlainIndexer(nn.Module):
    """An indexer: it chooses for each token the `index_topk` rows with the highest scores."""

    def __init__(self, c: DeepseekV32Config) -> None:
        super().__init__()
        assert c.q_lora_rank is not None
        H, D = c.index_n_heads, c.index_head_dim
        self.config = c
        self.wq_b = nn.Linear(c.q_lora_rank, H * D, bias=False)
        self.wk = nn.Linear(c.hidden_size, D, bias=False)
        self.k_norm = nn.LayerNorm(D, eps=1e-6)
        self.weights_proj = nn.Linear(c.hidden_size, H, bias=False)

    def forward(self, x: Tensor, latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return which rows each token attends to, [B, T, T] bool, from x and queries' latent."""
        c, (B, T, _) = self.config, x.shape
        q = self.wq_b(latent).view(B, T, c.index_n_heads, c.index_head_dim).transpose(1, 2)
        q, k = self.rotate_heads(q, cos, sin), self.rotate_heads(self.k_norm(self.wk(x)), cos, sin)
        scores = (q.float() @ k[:, None].mT.float() * c.index_head_dim**-0.5).relu()
        weights = self.weights_proj(x).float() * c.index_n_heads**-0.5
        sums = (weights[..., None, :] @ scores.transpose(1, 2))[..., 0, :]
        unseen = torch.ones(T, T, dtype=torch.bool).triu(1)
        order = sums.masked_fill(unseen, float("-inf")).sort(dim=-1, descending=True, stable=True)
        best = order.indices[..., : c.index_topk]  # of equal scores the lowest positions
        return torch.zeros_like(sums, dtype=torch.bool).scatter(-1, best, True) & ~unseen

    def rotate_heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        R = self.config.qk_rope_head_dim
        rotated = rotate(x[..., :R], cos, sin, self.config.indexer_rope_interleave)
        return torch.cat([rotated, x[..., R:]], dim=-1)


class PlainSparseAttention(PlainLatentAttention):
    """Attention to the chosen rows; without an indexer it uses the choice of `chooser`.

    later: how many of the last tokens attend to the rows of the token before them (later drafts).
    """

    config: DeepseekV32Config
    seen: Tensor  # [B, T, T] bool, of the last pass

    def __init__(self, c: DeepseekV32Config, chooser: "PlainSparseAttention | None") -> None:
        super().__init__(c)
        self.indexer = PlainIndexer(c) if chooser is None else None
        # A tuple, so that the chooser is not registered as a submodule.
        self.chooser = (self if chooser is None else chooser,)
        self.later = 0

    def mask(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        [chooser] = self.chooser
        if self.indexer is not None:
            self.seen = self.indexer(x, self.q_a_layernorm(self.q_a_proj(x)), cos, sin)
            if self.later:
                self.seen[:, -self.later :] = self.seen[:, -self.later - 1, None]
        return chooser.seen[:, None]


class PlainDeepseekV32(PlainCausalLM):
    config: DeepseekV32Config

    def __init__(self, config: DeepseekV32Config) -> None:
        layers: list[PlainSparseAttention] = []

        def attention(layer: int) -> PlainSparseAttention:
            chooser = None if config.has_indexer(layer) else layers[config.chooser(layer)]
            layers.append(PlainSparseAttention(config, chooser))
            return layers[-1]

        super().__init__(config, attention, config.qk_rope_head_dim)

    def mtp(self, k: int, tokens: Tensor, hidden: Tensor, later: int = 0) -> Tensor:
        attention = self.module(k).self_attn
        assert isinstance(attention, PlainSparseAttention)
        attention.later = later if self.config.mtp.shares_choice else 0
        return super().mtp(k, tokens, hidden)
