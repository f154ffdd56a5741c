"""Messages in the shape that chat templates read: texts for content, objects for arguments."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mtpbuild.runtime.errors import RequestError, TemplateLimitError
from mtpbuild.runtime.text.chat_template import REASONING, Message

Render = Callable[[Sequence[Message]], str]
MARK = "<instruction-{}-9e3b>"  # replaces an instruction's text in a trial rendering


def render_messages(messages: Sequence[Message], render_plain: Render) -> str:
    """Render messages as clients of OpenAI's API write them; raise RequestError.

    Parts of a content are joined, a call's arguments may be JSON text, and a developer's message
    becomes the system's if the template does not know developers. render_plain: renders messages as
    the template reads them.
    """

    def render(messages: Sequence[Message]) -> str:
        try:
            return render_plain([_parse_arguments(message) for message in messages])
        except RequestError as error:
            limited = isinstance(error, TemplateLimitError)
            if limited or not any("tool_calls" in message for message in messages):
                raise
            return render_plain(messages)  # templates that want JSON text

    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
        return render_plain(messages)  # it says what is wrong
    joined = [_join_content(number, message) for number, message in enumerate(messages)]
    return render(adapt_roles(joined, render))


def _join_content(number: int, message: Message) -> Message:
    """Return the message with its content as one string, as vLLM passes it to templates."""
    content, where = message.get("content"), f"messages.{number}.content"
    if content is None:
        parts = any(message.get(name) for name in ("tool_calls", "function_call", *REASONING))
        if message.get("role") == "assistant" and (parts or "content" in message):
            return {**message, "content": ""}
        raise RequestError(f"{where} is missing: give a text or a list of parts", where)
    if isinstance(content, str):
        return message
    if not isinstance(content, list | tuple):
        kind = type(content).__name__
        raise RequestError(f"{where} must be a text or a list of parts, not {kind}", where)
    texts = []
    for part in content:
        match part:
            case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                raise RequestError(f"{where}: only parts of text are supported", where)
    return {**message, "content": "\n".join(texts)}


def _parse_arguments(message: Message) -> Message:
    """Return the message with its calls' arguments as objects, which most templates want."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parse_call(call) for call in calls]}


def _parse_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    text = function.get("arguments") or "{}"
    if isinstance(text, str):
        with contextlib.suppress(ValueError, RecursionError):  # the template gets the text
            return call | {"function": function | {"arguments": json.loads(text)}}
    return call


def adapt_roles(messages: list[Message], render: Render) -> list[Message]:
    """Return the first variant of the messages whose instructions the template shows completely.

    The variants: role `developer` stays; it becomes `system`; the leading system messages are also
    joined into one message. If no variant fits, the second is returned.
    """
    if not any(message.get("role") == "developer" for message in messages):
        return messages
    tried = [messages, *_list_role_variants(messages)]
    return next((variant for variant in tried if _shows_instructions(variant, render)), tried[1])


def _list_role_variants(messages: list[Message]) -> Iterator[list[Message]]:
    system: list[Message] = [
        {**m, "role": "system"} if m.get("role") == "developer" else m for m in messages
    ]
    yield system
    first = next((i for i, m in enumerate(system) if m.get("role") != "system"), len(system))
    if first > 1:
        text = "\n\n".join(str(message.get("content", "")) for message in system[:first])
        yield [{**system[0], "content": text}, *system[first:]]


def _shows_instructions(messages: list[Message], render: Render) -> bool:
    """Return whether the rendered template contains the texts of all instructions."""
    marked, marks = list[Message](), list[str]()
    for number, message in enumerate(messages):
        if message.get("role") in ("system", "developer") and message.get("content"):
            marks.append(MARK.format(number))
            message = {**message, "content": marks[-1]}
        marked.append(message)
    try:
        text = render(marked)
    except RequestError:
        return False
    return all(mark in text for mark in marks)
