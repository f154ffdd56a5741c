"""Checks of the values that users write: what a request's settings and a configuration may be.

A reader takes a value and gives it as it is kept; its ValueError says what the value must be.
"""

import contextlib
import itertools
import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Reader = Callable[[object], Any]


def number(least: int, most: float = math.inf, *, kind: type[int] | type[float] = float) -> Reader:
    name = "a whole number" if kind is int else "a number"
    span = f"from {least}" if most == math.inf else f"in {least}..{most}"

    def read(value: Any) -> float:
        fits = isinstance(value, int | kind) and not isinstance(value, bool)
        if not fits or not least <= value <= most or value == math.inf:
            raise ValueError(f"must be {name} {span}, not {reprlib.repr(value)}")
        return kind(value)

    return read


def whole_number(least: int, most: float = math.inf) -> Reader:
    return number(least, most, kind=int)


def switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {reprlib.repr(value)}")
    return value


def choice(*names: str) -> Reader:
    def read(value: object) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}, not {reprlib.repr(value)}")
        return str(value)

    return read


def list_of(kind: type) -> Reader:
    """A tuple of such values; a text alone is a list of one."""

    def read(values: Any) -> tuple[object, ...]:
        items = (values,) if isinstance(values, str) else values
        listed = isinstance(items, list | tuple | set | frozenset)
        if not listed or not all(type(item) is kind for item in items):
            raise ValueError(f"must be a list of {kind.__name__}, not {reprlib.repr(values)}")
        return tuple(items)

    return read


def above(least: int) -> Reader:
    def read(value: object) -> float:
        with contextlib.suppress(ValueError):
            if (found := number(least)(value)) > least:
                return float(found)
        raise ValueError(f"must be a number above {least}, not {reprlib.repr(value)}")

    return read


def biases(most: int) -> Reader:
    """What is added to the logits of at most so many token ids, which may be texts, as in JSON."""

    def read(values: object) -> dict[int, float]:
        if not isinstance(values, Mapping):
            raise ValueError(f"must map token ids to numbers, not {reprlib.repr(values)}")
        if len(values) > most:
            raise ValueError(f"must be of {most} tokens at most, not of {len(values)}")
        return dict(bias(*item) for item in values.items())

    def bias(id: object, value: object) -> tuple[int, float]:
        if isinstance(id, bool) or not re.fullmatch("[0-9]{1,9}", str(id)):
            raise ValueError(f"must map token ids to numbers, and {reprlib.repr(id)} is no id")
        try:
            return int(str(id)), number(-100, 100)(value)
        except ValueError as error:
            raise ValueError(f"of token {id} {error}") from None

    return read


def rates(values: object) -> tuple[float, ...]:
    """Entry i is the share of steps whose first i + 1 drafts are all accepted."""
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"must be a list of rates, not {reprlib.repr(values)}")
    found: Sequence[float] = [number(0, 1)(rate) for rate in values]
    if any(later > earlier for earlier, later in itertools.pairwise(found)):
        raise ValueError(f"must not increase, as in {reprlib.repr(values)}")
    return tuple(found)


NEXTN_LIMIT = 15
# What a request may ask for, by the names of SamplingParams.
SETTINGS: dict[str, Reader] = {
    "max_tokens": whole_number(1),
    "min_tokens": whole_number(0),
    "stop": list_of(str),
    "stop_token_ids": list_of(int),
    "temperature": number(0, 100),
    "top_k": whole_number(-1),
    "top_p": number(0, 1),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": above(0),
    "seed": whole_number(0, 2**64 - 1),
    "acceptance": choice("strict", "rejection"),
    "rejection_sample_method": choice("standard", "block", "synthetic"),
    "draft_sample_method": choice("probabilistic", "greedy"),
    "synthetic_acceptance_rates": rates,
    "synthetic_acceptance_length": number(1, NEXTN_LIMIT + 1),
    "relaxed_topk": whole_number(1),
    "relaxed_delta": number(0, 1),
    "begin_thinking_phase_token": whole_number(0),
    "end_thinking_phase_token": whole_number(0),
    "shown_tokens": list_of(int),
}
