"""POST /v1/chat/completions: messages become a prompt, chunks become messages."""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.errors import (
    ContextLengthError,
    MtpbuildError,
    RequestError,
    TemplateLimitError,
)
from mtpbuild.runtime.requests.request import Chunk, TokenLogprobs
from mtpbuild.runtime.server.answers import Answer, AnswerChoice, clamp_logprob, seed_choices
from mtpbuild.runtime.server.errors import ApiError, TooLongError
from mtpbuild.runtime.server.params import check_refused, leading_field, read_params
from mtpbuild.runtime.server.protocol import ChatBody
from mtpbuild.runtime.server.roles import adapt_roles
from mtpbuild.runtime.server.service import Service
from mtpbuild.runtime.server.structured import forced_calls, form_field
from mtpbuild.runtime.server.tools import FORMS, Form, ToolCalls, detect_form
from mtpbuild.runtime.text.chat_template import ChatOptions
from mtpbuild.runtime.text.reasoning import BEGIN, END, AnswerPiece, ThinkingSplitter, opens_thought

Json = dict[str, Any]
T = TypeVar("T", bound=Answer)
CHUNK = "chat.completion.chunk"


def read_chat(service: Service, engine: Engine, body: ChatBody) -> "ChatAnswer":
    """Create the answer for a body; ApiError names the wrong field."""
    return read_chat_as(ChatAnswer, service, engine, body)


def read_chat_as(kind: type[T], service: Service, engine: Engine, body: ChatBody) -> T:
    """Create an answer of class `kind` for a chat's body; ApiError names the wrong field."""
    form = _form(service, engine, body)
    ids = encode_prompt(engine, body)
    most, names = body.max_completion_tokens, {"max_tokens": "max_completion_tokens"}
    if most is None:
        most, names = body.max_tokens, {}
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    calls = forced_calls(body, form, engine.tokenizer)
    split = not service.settings.no_thinking_split
    marks = engine.manifest.model.thinking_token_ids if split else None
    markers = (*((BEGIN, END) if marks else ()), *(form.tokens if form else ()))
    params = read_params(
        service,
        engine,
        body,
        len(ids),
        most,
        logprobs=logprobs,
        calls=calls,
        markers=markers,
        names=names,
        split_thought=marks is not None,
        stop_in_thought=bool(body.stop_in_thought),
    )
    single = body.parallel_tool_calls is False
    schemas = {tool.function.name: tool.function.parameters for tool in body.tools or ()}
    choices = [
        AnswerChoice(index, ids, own) for index, own in enumerate(seed_choices(params, body.n or 1))
    ]
    for choice in choices:
        if marks is not None:
            choice.splitter = ThinkingSplitter(marks, opens_thought(ids, marks, engine.tokenizer))
        choice.calls = ToolCalls(form, schemas, single=single) if form else None
    return kind(
        service.model,
        choices,
        len(choices),
        engine.tokenizer,
        with_logprobs=bool(body.logprobs),
        with_ids=bool(body.return_token_ids),
        ids_as_texts=bool(body.return_tokens_as_token_ids),
        id=body.request_id,
        reasoning=body.include_reasoning is not False,
        usage_in=body.usage_in,
        form_field=form_field(body),
    )


def _form(service: Service, engine: Engine, body: ChatBody) -> Form | None:
    """Return the form of the model's tool calls; None if the request allows none."""
    if not body.tools:
        if body.tool_choice == "auto" and body.tools is not None:
            raise ApiError(400, "tool_choice needs tools", "tool_choice")
        return None
    if body.tool_choice == "none" or service.settings.tool_call_parser == "none":
        return None
    name = service.settings.tool_call_parser or _written_form(engine)
    if name is None:
        message = (
            "this model's chat template writes no calls of tools, or in a form that is not known: "
            f"start the server with --tool-call-parser and one of {', '.join(FORMS)}"
        )
        raise ApiError(400, message, "tools")
    return FORMS[name]


def _written_form(engine: Engine) -> str | None:
    templates = engine.tokenizer.chat_template if engine.tokenizer else None
    return detect_form(templates) if templates else None


def _template(engine: Engine) -> str:
    """Return the text of the model's chat templates."""
    templates = engine.tokenizer.chat_template if engine.tokenizer else None
    return templates.text if templates else ""


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
        if "reasoning_effort" not in _template(engine):
            message = "reasoning_effort is not supported: this model's chat template does not ask"
            raise ApiError(400, message, "reasoning_effort")
        kwargs = {"reasoning_effort": body.reasoning_effort} | (body.chat_template_kwargs or {})
        options["chat_template_kwargs"] = kwargs
    if body.tools and body.tool_choice != "none":
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    messages = [_message(number, message) for number, message in enumerate(body.messages)]

    def render(messages: Sequence[Json]) -> str:
        try:
            return engine.chat_prompt([_with_objects(m) for m in messages], **options)
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


def _message(number: int, message: Json) -> Json:
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


def _with_objects(message: Json) -> Json:
    """Return the message with its calls' arguments parsed into objects, as most templates want."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_object_call(call) for call in calls]}


def _object_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        return call
    try:
        arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}


def make_tool_call(id: str, name: str, arguments: str) -> Json:
    """Return a tool call in the form that messages have."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class ChatAnswer(Answer):
    """An answer as chat messages."""

    kind = "chatcmpl"

    def full_body(self) -> Json:
        choices = [self._choice(choice) for choice in self.choices]
        prompt = self.prompt() | self.prompt_logprobs_field(self.choices[0])
        return self.openai_object("chat.completion", choices) | prompt | self.usage_fields()

    def prompt(self) -> Json:
        """Return the field with the prompt's token ids, if requested."""
        return {"prompt_token_ids": self.choices[0].ids} if self.with_ids else {}

    def _choice(self, choice: AnswerChoice) -> Json:
        content = choice.join_text("content")
        message: Json = {"role": "assistant", "content": content or None, "refusal": None}
        if not choice.call_blocks and choice.splitter is None:
            message["content"] = content
        thought = choice.join_text("reasoning") if self.reasoning else ""
        if thought:
            message |= {"reasoning_content": thought, "reasoning": thought}
        if choice.call_blocks:
            message["tool_calls"] = [
                make_tool_call(block.id, block.name, block.text) for block in choice.call_blocks
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if self.with_logprobs else None,
            **choice.finish_fields,
        } | ({"token_ids": choice.token_ids} if self.with_ids else {})

    def opening_event(self, choice: AnswerChoice) -> Json:
        opening_event = self._event(choice, {"role": "assistant", "content": ""})
        return opening_event | (self.prompt() if choice.index == 0 else {})

    def event(
        self, choice: AnswerChoice, chunk: Chunk, pieces: Sequence[AnswerPiece]
    ) -> Json | None:
        delta: Json = {}
        for piece in pieces:
            if piece.kind in ("name", "arguments"):
                self._add_call(delta.setdefault("tool_calls", []), choice, piece)
            elif piece.kind == "content":
                delta["content"] = delta.get("content", "") + piece.text
            elif self.reasoning:
                for name in ("reasoning_content", "reasoning"):
                    delta[name] = delta.get(name, "") + piece.text
        logprobs = self._logprobs(chunk.logprobs or ()) if self.with_logprobs else None
        if not (delta or chunk.finish_reason or logprobs or self.with_ids):
            return None
        event = self._event(choice, delta)
        (fields,) = event["choices"]
        fields["logprobs"] = logprobs
        if chunk.finish_reason is not None:
            fields |= choice.finish_fields
        if self.with_ids:
            fields |= {
                "token_ids": list(chunk.token_ids),
                "spans": [[p.text, p.from_draft, p.kind] for p in pieces],
            }
        return event

    def _event(self, choice: AnswerChoice, delta: Json) -> Json:
        fields = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.openai_object(CHUNK, [fields])

    def _add_call(self, calls: list[Json], choice: AnswerChoice, piece: AnswerPiece) -> None:
        """Add a piece of a call; only its first piece has id, type and name: clients join them."""
        if piece.kind == "name":
            id = choice.blocks[piece.block].id
            calls.append({"index": piece.call} | make_tool_call(id, piece.text, ""))
        elif calls and calls[-1]["index"] == piece.call:
            calls[-1]["function"]["arguments"] += piece.text
        else:
            calls.append({"index": piece.call, "function": {"arguments": piece.text}})

    def usage_event(self) -> Json:
        return self.openai_object(CHUNK, []) | self.usage_fields()

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
