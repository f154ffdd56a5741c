"""Drives a request step by step and compares every step with recomputation.

Drafts are changed, so that every acceptance count and draft count occurs. With MTP Eagle the true
continuation is written into `window`, wrong from a random place on. MTP vanilla does not allow
that: its caches hold rows of its own drafts, which are exact only if the accepted tokens are those
drafts. There drafts are only spoilt, and the model must be predictable.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.runtime.contract.programs import Adaptive, Programs
from tests.reference.recompute import cache_rows, draft_logits, greedy

GARBAGE = 1e20  # on a CPU unseen rows weigh 1e-32 (`floored_softmax`)
TIE = 1e-3  # logits nearer than this may be ranked either way

# The oracle's messages begin so; only one of them counts as catching a planted bug.
COUNT = "the number of accepted tokens differs from greedy's"
TOKENS = "accepted tokens differ from greedy's"
LENGTH = "the length differs from the tokens that are known"
DRAFTS = "drafts differ from the recomputed ones"
STATES = "recurrent states differ from those of the tokens that are known"
ROWS = "committed rows differ from the recomputed ones"


@runtime_checkable
class Inspectable(Programs, Protocol):
    @property
    def state(self) -> dict[str, NDArray[Any]]: ...


@dataclass
class Seen:
    """Collects the acceptance counts and the draft counts that occurred in a run."""

    accepted: set[int] = field(default_factory=set)
    num_drafts: set[int] = field(default_factory=set)


@dataclass
class Run:
    """Drives one request in one slot; nextn is K, drafter is None for an engine without drafts.

    Adaptive programs get another nextn, up to K, before each step.
    """

    programs: Inspectable
    reference: PlainLM
    nextn: int
    drafter: str | None
    chunk: int
    rng: np.random.Generator
    adaptive: bool = False

    def prefill(self, prompt: list[int], slot: int = 0) -> None:
        ahead = self.programs.lookahead
        for start in range(0, len(prompt) - 1, self.chunk):
            stop = min(start + self.chunk, len(prompt) - 1)
            tokens = np.zeros(stop - start + ahead, np.int64)
            known = prompt[start : stop + ahead]
            tokens[: len(known)] = known
            self.programs.prefill(slot, start, tokens)
        self.programs.begin(slot, len(prompt) - 1, prompt[-1])

    def steps(self, prompt: list[int], count: int) -> tuple[list[int], Seen]:
        """Prefills, runs `count` steps and checks each; returns all tokens and the counts seen."""
        K, T = self.nextn, self.nextn + 1
        self.prefill(prompt)
        truth, tokens, seen = list(prompt), list(prompt), Seen()
        for step in range(count):
            if (missing := len(tokens) + T - len(truth)) > 0:
                truth += greedy(self.reference, truth, missing)
            real = int(self.rng.integers(0, K + 1)) if step else 0
            self._tamper(truth[len(tokens) : len(tokens) + K], real)
            self._spoil_garbage(len(tokens) - 1)
            window = self.programs.state["window"][0].tolist()
            made = self._adapt()
            real = min(real, made)
            out = self.programs.step(np.array([True]), len(tokens) - 1 + T)
            n = int(out.num_tokens[0])
            wanted = 1 + matching(window[1 : 1 + real], truth[len(tokens) :])
            assert n == wanted, f"{COUNT}: {n}, not {wanted}"
            given, wanted_tokens = out.tokens[0, :n].tolist(), truth[len(tokens) : len(tokens) + n]
            assert given == wanted_tokens, f"{TOKENS}: {given}, not {wanted_tokens}"
            assert (out.tokens[0, n:] == -1).all(), f"{TOKENS}: there are some after the last"
            tokens += given
            length = int(self.programs.state["lengths"][0])
            assert length == len(tokens) - 1, f"{LENGTH}: {length}, not {len(tokens) - 1}"
            self._check_drafts(tokens, made)
            seen.accepted.add(n)
            seen.num_drafts.add(real)
        return tokens, seen

    def _tamper(self, truth: list[int], real: int) -> None:
        K, vocab = self.nextn, self.reference.config.vocab_size
        drafts = self.programs.state["window"][0, 1:]
        if self.drafter != "mtp-vanilla" or K == 1:  # no cached row was made from a lone draft
            drafts[:] = truth
        wrong = int(self.rng.integers(0, 2 * K + 1))  # beyond K - 1: none is spoilt
        if wrong < K:
            drafts[wrong] = (drafts[wrong] + 1 + int(self.rng.integers(vocab - 1))) % vocab
        self.programs.state["num_drafts"][0] = real

    def _spoil_garbage(self, length: int) -> None:
        for name, cache in self.programs.state.items():
            if "kv." in name:
                cache[:, :, length:] = GARBAGE

    def _adapt(self) -> int:
        """Choose how many drafts the next step judges and makes."""
        if not self.adaptive:
            return self.nextn
        made = int(self.rng.integers(0, self.nextn + 1))
        cast(Adaptive, self.programs).draft(made)
        return made

    def _check_drafts(self, tokens: list[int], made: int) -> None:
        if self.drafter is None:
            return
        drafts = self.programs.state["window"][0, 1 : 1 + made].tolist()
        count = int(self.programs.state["num_drafts"][0])
        assert count == made, f"{DRAFTS}: {count} of them, not {made}"
        wanted = draft_logits(self.reference, tokens, made, self.drafter)
        for draft, logits in zip(drafts, wanted, strict=True):
            if draft != int(logits.argmax()):
                off = float(logits.max() - logits[draft])
                assert off < TIE, f"{DRAFTS}: {drafts} after {len(tokens)} tokens, off by {off}"
                return  # later drafts depend on a near-tie


def check_programs(
    programs: Programs,
    reference: PlainLM,
    nextn: int,
    drafter: str | None,
    chunk: int,
    lengths: Sequence[int] = (),
    count: int = 10,
    every: bool = True,
) -> None:
    """Check one engine's programs (O3, O6), request after request: stale state must not matter.

    lengths: of the prompts, by default some around a chunk's border; count: of steps. every:
    whether each number of accepted tokens and each number of drafts must occur.
    """
    assert isinstance(programs, Inspectable)
    rng, seen = np.random.default_rng(nextn), Seen()
    for length in lengths or (11, 1, 2, 3, chunk, chunk + 1, chunk + 2, 20):
        prompt = rng.integers(0, reference.config.vocab_size, length).tolist()
        tokens, saw = Run(programs, reference, nextn, drafter, chunk, rng).steps(prompt, count)
        if isinstance(reference, PlainDeepseek):
            for i, rows in enumerate(cache_rows(reference, tokens[:-1])):
                cache = programs.state[f"kv.{i}"][0, 0, : len(tokens) - 1]
                np.testing.assert_allclose(cache, rows, atol=2e-4, err_msg=ROWS)
        seen.accepted |= saw.accepted
        seen.num_drafts |= saw.num_drafts
    assert not every or seen.accepted == set(range(1, nextn + 2))
    assert not every or seen.num_drafts == set(range(nextn + 1))


def matching(drafts: list[int], truth: list[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = list(zip(drafts, truth, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
