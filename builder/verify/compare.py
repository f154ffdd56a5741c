"""The finding of a check, and how the texts of two engines are compared, token by token."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from mtpbuild.builder.verify.play import Played

# A near-tie has a margin within TIE times the difference that is measured between the
# log-probabilities that the two give to the same tokens.
TIE = 4
LEAST = 1e-5  # fp32 can't tell smaller differences apart
MOST = 1e-2  # beyond this difference the two are not the same model
PARTED = 0.05  # this share of the texts may part, and one text always may

# (number of the text, tokens to put after its prompt, how many to add) -> our answer
Replay = Callable[[int, list[int], int], Played]


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's result, in a line and in figures."""

    passed: bool | None  # None: the check could not be made
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return {True: "passed", False: "failed", None: "not checked"}[self.passed]


class NotChecked(Exception):  # noqa: N818 - not an error: a check that has nothing to check
    """A check can't be made; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where the two engines choose different tokens after the same ones."""

    place: int
    ours: int | None  # None: the text ends
    theirs: int | None
    margin: float  # the larger one of the two


def compare(
    ours: Sequence[Played],
    theirs: Sequence[Played],
    replay: Replay,
    most: float = MOST,
    parted: float = PARTED,
) -> Finding:
    """Compare every token; after a near-tie our engine goes on with their token.

    most, parted: the limits, which are wider for engines that round more.
    """
    noise = largest_but_jumps(n for pair in zip(ours, theirs, strict=True) for n in apart(*pair))
    limit = TIE * max(noise, LEAST)
    figures = {"texts": len(ours), "tokens": sum(len(t.token_ids) for t in theirs), "noise": noise}
    if not noise <= most:
        return Finding(
            False,
            f"log-probabilities of the same tokens are up to {noise:.2g} apart: other weights, or "
            "a wrong cache",
            figures,
        )
    apart_at_ties = 0
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for difference in differences(number, mine, other, replay):
            if difference.margin > limit:
                return Finding(False, named(number, difference, limit), figures)
        apart_at_ties += mine.token_ids != other.token_ids
    figures["near_ties"] = apart_at_ties
    said = f"{len(ours) - apart_at_ties} of {len(ours)} texts equal, {figures['tokens']} tokens"
    if apart_at_ties > max(1, parted * len(ours)):
        return Finding(False, f"{said}: too many part, if only at near-ties", figures)
    near = f", {apart_at_ties} parts at a near-tie" if apart_at_ties else ""
    return Finding(True, said + near, figures)


def differences(number: int, ours: Played, theirs: Played, replay: Replay) -> Iterator[Difference]:
    """Find every place where ours chooses another token after their tokens."""
    at, wanted = 0, theirs.token_ids
    while (place := first_difference(ours.token_ids, wanted[at:])) is not None:
        mine, other = _at(ours.token_ids, place), _at(wanted, at + place)
        ends = mine is None or other is None
        margin = math.inf if ends else max(ours.margins[place], theirs.margins[at + place])
        yield Difference(at + place, mine, other, margin)
        at += place + 1
        if at >= len(wanted):
            return
        ours = replay(number, wanted[:at], len(wanted) - at)


def largest_but_jumps(differences: Iterable[float]) -> float:
    """The largest, one in a hundred left out; 0 of none.

    Where two experts have the same score to the last bit, either may be taken, and the
    log-probabilities of that token jump. A wrong cache or weight shows in all that follow.
    """
    found = sorted(differences)
    return found[-1 - len(found) // 100] if found else 0.0


def apart(ours: Played, theirs: Played) -> list[float]:
    """List how far log-probabilities differ, up to the first token that differs."""
    same = first_difference(ours.token_ids, theirs.token_ids)
    pairs = zip(ours.logprobs[:same], theirs.logprobs[:same], strict=True)
    return [abs(a - b) for a, b in pairs]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    pairs = enumerate(zip_longest(ours, theirs))
    return next((i for i, (a, b) in pairs if a != b), None)


def named(number: int, difference: Difference, limit: float) -> str:
    """Describe a difference."""
    d = difference
    says = "ends" if d.ours is None else f"says {d.ours}"
    other = "an end" if d.theirs is None else str(d.theirs)
    return (
        f"text {number}, token {d.place}: {says}, not {other} "
        f"(margin {d.margin:.2g}, a near-tie is below {limit:.1g})"
    )


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None
