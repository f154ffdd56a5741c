"""What one step moves and computes on one rank, part by part, and how long that takes at least.

T = B (nextn + 1) tokens are verified. A draft's first pass covers the same tokens, each further
pass one token per request; every pass reads the head. Weights are read once per pass, of the routed
experts those that some token chose.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mtpbuild.builder.forecast.machines import Gpu
from mtpbuild.builder.forecast.ranks import Ranks
from mtpbuild.builder.forecast.weights import Class
from mtpbuild.builder.models.deepseek_v3.config import ModelConfig
from mtpbuild.builder.plan import choose_drafter

CACHE_BYTES = {"bf16": 2, "fp8": 1, "fp32": 4}


@dataclass(frozen=True)
class Load:
    """Requests at once, cached tokens of each, and the caches' number format."""

    batch: int
    context: int
    cache: str


@dataclass(frozen=True)
class Part:
    """Bytes and operations per rank and step, and the seconds that they take at least."""

    name: str
    bytes: float
    operations: float
    seconds: float
    limit: str  # memory or compute


@dataclass(frozen=True)
class Model:
    """A model on its ranks."""

    config: ModelConfig
    classes: list[Class]
    ranks: Ranks
    gpu: Gpu

    def step(self, nextn: int, load: Load) -> list[Part]:
        """The parts of one step."""
        return [*self._verify(nextn, load), *self._draft(nextn, load)]

    def _verify(self, nextn: int, load: Load) -> Iterator[Part]:
        for one in self.classes:
            if not one.module and one.name != "embedding":
                yield self._weights(one.name, [one], [nextn + 1], load)
        yield self._cache("caches", self.config.num_hidden_layers, [nextn + 1], load)

    def _draft(self, nextn: int, load: Load) -> Iterator[Part]:
        """MTP Eagle runs one module nextn times; MTP vanilla runs each over the whole window."""
        if nextn == 0:
            return
        vanilla = choose_drafter(self.config, nextn, None) == "mtp-vanilla"
        counts = [nextn + 1] * nextn if vanilla else [nextn + 1, *[1] * (nextn - 1)]
        modules = self.config.num_nextn_predict_layers
        own = [one for one in self.classes if one.module]
        yield self._weights("MTP modules", own, counts, load, 1 / modules)
        heads = [one for one in self.classes if one.name.endswith("head")]
        yield self._weights("head of drafts", heads, [1] * nextn, load)
        yield self._cache("MTP caches", 1, counts, load)

    def _weights(
        self, name: str, classes: list[Class], counts: list[int], load: Load, share: float = 1.0
    ) -> Part:
        """Weights under passes of so many tokens per request; share: of the classes in use."""
        c, bytes, operations, compute = self.config, 0.0, 0.0, 0.0
        for one in classes:
            for count in counts:
                touched = chosen = 1.0
                tokens = self.ranks.local(load.batch) * count
                if one.name == "experts":  # of all ranks' requests
                    tokens = load.batch * count
                    touched = distinct_experts(c, tokens) / c.n_routed_experts
                    chosen = c.num_experts_per_tok / c.n_routed_experts
                bytes += one.per_rank * share * touched
                held = one.parameters * one.per_rank / one.bytes
                work = 2 * held * share * chosen * tokens
                operations += work
                compute += work / self.gpu.peak(one.format)
        return self._part(name, bytes, operations, compute)

    def _cache(self, name: str, layers: int, passes: list[int], load: Load) -> Part:
        """Latents of the context, and the absorbed scores and values over them, per pass."""
        c, local = self.config, self.ranks.local(load.batch)
        heads = c.num_attention_heads / (1 if self.ranks.attention_dp else self.ranks.tp)
        rows = local * load.context * layers
        bytes = len(passes) * rows * c.cache_dim * CACHE_BYTES[load.cache]
        operations = 2.0 * rows * heads * (c.cache_dim + c.kv_lora_rank) * sum(passes)
        return self._part(name, bytes, operations, operations / self.gpu.peak("bf16"))

    def _part(self, name: str, bytes: float, operations: float, compute: float) -> Part:
        memory = bytes / self.gpu.bandwidth
        limit = "memory" if memory >= compute else "compute"
        return Part(name, bytes, operations, max(memory, compute), limit)

    def cache_bytes(self, nextn: int, cache: str) -> int:
        """Per token and rank: latent caches have no head axis, so every rank holds all of them."""
        modules = 0
        if nextn:
            modules = nextn if choose_drafter(self.config, nextn, None) == "mtp-vanilla" else 1
        layers = self.config.num_hidden_layers + modules
        return layers * self.config.cache_dim * CACHE_BYTES[cache]

    def weight_bytes(self, nextn: int) -> float:
        """Per rank; without drafts the modules are not loaded."""
        return sum(one.per_rank for one in self.classes if nextn or not one.module)

    def scratch_bytes(self, nextn: int, batch: int, chunk: int) -> float:
        """Largest activations of a pass (bf16) and the logits of a step (fp32), per rank."""
        c, split = self.config, 1 if self.ranks.attention_dp else self.ranks.tp
        tokens = max(chunk, self.ranks.local(batch) * (nextn + 1))
        heads = c.num_attention_heads / split
        attention = heads * (2 * c.cache_dim + c.qk_head_dim + c.v_head_dim)
        experts = c.num_experts_per_tok * (2 * c.moe_intermediate_size + c.hidden_size)
        dense = 3 * c.intermediate_size / split
        widest = max(attention, experts, dense) + 4 * c.hidden_size
        logits = self.ranks.local(batch) * (nextn + 1) * c.vocab_size
        return 2 * tokens * widest + 4 * logits


def distinct_experts(c: ModelConfig, tokens: int) -> float:
    """Expected number of a layer's experts that some of the tokens choose, all equally likely."""
    if not c.n_routed_experts:
        return 0.0
    missed = (1 - c.num_experts_per_tok / c.n_routed_experts) ** tokens
    return c.n_routed_experts * (1 - missed)
