"""The incremental parser of calls whose arguments are JSON."""

import json
import re
from collections.abc import Callable
from typing import Any

from mtpbuild.runtime.tool_calls.forms import CallParser, CallPart, Form, call_parts
from mtpbuild.runtime.tool_calls.json_reader import JsonReader, parse_strictly, repair_json

LEAD = re.compile(r"\s*(?:```(?:json)?\s*)?")
FENCES = ("```json", "```")
HEAD = re.compile(
    r'\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\[\s\S])+")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
LONGEST_HEAD = 4096  # characters; a call with a longer head is parsed once it is complete
MORE_FIELDS = '{"":0'  # lets a JsonReader continue after fields that it has not read


class JsonCallParser(CallParser):
    """A call as JSON, or as a name and JSON; its arguments are returned as they arrive."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._stops = (*form.markers, form.end)
        self._text = ""  # not parsed yet
        self._raw: list[str] = []  # parsed text; becomes content if this is not a call
        self._json: list[str] = []  # the value so far, in strict JSON
        self._value = JsonReader(self._stops, form.quote)
        self._name = ""
        self._fenced = False
        self._next: Callable[[bool], list[CallPart]] = (
            self._lead if form.head is None else self._read_head
        )

    def feed(self, text: str, *, last: bool) -> list[CallPart]:
        self._text += text
        parts: list[CallPart] = []
        while self.rest is None:
            step = self._next
            parts += step(last)
            if self._next == step:
                break
        return parts

    def _refuse(self, *, truncated: bool = False) -> list[CallPart]:
        """Give up on this call: its marker becomes content, and the rest is parsed for calls.

        truncated: the text has ended inside the call; it is not parsed, as it may quote calls.
        """
        self.rest, self.truncated = "" if truncated else "".join(self._raw) + self._text, truncated
        return [] if truncated else [("content", self._form.begin)]

    def _read_head(self, last: bool) -> list[CallPart]:
        """Parse the name before the arguments."""
        assert self._form.head is not None
        head = self._form.head.match(self._text[:LONGEST_HEAD])
        if head is None:
            ended = any(stop in self._text for stop in self._stops)
            if ended or len(self._text) >= LONGEST_HEAD:
                return self._refuse()
            return self._refuse(truncated=True) if last else []
        self._name = head["name"].strip()
        if not self._name:
            return self._refuse()
        self._read(head.end())
        self._next = self._lead
        return []

    def _read(self, count: int) -> None:
        self._raw.append(self._text[:count])
        self._text = self._text[count:]

    def _lead(self, last: bool) -> list[CallPart]:
        """Skip white space and the start of a code fence before the JSON."""
        lead, start = LEAD.match(self._text), self._text.lstrip()
        assert lead is not None
        first = self._text[lead.end() : lead.end() + 1]
        partial = not first or any(fence.startswith(start) for fence in FENCES)
        if partial and not last:
            return []
        self._fenced = "`" in lead[0]
        if self._form.head is None:
            if first not in ("{", "["):
                return self._refuse(truncated=partial)
            self._next = self._read_fields
        else:
            self._next = self._read_arguments if first == "{" else self._read_other
        self._read(lead.end())
        return [("name", self._name)] if self._next == self._read_arguments else []

    def _read_fields(self, last: bool) -> list[CallPart]:
        """Parse a call as JSON; if HEAD matches, stream the arguments, else wait for the end."""
        done = sum(map(len, self._raw))
        if done < LONGEST_HEAD + len(self._raw[0]):
            full_text = "".join(self._raw[1:]) + self._text
            head = HEAD.match(full_text[:LONGEST_HEAD])
            name = str(repair_json(f"[{head['name']}]")[0]).strip() if head else ""
            if head and name:
                self._text, self._value = full_text[head.end() :], JsonReader(self._stops)
                self._next = self._read_arguments
                return [("name", name)]
        count, text = self._value.take(self._text)
        self._read(count)
        self._json.append(text)
        if not self._value.closed:
            return self._refuse(truncated=True) if last else []
        try:
            calls = _read_calls(parse_strictly("".join(self._json)))
        except ValueError:
            calls = []
        if not calls:
            self.rest = self._text
            return [("content", self._form.begin + "".join(self._raw))]
        self._next = self._skip_tail
        return call_parts(calls)

    def _read_arguments(self, last: bool) -> list[CallPart]:
        count, text = self._value.take(self._text)
        self._text = self._text[count:]
        if last and not self._value.closed:
            self._refuse(truncated=True)
        elif self._value.closed:
            self._value = JsonReader(self._stops)
            self._value.take(MORE_FIELDS)
            self._next = self._skip_more_fields if self._form.head is None else self._skip_tail
        return [("arguments", text)]

    def _read_other(self, last: bool) -> list[CallPart]:
        """Parse arguments that are not an object: no text, or a string with the object in it."""
        ends = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        if not ends and not last:
            return []
        text = self._text[: min(ends, default=None)]
        value = text.strip("` \t\n\r")
        try:
            arguments = _write_arguments(_simplify_arguments(value))
            if not ends and not value:
                raise ValueError("cut before the arguments")
        except ValueError:
            return self._refuse(truncated=not ends)
        self._read(len(text))
        self._next = self._skip_tail
        return [("name", self._name), ("arguments", arguments)]

    def _skip_more_fields(self, last: bool) -> list[CallPart]:
        """Skip the fields after the arguments, such as an id."""
        start = self._text.lstrip()
        if not start and not last:
            return []
        if start.startswith(",") or self._json:
            self._json.append("more")
            count, _ = self._value.take(self._text, last=last)
            self._text = self._text[count:]
            if not self._value.closed:
                return []
        self._next = self._skip_tail
        return []

    def _skip_tail(self, last: bool) -> list[CallPart]:
        """Skip the remaining brackets, the code fence and the call's end marker."""
        self._text = self._text.lstrip("}] \t\n\r" + ("`" if self._fenced else ""))
        end = self._form.end
        partial = end.startswith(self._text) and self._text != end
        if last or not partial:
            self.rest = "" if partial else self._text.removeprefix(end)
        return []


def _simplify_arguments(text: str) -> Any:
    return None if text in ("", "None") else json.loads(text, strict=False)


def _write_arguments(arguments: Any) -> str:
    """Write the arguments as a JSON object; raises ValueError if they are not one."""
    if isinstance(arguments, str):
        arguments = repair_json(arguments) if arguments.strip() else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are no object")
    return json.dumps(arguments, ensure_ascii=False)


def _read_calls(value: Any) -> list[tuple[str, str]]:
    """Return names and arguments of a call or a list of calls; OpenAI's format is accepted too.

    Raises ValueError for anything else.
    """
    if isinstance(value, list):
        return [call for item in value for call in _read_calls(item)]
    if not isinstance(value, dict):
        raise ValueError("no call")
    function = value.get("function")
    if isinstance(function, dict):
        value = function
    name = value.get("name", function)
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call without a name")
    arguments = value.get("arguments", value.get("parameters"))
    return [(name.strip(), _write_arguments(arguments))]
