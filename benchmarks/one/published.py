"""Compares a published shape in int4 with llama.cpp's Q4_0: disk, memory, start, speed, drafts.

There are three engines: nextn 0 and one that drafts, which share a weights file, and one with
drafts over a quarter of the vocabulary, where a reduced vocabulary is a choice.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rich.table import Table

from mtpbuild.builder.models.common.weight import WHOLE
from mtpbuild.builder.weights.table import list_weights
from one.cost import ENDS, Counted, as_json, group, sum_weight_bytes
from one.files import Workshop, on_disk
from one.report import Aim, Row, over, rate, scaled, table
from one.run import Run
from one.section import Data, Found
from one.shapes import Shape, published
from one.sides import LLAMA, LLAMA_MTP, Side, decode, ours, prompt, take_turns

PLAIN, DRAFTING, REDUCED = "nextn 0", "drafting", "drafting, a quarter"
SHORT = 32
GB, WEIGHTS = 1e-9, "int4"
STEP = 1.1  # a step with drafts may take this factor more than its ratio of bytes


@dataclass(frozen=True)
class Published:
    """A recipe's section, with the rates at which drafts are accepted, and aims.

    rates: unconditional, as for `--synthetic-acceptance-rates`. flags: of all builds. Aims: disk,
    GB of all layers; short and long_aim, a token's time over llama.cpp's; prompt_aim, gain and
    reduced_gain, tokens/s over llama.cpp's, the last two with drafts of all tokens and of a quarter
    (None: not built); own_gain, tokens/s with drafts over those without.
    """

    recipe: str
    nextn: int
    rates: tuple[float, ...]
    reduced_gain: float | None = None
    gain: float | None = None
    own_gain: float | None = None
    disk: float | None = None
    bits: float | None = 4.5  # of a stored weight but embeddings and heads
    layers: int | None = None  # most layers; None: all
    long: int = 1024  # cached tokens
    prompt: int = 256
    flags: tuple[str, ...] = ()
    short_aim: float = 1.0
    long_aim: float = 1.0
    prompt_aim: float = 1.5
    # Long caches are filled without a prompt. That is impossible for llama.cpp's recurrent states.
    filled: bool = True
    their_gain: float | None = None  # tokens/s over llama.cpp's with its MTP, if it has one

    @property
    def accepted(self) -> float:
        """Return the mean number of tokens that a step emits."""
        return 1 + sum(self.rates)

    def shape(self, layers: int | None) -> Shape:
        given = [count for count in (layers, self.layers) if count is not None]
        return published(self.recipe, min(given, default=None))

    @property
    def drafting(self) -> tuple[str, ...]:
        """The names of the engines that draft."""
        return (DRAFTING,) if self.reduced_gain is None else (DRAFTING, REDUCED)

    def measure(self, run: Run) -> Data:
        shape = self.shape(run.layers)
        shop = Workshop(run.folder, shape, run.watch)
        counted = shop.write_checkpoint()
        engines = self.build(shop)
        shop.drop_checkpoint()  # before the GGUF file is written, to need less disk
        sides = [*self.our_sides(engines, run, shop.vocabulary)]
        costs = self.our_costs(counted, engines)
        sizes = {name: on_disk(engine) for name, engine in engines.items()}
        if run.peers is not None:
            gguf, tensors = shop.write_gguf()
            sides.append(self.their_side(gguf, run, shop.vocabulary))
            costs |= self.their_costs(counted, tensors, engines[PLAIN])
            sizes[LLAMA] = gguf.stat().st_size
            if self.their_gain is not None:
                drafting, _ = shop.write_gguf(module=True)
                head = shop.write_head_gguf()
                sides.append(self.their_drafting_side(drafting, head, run, shop.vocabulary))
        return {
            "whole": shape.whole,
            "layers": shape.config.num_hidden_layers,
            "bits": bits(engines[PLAIN], shape),
            "sizes": sizes,
            "costs": costs,
            "rounds": take_turns(sides, run),
            "most_on_disk": shop.most,
        }

    def build(self, shop: Workshop) -> dict[str, Path]:
        flags = ("--max-seq-len", str(self.long + 512), *self.flags)
        plain, drafting = shop.build("whole", (0, self.nextn), *flags)
        engines = {PLAIN: plain, DRAFTING: drafting}
        if REDUCED in self.drafting:
            less = (*flags, "--draft-vocab", shop.draft_vocab())
            (engines[REDUCED],) = shop.build("quarter", (self.nextn,), *less)
        return engines

    def our_sides(self, engines: dict[str, Path], run: Run, vocabulary: int) -> Iterator[Side]:
        """Yield our sides; "short" comes first, as its memory counts and later asks add more."""
        short = {"short": decode(run.steps, SHORT, filled=False)}
        accepted = {"accepted": decode(run.steps, SHORT, filled=False, rates=self.rates)}
        long = decode(run.steps, self.long, filled=self.filled)
        plain = {"prompt": prompt(self.prompt), "long": long}
        for name, engine in engines.items():
            rest = plain if name == PLAIN else accepted
            yield ours(name, engine, short | rest, vocabulary)

    def their_side(self, gguf: Path, run: Run, vocabulary: int) -> Side:
        assert run.peers is not None
        asks = {
            "short": decode(run.steps, SHORT, filled=False),
            "prompt": prompt(self.prompt),
            "long": decode(run.steps, self.long, filled=self.filled),
            "verify": decode(run.steps, SHORT, filled=False, window=self.nextn + 1),
        }
        return Side(LLAMA, run.peers, gguf, asks, vocabulary, max(self.prompt, self.long) + 64)

    def their_drafting_side(self, gguf: Path, head: Path | None, run: Run, vocabulary: int) -> Side:
        assert run.peers is not None
        asks = {"short": decode(run.steps, SHORT, filled=False, window=self.nextn + 1)}
        return Side(LLAMA_MTP, run.peers, gguf, asks, vocabulary, drafts=self.nextn, head=head)

    def our_costs(self, counted: Counted, engines: dict[str, Path]) -> Data:
        plain = engines[PLAIN]
        costs = {name: counted.step(engine, SHORT, 1) for name, engine in engines.items()}
        costs["long"] = counted.step(plain, self.long, 1)
        costs["prompt"] = counted.prompt(plain, self.prompt)
        return as_json(costs)

    def their_costs(self, counted: Counted, tensors: dict[str, int], plain: Path) -> Data:
        costs = {
            LLAMA: counted.gguf(tensors, SHORT, 1),
            f"{LLAMA}, long": counted.gguf(tensors, self.long, 1),
            f"{LLAMA}, prompt": counted.gguf_prompt(tensors, plain, self.prompt),
            f"{LLAMA}, verify": counted.gguf(tensors, SHORT, 1, self.nextn + 1),
        }
        return as_json(costs)

    def tables(self, found: Found) -> list[Table]:
        data = found.data
        title = (
            f"{self.recipe}, {data['layers']} layers, random weights, int4 beside Q4_0; drafting: "
            f"nextn {self.nextn}; {data['most_on_disk'] * GB:.1f} GB on disk at most"
        )
        rows = (self.stored(found), self.times(found), self.steps(found), self.gains(found))
        return [table(title, (row for part in rows for row in part))]

    def stored(self, found: Found) -> Iterator[Row]:
        """Yield rows of disk, memory and start; some aims apply only to the whole model."""
        measured, sizes, whole = found.measured, found.data["sizes"], found.data["whole"]
        size, theirs = sizes[PLAIN] * GB, scaled(sizes.get(LLAMA), GB)
        row = Row("engine on disk, MTP module included", "GB", (size, theirs))
        yield row.judge(size, Aim(self.disk)) if whole and self.disk else row
        width = found.data["bits"]
        yield Row("a weight but embedding and head", "bits", (width,)).judge(
            width, None if self.bits is None else Aim(self.bits)
        )
        their_peak = measured.memory(LLAMA, "short")
        for name in (PLAIN, DRAFTING):
            peak = measured.memory(name, "short")
            numbers = scaled(peak, GB), scaled(their_peak, GB)
            row = Row(f"peak memory, greedy, {name}; over disk", "GB", numbers)
            yield row.judge(over(peak, sizes[name]), Aim(1.3), over(their_peak, sizes.get(LLAMA)))
        first = measured.first(PLAIN)
        row = Row("start to first token", "s", (first, measured.first(LLAMA)))
        yield row.judge(first, Aim(15.0)) if whole else row

    def times(self, found: Found) -> Iterator[Row]:
        """Yield rows of single tokens, and of a prompt."""
        measured = found.measured
        asks = ("short", SHORT, self.short_aim), ("long", self.long, self.long_aim)
        for ask, context, aim in asks:
            own, other = measured.step(PLAIN, ask), measured.step(LLAMA, ask)
            costs = (PLAIN, LLAMA) if ask == "short" else (ask, f"{LLAMA}, {ask}")
            row = found.timed(f"token after {context}, nextn 0", (own, other), costs, WEIGHTS)
            yield row.judge(over(own, other), Aim(aim))
        own, other = measured.prompt(PLAIN, "prompt"), measured.prompt(LLAMA, "prompt")
        bounds = (found.bound(name, WEIGHTS) for name in ("prompt", f"{LLAMA}, prompt"))
        speeds = (*(rate(self.prompt, seconds) for seconds in (own, other, *bounds)),)
        row = Row(f"prompt of {self.prompt:,}", "tokens/s", speeds)
        yield row.judge(over(other, own), Aim(self.prompt_aim, at_least=True))

    def steps(self, found: Found) -> Iterator[Row]:
        """Yield ratios of a step with drafts to one without, with the ratio of their bytes."""
        measured, plain = found.measured, found.cost(PLAIN)
        own, other = measured.step(PLAIN, "short"), measured.step(LLAMA, "verify")
        assert plain is not None
        for name in self.drafting:
            step, cost = measured.step(name, "short"), found.cost(name)
            assert cost is not None
            beside = cost.bytes / plain.bytes
            label = f"step, {name}; {self.nextn + 1} tokens of llama.cpp"
            row = found.timed(label, (step, other), (name, f"{LLAMA}, verify"), WEIGHTS)
            yield row.judge(over(step, own), Aim(STEP * beside), beside)

    def gains(self, found: Found) -> Iterator[Row]:
        """Yield tokens per second with drafts that are accepted at random."""
        measured = found.measured
        other = rate(1, measured.step(LLAMA, "short"))
        their_bound = rate(1, found.bound(LLAMA, WEIGHTS))
        gains = {DRAFTING: self.gain, REDUCED: self.reduced_gain}
        for name in self.drafting:
            gain = gains[name]
            own = rate(self.accepted, measured.step(name, "accepted"))
            bound = rate(self.accepted, found.bound(name, WEIGHTS))
            label = f"{self.accepted:.2f} tokens a step, {name}"
            row = Row(label, "tokens/s", (own, other, bound, their_bound))
            yield row.judge(over(own, other), None if gain is None else Aim(gain, at_least=True))
        if self.own_gain is not None:
            own = rate(self.accepted, measured.step(DRAFTING, "accepted"))
            before = rate(1, measured.step(PLAIN, "short"))
            names = ((self.accepted, DRAFTING), (1, PLAIN))
            bounds = (rate(tokens, found.bound(name, WEIGHTS)) for tokens, name in names)
            row = Row(
                f"{self.accepted:.2f} tokens a step; without drafts", "tokens/s", (own, before)
            )
            yield row.judge(over(own, before), Aim(self.own_gain, at_least=True), over(*bounds))
        if self.their_gain is None:
            return
        # Its steps take as long whatever is accepted, except for undoing rejected drafts.
        other = rate(self.accepted, measured.drafting_step(LLAMA_MTP, "short"))
        for name in self.drafting:
            own = rate(self.accepted, measured.step(name, "accepted"))
            row = Row(f"the same, {name}; llama.cpp with its MTP", "tokens/s", (own, other))
            yield row.judge(over(own, other), Aim(self.their_gain, at_least=True))


def bits(engine: Path, shape: Shape) -> float:
    """Return the mean bits of a stored weight, with scales, without embeddings and heads."""
    held, config = sum_weight_bytes(engine, shape.joined), shape.joined
    values = sum(
        prod(source.shape)
        for weight in list_weights(config, WHOLE)
        if group(weight.name) not in ENDS
        for source in weight.stored
    )
    return 8 * sum(size for name, size in held.items() if name not in ENDS) / values
