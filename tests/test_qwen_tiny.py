"""The hybrid model that the repository ships, as a user runs it, against transformers."""

from pathlib import Path

import onnx
import pytest
import torch

from mtpbuild.builder.plan.recipe import find_model
from mtpbuild.runtime import Engine, SamplingParams
from tests.support.conversations import Users, check_found, with_prefix
from tests.support.crowds import Case, check_crowd, texts
from tests.support.engines import EngineBuilder, greedy_ids
from tests.support.prompts import CODE, QUESTIONS
from tests.support.transformers_oracle import transformers_greedy, transformers_model

pytestmark = pytest.mark.xdist_group("qwen_tiny")  # another worker would wait for the same engine
OUTPUT = 48
TOGETHER, SOME = 40, 20_000_000  # requests that are queued at once; bytes of a pool
MEAN_ACCEPTANCE_LENGTH = 2.0  # a broken drafter would not reach it; the card has what this one does


@pytest.fixture(scope="session")
def engine(build_engine: EngineBuilder) -> Path:
    return build_engine("qwen-tiny", 3, max_batch=1, prefill_chunk=32)


def prompts(engine: Path) -> list[list[int]]:
    """Return questions, and code of more than a chunk."""
    with Engine.load(engine, threads=1, prefix_cache=False) as loaded:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:6]]
        code = [token for text in CODE[:6] for token in loaded.encode(text)]
        return [*(loaded.chat_ids(chat) for chat in chats), code]


def test_text_is_that_of_transformers(engine: Path) -> None:
    """With drafts that are accepted: states advance by them and by nothing else."""
    torch.set_num_threads(1)
    model = transformers_model(find_model("qwen-tiny").folder)
    chosen = [prompts(engine)[i] for i in (0, 5, -1)]
    theirs = [transformers_greedy(model, prompt, OUTPUT) for prompt in chosen]
    assert greedy_ids(engine, chosen, OUTPUT) == theirs


def test_it_answers_and_its_drafts_are_accepted(engine: Path) -> None:
    with Engine.load(engine, threads=1, prefix_cache=False) as loaded:
        results = [loaded.generate(p, SamplingParams(max_tokens=200)) for p in prompts(engine)[:6]]
    assert results[0].text.rsplit("\n", 1)[-1] == "132"
    drafting = [result.metrics.speculative_decoding for result in results]
    accepted = sum(d.num_accepted_draft_tokens for d in drafting)
    assert 1 + accepted / sum(d.num_spec_steps for d in drafting) > MEAN_ACCEPTANCE_LENGTH


def test_a_step_has_few_nodes(engine: Path) -> None:
    """States, gates and splits leave no operator of ONNX Runtime's own between ours."""
    for name, most in {"decode": 16, "prefill": 7}.items():
        graph = onnx.load(engine / f"{name}.onnx", load_external_data=False).graph
        assert len(graph.node) <= most


@pytest.mark.full
@pytest.mark.parametrize("nextn", [0, 1, 2, "auto"])
def test_every_nextn_says_the_same(
    engine: Path, build_engine: EngineBuilder, nextn: int | str
) -> None:
    other = build_engine("qwen-tiny", nextn, max_batch=4, prefill_chunk=32)
    given = prompts(engine)
    assert greedy_ids(other, given, 128) == greedy_ids(engine, given, 128)


def test_warm_starts_say_what_cold_ones_say(engine: Path, tmp_path: Path) -> None:
    """Behind a prefix of the engine and behind earlier turns, to the bit: it is exact.

    Of earlier turns there are the states at the ends of prompts.
    """
    users, longest = Users(5), 24
    with Engine.load(engine, threads=1, prefix_cache=False) as cold:
        assert cold.manifest.build.exact
        beginning = cold.encode("You add and sort numbers. " * 12)
        behind = Users(5, beginning=beginning)
        with Engine.load(
            with_prefix(engine, tmp_path / "own", beginning), threads=1, prefix_cache=False
        ) as own:
            check_found(behind.ask(own), own.manifest.lookahead)
            (cut,) = own.generate([[*beginning[:50], 9, 10]], SamplingParams(max_tokens=1))
            assert cut.metrics.cached_tokens == 32, "the end of a chunk"
        with Engine.load(engine, threads=1, prefix_cache=True) as warm:
            users.ask(warm)
            for turn in users.ask(warm):
                assert turn.result.metrics.cached_tokens >= turn.before - longest - 1
        behind.check(cold)
        users.check(cold)


@pytest.mark.full
def test_2000_requests_over_8_slots(engine: Path, build_engine: EngineBuilder) -> None:
    """Beside others, behind earlier prompts, and cancelled: each says what it says alone."""
    crowd = build_engine("qwen-tiny", 3, max_batch=8, prefill_chunk=32)
    with (
        Engine.load(engine, threads=1, prefix_cache=False) as alone,
        Engine.load(crowd, threads=2, prefix_cache=True, prefix_cache_bytes=SOME) as many,
    ):
        begun = [alone.encode(code * 20)[:70] for code in CODE[:4]]
        for first in range(0, 2000, TOGETHER):
            numbers = range(first, first + TOGETHER)
            requests = [Case(n, 40, begun[n % 5] if n % 5 < 4 else ()) for n in numbers]
            check_crowd(many, requests, texts(alone, requests, at_once=False))
        stats = many.stats
    assert stats.prefix_hits > stats.prefix_queries / 20
    assert SOME / 2 < stats.prefix_bytes <= SOME
