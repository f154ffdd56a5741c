"""Measures how a token's time grows with the context where attention reads few of its rows.

DeepSeek-V4 attends to a window and to compressed rows, DeepSeek-V3.2 to chosen rows of single
tokens. Layers and experts are cut so that a machine holds them. Caches are filled with random
values, without a prompt.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from one.cost import as_json
from one.files import Workshop
from one.report import Aim, Row, over, rate, table
from one.run import Run
from one.section import Data, Found
from one.shapes import published
from one.sides import decode, ours, take_turns

CONTEXTS = (1024, 8192, 65536)
PLAIN, DRAFTING = "nextn 0", "drafting"
RATES = (0.8, 0.64, 0.51, 0.41, 0.33)  # at which drafts are accepted
WEIGHTS = "int4"
AIM = Aim(1.5)  # a token's time over its bound


@dataclass(frozen=True)
class CutShape:
    """A recipe with fewer layers and experts; `changes` are those of its configuration.

    int8: globs of the modules that are int8, beside experts in int4.
    """

    recipe: str
    changes: Mapping[str, Any]
    int8: tuple[str, ...] = ()
    nextn: int = 3

    @property
    def rates(self) -> tuple[float, ...]:
        return RATES[: self.nextn]


BESIDE_EXPERTS = ("*.self_attn.*", "*.shared_experts.*")
V4 = {"num_hidden_layers": 4, "n_routed_experts": 64}
MTP = CutShape(
    "deepseek-v4-flash-preview", {**V4, "compress_ratios": [0, 0, 4, 128, 0]}, BESIDE_EXPERTS
)
DSPARK = CutShape(
    "deepseek-v4-flash",
    {**V4, "compress_ratios": [0, 0, 4, 128, 0, 0, 0], "dspark_target_layer_ids": [1, 2, 3]},
    BESIDE_EXPERTS,
    nextn=5,
)
V32 = CutShape("deepseek-v3.2", {"num_hidden_layers": 4, "n_routed_experts": 32})


@dataclass(frozen=True)
class Compressed:
    """The section of V4's shape with each kind of head, and of V3.2's."""

    shapes: tuple[CutShape, ...] = (MTP, DSPARK, V32)

    def measure(self, run: Run) -> Data:
        return {shape.recipe: self.measure_shape(shape, run) for shape in self.shapes}

    def measure_shape(self, cut: CutShape, run: Run) -> Data:
        shape = published(cut.recipe, None, WEIGHTS, cut.changes, cut.int8)
        shop = Workshop(run.folder / cut.recipe, shape, run.watch)
        shop.folder.mkdir(parents=True, exist_ok=True)
        counted = shop.write_checkpoint()
        length = str(max(CONTEXTS) + 4 * run.steps)
        built = shop.build("whole", (0, cut.nextn), "--max-seq-len", length)
        engines = dict(zip((PLAIN, DRAFTING), built, strict=True))
        shop.drop_checkpoint()
        asks = {name: decode(run.steps, int(name)) for name in map(str, CONTEXTS)}
        drafting = {name: ask | {"rates": cut.rates} for name, ask in asks.items()}
        sides = [
            ours(name, engine, asks if name == PLAIN else drafting, shop.vocabulary)
            for name, engine in engines.items()
        ]
        costs = {
            f"{name}, {context}": counted.step(engine, context, 1)
            for name, engine in engines.items()
            for context in CONTEXTS
        }
        return {"costs": as_json(costs), "rounds": take_turns(sides, run), "most": shop.most}

    def tables(self, found: Found) -> list[Table]:
        return [
            table(
                f"{cut.recipe}, {cut.changes['num_hidden_layers']} layers, "
                f"{cut.changes['n_routed_experts']} experts, random weights; drafting: nextn "
                f"{cut.nextn}; ratio: over the bound",
                self.rows(Found(found.data[cut.recipe], found.machine), cut),
            )
            for cut in self.shapes
        ]

    def rows(self, found: Found, cut: CutShape) -> Iterator[Row]:
        for name in (PLAIN, DRAFTING):
            for context in CONTEXTS:
                seconds = found.measured.step(name, str(context))
                cost = f"{name}, {context}"
                row = found.timed(
                    f"step after {context:,}, {name}", (seconds, None), (cost, cost), WEIGHTS
                )
                yield row.judge(over(seconds, found.bound(cost, WEIGHTS)), AIM)
        tokens = 1 + sum(cut.rates)
        for context in CONTEXTS:
            before = rate(1, found.measured.step(PLAIN, str(context)))
            after = rate(tokens, found.measured.step(DRAFTING, str(context)))
            row = Row(f"{tokens:.2f} tokens a step after {context:,}", "tokens/s", (after, None))
            yield row.judge(over(after, before))
