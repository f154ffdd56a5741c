"""How a model is split over GPUs: which ways are possible, and what each rank holds of a weight."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtpbuild.builder.forecast.machines import Gpu
from mtpbuild.builder.models.deepseek_v3.config import ModelConfig
from mtpbuild.builder.quantize.format import Shape
from mtpbuild.runtime.errors import UsageError

BLOCKS = {"fp8": 128, "nvfp4": 16, "int8": 32, "int4": 32}  # columns that a split must not cut
REPLICATED = re.compile(
    r".*(norm\.weight|\.gate\..*|\.q_a_proj\.weight|kv_a_proj_with_mqa\.weight)"
)


@dataclass(frozen=True)
class Ranks:
    """tp GPUs; of the routed experts' split, ep parts are whole experts and tp / ep are columns.

    attention_dp: every rank holds all of attention, dense layers and head, and its own requests.
    """

    tp: int = 1
    ep: int = 1
    attention_dp: bool = False

    def share(self, name: str, shape: Shape) -> float:
        """The part of a stored tensor that one rank holds (spec/deepseek-v3.md section 5)."""
        if ".experts." in name:
            return 1 / self.tp if shape or self.ep == self.tp else 1 / self.ep
        if self.attention_dp or not shape or REPLICATED.fullmatch(name):
            return 1.0
        return 1 / self.tp

    def local(self, requests: int) -> int:
        """Requests that the fullest rank serves."""
        return -(-requests // self.tp) if self.attention_dp else requests

    def check(self, c: ModelConfig, gpu: Gpu) -> None:
        """Raise UsageError for numbers that no number format makes right."""
        for flag, value in (("--tp", self.tp), ("--ep", self.ep)):
            if value < 1:
                raise UsageError(f"{flag} {value} must be at least 1")
        if self.tp > gpu.ranks:
            raise UsageError(f"--tp {self.tp}: a {gpu.name} machine has {gpu.ranks} GPUs")
        experts = max(c.n_routed_experts, 1)
        if self.tp % self.ep or experts % self.ep:
            good = [n for n in range(1, self.tp + 1) if self.tp % n == 0 and experts % n == 0]
            raise UsageError(
                f"--ep {self.ep} does not divide both --tp {self.tp} and the {experts} routed "
                f"experts; possible: {_list(good)}"
            )

    def check_blocks(self, c: ModelConfig, formats: Mapping[str, str], gpu: Gpu) -> None:
        """Raise UsageError with the tp that work; formats: of each class of weights."""
        why = self._obstacle(c, formats)
        if why:
            others = (replace(self, tp=n) for n in range(self.ep, gpu.ranks + 1, self.ep))
            good = [other.tp for other in others if not other._obstacle(c, formats)]
            raise UsageError(f"--tp {self.tp} does not divide {why}; possible: {_list(good)}")

    def _obstacle(self, c: ModelConfig, formats: Mapping[str, str]) -> str:
        """What does not split into so many parts."""
        splits = [("moe_intermediate_size", c.moe_intermediate_size, "experts", self.tp // self.ep)]
        if not self.attention_dp:
            if c.num_attention_heads % self.tp:
                return f"the {c.num_attention_heads} attention heads"
            if c.vocab_size % self.tp:
                return f"the vocabulary of {c.vocab_size}"
            rows = c.num_attention_heads * c.v_head_dim
            splits += [
                ("num_attention_heads x v_head_dim", rows, "attention", self.tp),
                ("intermediate_size", c.intermediate_size, "dense MLPs", self.tp),
            ]
        for name, size, kind, parts in splits:
            block = BLOCKS.get(formats.get(kind, ""), 1)
            if parts > 1 and size % (block * parts):
                return f"{name} {size} into blocks of {block}"
        return ""


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "none"
