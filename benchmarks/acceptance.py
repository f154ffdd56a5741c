"""Acceptance length by temperature, rule of acceptance and drafter's sampling, on one engine.

    python benchmarks/acceptance.py engines/tiny_n3 [--tokens 192] [--top-p 0.95] [--requests 20]

Each cell is the acceptance length over the built-in prompts of one kind. A request's seed is
its number, so a run can be repeated.
"""

from dataclasses import replace

from rich.console import Console
from rich.table import Table
from script import load_prompts, parse_flags, run

from mtpbuild.builder.plan.recipe import BUILT_IN
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.requests.stats import compute_acceptance_length

TEMPERATURES = (0.6, 1.0)
STRICT = SamplingParams()
REJECTION = replace(STRICT, acceptance="rejection")
BLOCK = replace(REJECTION, rejection_sample_method="block")
MODES = {"strict": STRICT, "rejection": REJECTION, "block": BLOCK}
METHODS = {}
for name, mode in MODES.items():
    METHODS[f"{name}, argmax"] = replace(mode, draft_sample_method="greedy")
    METHODS[f"{name}, drawn"] = replace(mode, draft_sample_method="probabilistic")


def acceptance_length(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> float:
    """Return the acceptance length over all prompts; a prompt's seed is its number."""
    each = [replace(params, seed=seed) for seed in range(len(prompts))]
    metrics = [result.metrics for result in engine.generate(prompts, each)]
    steps = sum(one.speculative_decoding.num_spec_steps for one in metrics)
    return compute_acceptance_length(sum(one.output_tokens for one in metrics), steps) or 0.0


def main() -> None:
    arguments = parse_flags(__doc__, "engine", tokens=192, top_p=0.95, requests=20)
    table = Table("kind", "temperature", *METHODS)
    with Engine.load(arguments.engine, prefix_cache=False) as engine:
        for kind in BUILT_IN:
            prompts = load_prompts(engine, kind, arguments.requests, arguments.tokens)
            greedy = SamplingParams(max_tokens=arguments.tokens)
            table.add_row(kind, "0", f"{acceptance_length(engine, prompts, greedy):.2f}")
            for temperature in TEMPERATURES:
                cells = []
                for method in METHODS.values():
                    params = replace(
                        method,
                        max_tokens=arguments.tokens,
                        temperature=temperature,
                        top_p=arguments.top_p,
                    )
                    cells.append(f"{acceptance_length(engine, prompts, params):.2f}")
                table.add_row(kind, str(temperature), *cells)
    Console().print(table)


if __name__ == "__main__":
    run(main)
