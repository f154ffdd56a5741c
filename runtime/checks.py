"""Checks the values that users write in requests and configurations.

A check takes a value and returns it as it is kept; its ValueError says what the value must be.
"""

import contextlib
import difflib
import itertools
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mtpbuild.runtime.errors import UsageError

T = TypeVar("T")
Check = Callable[[object], Any]


def number(least: int, most: float = math.inf, *, kind: type[int] | type[float] = float) -> Check:
    name = "a whole number" if kind is int else "a number"
    span = f"from {least}" if most == math.inf else f"in {least}..{most}"

    def read(value: Any) -> float:
        fits = isinstance(value, int | kind) and not isinstance(value, bool)
        if not fits or not least <= value <= most or value == math.inf:
            raise ValueError(f"must be {name} {span}, not {reprlib.repr(value)}")
        return kind(value)

    return read


def whole_number(least: int, most: float = math.inf) -> Check:
    return number(least, most, kind=int)


def switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {reprlib.repr(value)}")
    return value


def choice(*names: str) -> Check:
    def read(value: object) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}, not {reprlib.repr(value)}")
        return str(value)

    return read


def text(most: int) -> Check:
    """Checks a text of 1 to so many characters."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= most:
            raise ValueError(f"must be a text of 1 to {most} characters")
        return value

    return read


def list_of(kind: type, most: float = math.inf, longest: float = math.inf) -> Check:
    """Makes a tuple of at most so many values of a type; a single text is a list of one.

    longest: characters that a text may have.
    """

    def read(values: Any) -> tuple[object, ...]:
        items = (values,) if isinstance(values, str) else values
        listed = isinstance(items, list | tuple | set | frozenset)
        if not listed or not all(type(item) is kind for item in items):
            raise ValueError(f"must be a list of {kind.__name__}, not {reprlib.repr(values)}")
        if len(items) > most:
            raise ValueError(f"must be a list of {most} at most, not of {len(items)}")
        if kind is str and (found := max(map(len, items), default=0)) > longest:
            raise ValueError(f"must have texts of {longest} characters at most, not of {found}")
        return tuple(items)

    return read


def instance_of(kind: type) -> Check:
    def read(value: object) -> object:
        if not isinstance(value, kind):
            raise ValueError(f"must be a {kind.__name__}")
        return value

    return read


def object_of(value: object) -> dict[str, Any]:
    """Checks an object of values by name, as JSON has it."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"must map names to values, not {reprlib.repr(value)}")
    return dict(value)


def above(least: int) -> Check:
    def read(value: object) -> float:
        with contextlib.suppress(ValueError):
            if (found := number(least)(value)) > least:
                return float(found)
        raise ValueError(f"must be a number above {least}, not {reprlib.repr(value)}")

    return read


def biases(most: int) -> Check:
    """Checks at most so many token ids, which may be texts, and the number added to each logit."""

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
    """Checks rates; entry i is the share of steps whose first i + 1 drafts are all accepted."""
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"must be a list of rates, not {reprlib.repr(values)}")
    found: Sequence[float] = [number(0, 1)(rate) for rate in values]
    if any(later > earlier for earlier, later in itertools.pairwise(found)):
        raise ValueError(f"must not increase, as in {reprlib.repr(values)}")
    return tuple(found)


NEXTN_LIMIT = 15  # one step verifies at most 16 tokens, as in vllm-ascend


def parse_list(flag: str, text: str, kind: Callable[[str], T], example: str) -> tuple[T, ...]:
    """Read `0,1,2` as numbers of a kind; raises UsageError that shows an example."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} {text!r} is not a list of numbers such as {example}") from None


def parse_object(flag: str, text: str, example: str) -> dict[str, Any]:
    """Read a JSON object; raises UsageError that shows an example."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise UsageError(f"{flag} {text!r:.60} is no JSON object: '{example}'")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Ends a message with the known word that is nearest to an unknown one, if one is near."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
