"""Prints the tables of the model card, from the plain model or from a built engine."""

import argparse
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer

from data import ChatRows, CodeRows, code_documents, common_words, library_files, make_batch
from export import load_folder, load_model
from generate import continuations
from measure import DRAFTERS, acceptance, drafts, held_out, repeated_share
from model import TrainedModel
from problems import Problem, held_out_problems, is_correct
from tokenizer import BOS_ID, EOS_ID, chat, generation_prompt

LOOPING = 0.10  # outputs with a larger share of repeated 8-grams don't count


class Output(NamedTuple):
    """One generated text, with the engine's steps if an engine generated it."""

    prompt: list[int]
    tokens: list[int]
    text: str
    steps: int = 0


def table(title: str, head: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    print(f"\n### {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for line in lines:
        cells = (f"{x:.3f}" if isinstance(x, float) else str(x) for x in line)
        print(f"| {' | '.join(cells)} |")


def code_prompts(tokenizer: Tokenizer, count: int, size: int, seed: int) -> list[list[int]]:
    """Make prompts: BOS, then `size` tokens of a held-out file from a random line on."""
    documents = code_documents(tokenizer, library_files(held_out=True))
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    newline = {i for t, i in tokenizer.get_vocab().items() if t == "Ċ"}
    while len(prompts) < count:
        document = rng.choice(documents)
        starts = [i + 1 for i, t in enumerate(document[:-size]) if int(t) in newline]
        if starts:
            start = rng.choice(starts)
            prompts.append([BOS_ID, *(int(t) for t in document[start : start + size - 1])])
    return prompts


def generate(
    model: TrainedModel,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    count: int,
    temperature: float = 0.0,
) -> list[Output]:
    """Generate outputs with the plain model, in batches; greedy at temperature 0."""
    outputs = []
    for i in range(0, len(prompts), 64):
        part = prompts[i : i + 64]
        size = max(map(len, part))
        padded = torch.tensor([[EOS_ID] * (size - len(p)) + p for p in part])
        pad = torch.tensor([size - len(p) for p in part])
        rows = continuations(model, padded, count, temperature, pad)[:, size:].tolist()
        for prompt, row in zip(part, rows, strict=True):
            row = row[: row.index(EOS_ID) + 1] if EOS_ID in row else row
            outputs.append(Output(prompt, row, tokenizer.decode(row)))
    return outputs


def engine_generate(engine: Any, prompts: list[list[int]], count: int) -> list[Output]:
    """Generate outputs with an engine, which also counts acceptance."""
    from mtpbuild.runtime import SamplingParams

    outputs = []
    for prompt in prompts:
        result = engine.generate(prompt, SamplingParams(max_tokens=count))
        counts = result.metrics.speculative_decoding
        made = prompt, list(result.token_ids), result.text, counts.num_spec_steps
        outputs.append(Output(*made))
    return outputs


def report_held_out(model: TrainedModel, tokenizer: Tokenizer, rows: int) -> None:
    """Print loss and agreement on text that was not trained on."""
    words = common_words()
    code = CodeRows(code_documents(tokenizer, library_files(held_out=True)), seed=5)
    problems = held_out_problems(100, words, seed=5)
    texts = [chat(p.question, p.reply) for p in problems]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    chats = ChatRows([np.array(e.ids, np.uint16) for e in encoded], seed=5)
    for title, share, length in (("code", 1.0, 512), ("reasoning", 0.0, 256)):
        batches = [make_batch(code, chats, 8, length, share) for _ in range(rows // 8)]
        sums = held_out(model, batches, length)
        lines: list[Sequence[Any]] = [("trunk", *sums["vanilla"].row(0)[:2], "")]
        for drafter in DRAFTERS:
            depth = len(sums[drafter].slots)
            lines += [(f"{drafter} {k}", *sums[drafter].row(k)) for k in range(1, depth)]
        table(
            f"Held-out {title}, {rows} rows of {length} tokens",
            ("prediction", "loss", "top-1 is the text", "top-1 is the trunk's"),
            lines,
        )


def report_acceptance(model: TrainedModel, kind: str, outputs: list[Output], most: int) -> None:
    """Print mean tokens per step, and acceptance per position."""
    kept = [o for o in outputs if repeated_share(o.tokens) < LOOPING]
    looping = len(outputs) - len(kept)
    lines = []
    for drafter in DRAFTERS:
        depth = len(model.mtp) if drafter == "vanilla" else most
        guesses = [
            drafts(model, torch.tensor(o.prompt + o.tokens), drafter, depth) for o in outputs
        ]
        for nextn in range(1, depth + 1):
            steps: dict[bool, list[int]] = defaultdict(list)
            for o, g in zip(outputs, guesses, strict=True):
                text = torch.tensor(o.prompt + o.tokens)
                loops = repeated_share(o.tokens) >= LOOPING
                steps[loops] += acceptance(g, text, len(o.prompt), nextn)
            good, every = steps[False], steps[False] + steps[True]
            rates = (sum(n > j for n in good) / max(1, len(good)) for j in range(1, nextn + 1))
            mean = sum(good) / max(1, len(good))
            lines.append((drafter, nextn, mean, sum(every) / max(1, len(every)),
                          " ".join(f"{r:.2f}" for r in rates)))  # fmt: skip
    title = f"Acceptance on {kind}: {len(outputs)} outputs, of which {looping} repeat themselves"
    head = ("drafter", "nextn", "tokens per step", "with repeating outputs", "reached per position")
    table(title, head, lines)


def report_answers(problems: list[Problem], outputs: list[Output]) -> None:
    right: dict[str, list[bool]] = defaultdict(list)
    for problem, output in zip(problems, outputs, strict=True):
        right[problem.form].append(is_correct(problem, plain(output.text)))
    lines = [(form, len(found), sum(found) / len(found)) for form, found in right.items()]
    total = [x for found in right.values() for x in found]
    lines.append(("all", len(total), sum(total) / len(total)))
    table("Exact answers on held-out problems, greedy", ("form", "problems", "right"), lines)


def plain(text: str) -> str:
    return text.replace("<｜end▁of▁sentence｜>", "")


def report_engine(kind: str, outputs: list[Output]) -> None:
    kept = [o for o in outputs if repeated_share(o.tokens) < LOOPING]
    lines = [(kind, len(outputs), len(kept), mean_length(kept), mean_length(outputs))]
    head = ("text", "outputs", "not repeating", "acceptance length", "with repeating outputs")
    table("Acceptance, counted by the engine", head, lines)


def mean_length(outputs: list[Output]) -> float:
    """Return the acceptance length of all outputs together."""
    from mtpbuild.runtime.requests.stats import compute_acceptance_length

    tokens, steps = sum(len(o.tokens) for o in outputs), sum(o.steps for o in outputs)
    return compute_acceptance_length(tokens, steps) or 1.0


def main(args: argparse.Namespace) -> None:
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = load_model(args.checkpoint) if args.checkpoint else load_folder(args.model)
    problems = held_out_problems(args.problems, common_words(), seed=3)
    questions = [tokenizer.encode(generation_prompt(p.question), add_special_tokens=False).ids
                 for p in problems]  # fmt: skip
    prompts = code_prompts(tokenizer, args.code, size=64, seed=3)
    if args.engine:
        from mtpbuild.runtime import Engine

        with Engine.load(args.engine, prefix_cache=False) as engine:
            answers = engine_generate(engine, questions, 256)
            code = engine_generate(engine, prompts, args.tokens)
        report_engine("reasoning", answers)
        report_engine("code", code)
    else:
        answers = generate(model, tokenizer, questions, 256)
        code = generate(model, tokenizer, prompts, args.tokens)
    report_answers(problems, answers)
    report_held_out(model, tokenizer, args.rows)
    report_acceptance(model, "code", code, args.nextn)
    torch.manual_seed(3)
    sampled = generate(model, tokenizer, prompts, args.tokens, temperature=0.6)
    report_acceptance(model, "code at temperature 0.6", sampled, args.nextn)
    report_acceptance(model, "reasoning", answers[:: args.thin], args.nextn)
    for output in [*code[: args.samples], *answers[:: len(answers) // max(1, args.samples)]]:
        print(f"\n```\n{tokenizer.decode(output.prompt)}¦{output.text}\n```")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("recipes/deepseek_tiny"))
    parser.add_argument("--checkpoint", type=Path, help="weights of a checkpoint, not of --model")
    parser.add_argument("--engine", type=Path, help="generate with this engine")
    parser.add_argument("--problems", type=int, default=40, help="held-out problems per form")
    parser.add_argument("--code", type=int, default=48, help="held-out code prompts")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per code prompt")
    parser.add_argument("--rows", type=int, default=64, help="rows of held-out text")
    parser.add_argument("--nextn", type=int, default=5, help="largest number of Eagle passes")
    parser.add_argument("--thin", type=int, default=4, help="draft for one in so many answers")
    parser.add_argument("--samples", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main(arguments())
