"""An incremental reader of JSON written by a model, which repairs it to strict JSON."""

import json
import math
import re
from typing import Any

from mtpbuild.runtime.constraints.json_schema import parse_finite
from mtpbuild.runtime.text.detokenizer import measure_marker_prefix

DEEPEST = 200  # nested objects and arrays; Python's JSON parser has a limit, too
LONGEST_NUMBER = 400  # digits
SPACE = re.compile(r"[ \t\n\r]*")
UNESCAPED = re.compile(r"""[^"'\\\x00-\x1f\ud800-\udfff]+""")
BARE = re.compile(r"""[^\s,:{}\[\]"'<`]+""")
# Words in a notation with bare keys, which may have spaces.
BARE_KEY, BARE_VALUE = re.compile(r"[^:,{}\[\]<]+"), re.compile(r"[^,{}\[\]<]+")
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
HEX, HIGH, LOW = "[0-9a-fA-F]", "[dD][89abAB][0-9a-fA-F]{2}", "[dD][c-fC-F][0-9a-fA-F]{2}"
SURROGATE = re.compile(rf"\\u(?:{HIGH}|{LOW})")
ESCAPE = re.compile(rf'\\(?:["\\/bfnrt]|u{HIGH}\\u{LOW}|u(?!{HIGH}|{LOW}){HEX}{{4}})')
UNFINISHED_ESCAPE = re.compile(
    rf"\\(?:u(?:{HEX}{{0,3}}|{HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F]{HEX}?)?)?)?)?))?"
)
NULLS = ("null", "None", "NaN", "Infinity", "-Infinity", "undefined")
WORDS = dict.fromkeys(NULLS, "null") | dict.fromkeys(("true", "True"), "true")
WORDS |= dict.fromkeys(("false", "False"), "false")
CLOSERS = {"{": "}", "[": "]"}


def parse_strictly(text: str) -> Any:
    """Parse JSON; raises ValueError if it is not strict JSON, not UTF-8, or nested too deeply."""
    try:
        value = json.loads(text, parse_constant=parse_finite, parse_float=parse_finite)
        json.dumps(value, ensure_ascii=False).encode()
        _check_depth(value, DEEPEST)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _check_depth(value: Any, levels: int) -> None:
    if isinstance(value, dict | list):
        if levels == 0:
            raise ValueError("nested too deeply")
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, levels - 1)


class JsonReader:
    """A reader of one object or array, whose joined output is always strict JSON.

    Valid JSON is passed on unchanged. Common mistakes of models are repaired: raw line breaks and
    quotes in strings, single quotes, Python's words, missing and extra commas, missing brackets.
    Values that JSON lacks (NaN, 1e400) become null.

    stops: texts that end the value if they occur outside strings; open brackets are closed there.
    quote: what stands on both sides of a string in a notation with bare keys; such a string is
    literal inside.
    """

    def __init__(self, stops: tuple[str, ...] = (), quote: str = "") -> None:
        self.closed = False
        self._stops = stops
        self._literal = quote
        self._quotes = ('"', "'", *([quote] if quote else []))
        self._words = (BARE_VALUE, BARE_KEY) if quote else (BARE, BARE)
        self._open: list[str] = []  # the closing brackets still to come
        self._quote = ""  # of the open string
        self._place = "value"  # what comes next: key, colon, value or comma
        self._comma = ""  # read, but written only if something follows

    def take(self, text: str, *, last: bool = False) -> tuple[int, str]:
        """Read text; return the number of characters consumed, and their JSON.

        The other characters must be passed again, followed by more text. last: no text follows, so
        the value is closed.
        """
        at, written = 0, []
        while not self.closed:
            step = (
                self._in_string(text, at, last)
                if self._quote
                else self._read_outside(text, at, last)
            )
            if step is None:
                break
            at, piece = step
            written.append(piece)
        if last and not self.closed:
            written.append(self._close())
            at = len(text)
        return at, "".join(written)

    def _close(self) -> str:
        """Write the missing quote and brackets."""
        written = '"' if self._quote else ""
        if self._quote:
            self._quote = ""
            self._place = "colon" if self._place == "key" else "comma"
        while self._open:
            written += self._close_innermost()
        self.closed = True
        return written

    def _close_innermost(self) -> str:
        """Write the innermost closing bracket."""
        bracket = self._open.pop()
        before = ""
        if bracket == "}":
            before = {"colon": ": null", "value": "null"}.get(self._place, "")
        self._place, self._comma = "comma", ""
        return before + bracket

    def _stop(self, text: str, at: int, last: bool) -> bool | None:
        """Return whether a stop text begins here; None if more text is needed."""
        if any(text.startswith(stop, at) for stop in self._stops):
            return True
        rest = text[at : at + 64]
        if not last and any(mark.startswith(rest) for mark in (*self._stops, self._literal)):
            return None
        return False

    def _read_outside(self, text: str, at: int, last: bool) -> tuple[int, str] | None:
        match = SPACE.match(text, at)
        assert match is not None
        space, here = match[0], match.end()
        if here == len(text):
            return None
        char = text[here]
        if self._literal and text.startswith(self._literal, here):
            char = self._literal
        else:
            match self._stop(text, here, last):
                case None:
                    return None
                case True:
                    return at, self._close()
        if char in "}]":
            return here + 1, self._close_bracket(char, space)
        if self._place == "colon":
            self._place = "value"
            return (here + 1, f"{space}:") if char == ":" else (at, ":")
        if self._place == "comma":
            return self._read_after_value(char, at, here, space)
        return self._read_key_or_value(text, char, here, space, last)

    def _close_bracket(self, char: str, space: str) -> str:
        """Close everything up to this bracket; drop it if it was never opened."""
        if char not in self._open:
            return ""
        inner = ""
        while self._open[-1] != char:
            inner += self._close_innermost()
        written = inner + space + self._close_innermost()
        if not self._open:
            self.closed = True
        return written

    def _read_after_value(self, char: str, at: int, here: int, space: str) -> tuple[int, str]:
        in_object = self._open[-1] == "}"
        if char == ",":
            self._comma = f"{space},"
        elif char in self._quotes or (char in "{[" and not in_object):
            self._comma, here = ",", at - 1
        else:
            return here + 1, ""
        self._place = "key" if in_object else "value"
        return here + 1, ""

    def _read_key_or_value(
        self, text: str, char: str, here: int, space: str, last: bool
    ) -> tuple[int, str] | None:
        before = self._comma + space
        key = self._place == "key"
        if char in self._quotes and self._open:
            self._quote, self._comma = char, ""
            return here + len(char), f'{before}"'
        if char in CLOSERS:
            if key or len(self._open) >= DEEPEST:
                return here + 1, ""
            self._open.append(CLOSERS[char])
            self._place, self._comma = "key" if char == "{" else "value", ""
            return here + 1, before + char
        word = self._words[key].match(text, here)
        if word is None:
            if char == "," and not key and self._open and self._open[-1] == "}":
                self._place = "comma"
                return here, f"{before}null"
            return here + 1, ""
        if word.end() == len(text) and not last:
            return None
        self._place, self._comma = "colon" if key else "comma", ""
        return word.end(), before + _write_word(word[0].rstrip(), key=key)

    def _in_string(self, text: str, at: int, last: bool) -> tuple[int, str] | None:
        if at == len(text):
            return None
        if self._quote == self._literal:
            return self._in_literal(text, at)
        if plain := UNESCAPED.match(text, at):
            return plain.end(), plain[0]
        char = text[at]
        if char == "\\":
            return _escape(text, at, last)
        if char != self._quote:
            return at + 1, json.dumps("\ufffd" if char >= "\ud800" else char)[1:-1]
        ends = self._ends_string(text, at + 1, last)
        if ends is None:
            return None
        if not ends:  # a quote that belongs to the text
            return at + 1, '\\"' if char == '"' else char
        self._quote = ""
        self._place = "colon" if self._place == "key" else "comma"
        return at + 1, '"'

    def _in_literal(self, text: str, at: int) -> tuple[int, str] | None:
        if text.startswith(self._quote, at):
            end, self._quote = at + len(self._quote), ""
            self._place = "colon" if self._place == "key" else "comma"
            return end, '"'
        end = text.find(self._quote, at)
        if end < 0:
            end = len(text) - measure_marker_prefix(text[at:], self._quote)
        piece = json.dumps(text[at:end], ensure_ascii=False)[1:-1]
        return (end, piece) if piece else None

    def _ends_string(self, text: str, at: int, last: bool) -> bool | None:
        """Return whether a quote ends its string, by what follows; None if more text is needed."""
        space = SPACE.match(text, at)
        assert space is not None
        if space.end() == len(text):
            return True if last else None
        if text[space.end()] in ",:}]" or "\n" in space[0]:
            return True
        return self._stop(text, space.end(), last)


def _write_word(word: str, *, key: bool) -> str:
    """Write a word outside quotes in strict JSON: a value's word, or else a text."""
    if word in WORDS and not key:
        return WORDS[word]
    if key or not NUMBER.fullmatch(word) or len(word) > LONGEST_NUMBER:
        return json.dumps(word, ensure_ascii=False)
    return word if math.isfinite(float(word)) else "null"


def _escape(text: str, at: int, last: bool) -> tuple[int, str] | None:
    """Read an escape in a string; a backslash without a valid escape is kept as a backslash.

    A lone surrogate, which UTF-8 can't encode, becomes U+FFFD. Returns None if more text is needed.
    """
    if escape := ESCAPE.match(text, at):
        return escape.end(), escape[0]
    if not last and UNFINISHED_ESCAPE.fullmatch(text, at):
        return None
    if surrogate := SURROGATE.match(text, at):
        return surrogate.end(), "\\ufffd"
    if text.startswith("\\'", at):
        return at + 2, "'"
    return at + 1, "\\\\" if at + 1 < len(text) else ""


def repair_json(text: str) -> Any:
    """Repair and parse a text that begins with an object or array; raises ValueError otherwise."""
    reader = JsonReader()
    start = text.lstrip()
    if start[:1] not in ("{", "["):
        raise ValueError("no object")
    _, written = reader.take(start, last=True)
    return parse_strictly(written)
