"""Measures how fast prompts of several lengths are processed, and llama.cpp's speed."""

from collections.abc import Iterator

from rich.table import Table

from one.cost import as_json
from one.files import Workshop
from one.report import Aim, Row, over, rate, table
from one.run import Run
from one.section import Data, Found
from one.shapes import MOE, published
from one.sides import LLAMA, Side, ours, prompt, take_turns

OURS, INT8 = "nextn 0", "nextn 0, int8 caches"
AIMS = {256: 2.5, 2048: 2.0, 8192: 1.6}  # length -> our tokens per second over llama.cpp's
ROOM = 64  # cached tokens beyond the longest prompt


class Prompts:
    def measure(self, run: Run) -> Data:
        shop = Workshop(run.folder, published(MOE, run.layers), run.watch)
        counted, most = shop.write_checkpoint(), max(AIMS) + ROOM
        length = ("--max-seq-len", str(most))
        (engine,) = shop.build("whole", (0,), *length)
        (narrow,) = shop.build("int8", (0,), *length, "--cache-dtype", "int8")
        shop.drop_checkpoint()
        asks = {str(length): prompt(length, 1) for length in AIMS}
        built = {OURS: engine, INT8: narrow}
        sides = [ours(name, folder, asks, shop.vocabulary) for name, folder in built.items()]
        costs = {f"{OURS}, {length}": counted.prompt(engine, length) for length in AIMS}
        if run.peers is not None:
            gguf, tensors = shop.write_gguf()
            sides.append(Side(LLAMA, run.peers, gguf, asks, shop.vocabulary, most))
            costs |= {f"{LLAMA}, {n}": counted.gguf_prompt(tensors, engine, n) for n in AIMS}
        return {
            "layers": shop.shape.config.num_hidden_layers,
            "costs": as_json(costs),
            "rounds": take_turns(sides, run),
        }

    def tables(self, found: Found) -> list[Table]:
        title = (
            f"{MOE}, {found.data['layers']} layers, int4 beside Q4_0 (bounds: without attention)"
        )
        return [table(title, self.rows(found))]

    def rows(self, found: Found) -> Iterator[Row]:
        for length, aim in AIMS.items():
            other = found.measured.prompt(LLAMA, str(length))
            their_bound = rate(length, found.bound(f"{LLAMA}, {length}", "int4"))
            bound = rate(length, found.bound(f"{OURS}, {length}", "int4"))
            for side in (OURS, INT8):
                own = found.measured.prompt(side, str(length))
                speeds = rate(length, own), rate(length, other), bound, their_bound
                row = Row(f"prompt of {length:,}, {side}", "tokens/s", speeds)
                yield row.judge(over(other, own), Aim(aim, at_least=True))
