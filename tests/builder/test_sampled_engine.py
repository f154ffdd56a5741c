"""The mixed program of a built engine: sampled, rejected, relaxed requests, alone and together."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtpbuild.builder.plan import DrafterName
from mtpbuild.builder.reference import Transformer
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.programs.base import Controls
from tests.conftest import EngineBuilder
from tests.reference.recompute import greedy
from tests.reference.sampling import sample

CHUNK, COUNT = 4, 60
BEGIN, END = 7, 8
ENGINES: list[tuple[int, DrafterName | None]] = [(0, None), (3, "mtp-eagle"), (3, "mtp-vanilla")]
HOT = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.8, top_p=0.95, seed=5)
SETTINGS = [
    HOT,
    replace(HOT, temperature=1.3, top_p=1.0, top_k=9, seed=6),
    replace(HOT, temperature=0.6, min_p=0.1, seed=7),
    replace(HOT, draft_sample_method="greedy", seed=8),
]
PLAIN = SamplingParams(max_tokens=COUNT, ignore_eos=True)
RELAXED = replace(
    PLAIN,
    relaxed_topk=61,
    relaxed_delta=1.0,
    begin_thinking_phase_token=BEGIN,
    end_thinking_phase_token=END,
)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(9, 61, n).tolist() for n in (1, 6, 11, 3)[:count]]


def controls(params: SamplingParams) -> Controls:
    assert params.seed is not None
    return Controls(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
    )


@pytest.mark.parametrize(("nextn", "drafter"), ENGINES)
def test_sampled_text_is_what_plain_sampling_gives(
    nextn: int,
    drafter: DrafterName | None,
    predictable_folder: Path,
    predictable: Transformer,
    build_engine: EngineBuilder,
) -> None:
    """O2 above temperature 0: for every nextn and drafter, drawn or argmax drafts."""
    accepted = 0
    with Engine.load(
        build_engine(predictable_folder, nextn, drafter, prefill_chunk=CHUNK), threads=1
    ) as engine:
        for params in SETTINGS:
            for prompt, result in zip(prompts(2), engine.generate(prompts(2), params), strict=True):
                assert result.token_ids == sample(predictable, prompt, COUNT, controls(params))
                assert result.seed == params.seed
                accepted += result.metrics.speculative_decoding.num_accepted_draft_tokens
    assert bool(accepted) == bool(nextn)


def test_modes_share_a_batch(
    predictable_folder: Path, predictable: Transformer, build_engine: EngineBuilder
) -> None:
    """Each request of a mixed batch gives what it gives alone, whoever it shares a step with."""
    params = [PLAIN, HOT, replace(HOT, acceptance="rejection"), RELAXED, PLAIN, HOT]
    asked = [*prompts(3), [BEGIN, 20, 21], *prompts(2)]
    engine = build_engine(predictable_folder, 3, "mtp-vanilla", prefill_chunk=CHUNK, max_batch=3)
    with Engine.load(engine, threads=1) as loaded:
        together = loaded.generate(asked, params)
        alone = [loaded.generate(p, settings) for p, settings in zip(asked, params, strict=True)]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    for i in (0, 4):
        assert together[i].token_ids == greedy(predictable, asked[i], COUNT)
    assert together[1].token_ids == sample(predictable, asked[1], COUNT, controls(HOT))


def test_relaxed_acceptance(
    predictable_folder: Path, predictable: Transformer, build_engine: EngineBuilder
) -> None:
    engine = build_engine(predictable_folder, 3, "mtp-vanilla", prefill_chunk=CHUNK)
    thought, closed = [9, BEGIN, 20, 21], [BEGIN, 20, END, 21]
    with Engine.load(engine, threads=1) as loaded:
        relaxed = loaded.generate(thought, RELAXED)
        strict = loaded.generate(thought, replace(RELAXED, relaxed_topk=1))
        outside = loaded.generate(closed, RELAXED)
    # Everything is near enough: all drafts are accepted but in the first step, which has none.
    drafting = relaxed.metrics.speculative_decoding
    if END not in relaxed.token_ids:
        assert drafting.draft_acceptance_rate == 1.0
    assert relaxed.token_ids != strict.token_ids
    assert strict.token_ids == greedy(predictable, thought, COUNT)
    until = next((i for i, t in enumerate(outside.token_ids) if t == BEGIN), COUNT)
    assert outside.token_ids[:until] == greedy(predictable, closed, COUNT)[:until]


def test_a_seed_is_drawn_and_reported(
    predictable_folder: Path, build_engine: EngineBuilder
) -> None:
    engine = build_engine(predictable_folder, 3, "mtp-vanilla", prefill_chunk=CHUNK)
    with Engine.load(engine, threads=1) as loaded:
        first = loaded.generate([20, 21], replace(HOT, seed=None))
        assert first.seed is not None
        again = loaded.generate([20, 21], replace(HOT, seed=first.seed))
        other = loaded.generate([20, 21], replace(HOT, seed=first.seed + 1))
    assert again.token_ids == first.token_ids
    assert other.token_ids != first.token_ids
