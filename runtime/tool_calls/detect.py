"""Detection of the call format that a chat template writes, by rendering a call with it."""

import json
from functools import lru_cache
from typing import Any

from mtpbuild.runtime.errors import MtpbuildError
from mtpbuild.runtime.text.chat_template import ChatTemplates
from mtpbuild.runtime.tool_calls.calls import ToolCallParser
from mtpbuild.runtime.tool_calls.forms import FORMS, INDEX_OF_CALL, Form
from mtpbuild.runtime.tool_calls.values import as_text

ASKED = "what-is-asked-5d1c"
NAME = "probe_5d1c"
ARGUMENTS = {"text": "a b", "list": [1, {"a": None}]}
TYPES = {"text": {"type": "string"}, "list": {"type": "array"}}
SCHEMA = {"type": "object", "properties": TYPES}


@lru_cache(maxsize=16)
def detect_form(templates: ChatTemplates) -> str | None:
    """Return the name of the form in which a template writes calls; None if it is unknown."""
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):  # some templates want JSON text
        try:
            text = _render_call(templates, arguments)
        except MtpbuildError:  # the template wants the other kind of arguments, or no calls
            continue
        names = [name for name, form in FORMS.items() if _is_read_back(form, text)]
        if names:  # several forms match if they differ in line breaks alone
            return next((name for name in names if _write_beginning(FORMS[name]) in text), names[0])
    return None


def _render_call(templates: ChatTemplates, arguments: Any) -> str:
    function = {"name": NAME, "arguments": arguments}
    call = {"id": f"functions.{NAME}:0", "type": "function", "function": function}
    tool = {"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    text = templates.render(messages, tools=[tool], add_generation_prompt=False)
    return text.rpartition(ASKED)[2]


def _is_read_back(form: Form, text: str) -> bool:
    """Return whether the form's parser reads back exactly this call."""
    parser = ToolCallParser(form, {NAME: SCHEMA})
    pieces = parser.feed(text, last=True)
    names = [piece.text for piece in pieces if piece.kind == "name"]
    text = "".join(piece.text for piece in pieces if piece.kind == "arguments")
    return names == [NAME] and parser.cut is None and json.loads(text) == ARGUMENTS


def _write_beginning(form: Form) -> str:
    """Write the beginning of the call in this form."""
    if form.tags is None:
        before, after, _ = form.spelled
        return form.begin + before + NAME + after.replace(INDEX_OF_CALL, "0")
    name, value = form.tags.name, form.tags.value
    argument = form.tags.key + "text" + value[0] + as_text("a b") + value[1]
    return form.begin + name[0] + NAME + name[1] + argument
