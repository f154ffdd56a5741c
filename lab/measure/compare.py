"""The finding of a check, and the comparison of two engines' texts, token by token."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from mtpbuild.lab.measure.runs import TimedAnswer

# A near-tie has a margin of at most TIE_FACTOR times the measured difference between the
# log-probabilities that the two engines give to the same tokens.
TIE_FACTOR = 4
LEAST_NOISE = 1e-5  # fp32 can't tell smaller differences apart
LARGEST_DIFFERENCE = 1e-2  # beyond this difference the two are different models
DIVERGING_SHARE = 0.05  # share of the texts that may diverge; one text always may

# (number of the text, tokens to append to its prompt, number of tokens to add) -> our answer
Replay = Callable[[int, list[int], int], TimedAnswer]


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result: a verdict, one line of text, and figures."""

    passed: bool | None  # None: the check could not be made
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return {True: "passed", False: "failed", None: "not checked"}[self.passed]


class NotChecked(Exception):  # noqa: N818 - not an error: a check that has nothing to check
    """The reason why a check can't be made."""


def compare_texts(
    ours: Sequence[TimedAnswer],
    theirs: Sequence[TimedAnswer],
    replay: Replay,
    largest_difference: float = LARGEST_DIFFERENCE,
    diverging_share: float = DIVERGING_SHARE,
) -> Finding:
    """Compare every token; after a near-tie our engine continues with their token.

    The last two are limits, which are wider for engines that round more.
    """
    noise = find_largest_without_jumps(
        n for pair in zip(ours, theirs, strict=True) for n in list_logprob_differences(*pair)
    )
    limit = TIE_FACTOR * max(noise, LEAST_NOISE)
    figures = {"texts": len(ours), "tokens": sum(len(t.token_ids) for t in theirs), "noise": noise}
    if not noise <= largest_difference:
        detail = f"log-probabilities of the same tokens are up to {noise:.2g} apart"
        return Finding(False, f"{detail}: other weights, or a wrong cache", figures)
    apart_at_ties = 0
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for margin, detail in find_differences(number, mine, other, replay):
            if margin > limit:
                detail += f" (margin {margin:.2g}, a near-tie is below {limit:.1g})"
                return Finding(False, detail, figures)
        apart_at_ties += mine.token_ids != other.token_ids
    figures["near_ties"] = apart_at_ties
    detail = f"{len(ours) - apart_at_ties} of {len(ours)} texts equal, {figures['tokens']} tokens"
    if apart_at_ties > max(1, diverging_share * len(ours)):
        return Finding(
            False, f"{detail}: too many texts differ, although only after near-ties", figures
        )
    near = f", {apart_at_ties} differ only after a near-tie" if apart_at_ties else ""
    return Finding(True, detail + near, figures)


def compare_bits(ours: Sequence[TimedAnswer], theirs: Sequence[TimedAnswer]) -> Finding:
    """Compare every token and every log-probability, of which no bit may differ."""
    figures = {"texts": len(ours), "tokens": sum(len(t.token_ids) for t in theirs)}
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        tokens = [[*zip(text.token_ids, text.logprobs, strict=True)] for text in (mine, other)]
        if (place := find_first_difference(*tokens)) is not None:
            one, two = (text[place] if place < len(text) else "an end" for text in tokens)
            detail = f"text {number}, token {place}: {one}, not {two} (token, log-probability)"
            return Finding(False, detail, figures)
    return Finding(True, f"{len(ours)} texts equal to the bit, {figures['tokens']} tokens", figures)


def find_differences(
    number: int, ours: TimedAnswer, theirs: TimedAnswer, replay: Replay
) -> Iterator[tuple[float, str]]:
    """Find every place where our engine chooses another token after the same tokens.

    Yields the larger margin of the two choices, and a description of the place.
    """
    at = 0
    wanted = theirs.token_ids
    while (place := find_first_difference(ours.token_ids, wanted[at:])) is not None:
        mine, other = ours.token_ids[place:][:1], wanted[at + place :][:1]  # []: the text ends
        both = mine and other
        margin = max(ours.margins[place], theirs.margins[at + place]) if both else math.inf
        says = f"says {mine[0]}" if mine else "ends"
        instead = other[0] if other else "an end"
        yield margin, f"text {number}, token {at + place}: {says}, not {instead}"
        at += place + 1
        if at >= len(wanted):
            return
        ours = replay(number, wanted[:at], len(wanted) - at)


def find_largest_without_jumps(differences: Iterable[float]) -> float:
    """Return the largest difference after leaving out the largest 1 %; 0 if there is none.

    Where two experts have the same score to the last bit, either may be chosen, and the
    log-probabilities of that token jump. A wrong cache or weight changes all later tokens.
    """
    ordered = sorted(differences)
    return ordered[-1 - len(ordered) // 100] if ordered else 0.0


def list_logprob_differences(ours: TimedAnswer, theirs: TimedAnswer) -> list[float]:
    """List the differences of log-probabilities, up to the first token that differs."""
    same = find_first_difference(ours.token_ids, theirs.token_ids)
    return [abs(a - b) for a, b in zip(ours.logprobs[:same], theirs.logprobs[:same], strict=True)]


def find_first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)
