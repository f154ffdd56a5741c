"""Writes the prompts of `mtpbuild bench` and `eval`: held-out problems and library code."""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from data import common_words, library_files, read
from problems import Problem, held_out_problems

OPENINGS = ("def ", "class ", "    def ")
SIZE = (48, 128)  # tokens of a code prompt
OUTPUT = 256
FOLDER = Path("recipes/deepseek_tiny_bench")


def reasoning(per_form: int, seed: int) -> Iterator[dict[str, object]]:
    """Yield questions in chat form; the forms of problems alternate."""
    problems = held_out_problems(per_form, common_words(), seed)
    count = len(problems) // per_form
    for i in range(per_form):
        for problem in problems[i::per_form][:count]:
            message = {"role": "user", "content": problem.question}
            yield {
                "task_id": f"reasoning/{problem.form}/{i}",
                "messages": [message],
                "output_tokens": OUTPUT,
            }


def answered(per_form: int, seed: int) -> Iterator[dict[str, object]]:
    """Yield questions with answers, alternating forms; a form may have fewer than `per_form`."""
    forms = defaultdict[str, list[Problem]](list)
    for problem in held_out_problems(per_form, common_words(), seed):
        forms[problem.form].append(problem)
    for i in range(per_form):
        for form, problems in forms.items():
            for problem in problems[i : i + 1]:
                yield {
                    "task_id": f"{form}/{i}",
                    "form": form,
                    "question": problem.question,
                    "answer": problem.answer,
                    "output_tokens": OUTPUT,
                }


def code(count: int, tokenizer: Tokenizer, seed: int) -> Iterator[dict[str, object]]:
    """Yield heads of functions or classes: one per file, then a second one, in random order."""
    rng = random.Random(seed)
    heads = {p: h for p in library_files(held_out=True, tests=False) if (h := found(p, tokenizer))}
    files = sorted(heads)
    rng.shuffle(files)
    for part in heads.values():
        rng.shuffle(part)
    turns = [(p, heads[p][i]) for i in range(count) for p in files if i < len(heads[p])]
    for path, (number, text) in turns[:count]:
        yield {"task_id": f"code/{path.name}:{number}", "prompt": text, "output_tokens": OUTPUT}


def found(path: Path, tokenizer: Tokenizer) -> list[tuple[int, str]]:
    """Return pairs (line, text): whole lines from a definition's first line on, of SIZE tokens."""
    lines = read(path).splitlines(keepends=True)
    heads: list[tuple[int, str]] = []
    for number, line in enumerate(lines):
        if line.startswith(OPENINGS):
            text = ""
            for more in lines[number:]:
                if len(tokenizer.encode(text + more).ids) > SIZE[1]:
                    break
                text += more
            if len(tokenizer.encode(text).ids) >= SIZE[0] and text.isascii():
                heads.append((number + 1, text))
    return heads


def write(path: Path, lines: Iterator[dict[str, object]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"{path}: {text.count(chr(10))} prompts")


def main(args: argparse.Namespace) -> None:
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    write(args.out / "reasoning.jsonl", reasoning(args.per_form, seed=11))
    write(args.out / "eval_reasoning.jsonl", answered(args.problems, seed=17))
    write(args.out / "code.jsonl", code(args.code, tokenizer, seed=11))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("recipes/deepseek_tiny"))
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--per-form", type=int, default=8)
    parser.add_argument("--problems", type=int, default=50, help="per form, with answers")
    parser.add_argument("--code", type=int, default=48)
    main(parser.parse_args())
