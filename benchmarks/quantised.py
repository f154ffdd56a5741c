"""Measures what number formats do to a model: its distributions, size, acceptance, answers, speed.

    python benchmarks/quantised.py [--models deepseek-tiny qwen-tiny] [--only int8 int4]
    python benchmarks/quantised.py --engines --models deepseek-tiny --only fp8 nvfp4

The first form takes a few minutes. Per row it prints the KL divergence from the unquantised model
in nats a position, and the share of positions with the same first choice. Positions are all of 24
texts: the first built-in prompts with up to 100 tokens of the fp32 engine's answer. It runs eager
models with the dequantised weights; "inputs too" rounds the inputs of integer products to int8, as
the CPU's kernels do. Q4_0 and Q4_K are llama.cpp's, by formulas (`reference_formats.py`).

With --engines it builds an engine per row, asks the built-in reasoning problems, and prints sizes,
right answers, acceptance and speed. MTP modules in another format than the main model change
acceptance and speed, never a greedy answer. The ends are embedding and head. Formats that a target
can't keep (fp8 and nvfp4 on onnxruntime, int8 and int4 on inductor) are fp32 in its engine.
Checkpoints and engines are in --work, and are used again.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from reference_formats import round_q4_0, round_q4_k
from script import load_both, run
from torch import Tensor, nn

from mtpbuild.builder.checkpoint.shards import SINGLE
from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.compiler.quantize import QuantizeRequest, quantize
from mtpbuild.builder.formats import FORMATS
from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.scheme import OWN_TEXT, SCHEMES, Scheme, find_weight_role
from mtpbuild.lab.eval.problems import GradedAnswer, answer_problems, load_problems
from mtpbuild.lab.eval.report import make_rows
from mtpbuild.lab.measure.runs import STRICT
from mtpbuild.lab.measure.statistics import ALL
from mtpbuild.lab.measure.workbench import WORKBENCH
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import WEIGHTS, read_manifest

SOURCE = "bf16"
TEXTS, ANSWER = 24, 100  # texts, and tokens of each answer at most
BLOCK = 32
INT4, INT8 = (replace(SCHEMES[name], mtp=name) for name in ("int4", "int8"))
VARIANTS = {
    "int8": INT8,
    "int4": INT4,
    "int4, calibrated": replace(INT4, calibration=OWN_TEXT),
    "int8, head int4": replace(INT8, head="int4"),
    "int8, head int4, calibrated": replace(INT8, head="int4", calibration=OWN_TEXT),
    "fp8": SCHEMES["fp8"],
    "nvfp4": SCHEMES["nvfp4"],
    "int8, ends int8": replace(INT8, head="int8"),
    "int4, ends int8": replace(INT4, head="int8"),
    "int4, head int4": replace(INT4, head="int4"),
    "bf16, MTP fp8": Scheme("bf16", "fp8"),
    "bf16, MTP nvfp4": Scheme("bf16", "nvfp4"),
    "bf16, MTP int4": Scheme("bf16", "int4"),
}
# Rounded in place: the same weights as int4's, without int8 among them.
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {"Q4_0": round_q4_0, "Q4_K": round_q4_k}
USUAL = [*[*VARIANTS][:5], *FORMULAS]
HEADERS = {
    False: ("weights", "bits", "KL", "inputs too", "same first choice"),
    True: ("weights", "checkpoint MB", "engine's MB", "right answers", "acceptance", "tokens/s"),
}

Products = list[tuple[nn.Linear, str]]  # with the names of their formats


@dataclass(frozen=True)
class Compared:
    """A model's weights beside the unquantised ones."""

    source: Path
    texts: list[list[int]]
    wanted: list[Tensor]  # log-probabilities [positions, V] of each text

    def row(self, name: str, work: Path) -> list[str]:
        """Measure one row."""
        if name in FORMULAS:
            model = load_plain(self.source)
            for product, _ in products(model, INT4):
                product.weight.data = FORMULAS[name](product.weight.data)
            kl, same = self.judge(model)
            return [name, "4.50", f"{kl:.4f}", "", f"{same:.1%}"]
        model, scheme = load_plain(write_checkpoint(name, self.source, work)), VARIANTS[name]
        (kl, same), found = self.judge(model), products(model, scheme)
        rounded = ""
        if scheme.main in ("int4", "int8"):
            for product, _ in found:
                product.register_forward_pre_hook(round_inputs)
            rounded = f"{self.judge(model)[0]:.4f}"
        return [name, f"{count_bits(found):.2f}", f"{kl:.4f}", rounded, f"{same:.1%}"]

    def judge(self, model: PlainLM) -> tuple[float, float]:
        """Return the mean divergence, and the share of equal first choices."""
        pairs = [*zip(self.wanted, distributions(model, self.texts), strict=True)]
        kl = torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in pairs])
        same = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in pairs])
        return float(kl.mean()), float(same.float().mean())


def count_bits(found: Products) -> float:
    """Return the bits of a weight, with its share of a block's scale, on the average."""
    sizes = [(product.weight.numel(), FORMATS[format]) for product, format in found]
    total = sum(size * (format.bits + 16 / format.block) for size, format in sizes)
    return total / sum(size for size, _ in sizes)


def products(model: PlainLM, scheme: Scheme) -> Products:
    """Return the main model's products that a scheme quantises, with their formats."""
    found = []
    for name, part in model.named_modules():
        weight, c = f"{name}.weight", model.config
        format = scheme.wanted(c, weight)
        if (
            isinstance(part, nn.Linear)
            and format
            and find_weight_role(c, weight) in ("main", "head")
        ):
            found += [(part, format)] if part.in_features % BLOCK == 0 else []
    return found


def round_inputs(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Round a product's inputs to int8, per row and block, as the CPU's kernels do."""
    blocks = inputs[0].unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return (((blocks / torch.where(scale != 0, scale, 1.0)).round() * scale).flatten(-2),)


@torch.no_grad()
def distributions(model: PlainLM, texts: Sequence[list[int]]) -> list[Tensor]:
    """Return the log-probabilities [positions, V] of each text's next tokens."""
    longest, found = max(map(len, texts)), list[Tensor]()
    for some in (texts[i : i + 12] for i in range(0, len(texts), 12)):
        tokens = torch.tensor([text + [0] * (longest - len(text)) for text in some])
        logits = model.logits(model.main(tokens)).log_softmax(-1)
        found += [own[: len(text) - 1] for own, text in zip(logits, some, strict=True)]
    return found


def write_checkpoint(name: str, source: Path, work: Path) -> Path:
    """Write a row's checkpoint, if it is not there."""
    checkpoint = work / name.replace(", ", "_").replace(" ", "_")
    if name == SOURCE:
        return source
    if not checkpoint.exists():
        quantize(QuantizeRequest(str(source), VARIANTS[name], checkpoint), WORKBENCH)
    return checkpoint


def compare(source: Path, work: Path, threads: int | None) -> Compared:
    """Let the fp32 engine answer, and read the unquantised model's distributions."""
    (built,) = build(BuildRequest(str(source), nextn=(0,), out=work / "bf16_n0"), WORKBENCH)
    with Engine.load(built.folder, threads=threads, prefix_cache=False) as engine:
        prompts = load_both(engine, TEXTS, ANSWER)
        params = SamplingParams(max_tokens=ANSWER)
        texts = [[*prompt, *engine.generate(prompt, params).token_ids] for prompt in prompts]
    return Compared(source, texts, distributions(load_plain(source), texts))


def engine_row(name: str, source: Path, work: Path, a: argparse.Namespace) -> list[str]:
    """Build a row's engine and let it answer the built-in problems greedily."""
    checkpoint = write_checkpoint(name, source, work)
    out = work / f"{checkpoint.name}_{a.target}_n{a.nextn}"
    build(BuildRequest(str(checkpoint), nextn=(a.nextn,), out=out, target=a.target), WORKBENCH)
    with Engine.load(out, threads=a.threads, prefix_cache=False) as engine:
        asked = load_problems("reasoning", engine, SamplingParams(max_tokens=256), a.problems)
        answered: list[GradedAnswer] = answer_problems(engine, asked, {"strict": STRICT})["strict"]
    (found,) = make_rows({"strict": answered})
    manifest, figures = read_manifest(out), found.forms[ALL]
    low, high = figures["accuracy_interval"]
    return [
        name,
        f"{(checkpoint / SINGLE).stat().st_size / 1e6:.1f}",
        f"{manifest.files[WEIGHTS].size / 1e6:.1f} {manifest.build.weights}",
        f"{figures['accuracy']:.1%} ({low:.1%}-{high:.1%})",
        f"{figures['spec_decode_acceptance_length']:.2f}",
        f"{figures['user_tokens_per_s']:.0f}",
    ]


def markdown(header: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["deepseek-tiny", "qwen-tiny"])
    rows = [*VARIANTS, *FORMULAS]
    parser.add_argument("--only", nargs="+", choices=rows, default=USUAL, metavar="ROW")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", type=Path, default=Path("runs/quantised"))
    parser.add_argument("--engines", action="store_true")
    parser.add_argument("--nextn", type=int, default=3)
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--target", choices=("onnxruntime", "inductor"), default="onnxruntime")
    a = parser.parse_args()
    for name in a.models:
        source, work, table = find_model(name).folder, a.work / name, []
        compared = None if a.engines else compare(source, work, a.threads)
        names = [n for n in a.only if n not in FORMULAS or compared is not None]
        for row in [SOURCE, *names] if compared is None else names:
            if compared is None:
                cells = engine_row(row, source, work, a)
            else:
                cells = compared.row(row, work)
            table.append(cells)
            print(name, *cells, flush=True)
        if compared is not None:
            print(f"\n{name}, {sum(map(len, compared.wanted)):,} positions:")
        print("\n" + markdown(HEADERS[a.engines], table) + "\n")


if __name__ == "__main__":
    run(main)
