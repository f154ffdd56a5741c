"""Runs an engine's requests through the real run time and returns token ids."""

from pathlib import Path

from mtpbuild.runtime import Engine, SamplingParams


def greedy_ids(engine: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The next `count` token ids of each prompt, not stopping at EOS."""
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    with Engine.load(engine) as loaded:
        results = loaded.generate(prompts, params)
    return [list(result.token_ids) for result in results]
