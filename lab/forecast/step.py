"""Counts of the bytes and operations of a step's parts on one rank, and their least time.

T = B (nextn + 1) tokens are verified. The first draft's pass covers the same tokens, each further
pass one token per request; every pass reads the head. A pass reads its weights once, and of the
routed experts only those that some token chose.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.models import find_family_of
from mtpbuild.builder.models.costs import Costs
from mtpbuild.builder.plan.plan import (
    DrafterName,
    choose_drafter,
    count_cached_layers,
    count_int8_width,
    count_ring_rows,
)
from mtpbuild.builder.plan.weight_classes import WeightClass
from mtpbuild.lab.forecast.machines import GpuSpec
from mtpbuild.runtime.contract.drafters import ASSISTANT, BLOCK_HEAD, VANILLA
from mtpbuild.runtime.ranks import Ranks

CACHE_BYTES = {"bfloat16": 2, "float32": 4}  # of a number; int8 rows have scales besides


@dataclass(frozen=True)
class LayerRows:
    """The cache rows of a layer: width, sizes of their parts, how many it sees (0: all)."""

    width: int
    sections: tuple[int, ...]
    window: int

    def count_bytes(self, cache: str) -> int:
        """Count the bytes of a row in a cache of this type."""
        if cache == "int8":
            return count_int8_width(self.width, self.sections)
        return self.width * CACHE_BYTES[cache]


@dataclass(frozen=True)
class StepLoad:
    """The number of requests, the cached tokens of each, and the caches' number format."""

    batch: int
    context: int
    cache: str


@dataclass(frozen=True)
class StepPart:
    """A part's bytes and operations per rank and step, and its least seconds."""

    name: str
    bytes: float
    operations: float
    seconds: float
    limit: str  # memory or compute


@dataclass(frozen=True)
class CostModel:
    """A model on its ranks."""

    config: ModelConfig
    classes: list[WeightClass]
    ranks: Ranks
    gpu: GpuSpec

    @property
    def costs(self) -> Costs:
        return find_family_of(self.config).costs(self.config, self.ranks)

    @property
    def rows(self) -> list[LayerRows]:
        """The cache rows of each layer, then of each MTP module."""
        family = find_family_of(self.config)
        rows = family.list_rows(self.config, self.ranks)
        windows = [*family.windows(self.config), *[0] * len(rows)]
        return [LayerRows(*row, window) for row, window in zip(rows, windows, strict=False)]

    @property
    def state_bytes(self) -> int:
        """The bytes of a request's recurrent states, which are always fp32."""
        states = find_family_of(self.config).recurrent(self.config, self.ranks)
        return sum(CACHE_BYTES["float32"] * prod(state.sizes.values()) for state in states)

    def drafter(self, nextn: int) -> DrafterName | None:
        return choose_drafter(self.config, nextn, None)

    def step(self, nextn: int, load: StepLoad) -> list[StepPart]:
        """List the parts of one step."""
        return [*self._verify(nextn, load), *self._draft(nextn, load)]

    def _verify(self, nextn: int, load: StepLoad) -> Iterator[StepPart]:
        for weights in self.classes:
            if not weights.module and weights.name != "embedding":
                yield self._count_weights(weights.name, [weights], [nextn + 1], load)
        trunk = self.rows[: self.config.num_hidden_layers]
        yield self._cache("caches", trunk, [nextn + 1], load)
        if self.state_bytes:  # verifying reads the state; advancing it reads and writes it
            bytes = 3 * self.ranks.local(load.batch) * self.state_bytes
            yield self._make_part("recurrent states", bytes, 0, 0)

    def _draft(self, nextn: int, load: StepLoad) -> Iterator[StepPart]:
        """Count drafting: Eagle runs one module nextn times, vanilla runs nextn modules in full.

        A block has one pass of all drafts; the rows of its context are left out.
        """
        if nextn == 0:
            return
        drafter = self.drafter(nextn)
        counts = [nextn + 1, *[1] * (nextn - 1)]
        if drafter == VANILLA:
            counts = [nextn + 1] * nextn
        elif drafter == ASSISTANT:
            counts = [1] * nextn
        elif drafter == BLOCK_HEAD:
            counts = [nextn]
        modules = self.config.num_nextn_predict_layers
        ends = ("embedding", "head")
        inner = [weights for weights in self.classes if weights.module and weights.name not in ends]
        yield self._count_weights("MTP modules", inner, counts, load, 1 / modules)
        heads = [weights for weights in self.classes if weights.name.endswith("head")]
        heads = [weights for weights in heads if weights.module] or heads  # its own, if any
        of_head = [nextn] if drafter == BLOCK_HEAD else [1] * nextn
        yield self._count_weights("head of drafts", heads, of_head, load)
        yield self._cache("MTP caches", self._list_rows_of_drafts(), counts, load)

    def _list_rows_of_drafts(self) -> list[LayerRows]:
        """List the rows that a draft reads: a module's, or those of the trunk that a head reads."""
        head, rows = self.config.head, self.rows
        read = head.list_read_layers(self.config) if head else []
        of_head = rows[self.config.num_hidden_layers :] if head else rows[-1:]
        return [rows[layer] for layer in read] or of_head

    def _count_weights(
        self,
        name: str,
        classes: list[WeightClass],
        counts: list[int],
        load: StepLoad,
        share: float = 1.0,
    ) -> StepPart:
        """Count reads of weights; `counts` has each pass's tokens per request.

        share: the fraction of these weights that a pass reads.
        """
        c = self.costs
        bytes = 0.0
        operations = 0.0
        compute = 0.0
        for weights in classes:
            for count in counts:
                read = chosen = 1.0
                tokens = self.ranks.local(load.batch) * count
                if weights.name == "experts":  # a rank's experts serve all ranks' requests
                    tokens = load.batch * count
                    read = count_distinct_experts(c, tokens) / c.experts
                    chosen = c.chosen / c.experts
                bytes += weights.per_rank * share * read
                work = 2 * weights.parameters_per_rank * share * chosen * tokens
                operations += work
                compute += work / self.gpu.peak(weights.format)
        return self._make_part(name, bytes, operations, compute)

    def _cache(
        self, name: str, layers: list[LayerRows], passes: list[int], load: StepLoad
    ) -> StepPart:
        """Count reads of the context's cache rows in these layers, and attention.

        passes: tokens of each. Where tokens choose rows (DSA), all are assumed to choose others.
        """
        c = self.costs
        read = 0.0
        operations = 0.0
        for rows in layers:
            if not (width := rows.width):
                continue
            context = min(load.context, rows.window or load.context)
            attended = c.attended or width
            scoring = c.scoring if width > attended else 0.0
            for tokens in passes:
                rows_per_token, rows_read = (c.rows(context, count) for count in (1, tokens))
                values = rows_read * attended + context * (width - attended)
                read += values * rows.count_bytes(load.cache) / width
                operations += tokens * (rows_per_token * c.row_operations + context * scoring)
        requests = self.ranks.local(load.batch)
        bytes, operations = requests * read, requests * operations
        return self._make_part(name, bytes, operations, operations / self.gpu.peak("bf16"))

    def _make_part(self, name: str, bytes: float, operations: float, compute: float) -> StepPart:
        memory = bytes / self.gpu.bandwidth
        limit = "memory" if memory >= compute else "compute"
        return StepPart(name, bytes, operations, max(memory, compute), limit)

    def cache_bytes(self, nextn: int, cache: str) -> int:
        """Count a token's bytes per rank in the layers that keep it, and in modules that draft."""
        return sum(rows.count_bytes(cache) for rows in self._list_used(nextn) if not rows.window)

    def ring_bytes(self, nextn: int, cache: str, chunk: int, capacity: int) -> int:
        """Count the bytes per request and rank of the layers that see a window."""
        return sum(
            rows.count_bytes(cache) * count_ring_rows(rows.window, chunk, nextn + 1, capacity)
            for rows in self._list_used(nextn)
            if rows.window
        )

    def _list_used(self, nextn: int) -> list[LayerRows]:
        used = self.config.num_hidden_layers + count_cached_layers(
            self.config, self.drafter(nextn), nextn
        )
        return self.rows[:used]

    def weight_bytes(self, nextn: int) -> float:
        """Count the bytes of weights per rank; without drafts the modules are not loaded."""
        return sum(weights.per_rank for weights in self.classes if nextn or not weights.module)

    def scratch_bytes(self, nextn: int, batch: int, chunk: int, rows: int) -> float:
        """Count a pass's largest activations (bf16) and a step's logits (fp32), per rank.

        A prompt's attention over `rows` rows is included. Recurrent states are counted here, as
        they do not grow with the context.
        """
        c = self.costs
        window = self.ranks.local(batch) * (nextn + 1)
        activations = 2 * max(chunk, window) * c.activations
        activations += 2 * rows * (chunk * c.scores + c.expanded)
        states = self.ranks.local(batch) * self.state_bytes
        return activations + 4 * window * self.config.vocab_size + states


def count_distinct_experts(c: Costs, tokens: int) -> float:
    """Return how many of a layer's experts tokens choose on average, if all are equally likely."""
    if not c.experts:
        return 0.0
    return c.experts * (1 - (1 - c.chosen / c.experts) ** tokens)
