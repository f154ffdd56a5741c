"""Rendering of chat templates as in transformers: messages, tools and documents become a prompt.

A template is code from a checkpoint. It runs in Jinja's sandbox, in a separate process with limits
(`template_pool.py`), and sees plain JSON values alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

from mtpbuild.runtime.checks import did_you_mean
from mtpbuild.runtime.errors import EngineFileError, RequestError, TemplateLimitError
from mtpbuild.runtime.sampling.params import SETTINGS
from mtpbuild.runtime.text.template_pool import render_text
from mtpbuild.runtime.text.template_process import DONE, REFUSED, SYNTAX

Message = Mapping[str, Any]  # {"role": ..., "content": ...} and others that the template reads

DEFAULT, TOOL_USE = "default", "tool_use"
# The names of a message's reasoning; most templates read the first.
REASONING = ("reasoning_content", "thinking", "reasoning")
MARK = "<continued-here-5d1c> "  # its final space is gone if a template strips messages
# Names in RESERVED are separate options; the other two could change the template or its result.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
KWARGS, CONTINUE = "chat_template_kwargs", "continue_final_message"
NOT_KWARGS = (*RESERVED, "chat_template", "tokenize")


class ChatOptions(TypedDict, total=False):
    """The options of a conversation beside its messages, named as in transformers and vLLM."""

    tools: Sequence[Mapping[str, Any]] | None  # JSON schemas of functions, in OpenAI's shape
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None  # None: true unless the final message is continued
    continue_final_message: bool | str | None  # a text names the field to continue
    chat_template_kwargs: Mapping[str, Any] | None  # enable_thinking and the like


class TemplateText(NamedTuple):
    """A template's text and the file that it comes from."""

    where: str
    text: str


class ChatTemplates:
    """A model's chat templates by name, with the special tokens that they may mention."""

    def __init__(
        self, sources: Mapping[str, TemplateText], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self._sources, self._special_tokens = dict(sources), dict(special_tokens or {})

    @property
    def text(self) -> str:
        """The texts of all templates, joined."""
        return "\n".join(source.text for source in self._sources.values())

    def render(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> str:
        """Render the prompt; raise RequestError for bad options or if the template refuses."""
        _check_names(options)
        tools, continued = options.get("tools"), options.get("continue_final_message")
        opened = options.get("add_generation_prompt")
        for name, value, kinds in (
            ("add_generation_prompt", opened, bool),
            ("continue_final_message", continued, bool | str),
        ):
            if value is not None and not isinstance(value, kinds):
                raise RequestError(f"{name} must be true or false, not {value!r:.60}", name)
        if continued and opened:
            raise RequestError("give one of add_generation_prompt and continue_final_message")
        variables = {
            **self._special_tokens,
            **_check_kwargs(options.get("chat_template_kwargs") or {}),
            "tools": _check_objects("tools", tools),
            "documents": _check_objects("documents", options.get("documents")),
            "add_generation_prompt": not continued if opened is None else opened,
        }
        source = self._choose(tools is not None)
        chat = _prepare_messages(messages)
        if not continued:
            return _render(source, chat, variables)
        field = continued if isinstance(continued, str) else "content"
        final = _mark_final(chat, field, source)
        return _cut_at_mark(_render(source, chat, variables), final)

    def check(self) -> None:
        """Raise EngineFileError for a template that does not parse."""
        for source in self._sources.values():
            kind, text = render_text(source.text, {})
            if kind == SYNTAX:
                raise EngineFileError(f"{source.where}: {text}")

    def _choose(self, with_tools: bool) -> TemplateText:
        for name in (TOOL_USE, DEFAULT) if with_tools else (DEFAULT,):
            if name in self._sources:
                return self._sources[name]
        names = ", ".join(sorted(self._sources))
        raise RequestError(f"this engine's chat templates ({names}) have no default")


def _render(source: TemplateText, chat: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    kind, text = render_text(source.text, {"messages": chat, **variables})
    if kind == DONE:
        return text
    if kind == SYNTAX:
        raise EngineFileError(f"{source.where}: {text}; rebuild the engine")
    if kind == REFUSED:
        raise RequestError(f"the chat template refuses these messages: {text}")
    raise TemplateLimitError(f"the chat template can't be used for these messages: {text}")


def _check_names(options: Iterable[str]) -> None:
    """Raise RequestError for an option that is not one of `ChatOptions`."""
    known = ChatOptions.__annotations__
    for name in options:
        if name in SETTINGS:
            advice = f"give SamplingParams({name}=...)"
            raise RequestError(f"{name} is no option of a chat: {advice}", name)
        if name not in known:
            near = did_you_mean(name, known)
            raise RequestError(f"unknown option {name}; known: {', '.join(known)}{near}")


def _check_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Check the template's own variables; raise RequestError for reserved names."""
    if not isinstance(kwargs, Mapping):
        raise RequestError(f'{KWARGS} is an object such as {{"enable_thinking": false}}', KWARGS)
    for name in NOT_KWARGS:
        if name in kwargs:
            other = "give it beside them" if name in RESERVED else "an engine has its own template"
            raise RequestError(f"{KWARGS} can't have {name}: {other}", KWARGS)
    if not all(isinstance(name, str) for name in kwargs):
        raise RequestError(f"{KWARGS}: names must be texts", KWARGS)
    return {str(n): _simplify_value(value, KWARGS, n) for n, value in kwargs.items()}


def _check_objects(name: str, objects: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    """Check and copy a list of JSON objects; None stays None."""
    if objects is None:
        return None
    if isinstance(objects, str) or not isinstance(objects, Sequence):
        raise RequestError(f"{name} is a list of JSON objects, not {objects!r:.60}", name)
    for number, entry in enumerate(objects):
        if not isinstance(entry, Mapping):
            raise RequestError(f"{name} {number} is not a JSON object: {entry!r:.60}", name)
    return [_simplify_value(entry, name, number) for number, entry in enumerate(objects)]


def _prepare_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copy the messages without empty fields, and give reasoning all of its names."""
    chat = _check_objects("messages", messages)
    if not chat:
        raise RequestError("messages is empty: a conversation has at least one message", "messages")
    for number, message in enumerate(chat):
        if not isinstance(role := message.get("role"), str):
            wrong = f"messages {number}: role must be a text, not {role!r:.60}"
            raise RequestError(wrong, "messages")
    chat = [{name: value for name, value in m.items() if value is not None} for m in chat]
    return [_with_reasoning(message) for message in chat]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    thoughts = [message[name] for name in REASONING if name in message]
    if not thoughts:
        return message
    thought = next(filter(None, thoughts), thoughts[0])  # an empty field may stand beside it
    message = {name: value for name, value in message.items() if value or name not in REASONING}
    return {"thinking": thought, **message, "reasoning_content": thought}


def _mark_final(chat: list[dict[str, Any]], field: str, source: TemplateText) -> str:
    """Append a mark to the final message, and return its text without the mark."""
    message = chat[-1]
    if (value := message.get(field)) is None:
        raise RequestError(f"{CONTINUE}: the final message has no {field}", CONTINUE)
    fields = [field]
    if field in REASONING:  # the template may read any of its copies
        fields = [name for name in REASONING if message.get(name) == value]
    if not any(name in source.text for name in fields):
        raise RequestError(f"{CONTINUE}: the chat template reads no {field}", CONTINUE)
    if isinstance(value, str):
        for name in fields:
            message[name] = value + MARK
        return value
    parts = value if isinstance(value, list | tuple) else ()
    for part in reversed(parts):
        if isinstance(part, dict) and isinstance(text := part.get("text"), str):
            part["text"] = text + MARK
            return text
    raise RequestError(f"{CONTINUE}: the final message's {field} has no text", CONTINUE)


def _cut_at_mark(text: str, final: str) -> str:
    """Cut the prompt at the mark, where the final message ends."""
    at = text.rfind(MARK.rstrip())
    if at < 0 or final.strip() not in text:
        wrong = "the chat template leaves the final message out, or changes it"
        raise RequestError(f"{CONTINUE}: {wrong}", CONTINUE)
    # If the mark's space is gone, the template strips messages, so the text is stripped too.
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()


def _simplify_value(value: Any, name: str, entry: object) -> Any:
    """Copy an entry of an option into plain JSON types, so that the sandbox sees no others."""

    def copy(value: Any) -> Any:
        if value is None or type(value) in (str, int, float, bool):
            return value
        for kind in (str, int, float):
            if isinstance(value, kind):  # a member of an enumeration, for example
                return getattr(kind, f"__{kind.__name__}__")(value)
        if isinstance(value, Mapping):
            return {copy(key): copy(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [copy(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if callable(dump := getattr(value, "model_dump", None)):  # pydantic, OpenAI's client
            return copy(dump())
        raise RequestError(f"{name} {entry} has a value that is not JSON: {value!r:.60}", name)

    try:
        return copy(value)
    except RecursionError:
        raise RequestError(f"{name} {entry} is nested too deeply", name) from None
