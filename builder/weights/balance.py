"""Keys and queries balanced by powers of two, so that int8 caches lose less of them.

A row of an int8 cache has one scale for the keys of a head. Where biases or norms make some of its
channels much larger than others, the others are rounded coarsely. So each channel of the keys is
divided by a power of two, and that of the queries multiplied by it: no score changes. Both channels
of a rotary pair have the same power, which the rotation passes on.
"""

import re
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtpbuild.builder.checkpoint.config import KeyRows, ModelConfig
from mtpbuild.builder.formats import Format
from mtpbuild.builder.models.common.weight import Readable
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.plugins.cpu.layout import multiply_scales

QUERY_OR_KEY = re.compile(r"(.+\.)self_attn\.([qk])_(proj|norm)\.(weight|bias)")
INPUT_DEVIATIONS = 3.0  # of a product's inputs, whose mean square the norm makes 1
MAX_EXPONENT = 5  # exponent of a power


@dataclass(frozen=True)
class BalancedReader:
    """A checkpoint whose queries and keys are read balanced."""

    checkpoint: Readable
    stored: Checkpoint  # the same weights before they are quantised
    config: ModelConfig
    powers: dict[str, Tensor] = field(default_factory=dict)  # [heads, D] by layer

    def read(self, name: str) -> Tensor:
        """Read a weight in fp32."""
        tensor = self.checkpoint.read(name)
        if (factors := self.find_factors(name)) is None:
            return tensor
        added = float(self.config.norms_minus_one and "_norm." in name)
        return (tensor + added) * factors.view(-1, *[1] * (tensor.dim() - 1)) - added

    def read_engine_parts(self, name: str, engine_format: Format | None) -> dict[str, Tensor]:
        """Read a quantised weight's parts, of which the scales are balanced."""
        parts = self.checkpoint.read_engine_parts(name, engine_format)
        if (factors := self.find_factors(name)) is None:
            return parts
        return parts | {"_scale": multiply_scales(parts["_scale"], factors)}

    def find_factors(self, name: str) -> Tensor | None:
        """Return the factor of each row of a weight of queries or keys; None for other weights."""
        if not (match := QUERY_OR_KEY.fullmatch(name)):
            return None
        rows = self.config.find_key_rows(match[1])
        if rows is None or (match[3] == "proj" and rows.has_norm):
            return None
        if rows.layer not in self.powers:
            self.powers[rows.layer] = self._balance(rows)
        powers = self.powers[rows.layer]
        if match[2] == "k":
            return 1 / powers.flatten()
        times = 1 if rows.has_norm else rows.queries
        return powers.repeat_interleave(times, dim=0).flatten()

    def _balance(self, rows: KeyRows) -> Tensor:
        """Return the powers of a layer's key heads [heads, D]; heads share those of norms."""
        queries, keys = (self._measure_amplitudes(rows, name) for name in "qk")
        queries = queries.unflatten(0, (len(keys), -1)).amax(1)
        exponents = (keys.log2() - queries.log2()) / 2
        exponents = torch.where(exponents.isfinite(), exponents, 0.0)
        exponents -= exponents.mean(1, keepdim=True)
        return exponents.round().clamp(-MAX_EXPONENT, MAX_EXPONENT).exp2()

    def _measure_amplitudes(self, rows: KeyRows, name: str) -> Tensor:
        """Return how large queries or keys get, [heads, D]; both channels of a pair the same."""
        c, read, layer = self.config, self.stored.read, rows.layer
        at = f"{layer}self_attn.{name}"
        if rows.has_norm:
            squares = (read(f"{at}_norm.weight") + c.norms_minus_one).square()
        else:
            norm = read(f"{layer}input_layernorm.weight") + c.norms_minus_one
            squares = (INPUT_DEVIATIONS * read(f"{at}_proj.weight") * norm).square().sum(1)
            if rows.has_bias:
                squares += read(f"{at}_proj.bias").square()
        squares = squares.view(-1, rows.width)
        pairs, others = squares.split([rows.rotated, rows.width - rows.rotated], dim=1)
        both = pairs.unflatten(1, (2, -1)).sum(1)
        return torch.cat([both, both, others], dim=1).sqrt()
