"""Checks of the values that users write in requests and configurations.

A check takes a value and returns the value to store; its ValueError says what the value must be.
"""

import contextlib
import difflib
import itertools
import json
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from mtpbuild.runtime.errors import UsageError

T = TypeVar("T")
Check = Callable[[object], Any]
NEXTN_LIMIT = 15  # one step verifies at most 16 tokens, as in vllm-ascend
LARGEST = 2**31 - 1  # limit of counts and token ids: kernels, tokenizers and masks may have 32 bits


def format_value(value: object) -> str:
    """Return the beginning of a wrong value's repr, for an error message."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number of thousands of digits"


def check_number(least: float, most: float, *, kind: type[int] | type[float] = float) -> Check:
    name, kinds = ("a whole number", Integral) if kind is int else ("a number", Real)

    def read(value: Any) -> float:
        fits = type(value) is kind or (isinstance(value, kinds) and not isinstance(value, bool))
        if fits and least <= value <= most:
            return kind(value)
        hide_limit = most == LARGEST and not (fits and value > most)
        span = f"from {least}" if hide_limit else f"in {least}..{most}"
        raise ValueError(f"must be {name} {span}, not {format_value(value)}")

    return read


def check_integer(least: int, most: int = LARGEST) -> Check:
    return check_number(least, most, kind=int)


def check_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {format_value(value)}")
    return value


def check_choice(*names: str) -> Check:
    def read(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"must be one of {', '.join(names)}, not {format_value(value)}")
        return str(value)

    return read


def check_text(least: int, most: int) -> Check:
    """Return a check for a text of `least` to `most` characters that is valid Unicode."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not least <= len(value) <= most:
            raise ValueError(f"must be a text of {least} to {most} characters")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"must be valid Unicode text ({error})") from None
        return str(value)

    return read


def check_list(name: str, item: Check, limit: int) -> Check:
    """Return a check that makes a tuple of up to `limit` items; a text becomes a tuple of one."""

    def read(values: Any) -> tuple[object, ...]:
        items = (values,) if isinstance(values, str) else values
        if not isinstance(items, list | tuple | set | frozenset):
            raise ValueError(f"must be a list of {name}, not {format_value(values)}")
        if len(items) > limit:
            raise ValueError(f"must be a list of {limit} at most, not of {len(items)}")
        try:
            return tuple(map(item, items))
        except ValueError as error:
            raise ValueError(f"must be a list of {name}, each of which {error}") from None

    return read


def check_instance(kind: type) -> Check:
    def read(value: object) -> object:
        if not isinstance(value, kind):
            raise ValueError(f"must be a {kind.__name__}")
        return value

    return read


def check_object(value: object) -> dict[str, Any]:
    """Check a JSON object whose names are identifiers."""
    if isinstance(value, Mapping) and all(isinstance(n, str) and n.isidentifier() for n in value):
        return dict(value)
    raise ValueError(f"must map names to values, not {format_value(value)}")


def check_biases(limit: int) -> Check:
    """Return a check for a map of at most `limit` token ids, numbers or texts, to logit biases."""

    def read(values: object) -> dict[int, float]:
        if not isinstance(values, Mapping):
            raise ValueError(f"must map token ids to numbers, not {format_value(values)}")
        if len(values) > limit:
            raise ValueError(f"must be of {limit} tokens at most, not of {len(values)}")
        return dict(read_entry(*item) for item in values.items())

    def read_entry(id: object, value: object) -> tuple[int, float]:
        if isinstance(id, bool) or not re.fullmatch("[0-9]{1,9}", str(id)):
            raise ValueError(f"must map token ids to numbers, and {format_value(id)} is no id")
        try:
            return int(str(id)), check_number(-100, 100)(value)
        except ValueError as error:
            raise ValueError(f"of token {id} {error}") from None

    return read


def check_rates(values: object) -> tuple[float, ...]:
    """Check rates; entry i is the share of steps that accept at least the first i + 1 drafts."""
    if not isinstance(values, list | tuple) or not 1 <= len(values) <= NEXTN_LIMIT:
        raise ValueError(f"must be a list of rates, not {format_value(values)}")
    rates: Sequence[float] = [check_number(0, 1)(rate) for rate in values]
    if any(later > earlier for earlier, later in itertools.pairwise(rates)):
        raise ValueError(f"must not increase, as in {format_value(values)}")
    return tuple(rates)


def in_range(value: int, least: int, limit: int, flag: str) -> int:
    """Return the value; raise UsageError, which names the flag, if it is out of range."""
    if not least <= value <= limit:
        raise UsageError(f"{flag} {value} is outside {least}..{limit}")
    return value


def check_one_of(value: str, choices: Collection[str], flag: str) -> str:
    """Return the value; raise UsageError, which names the flag, if it is none of the choices."""
    if value not in choices:
        raise UsageError(f"{flag} {value} is unknown; supported: {', '.join(choices)}")
    return value


def parse_list(flag: str, text: str, kind: Callable[[str], T], example: str) -> tuple[T, ...]:
    """Read numbers such as `0,1,2`; raise UsageError that shows an example."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} {text!r} is not a list of numbers such as {example}") from None


def parse_object(flag: str, text: str, example: str) -> dict[str, Any]:
    """Read a JSON object; raise UsageError that shows an example."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise UsageError(f"{flag} {text!r:.60} is no JSON object: '{example}'")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" if a known word is similar to an unknown one, else ""."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
