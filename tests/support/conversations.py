"""Conversations of many users: what they are told must not depend on what an engine keeps."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mtpbuild.builder.compiler.prefixes import load_prefix_function, write_manifest, write_prefix
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.requests.request import Result
from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs

DIFFERS = "a warm start differs from a cold one"
PLAIN = SamplingParams(logprobs=1)
SAMPLED = replace(PLAIN, temperature=0.8, top_p=0.95)
KINDS = (
    PLAIN,
    SAMPLED,
    replace(SAMPLED, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    replace(SAMPLED, acceptance="rejection"),
    replace(PLAIN, structured_outputs=StructuredOutputs(regex=r"the answer is [0-9]{1,4}[.]")),
)


class Turn(NamedTuple):
    """A request, what it got, and the tokens of the conversation before it."""

    prompt: list[int]
    params: SamplingParams
    result: Result
    before: int


def check_same(warm: Result, cold: Result, params: SamplingParams) -> None:
    """Assert that tokens, drafts and log-probabilities are equal to the bit.

    Behind tokens that a grammar forced, the modules of MTP vanilla have seen others.
    """
    assert warm.token_ids == cold.token_ids, DIFFERS
    assert warm.logprobs == cold.logprobs, DIFFERS
    assert warm.prompt_logprobs == cold.prompt_logprobs, DIFFERS
    assert params.constraint or warm.from_draft == cold.from_draft, DIFFERS


class Users:
    """Users who ask in any order; each goes on from all that was said to them before.

    longest: tokens of an answer. beginning: tokens that stand before the first question of all.
    """

    def __init__(self, count: int, *, longest: int = 24, beginning: Sequence[int] = ()) -> None:
        self._random, self._longest = random.Random(0), longest
        self.turns: list[Turn] = []
        self._said = [[*beginning] for _ in range(count)]

    def ask(self, engine: Engine) -> list[Turn]:
        """Let each user ask once, all of them at the same time; returns what they got."""
        order = self._random.sample(range(len(self._said)), len(self._said))
        prompts, params = [], []
        for user in order:
            asked = f"What is {self._random.randint(2, 999)} + {user}?"
            new = engine.chat_ids([{"role": "user", "content": asked}])
            prompts.append(self._said[user] + new)
            length, seed = self._random.randint(2, self._longest), self._random.randrange(1 << 32)
            kind = KINDS[user % len(KINDS)]
            params.append(replace(kind, max_tokens=length, seed=seed))
        results, turns = engine.generate(prompts, params), list[Turn]()
        for user, prompt, own, result in zip(order, prompts, params, results, strict=True):
            turns.append(Turn(prompt, own, result, len(self._said[user])))
            self._said[user] = prompt + result.token_ids
        self.turns += turns
        return turns

    def check(self, cold: Engine) -> None:
        """All got what they get of an engine that keeps nothing."""
        results = cold.generate([t.prompt for t in self.turns], [t.params for t in self.turns])
        for turn, result in zip(self.turns, results, strict=True):
            assert result.metrics.cached_tokens == 0
            check_same(turn.result, result, turn.params)


def with_prefix(engine: Path, copy: Path, tokens: Sequence[int]) -> Path:
    """Copy an engine, and build a prefix of so many tokens into the copy."""
    shutil.copytree(engine, copy)
    manifest = read_manifest(copy)
    write_prefix(copy, manifest, "own", tokens, load_prefix_function(copy, manifest, 1)(tokens))
    write_manifest(copy, manifest)
    return copy


def check_found(turns: list[Turn], lookahead: int) -> None:
    """Each began behind its conversation's last turn, but for what is always filled in."""
    for turn in turns:
        assert turn.result.metrics.cached_tokens == turn.before - lookahead
