"""What a chat's options say about tools: which may be called, which must be, in which form."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs
from mtpbuild.runtime.text.chat_template import ChatOptions
from mtpbuild.runtime.text.tokenizer import Tokenizer
from mtpbuild.runtime.tool_calls.calls import ToolCallParser
from mtpbuild.runtime.tool_calls.detect import detect_form
from mtpbuild.runtime.tool_calls.forms import FORMS, Form
from mtpbuild.runtime.tool_calls.grammar import write_calls_grammar

CHOICE = "tool_choice"
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # of a function, as in OpenAI's API


class AnswerOptions(ChatOptions, total=False):
    """The options of a conversation, and those of its answer's calls of tools."""

    tool_choice: str | Mapping[str, Any] | None  # "auto", "none", "required" or one function
    parallel_tool_calls: bool | None  # False: one call at most
    tool_call_parser: str | None  # the form of calls; None: as the chat template; "none": no calls


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call, and the form of the calls.

    tools: function -> JSON schema of its arguments, or None. forced: the grammar of an answer that
    must be calls.
    """

    form: Form
    tools: Mapping[str, Any]
    single: bool
    forced: StructuredOutputs | None

    def make_parser(self) -> ToolCallParser:
        """Return a parser of one answer."""
        forced = self.forced is not None
        return ToolCallParser(self.form, self.tools, single=self.single, forced=forced)


def read_tool_use(
    tokenizer: Tokenizer | None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    tool_call_parser: str | None = None,
) -> ToolUse | None:
    """Return how an answer may use tools; None if it may not. Raises RequestError."""
    if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):
        raise RequestError("tools is a list of JSON objects", "tools")
    if not isinstance(parallel_tool_calls, bool | None):
        wrong = f"parallel_tool_calls must be true or false, not {parallel_tool_calls!r:.60}"
        raise RequestError(wrong, "parallel_tool_calls")
    known = dict(_read_tool(number, tool) for number, tool in enumerate(tools or ()))
    wanted = _find_required(tool_choice, known, listed=tools is not None)
    if not known or tool_choice == "none":
        return None
    if tool_call_parser == "none":
        if wanted is not None:
            raise RequestError(f"{CHOICE}: calls are not parsed (tool_call_parser none)", CHOICE)
        return None
    form = _find_form(tokenizer, tool_call_parser)
    named = wanted is not None and len(wanted) == 1 and tool_choice != "required"
    single = parallel_tool_calls is False
    forced = None
    if wanted is not None and tokenizer is not None:
        try:
            grammar = write_calls_grammar(form, wanted, tokenizer, single=single or named)
        except ValueError as error:
            wrong = f"{CHOICE}: in this model's form a call can't be held to {error}"
            raise RequestError(f'{wrong}: say "auto"', CHOICE) from None
        forced = StructuredOutputs(grammar=grammar)
    return ToolUse(form, known, single, forced)


def _read_tool(number: int, tool: Any) -> tuple[str, Any]:
    """Return a tool's function and the schema of its arguments."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        shape = '{"type": "function", "function": {"name": ...}}'
        raise RequestError(f"tools.{number} is not {shape}: {tool!r:.60}", f"tools.{number}")
    if not NAME.fullmatch(name := function["name"]):
        wrong = f"has up to 64 letters, digits, _ and -, unlike {name!r:.60}"
        raise RequestError(f"tools.{number}.function.name {wrong}", f"tools.{number}.function.name")
    return name, function.get("parameters")


def _find_required(
    choice: Any, known: Mapping[str, Any], *, listed: bool
) -> Mapping[str, Any] | None:
    """Return the tools of which one must be called; None if the model may choose."""
    match choice:
        case None | "none":
            return None
        case "auto":
            if listed and not known:
                raise RequestError(f"{CHOICE} needs tools", CHOICE)
            return None
        case "required":
            if not known:
                raise RequestError(f"{CHOICE} needs tools", CHOICE)
            return known
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in known:
                raise RequestError(f"{CHOICE}: no tool {name!r:.60}", CHOICE)
            return {name: known[name]}
    one = '"auto", "none", "required" or a function by its name'
    raise RequestError(f"{CHOICE} must be {one}", CHOICE)


def _find_form(tokenizer: Tokenizer | None, name: str | None) -> Form:
    """Return the form of that name, or the one that the model's chat template writes."""
    templates = tokenizer.chat_template if tokenizer else None
    form = name or (detect_form(templates) if templates else None)
    if not isinstance(form, str) or form not in FORMS:
        why = "this model's chat template writes no calls of tools, or in a form that is not known"
        wrong = why if name is None else f"there is no tool_call_parser {name!r:.60}"
        known = ", ".join(FORMS)
        raise RequestError(f"tools: {wrong}; tool_call_parser names one of {known}", "tools")
    return FORMS[form]
