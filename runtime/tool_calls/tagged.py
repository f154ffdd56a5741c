"""The parser of calls whose arguments are written in tags; it waits for complete calls."""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from mtpbuild.runtime.tool_calls.forms import CallParser, CallPart, Form, Tags, call_parts
from mtpbuild.runtime.tool_calls.values import convert_argument, find_schema

LONGEST_NAME = 256  # characters
SPACE = re.compile(r"\s*")
NEWLINE = "\n"
TWO_WORDS = r"|(?<=\S)[ \t]+(?=\w)"  # no name, but a text about calls


class MoreTextError(Exception):
    """The error that more text is needed to decide how to parse."""


class NoCallError(Exception):
    """The error that the text is not a call of this form."""


class TaggedCallParser(CallParser):
    """One or more function calls within the markers, with their arguments in tags."""

    def __init__(self, form: Form, tools: Mapping[str, Any], begin: str) -> None:
        """begin: the marker that was found: of the call, or of a function without it."""
        assert form.tags is not None
        self._form, self._tools, self._begin = form, tools, begin
        self._text, self._unparsed = "", [begin] if begin != form.begin else []
        self._end = ""  # the last characters of the text so far
        self._ends = (form.end, form.begin, *([form.tags.end.strip()] if form.tags.end else []))

    def feed(self, text: str, *, last: bool) -> list[CallPart]:
        self._unparsed.append(text)
        seen, self._end = self._end + text, (self._end + text)[-64:]
        early = len(self._text) < LONGEST_NAME
        if not last and not early and not any(end in seen for end in self._ends):
            return []  # no call ends here
        self._text += "".join(self._unparsed)
        self._unparsed = []
        try:
            return self._read(last=False)
        except MoreTextError:
            if not last:
                return []
        except NoCallError:
            self.rest = self._text[0 if self._begin == self._form.begin else len(self._begin) :]
            return [("content", self._begin)]
        try:
            return self._read(last=True)
        except NoCallError:
            self.rest, self.truncated = "", True
            return []

    def _read(self, *, last: bool) -> list[CallPart]:
        reader = TaggedReader(self._form, self._tools, self._text, last)
        calls = [
            (name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in reader.read()
        ]
        self.rest = self._text[reader.at :]
        return call_parts(calls)


class TaggedReader:
    """A parser of the function calls in a text.

    A value ends at a closing tag that is followed by another part of the call, so markup inside a
    value stays in it. If the value begins on a new line, closing tags next to a line break take
    precedence. If the closing tag is missing, the next tag on a line of its own ends the value.
    """

    def __init__(self, form: Form, tools: Mapping[str, Any], text: str, last: bool) -> None:
        """last: no text follows."""
        assert form.tags is not None
        self._form, self._tags, self._tools = form, form.tags, tools
        self._text, self._last = text, last
        self._name, self._end = form.tags.name[0].strip(), form.tags.end.strip()
        self.at = 0

    def read(self) -> list[tuple[str, dict[str, Any]]]:
        """Parse all complete functions; raises MoreTextError or NoCallError."""
        functions = [self._read_function()]
        while self._name and self._match_mark(self._name):
            start = self.at
            try:
                functions.append(self._read_function())
            except NoCallError:
                self.at = start
                return functions
        if not self._skip(self._form.end):
            self.at = self._skip_space()
            if self._form.end.startswith(self._text[self.at :]):  # the text ended in it
                self.at = len(self._text)
        return functions

    def _skip_space(self, at: int | None = None) -> int:
        space = SPACE.match(self._text, self.at if at is None else at)
        assert space is not None
        return space.end()

    def _match_mark(self, mark: str, at: int | None = None) -> int | None:
        """Return the end of `mark` if it comes next, after white space; else None.

        Raises MoreTextError if the text ends before this is known.
        """
        start = self._skip_space(at)
        end = start + len(mark)
        if self._text.startswith(mark, start):
            return end
        if not self._last and mark.startswith(self._text[start:end]):
            raise MoreTextError
        return None

    def _skip(self, mark: str) -> bool:
        end = self._match_mark(mark)
        self.at = self.at if end is None else end
        return end is not None

    def _read_function(self) -> tuple[str, dict[str, Any]]:
        if self._name and not self._skip(self._name):
            raise NoCallError
        name = self._read_name()
        root = self._tools.get(name)
        arguments: dict[str, Any] = {}
        while (start := self._match_mark(self._tags.key)) is not None:
            key, opening = self._read_text_before(_match_value_begin(self._tags), start)
            end, self.at = self._find_value_end(opening.end(), {*arguments, key}, root)
            kind = opening.groupdict().get("string")
            arguments[key] = convert_argument(
                self._text[opening.end() : end],
                find_schema(key, root),
                root,
                string=None if self._tags.other is None else kind is not None,
            )
        ended = bool(self._end) and self._skip(self._end)
        if not ended and not self._is_followed((self._form.end, self._form.begin)):
            rest = self._text[self._skip_space() :]
            marks = (self._tags.key, self._end, self._form.end, self._form.begin, self._name)
            if not arguments or any(mark.startswith(rest) for mark in marks):
                raise NoCallError  # with arguments: more of them might have followed
        return name, arguments

    def _read_name(self) -> str:
        """Parse the function's name and the markup after it, which are on one line."""
        close, self.at = self._tags.name[1].strip(), self._skip_space()
        ends = re.compile((rf"{re.escape(close)}|\n" if close else r"(?=[\n<])") + TWO_WORDS)
        name, markup = self._read_text_before(ends, self.at)
        if markup[0].isspace():
            raise NoCallError
        self.at = markup.end()
        return name

    def _read_text_before(self, ends: re.Pattern[str], start: int) -> tuple[str, re.Match[str]]:
        """Return a name or a key, and the markup after it."""
        markup = ends.search(self._text, start)
        text = self._text[start : markup.start() if markup else start + LONGEST_NAME]
        if markup is None and not self._last and len(text) < LONGEST_NAME:
            raise MoreTextError
        if markup is None or len(text) >= LONGEST_NAME or not text.strip():
            raise NoCallError
        return text.strip(), markup

    def _is_followed(self, marks: tuple[str, ...], at: int | None = None) -> bool:
        return any(self._match_mark(mark, at) is not None for mark in marks if mark)

    def _find_value_end(self, start: int, known_keys: set[str], root: Any) -> tuple[int, int]:
        """Return the ends of a value and of its closing tag; raise MoreTextError, NoCallError."""
        inline = None  # the first closing tag that is not next to a line break
        for closing in _match_value_end(self._form).finditer(self._text, start):
            if closing["lone"] is not None:
                known = root.get("properties") if isinstance(root, Mapping) else None
                key = closing["key"]
                if key is None or (isinstance(known, Mapping) and key in known.keys() - known_keys):
                    return closing.start(), closing.start()
            elif self._ends_here(closing.end(), known_keys):
                lines = self._text.startswith(NEWLINE, start - 1)
                near = self._text[closing.start()], self._text[closing.end() : closing.end() + 1]
                if not lines or NEWLINE in near:
                    return closing.start(), closing.end()
                inline = inline or (closing.start(), closing.end())
        if not self._last:
            raise MoreTextError
        if inline is None or not self._text.rstrip().endswith((self._form.end, self._end or "\0")):
            raise NoCallError  # the text ended in the value
        return inline

    def _ends_here(self, at: int, known_keys: set[str]) -> bool:
        """Return whether a closing tag is followed by another part of the call, or by nothing."""
        if (start := self._match_mark(self._tags.key, at)) is not None:
            try:
                key, _ = self._read_text_before(_match_value_begin(self._tags), start)
            except NoCallError:
                return False
            return key not in known_keys
        return self._is_followed((self._end, self._form.end, self._name, self._form.begin), at)


def _allow_spaces(mark: str) -> str:
    """Return a pattern for a mark that allows any white space at its line breaks."""
    return r"\s*".join(re.escape(part) for part in mark.split("\n"))


@cache
def _match_value_begin(tags: Tags) -> re.Pattern[str]:
    patterns = list[str]()
    for name, value in (("string", tags.value), ("other", tags.other)):
        if value:
            last = "\n?" if value[0].endswith(NEWLINE) else ""
            patterns.append(f"(?P<{name}>{_allow_spaces(value[0].removesuffix(NEWLINE))}{last})")
    return re.compile("|".join(patterns))


@cache
def _match_value_end(form: Form) -> re.Pattern[str]:
    """Return a pattern for a closing tag, or for the tag that follows if it is missing."""
    tags = form.tags
    assert tags is not None
    close = tags.value[1]
    before = "\n?" if close.startswith("\n") else ""
    key, value = re.escape(tags.key), re.escape(tags.value[0].partition("\n")[0])
    lone = [rf"{key}(?P<key>[^\n<>\"]+){value}(?=\n|<)"]
    ends = [re.escape(tags.end.strip()) + r"\n"] if tags.end.strip() else []
    lone += [f"{ends[0]}{re.escape(form.end)}"] if ends else []
    return re.compile(
        rf"(?P<close>{before}{re.escape(close.strip())})|(?P<lone>\n(?=(?:{'|'.join(lone)})))"
    )
