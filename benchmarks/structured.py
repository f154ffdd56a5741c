"""Measures how much drafting gains under a grammar: several engines give the same answers.

python benchmarks/structured.py engines/tiny_n0 engines/tiny_n3

Each engine answers the same prompts at temperature 0 with the schema TICKET, in turn, request by
request; the texts must be equal. Rates are relative to the first engine's. The table also shows the
tokens per step, and the share of tokens that the grammar had already determined before their step.
"""

import contextlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from script import parse_flags, run

from mtpbuild.runtime import Engine, EngineError, Result, SamplingParams, StructuredOutputs

# A help desk's ticket: five fields of a fixed form, and three short texts.
TICKET: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ticket_number": {"type": "integer", "minimum": 1, "maximum": 99999},
        "category": {"enum": ["hardware", "software", "network", "account"]},
        "priority": {"enum": ["low", "medium", "high"]},
        "customer": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "returning_customer": {"type": "boolean"},
            },
            "required": ["name", "returning_customer"],
            "additionalProperties": False,
        },
        "summary": {"type": "string", "maxLength": 40},
        "next_action": {"enum": ["call the customer", "send a replacement", "close the ticket"]},
        "keywords": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "additionalProperties": False,
}
TICKET["required"] = [*TICKET["properties"]]
PROMPTS = (
    "The printer on the second floor is out of paper.",
    "def close_ticket(ticket):",
    "My laptop does not find the network since yesterday.",
    "for customer in customers:",
    "Please reset the password of my account.",
    "class Ticket:\n    def __init__(self, number):",
)


def answers(engine: Engine, params: SamplingParams) -> tuple[float, list[Result]]:
    """Answer all prompts, one after the other; return the seconds and the answers."""
    start = time.perf_counter()
    results = [engine.generate(prompt, params) for prompt in PROMPTS]
    return time.perf_counter() - start, results


def main() -> None:
    asked = parse_flags(__doc__, "engines", threads=None, rounds=5)
    params = SamplingParams(
        max_tokens=400, temperature=0, structured_outputs=StructuredOutputs(json=TICKET)
    )
    seconds: list[list[float]] = [[] for _ in asked.engines]
    by_engine: list[list[Result]] = [[] for _ in asked.engines]
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(Engine.load(path, threads=asked.threads, prefix_cache=False))
            for path in asked.engines
        ]
        for number in range(asked.rounds + 1):
            for i, engine in enumerate(engines):
                took, by_engine[i] = answers(engine, params)
                if number:  # the first round loads programs
                    seconds[i].append(took)
    report(asked.engines, [statistics.median(each) for each in seconds], by_engine)


def report(engines: list[Path], seconds: list[float], by_engine: list[list[Result]]) -> None:
    """Print the table; raise EngineError if the texts are not the same."""
    for path, results in zip(engines, by_engine, strict=True):
        if [r.token_ids for r in results] != [r.token_ids for r in by_engine[0]]:
            raise EngineError(f"{path} gives another text than {engines[0]}")
    table = Table("engine", "tokens/s", "times", "tokens a step", "forced", box=None)
    tokens = sum(len(result.token_ids) for result in by_engine[0])
    for path, took, results in zip(engines, seconds, by_engine, strict=True):
        steps = sum(r.metrics.speculative_decoding.num_spec_steps for r in results)
        forced = sum(r.metrics.forced_tokens for r in results)
        table.add_row(
            path.name,
            f"{tokens / took:,.0f}",
            f"{seconds[0] / took:.2f}",
            f"{tokens / steps:.2f}",
            f"{forced / tokens:.0%}",
        )
    Console(width=100).print(table)
    ended = sum(result.finish_reason == "stop" for result in by_engine[0])
    print(f"{tokens} tokens, {ended} of {len(by_engine[0])} answers ended", file=sys.stderr)


if __name__ == "__main__":
    run(main)
