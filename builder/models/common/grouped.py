"""Grouped-query attention of the step program, over cache rows of keys and values.

Shapes: B slots, T tokens, E hidden size, H query heads, G heads of keys and values, D head width, C
= 2 G D values of a cache row. `plain.py` has the plain counterpart.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mtpbuild.builder.models.common.causal_lm import UniformLM
from mtpbuild.builder.models.common.grouped_config import GroupedConfig
from mtpbuild.builder.models.common.layers import Attention, Positions, RMSNorm
from mtpbuild.builder.models.common.precision import parameter
from mtpbuild.plugins import grouped_attention_flat, grouped_rows, grouped_rows_write
from mtpbuild.runtime.ranks import Ranks

Gates = Sequence[Tensor]  # none, or one [B, T, H D]


class GroupedAttention(Attention):
    """Grouped-query attention whose queries, keys and values are one product.

    A rank has whole groups of heads.
    """

    def __init__(
        self, c: GroupedConfig, ranks: Ranks, inputs: int | None = None, window: int = 0
    ) -> None:
        """Take the parts.

        inputs: of queries, keys and values, if not the hidden size. window: how many rows are seen,
        the last one included; 0: all.
        """
        super().__init__()
        H, G = (n // ranks.parts for n in (c.num_attention_heads, c.num_key_value_heads))
        D = c.head_dim
        self.heads, self.groups, self.width = H, G, D
        self.eps = c.rms_norm_eps
        self.scale = 1 / math.sqrt(D)  # YaRN's mscale_all_dim scales latent attention alone
        self.gated = c.output_gate
        self.bound = {"window": window} if window else {}
        outputs = (H + 2 * G + (H if self.gated else 0)) * D  # gates, queries, keys, values
        self.qkv_proj = parameter(inputs or c.hidden_size, outputs)
        self.qkv_bias = parameter(outputs) if c.attention_bias else None
        self.q_norm = RMSNorm(D, c.rms_norm_eps) if c.use_qk_norm else None
        self.k_norm = RMSNorm(D, c.rms_norm_eps) if c.use_qk_norm else None
        self.o_proj = parameter(H * D, c.hidden_size)

    def product(self, x: Tensor) -> tuple[Tensor, Gates]:
        """Compute queries, keys and values side by side, and the gates of the heads' outputs.

        Keys and values are the last outputs, as they may be int8 where the others are int4.
        """
        y = x @ self.qkv_proj
        if self.qkv_bias is not None:
            y = y + self.qkv_bias
        if not self.gated:
            return y, ()
        queries = self.heads * self.width
        gate, y = y.split([queries, y.shape[-1] - queries], dim=-1)
        return y, (gate,)

    def write(self, x: Tensor, rows: Positions, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, gates = self.product(x)
        q, fresh, cache = grouped_rows_write(
            y, cos=rows.cos, sin=rows.sin, cache=cache, start=rows.start, **self.heads_of_product()
        )
        return append_gates(q, gates), fresh, cache

    def project(self, x: Tensor, rows: Positions) -> tuple[Tensor, Tensor]:
        y, gates = self.product(x)
        q, fresh = grouped_rows(y, cos=rows.cos, sin=rows.sin, **self.heads_of_product())
        return append_gates(q, gates), fresh

    def heads_of_product(self) -> dict[str, Any]:
        """Return the operands of `grouped_rows` that are the same in all passes, by name."""
        return {
            "q_norm": None if self.q_norm is None else self.q_norm.weight,
            "k_norm": None if self.k_norm is None else self.k_norm.weight,
            "heads": self.heads,
            "groups": self.groups,
            "width": self.width,
            "eps": self.eps,
        }

    def attend(
        self, q: Tensor, rows: Positions, cache: Tensor, fresh: Tensor, first: Tensor
    ) -> Tensor:
        gates: Gates = ()
        if self.gated:
            q, *gates = q.chunk(2, dim=-1)
        o = grouped_attention_flat(
            q,
            cache=cache,
            fresh=fresh,
            base=rows.base,
            first=first,
            scale=self.scale,
            heads=self.heads,
            groups=self.groups,
            **self.bound,
        )
        for gate in gates:
            o = o * gate.sigmoid()
        return o @ self.o_proj


def append_gates(q: Tensor, gates: Gates) -> Tensor:
    """Append the gates to the queries, so that both are passed on together."""
    return torch.cat([q, *gates], dim=-1) if gates else q


def make_grouped_model(c: GroupedConfig, ranks: Ranks) -> UniformLM:
    return UniformLM(c, lambda layer: GroupedAttention(c, ranks), c.rotary_dim, ranks)
