"""Measures number formats' effect on a model: size, loss, acceptance, right answers, speed.

    python benchmarks/quantised.py [--model deepseek-tiny] [--nextn 3] [--problems 60] \
        [--target onnxruntime] [--only fp8 nvfp4] [--work runs/quantised]

It writes a checkpoint and an engine per row into --work (they are reused), asks the built-in
reasoning problems greedily and prints a table in Markdown. Loss is the dequantised weights' nats
per token on the texts of the first row. MTP modules in another format than the main model have rows
of their own: they change acceptance and speed, never a greedy answer. The ends are embedding and
head. Formats that a target can't keep (fp8 and nvfp4 on onnxruntime, int8 and int4 on inductor) are
fp32 in its engine, and as fast as fp32.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from script import run

from mtpbuild.builder.checkpoint.shards import SINGLE
from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.compiler.quantize import QuantizeRequest, quantize
from mtpbuild.builder.eval.problems import GradedAnswer, answer_problems, load_problems
from mtpbuild.builder.eval.report import Figures, make_rows
from mtpbuild.builder.measure.runs import STRICT
from mtpbuild.builder.measure.statistics import ALL
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.verify.plain import load_plain
from mtpbuild.builder.weights.scheme import SCHEMES, Scheme
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import WEIGHTS, read_manifest

SOURCE = "bf16"
VARIANTS = {
    "fp8": SCHEMES["fp8"],
    "nvfp4": SCHEMES["nvfp4"],
    "int8": SCHEMES["int8"],
    "int4": SCHEMES["int4"],
    "int8, ends int8": replace(SCHEMES["int8"], head="int8"),
    "int4, ends int8": replace(SCHEMES["int4"], head="int8"),
    "int4, head int4": replace(SCHEMES["int4"], head="int4"),
    "bf16, MTP fp8": Scheme("bf16", "fp8"),
    "bf16, MTP nvfp4": Scheme("bf16", "nvfp4"),
    "bf16, MTP int4": Scheme("bf16", "int4"),
}
HEADER = (
    "weights",
    "checkpoint MB",
    "engine's weights MB",
    "loss",
    "right answers (95 %)",
    "acceptance length",
    "tokens/s",
)


@dataclass(frozen=True)
class Row:
    """One model: bytes of its weights, nats per token, and figures of its answers.

    held: the format in which the engine holds products.
    """

    name: str
    checkpoint: int
    engine: int
    held: str
    loss: float
    figures: Figures

    def cells(self) -> list[str]:
        low, high = self.figures["accuracy_interval"]
        return [
            self.name,
            f"{self.checkpoint / 1e6:.1f}",
            f"{self.engine / 1e6:.1f} {self.held}",
            f"{self.loss:.4f}",
            f"{self.figures['accuracy']:.1%} ({low:.1%}-{high:.1%})",
            f"{self.figures['spec_decode_acceptance_length']:.2f}",
            f"{self.figures['user_tokens_per_s']:.0f}",
        ]


def prepare(name: str, source: Path, work: Path, nextn: int, target: str) -> tuple[Path, Path]:
    """Make the checkpoint and the engine of one row."""
    slug = name.replace(", ", "_").replace(" ", "_")
    checkpoint, engine = source, work / f"{slug}_{target}_n{nextn}"
    if name != SOURCE:
        checkpoint = work / slug
        quantize(QuantizeRequest(str(source), VARIANTS[name], checkpoint, force=True))
    build(BuildRequest(str(checkpoint), nextn=(nextn,), out=engine, target=target))
    return checkpoint, engine


def answers(folder: Path, problems: int, threads: int | None) -> list[GradedAnswer]:
    """Answer the built-in problems greedily."""
    with Engine.load(folder, threads=threads) as engine:
        asked = load_problems("reasoning", engine, SamplingParams(max_tokens=256), problems)
        return answer_problems(engine, asked, {"strict": STRICT})["strict"]


@torch.no_grad()
def loss(checkpoint: Path, texts: Sequence[GradedAnswer]) -> float:
    """Return the nats per output token of the texts, each after its prompt."""
    model, total, count = load_plain(checkpoint), 0.0, 0
    for text in texts:
        prompt, output = list(text.problem.prompt.token_ids), list(text.answer.token_ids)
        logits = model.lm_head(model.main(torch.tensor([prompt + output[:-1]])))
        logits = logits[0, len(prompt) - 1 :]
        total += float(F.cross_entropy(logits, torch.tensor(output), reduction="sum"))
        count += len(output)
    return total / count


def markdown(table: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(HEADER)
    return "\n".join(f"| {' | '.join(row)} |" for row in (HEADER, rule, *table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-tiny")
    parser.add_argument("--nextn", type=int, default=3)
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--target", choices=("onnxruntime", "inductor"), default="onnxruntime")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=[*VARIANTS], metavar="ROW")
    parser.add_argument("--work", type=Path, default=Path("runs/quantised"))
    arguments = parser.parse_args()
    source = find_model(arguments.model).folder
    texts: list[GradedAnswer] = []
    table = []
    for name in (SOURCE, *arguments.only):
        how = (arguments.work, arguments.nextn, arguments.target)
        checkpoint, engine = prepare(name, source, *how)
        answered = answers(engine, arguments.problems, arguments.threads)
        texts = texts or answered
        (found,) = make_rows({"strict": answered})
        manifest = read_manifest(engine)
        row = Row(
            name,
            (checkpoint / SINGLE).stat().st_size,
            manifest.files[WEIGHTS].size,
            manifest.build.weights,
            loss(checkpoint, texts),
            found.forms[ALL],
        )
        table.append(row.cells())
        print(" ".join(row.cells()), flush=True)
    print("\n" + markdown(table))


if __name__ == "__main__":
    run(main)
