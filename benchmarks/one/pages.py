"""Measures what weights in huge pages bring: a token's time, and the start that copies them."""

from collections.abc import Iterator

from rich.table import Table

from one.cost import as_json
from one.files import Workshop
from one.report import NONE, over
from one.run import Run
from one.section import Data, Found
from one.shapes import published
from one.sides import decode, ours, take_turns

MAPPED, HUGE = OURS = "mapped weights", "huge pages"
CONTEXT = 32
MS, GB = 1e3, 1e-9


class Pages:
    def __init__(self, recipe: str) -> None:
        self.recipe = recipe

    def measure(self, run: Run) -> Data:
        shop = Workshop(run.folder, published(self.recipe, run.layers), run.watch)
        counted = shop.write_checkpoint()
        (engine,) = shop.build("whole", (0,), "--max-seq-len", "1024")
        shop.drop_checkpoint()
        asks = {"token": decode(run.steps, CONTEXT)}
        sides = [
            ours(name, engine, asks, shop.vocabulary, huge_pages=name == HUGE) for name in OURS
        ]
        return {
            "layers": shop.shape.config.num_hidden_layers,
            "costs": as_json({"token": counted.step(engine, CONTEXT, 1)}),
            "rounds": take_turns(sides, run),
        }

    def tables(self, found: Found) -> list[Table]:
        title = f"{self.recipe}, {found.data['layers']} layers, int4, a token after {CONTEXT}"
        grid = Table("figure", *OURS, "ratio", title=title, title_justify="left")
        for name, *values in self.rows(found):
            cells = (NONE if each is None else f"{each:.3g}" for each in values)
            grid.add_row(name, *cells)
        return [grid]

    def rows(self, found: Found) -> Iterator[tuple[str, float | None, float | None, float | None]]:
        measured, least = found.measured, found.bound("token", "int4")
        name = "token, ms" if least is None else f"token, ms (bound {least * MS:.3g})"
        for row, factor, values in (
            (name, MS, [measured.step(side, "token") for side in OURS]),
            ("start to first token, s", 1.0, [measured.first(side) for side in OURS]),
            (
                "private memory, GB",
                GB,
                [measured.memory(side, "token", "RssAnon") for side in OURS],
            ),
        ):
            mapped, huge = (None if each is None else each * factor for each in values)
            yield row, mapped, huge, over(huge, mapped)
