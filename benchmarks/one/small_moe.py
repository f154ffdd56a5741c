"""Compares a 64-expert model of 0.95 billion parameters in fp32 and int8 with F32 and Q8_0."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from one.cost import Counted, as_json
from one.files import Workshop, on_disk
from one.report import Aim, Row, over, rate, scaled, table
from one.run import Run
from one.section import Data, Found
from one.shapes import small
from one.sides import LLAMA, Side, decode, ours, prompt, take_turns

PLAIN, NEXTN = "nextn 0", 3
DRAFTING = f"nextn {NEXTN}"
FORMATS = ("fp32", "int8")
SHORT, PROMPT = 32, 256
GB = 1e-9
STEP = 1.2  # a step with drafts may take this factor more than its ratio of bytes


class SmallMoE:
    def measure(self, run: Run) -> Data:
        found = {}
        for weights in FORMATS:
            own = replace(run, folder=run.folder / weights)
            own.folder.mkdir(exist_ok=True)
            found[weights] = self.measure_one(own, weights)
        return found

    def measure_one(self, run: Run, weights: str) -> Data:
        shop = Workshop(run.folder, small(run.layers, weights), run.watch)
        counted = shop.write_checkpoint()
        plain, drafting = shop.build("whole", (0, NEXTN), "--max-seq-len", str(2 * PROMPT))
        shop.drop_checkpoint()
        engines = {PLAIN: plain, DRAFTING: drafting}
        sides, costs = [*self.sides(engines, run, shop)], self.costs(counted, engines)
        sizes = {name: on_disk(engine) for name, engine in engines.items()}
        if run.peers is not None:
            gguf, tensors = shop.write_gguf(run.peers)
            asks = {
                "short": decode(run.steps, SHORT, filled=False),
                "prompt": prompt(PROMPT),
                "verify": decode(run.steps, SHORT, filled=False, window=NEXTN + 1),
            }
            sides.append(Side(LLAMA, run.peers, gguf, asks, shop.vocabulary))
            costs |= self.their_costs(counted, tensors)
            sizes[LLAMA] = gguf.stat().st_size
        return {
            "layers": shop.shape.config.num_hidden_layers,
            "sizes": sizes,
            "costs": costs,
            "rounds": take_turns(sides, run),
        }

    def sides(self, engines: dict[str, Path], run: Run, shop: Workshop) -> Iterator[Side]:
        short = {"short": decode(run.steps, SHORT, filled=False)}
        for name, engine in engines.items():
            rest = {"prompt": prompt(PROMPT)} if name == PLAIN else {}
            yield ours(name, engine, short | rest, shop.vocabulary)

    def costs(self, counted: Counted, engines: dict[str, Path]) -> Data:
        costs = {name: counted.step(engine, SHORT, 1) for name, engine in engines.items()}
        return as_json(costs | {"prompt": counted.prompt(engines[PLAIN], PROMPT)})

    def their_costs(self, counted: Counted, tensors: dict[str, int]) -> Data:
        costs = {
            LLAMA: counted.gguf(tensors, SHORT, 1),
            f"{LLAMA}, prompt": counted.gguf_prompt(tensors, PROMPT),
            f"{LLAMA}, verify": counted.gguf(tensors, SHORT, 1, NEXTN + 1),
        }
        return as_json(costs)

    def tables(self, found: Found) -> list[Table]:
        return [
            table(
                f"64 experts, {data['layers']} layers, random weights, {weights}",
                self.rows(Found(data, found.machine), weights),
            )
            for weights, data in found.data.items()
        ]

    def rows(self, found: Found, weights: str) -> Iterator[Row]:
        measured, sizes = found.measured, found.data["sizes"]
        size, theirs = sizes[PLAIN], sizes.get(LLAMA)
        yield Row("engine on disk", "GB", (size * GB, scaled(theirs, GB)))
        own, other = measured.memory(PLAIN, "short"), measured.memory(LLAMA, "short")
        row = Row("peak memory, greedy, nextn 0", "GB", (scaled(own, GB), scaled(other, GB)))
        yield row.judge(over(own, size), None, over(other, theirs))
        own, other = measured.prompt(PLAIN, "prompt"), measured.prompt(LLAMA, "prompt")
        bounds = (found.bound(name, weights) for name in ("prompt", f"{LLAMA}, prompt"))
        speeds = (*(rate(PROMPT, seconds) for seconds in (own, other, *bounds)),)
        row = Row(f"prompt of {PROMPT}", "tokens/s", speeds)
        yield row.judge(over(other, own), Aim(1.0, at_least=True))
        yield from self.steps(found, weights)

    def steps(self, found: Found, weights: str) -> Iterator[Row]:
        """Yield rows of a token, and of a step over four tokens."""
        measured = found.measured
        plain, drafting = found.cost(PLAIN), found.cost(DRAFTING)
        assert plain is not None
        assert drafting is not None
        one, other = measured.step(PLAIN, "short"), measured.step(LLAMA, "short")
        token = found.timed(f"token after {SHORT}, nextn 0", (one, other), (PLAIN, LLAMA), weights)
        yield token.judge(over(one, other))
        four, other = measured.step(DRAFTING, "short"), measured.step(LLAMA, "verify")
        label = f"step, {DRAFTING}; {NEXTN + 1} tokens of llama.cpp"
        step = found.timed(label, (four, other), (DRAFTING, f"{LLAMA}, verify"), weights)
        beside = drafting.bytes / plain.bytes
        yield step.judge(over(four, one), Aim(STEP * beside), beside)
