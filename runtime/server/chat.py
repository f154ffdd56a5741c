"""POST /v1/chat/completions: messages become a prompt, chunks become messages."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.errors import (
    ContextLengthError,
    MtpbuildError,
    RequestError,
    TemplateLimitError,
)
from mtpbuild.runtime.requests.request import Chunk, TokenLogprobs
from mtpbuild.runtime.server.answers import (
    Answer,
    AnswerChoice,
    Json,
    Pieces,
    clamp_logprob,
    seed_choices,
)
from mtpbuild.runtime.server.errors import ApiError, TooLongError
from mtpbuild.runtime.server.params import check_refused, leading_field, read_params
from mtpbuild.runtime.server.protocol import ChatBody
from mtpbuild.runtime.server.service import Service
from mtpbuild.runtime.server.tools import FORMS, Form, ToolCalls, detect_form
from mtpbuild.runtime.server.tools.grammar import forced_calls
from mtpbuild.runtime.text.chat_template import ChatOptions, ChatTemplates
from mtpbuild.runtime.text.reasoning import BEGIN, END, AnswerPiece

Render = Callable[[Sequence[Json]], str]
T = TypeVar("T", bound=Answer)
MARK = "<instruction-{}-9e3b>"  # replaces an instruction's text in a trial rendering


def read_chat(service: Service, body: ChatBody) -> "ChatAnswer":
    """Create the answer for a body; ApiError names the wrong field."""
    return read_chat_as(ChatAnswer, service, body)


def read_chat_as(kind: type[T], service: Service, body: ChatBody) -> T:
    """Create an answer of class `kind` for a chat's body; ApiError names the wrong field."""
    engine = service.engine
    form = _form(service, body)
    ids = encode_prompt(engine, body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    split = not service.settings.no_thinking_split
    marks = engine.manifest.model.thinking_token_ids if split else None
    params = read_params(
        service,
        body,
        len(ids),
        calls=forced_calls(body, form, engine.tokenizer),
        markers=(*((BEGIN, END) if marks else ()), *(form.tokens if form else ())),
        split_thought=marks is not None,
        stop_in_thought=bool(body.stop_in_thought),
    )
    single = body.parallel_tool_calls is False
    schemas = {tool.function.name: tool.function.parameters for tool in body.tools or ()}
    choices = []
    for index, own in enumerate(seed_choices(params, body.n or 1)):
        choices.append(choice := AnswerChoice(index, ids, own))
        choice.calls = ToolCalls(form, schemas, single=single) if form else None
    return kind(service.model, body, choices, engine.tokenizer)


def _form(service: Service, body: ChatBody) -> Form | None:
    """Return the form of the model's tool calls; None if the request allows none."""
    if not body.tools:
        if body.tool_choice == "auto" and body.tools is not None:
            raise ApiError(400, "tool_choice needs tools", "tool_choice")
        return None
    if body.tool_choice == "none" or service.settings.tool_call_parser == "none":
        return None
    templates = _templates(service.engine)
    name = service.settings.tool_call_parser or (detect_form(templates) if templates else None)
    if name is None:
        message = (
            "this model's chat template writes no calls of tools, or in a form that is not known: "
            f"start the server with --tool-call-parser and one of {', '.join(FORMS)}"
        )
        raise ApiError(400, message, "tools")
    return FORMS[name]


def _templates(engine: Engine) -> ChatTemplates | None:
    return engine.tokenizer.chat_template if engine.tokenizer else None


def encode_prompt(engine: Engine, body: ChatBody) -> list[int]:
    """Return the token ids of a conversation; raises ApiError."""
    check_refused(body)
    options: ChatOptions = {
        "documents": body.documents,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    if body.reasoning_effort is not None:
        templates = _templates(engine)
        if templates is None or "reasoning_effort" not in templates.text:
            message = "reasoning_effort is not supported: this model's chat template does not ask"
            raise ApiError(400, message, "reasoning_effort")
        kwargs = {"reasoning_effort": body.reasoning_effort} | (body.chat_template_kwargs or {})
        options["chat_template_kwargs"] = kwargs
    if body.tools and body.tool_choice != "none":
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    messages = [_join_content(number, message) for number, message in enumerate(body.messages)]

    def render(messages: Sequence[Json]) -> str:
        try:
            return engine.chat_prompt([_parse_arguments(m) for m in messages], **options)
        except RequestError as error:
            limited = isinstance(error, TemplateLimitError)
            if limited or not any("tool_calls" in message for message in messages):
                raise
            return engine.chat_prompt(messages, **options)  # templates that want JSON text

    special = bool(body.add_special_tokens)
    try:
        prompt = render(adapt_roles(messages, render))
        return engine.token_ids(prompt, add_special_tokens=special)
    except ContextLengthError as error:
        raise TooLongError("messages", error.limit, error.tokens) from None
    except MtpbuildError as error:
        raise ApiError(400, str(error), leading_field(str(error)) or "messages") from None


def _join_content(number: int, message: Json) -> Json:
    """Return the message with its content as one string, as vLLM passes it to templates."""
    content = message.get("content")
    if content is None:
        return message | {"content": ""}
    if isinstance(content, str):
        return message
    where = f"messages.{number}.content"
    if not isinstance(content, list):
        raise ApiError(400, f"{where} is a text or a list of parts", where)
    texts = []
    for part in content:
        match part:
            case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
                texts.append(text)
            case _:
                raise ApiError(400, f"{where}: only parts of text are supported", where)
    return message | {"content": "\n".join(texts)}


def _parse_arguments(message: Json) -> Json:
    """Return the message with its calls' arguments as objects, which most templates want."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_parse_call(call) for call in calls]}


def _parse_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    text = function.get("arguments") or "{}"
    if isinstance(text, str):
        with contextlib.suppress(ValueError, RecursionError):  # the template gets the text
            return call | {"function": function | {"arguments": json.loads(text)}}
    return call


def adapt_roles(messages: list[Json], render: Render) -> list[Json]:
    """Return the first variant of the messages whose instructions the template shows completely.

    The variants: role `developer` stays; it becomes `system`; the leading system messages are also
    joined into one message. If no variant fits, the second is returned.
    """
    if not any(message.get("role") == "developer" for message in messages):
        return messages
    tried = [messages, *_role_variants(messages)]
    return next((each for each in tried if _shows_instructions(each, render)), tried[1])


def _role_variants(messages: list[Json]) -> Iterator[list[Json]]:
    system = [m | {"role": "system"} if m.get("role") == "developer" else m for m in messages]
    yield system
    first = next((i for i, m in enumerate(system) if m.get("role") != "system"), len(system))
    if first > 1:
        text = "\n\n".join(str(message.get("content", "")) for message in system[:first])
        yield [system[0] | {"content": text}, *system[first:]]


def _shows_instructions(messages: list[Json], render: Render) -> bool:
    """Return whether the rendered template contains the texts of all instructions."""
    marked, marks = [], []
    for number, message in enumerate(messages):
        if message.get("role") in ("system", "developer") and message.get("content"):
            marks.append(MARK.format(number))
            message = message | {"content": marks[-1]}
        marked.append(message)
    try:
        text = render(marked)
    except RequestError:
        return False
    return all(mark in text for mark in marks)


def make_tool_call(id: str, name: str, arguments: str) -> Json:
    """Return a tool call in the form that messages have."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ChatAnswer(Answer):
    """An answer as chat messages."""

    kind, event_kind = "chatcmpl", "chat.completion.chunk"
    body: ChatBody

    def full_body(self) -> Json:
        choices = [self._choice(choice) for choice in self.choices]
        prompt = self._prompt_ids() | self.prompt_logprobs_field(self.choices[0])
        return self.openai_object("chat.completion", choices) | prompt | self.usage_fields()

    def _prompt_ids(self) -> Json:
        ids = {"prompt_token_ids": self.choices[0].ids}
        return ids if self.body.return_token_ids else {}

    def _choice(self, choice: AnswerChoice) -> Json:
        content = choice.join_text("content")
        message: Json = {"role": "assistant", "content": content or None, "refusal": None}
        if not choice.call_blocks and not choice.params.split_thought:
            message["content"] = content
        thought = choice.join_text("reasoning")
        if thought and self.body.include_reasoning is not False:
            message |= {"reasoning_content": thought, "reasoning": thought}
        if choice.call_blocks:
            message["tool_calls"] = [
                make_tool_call(block.id, block.name, block.text) for block in choice.call_blocks
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if self.body.logprobs else None,
            **choice.finish_fields,
        } | ({"token_ids": choice.token_ids} if self.body.return_token_ids else {})

    def opening_event(self, choice: AnswerChoice) -> Json:
        opening_event = self._event(choice, {"role": "assistant", "content": ""})
        return opening_event | (self._prompt_ids() if choice.index == 0 else {})

    def event(self, choice: AnswerChoice, chunk: Chunk, pieces: Pieces) -> Json | None:
        delta: Json = {}
        for piece in pieces:
            if piece.kind in ("name", "arguments"):
                self._add_call(delta.setdefault("tool_calls", []), choice, piece)
            elif piece.kind == "content":
                delta["content"] = delta.get("content", "") + piece.text
            elif self.body.include_reasoning is not False:
                for name in ("reasoning_content", "reasoning"):
                    delta[name] = delta.get(name, "") + piece.text
        logprobs = self._logprobs(chunk.logprobs or ()) if self.body.logprobs else None
        if not (delta or chunk.finish_reason or logprobs or self.body.return_token_ids):
            return None
        event = self._event(choice, delta)
        (fields,) = event["choices"]
        fields["logprobs"] = logprobs
        if chunk.finish_reason is not None:
            fields |= choice.finish_fields
        if self.body.return_token_ids:
            spans = [[piece.text, piece.from_draft, piece.kind] for piece in pieces]
            fields |= {"token_ids": list(chunk.token_ids), "spans": spans}
        return event

    def _event(self, choice: AnswerChoice, delta: Json) -> Json:
        fields = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.openai_object(self.event_kind, [fields])

    def _add_call(self, calls: list[Json], choice: AnswerChoice, piece: AnswerPiece) -> None:
        """Add a piece of a call; clients join pieces, so only the first has id, type and name."""
        if piece.kind == "name":
            id = choice.blocks[piece.block].id
            calls.append({"index": piece.call} | make_tool_call(id, piece.text, ""))
        elif calls and calls[-1]["index"] == piece.call:
            calls[-1]["function"]["arguments"] += piece.text
        else:
            calls.append({"index": piece.call, "function": {"arguments": piece.text}})

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> Json:
        def entry(id: int, logprob: float) -> Json:
            text, raw = self.token_text(id)
            return {"token": text, "logprob": clamp_logprob(logprob), "bytes": raw}

        content = []
        for token in tokens:
            own = entry(token.token_id, token.logprob)
            top = [entry(*pair) for pair in token.top]
            if top and token.token_id not in (id for id, _ in token.top):
                top.append(own)
            content.append(own | {"top_logprobs": top})
        return {"content": content}
