"""Measures how a step's time grows with cached tokens and requests, and llama.cpp's with sequences.

Caches are filled with random values, without a prompt. llama.cpp runs twice: with its caches of
f16, and with those of q8_0. What rows add is a step's time less the time of a step of as many
requests with 1,024 cached tokens each.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from mtpbuild.runtime.contract.manifest import read_manifest
from one.cost import Counted, as_json, count_row_bytes
from one.files import Workshop
from one.report import NONE, Aim, over
from one.run import Run
from one.section import Data, Found
from one.shapes import published
from one.sides import LLAMA, LLAMA_Q8, Measured, Side, decode, ours, take_turns

NEXTN, RATES = 1, (0.85,)  # as many drafts as the shape has modules
PLAIN, DRAFTING, INT8 = OURS = "nextn 0", f"nextn {NEXTN}", "nextn 0, int8 caches"
# Cached tokens of each request -> numbers of concurrent requests; an engine is built for the
# largest.
LOADS = {1024: (1, 2, 4, 8), 8192: (1, 2, 4, 8), 32768: (1, 2)}
BASE = min(LOADS)
THEIRS = (LLAMA, LLAMA_Q8)
AIM = Aim(0.25)  # of llama.cpp's time with f16 caches, for rows
WARM = "warm"  # the first ask, which loads programs before memory is read
MS, MB = 1e3, 1e-6
STEPS = 12


@dataclass(frozen=True)
class Load:
    """A number of concurrent requests, each with `context` cached tokens."""

    context: int
    batch: int

    def __str__(self) -> str:
        return f"{self.context} x {self.batch}"


def by_batch() -> dict[int, list[Load]]:
    """Group the loads by their engine's max_batch, the smaller ones first."""
    found: dict[int, list[Load]] = {}
    for context, batches in LOADS.items():
        found.setdefault(max(batches), []).extend(Load(context, batch) for batch in batches)
    return found


def every() -> list[Load]:
    return [load for loads in by_batch().values() for load in loads]


@dataclass(frozen=True)
class Contexts:
    """The section of a recipe's shape."""

    recipe: str

    def measure(self, run: Run) -> Data:
        shape = published(self.recipe, run.layers)
        shop = Workshop(run.folder, shape, run.watch)
        counted = shop.write_checkpoint()
        sides, costs, rows = list[Side](), dict[str, Any](), dict[str, int]()
        for most, loads in by_batch().items():
            length = max(load.context for load in loads) + 4 * STEPS
            flags = ("--max-seq-len", str(length), "--max-batch", str(most))
            built = shop.build(f"batch_{most}", (0, NEXTN), *flags)
            built += shop.build(f"int8_{most}", (0,), *flags, "--cache-dtype", "int8")
            for name, engine in zip(OURS, built, strict=True):
                sides.append(self.our_side(name, most, engine, loads, shop.vocabulary))
                costs |= self.our_costs(counted, name, engine, loads)
                rows[name] = count_row_bytes(read_manifest(engine)).total()
        shop.drop_checkpoint()
        if run.peers is not None:
            gguf, tensors = shop.write_gguf()
            asked = asks(every(), None)
            for name, caches in zip(THEIRS, ("f16", "q8_0"), strict=True):
                sides.append(Side(name, run.peers, gguf, asked, shop.vocabulary, caches=caches))
            costs |= self.their_costs(counted, tensors)
        return {
            "layers": shape.config.num_hidden_layers,
            "row_bytes": rows,
            "costs": costs,
            "rounds": take_turns(sides, run),
            "most_on_disk": shop.most,
        }

    def our_side(
        self, name: str, most: int, engine: Path, loads: list[Load], vocabulary: int
    ) -> Side:
        asked = asks(loads, RATES if name == DRAFTING else None)
        return ours(f"{name}, batch_{most}", engine, asked, vocabulary)

    def our_costs(self, counted: Counted, name: str, engine: Path, loads: list[Load]) -> Data:
        return as_json({f"{name}, {n}": counted.step(engine, n.context, n.batch) for n in loads})

    def their_costs(self, counted: Counted, tensors: Mapping[str, int]) -> Data:
        return as_json(
            {f"{LLAMA}, {n}": counted.gguf(tensors, n.context, n.batch) for n in every()}
        )

    def tables(self, found: Found) -> list[Table]:
        layers = found.data["layers"]
        title = f"{self.recipe}, {layers} layers, int4 beside Q4_0; caches filled without a prompt"
        times = Table("ms of a step (bound)", title=title, title_justify="left")
        for name in (*OURS, *THEIRS):
            times.add_column(name, justify="right")
        title = f"over llama.cpp with caches of f16, or of q8_0; aim for what rows add: {AIM}"
        ratios = Table("time over llama.cpp's", title=title, title_justify="left")
        for name in ("fp32 caches", "int8 caches", "int8 over q8_0", "fp32 rows", "int8 rows"):
            ratios.add_column(name, justify="right")
        for load in every():
            times.add_row(str(load), *self.times(found, load))
            ratios.add_row(str(load), *self.ratios(found, load))
        return [times, ratios, self.memory(found)]

    def times(self, found: Found, load: Load) -> Iterator[str]:
        for name in OURS:
            seconds, least = step(found, name, load), bound(found, name, load)
            yield f"{number(seconds, MS)} ({number(least, MS)})"
        for name in THEIRS:
            yield number(step(found, name, load), MS)

    def ratios(self, found: Found, load: Load) -> Iterator[str]:
        for own, other in ((PLAIN, LLAMA), (INT8, LLAMA), (INT8, LLAMA_Q8)):
            yield number(over(step(found, own, load), step(found, other, load)))
        for own in (PLAIN, INT8):
            share = over(added(found, own, load), added(found, LLAMA, load))
            yield NONE if share is None else AIM.colored(share)

    def memory(self, found: Found) -> Table:
        """Show the growth of anonymous memory since programs were loaded, and the caches in use."""
        grid = Table("cached x requests", title="memory grown, MB (caches in use)")
        for name in OURS:
            grid.add_column(name, justify="right")
        for load in every():
            cells = []
            for name in OURS:
                side = side_of(found.measured, name, load)
                now = found.measured.memory(side, str(load), "RssAnon")
                before = found.measured.memory(side, WARM, "RssAnon")
                grown = None if now is None or before is None else now - before
                caches = load.context * load.batch * found.data["row_bytes"][name]
                cells.append(f"{number(grown, MB)} ({caches * MB:.4g})")
            grid.add_row(str(load), *cells)
        return grid


def asks(loads: list[Load], rates: tuple[float, ...] | None) -> dict[str, Any]:
    found = {str(n): decode(STEPS, n.context, n.batch, rates=rates) for n in loads}
    return {WARM: decode(2, 16, rates=rates)} | found


def added(found: Found, name: str, load: Load) -> float | None:
    """Return the seconds that a step's rows beyond the first BASE of each request add."""
    least, most = step(found, name, Load(BASE, load.batch)), step(found, name, load)
    return None if load.context == BASE or least is None or most is None else most - least


def side_of(measured: Measured, name: str, load: Load) -> str:
    """Return the side that measured a load; an engine's side is named after its max_batch."""
    most = next(most for most, loads in by_batch().items() if load in loads)
    return name if name in THEIRS else f"{name}, batch_{most}"


def step(found: Found, name: str, load: Load) -> float | None:
    return found.measured.step(side_of(found.measured, name, load), str(load))


def bound(found: Found, name: str, load: Load) -> float | None:
    return found.bound(f"{name}, {load}", "int4")


def number(value: float | None, factor: float = 1.0) -> str:
    return NONE if value is None else f"{value * factor:.3g}"
