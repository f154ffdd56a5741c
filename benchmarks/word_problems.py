"""Prompts that deepseek-tiny and qwen-tiny were not trained for: sums in words, a JSON line each.

python benchmarks/word_problems.py > problems.jsonl
"""

import json
import random

COUNT = 600
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas",
         "Karla", "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Theo", "Uma", "Vera")  # fmt: skip
THINGS = ("apples", "pears", "books", "stamps", "shells", "coins", "cards", "pencils", "marbles",
          "eggs", "bottles", "cups")  # fmt: skip


def make_problem(rng: random.Random) -> str:
    a, b = rng.randint(11, 99), rng.randint(11, 99)
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    forms = (
        f"{name} has {a} {things} and buys {b} more. How many {things} has {name} now?",
        f"{name} had {a} {things} and lost {min(a, b)}. How many are left?",
        f"There are {a} {things} in one box and {b} {things} in another one. "
        f"How many {things} are there together?",
    )
    return rng.choice(forms)


def main() -> None:
    rng, problems = random.Random(7), dict[str, None]()
    while len(problems) < COUNT:
        problems[make_problem(rng)] = None
    for problem in problems:
        print(json.dumps({"messages": [{"role": "user", "content": problem}]}))


if __name__ == "__main__":
    main()
