"""Reads a call whose arguments stand in tags, once it is complete."""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from mtpbuild.runtime.server.tools.call import Call, Said
from mtpbuild.runtime.server.tools.forms import Form, Tags
from mtpbuild.runtime.server.tools.values import schema_of, typed

LONGEST_NAME = 256  # characters
SPACE = re.compile(r"\s*")
NEWLINE = "\n"


class MoreTextError(Exception):
    """What comes next decides how to read the text."""


class NoCallError(Exception):
    """The text is none of this form's calls."""


class TaggedCall(Call):
    """One or more functions within the markers of a call, with their arguments in tags."""

    def __init__(self, form: Form, tools: Mapping[str, Any], begin: str) -> None:
        """begin: the marker that was found, perhaps that of a function."""
        assert form.tags is not None
        self._form, self._tools, self._begin = form, tools, begin
        self._text, self._later = "", [begin] if begin != form.begin else []
        self._end = ""  # of the text so far
        self._ends = (form.end, form.begin, *([form.tags.end.strip()] if form.tags.end else []))

    def feed(self, text: str, *, last: bool) -> list[Said]:
        self._later.append(text)
        seen, self._end = self._end + text, (self._end + text)[-64:]
        early = len(self._text) < LONGEST_NAME
        if not last and not early and not any(end in seen for end in self._ends):
            return []  # no call ends here
        self._text += "".join(self._later)
        self._later = []
        reader = Functions(self._form, self._tools, self._text, last)
        try:
            said = [each for name, arguments in reader.read() for each in _said(name, arguments)]
        except MoreTextError:
            return []
        except NoCallError:
            self.rest = self._text[0 if self._begin == self._form.begin else len(self._begin) :]
            self.cut = last
            return [("content", self._begin)]
        self.rest = self._text[reader.at :]
        return said


def _said(name: str, arguments: dict[str, Any]) -> tuple[Said, Said]:
    return ("name", name), ("arguments", json.dumps(arguments, ensure_ascii=False))


class Functions:
    """Reads the functions of a call from a text.

    A value ends at its closing tag, if after that something else of the call begins: markup in a
    value stays a part of it. A value that begins on a line of its own ends at the end of one. Where
    the tag is missing, another one on a line of its own ends it.
    """

    def __init__(self, form: Form, tools: Mapping[str, Any], text: str, last: bool) -> None:
        """last: nothing follows the text."""
        assert form.tags is not None
        self._form, self._tags, self._tools = form, form.tags, tools
        self._text, self._last = text, last
        self._name, self._end = form.tags.name[0].strip(), form.tags.end.strip()
        self.at = 0

    def read(self) -> list[tuple[str, dict[str, Any]]]:
        """Read all that are complete; raises MoreTextError or NoCallError."""
        found = [self._function()]
        while self._name and self._at_mark(self._name):
            start = self.at
            try:
                found.append(self._function())
            except NoCallError:
                self.at = start
                return found
        if not self._skip(self._form.end):
            self.at = self._after_space()
        return found

    def _after_space(self) -> int:
        space = SPACE.match(self._text, self.at)
        assert space is not None
        return space.end()

    def _at_mark(self, mark: str, at: int | None = None) -> int | None:
        """Return where this mark ends that comes next, after white space; None if it doesn't."""
        space = SPACE.match(self._text, self.at if at is None else at)
        assert space is not None
        if self._text.startswith(mark, space.end()):
            return space.end() + len(mark)
        rest = self._text[space.end() : space.end() + len(mark)]
        if not self._last and mark.startswith(rest):
            raise MoreTextError
        return None

    def _skip(self, mark: str) -> bool:
        end = self._at_mark(mark)
        self.at = self.at if end is None else end
        return end is not None

    def _function(self) -> tuple[str, dict[str, Any]]:
        if self._name and not self._skip(self._name):
            raise NoCallError
        name = self._named()
        root = self._tools.get(name)
        arguments: dict[str, Any] = {}
        while (start := self._at_mark(self._tags.key)) is not None:
            opening = self._opening(start)
            key = self._text[start : opening.start()].strip()
            end, self.at = self._value_end(opening.end(), {*arguments, key}, root)
            kind = opening.groupdict().get("string")
            arguments[key] = typed(
                self._text[opening.end() : end],
                schema_of(key, root),
                root,
                string=None if self._tags.other is None else kind is not None,
            )
        ended = bool(self._end) and self._skip(self._end)
        if not ended and not arguments and not self._follows((self._form.end, self._form.begin)):
            raise NoCallError
        return name, arguments

    def _named(self) -> str:
        """Read the function's name and what ends it."""
        close, self.at = self._tags.name[1].strip(), self._after_space()
        found = re.compile(re.escape(close) if close else r"(?=[\n<])").search(
            self._text, self.at, self.at + LONGEST_NAME
        )
        name = self._text[self.at : found.start() if found else self.at + LONGEST_NAME]
        if found is None and not self._last and len(name) < LONGEST_NAME and "\n" not in name:
            raise MoreTextError
        if found is None or not name.strip() or "\n" in name:
            raise NoCallError
        self.at = found.end()
        return name.strip()

    def _opening(self, start: int) -> re.Match[str]:
        """Find where a value begins, after its key."""
        found = _value_begins(self._tags).search(self._text, start)
        key = self._text[start : found.start() if found else start + LONGEST_NAME]
        if found is None and not self._last and len(key) < LONGEST_NAME:
            raise MoreTextError
        if found is None or len(key) >= LONGEST_NAME or not key.strip():
            raise NoCallError
        return found

    def _follows(self, marks: tuple[str, ...], at: int | None = None) -> bool:
        return any(self._at_mark(mark, at) is not None for mark in marks if mark)

    def _value_end(self, start: int, given: set[str], root: Any) -> tuple[int, int]:
        """Return where a value ends, and its closing tag; raises MoreTextError or NoCallError."""
        inline = None  # the end of one that is not at the end of a line
        for closing in _value_ends(self._form).finditer(self._text, start):
            if closing["lone"] is not None:
                known = root.get("properties") if isinstance(root, Mapping) else None
                key = closing["key"]
                if key is None or (isinstance(known, Mapping) and key in known.keys() - given):
                    return closing.start(), closing.start()
            elif self._ends_here(closing.end(), given):
                lines = self._text.startswith(NEWLINE, start - 1)
                near = self._text[closing.start()], self._text[closing.end() : closing.end() + 1]
                if not lines or NEWLINE in near:
                    return closing.start(), closing.end()
                inline = inline or (closing.start(), closing.end())
        if not self._last:
            raise MoreTextError
        if inline is None:
            raise NoCallError
        return inline

    def _ends_here(self, at: int, given: set[str]) -> bool:
        """Tell whether a closing tag is one: something of the call, or nothing, follows it."""
        if (start := self._at_mark(self._tags.key, at)) is not None:
            try:
                opening = self._opening(start)
            except NoCallError:
                return False
            return self._text[start : opening.start()].strip() not in given
        if self._follows((self._end, self._form.end, self._name, self._form.begin), at):
            return True
        return self._last and not self._text[at:].strip()


def _spaced(mark: str) -> str:
    """Write a pattern for a mark that may have other line breaks."""
    return r"\s*".join(re.escape(part) for part in mark.split("\n"))


@cache
def _value_begins(tags: Tags) -> re.Pattern[str]:
    patterns = [("string", tags.value), ("other", tags.other)]
    return re.compile(
        "|".join(
            f"(?P<{name}>{_spaced(value[0].removesuffix(NEWLINE))}"
            f"{NEWLINE + '?' if value[0].endswith(NEWLINE) else ''})"
            for name, value in patterns
            if value
        )
    )


@cache
def _value_ends(form: Form) -> re.Pattern[str]:
    """Write a pattern for a closing tag, or for another tag that shows that it is missing."""
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
