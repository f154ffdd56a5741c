"""POST /v1/chat/completions: messages become a prompt, chunks become messages."""

from collections.abc import Sequence
from typing import TypeVar

from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.errors import ContextLengthError, MtpbuildError, RequestError
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
from mtpbuild.runtime.server.params import (
    check_refused,
    find_leading_field,
    make_field_error,
    read_params,
)
from mtpbuild.runtime.server.protocol import ChatBody
from mtpbuild.runtime.server.service import Service
from mtpbuild.runtime.text.chat_template import ChatOptions
from mtpbuild.runtime.tool_calls import read_tool_use

T = TypeVar("T", bound=Answer)


def read_chat(service: Service, body: ChatBody) -> "ChatAnswer":
    """Create the answer for a body; ApiError names the wrong field."""
    return read_chat_as(ChatAnswer, service, body)


def read_chat_as(kind: type[T], service: Service, body: ChatBody) -> T:
    """Create an answer of class `kind` for a chat's body; ApiError names the wrong field."""
    engine = service.engine
    try:
        tool_use = read_tool_use(
            engine.tokenizer,
            tools=_read_tools(body),
            tool_choice=body.tool_choice,
            parallel_tool_calls=body.parallel_tool_calls,
            tool_call_parser=service.settings.tool_call_parser,
        )
    except RequestError as error:
        raise make_field_error(error, {}) from None
    ids = encode_prompt(engine, body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    params = read_params(
        service,
        body,
        len(ids),
        calls=tool_use.forced if tool_use else None,
        stop_in_thought=bool(body.stop_in_thought),
    )
    split = not service.settings.no_thinking_split
    params = engine.answer_params(params, tool_use, split_thought=split)
    choices = []
    for index, own in enumerate(seed_choices(params, body.n or 1)):
        choices.append(AnswerChoice(index, ids, own))
        choices[-1].calls = tool_use.make_parser() if tool_use else None
    return kind(service.model, body, choices, engine.tokenizer)


def _read_tools(body: ChatBody) -> list[Json] | None:
    return None if body.tools is None else [t.model_dump(exclude_none=True) for t in body.tools]


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
        templates = engine.tokenizer.chat_template if engine.tokenizer else None
        if templates is None or "reasoning_effort" not in templates.text:
            message = "reasoning_effort is not supported: this model's chat template does not ask"
            raise ApiError(400, message, "reasoning_effort")
        kwargs = {"reasoning_effort": body.reasoning_effort} | (body.chat_template_kwargs or {})
        options["chat_template_kwargs"] = kwargs
    if body.tools and body.tool_choice != "none":
        options["tools"] = _read_tools(body)
    special = bool(body.add_special_tokens)
    try:
        prompt = engine.chat_prompt(body.messages, **options)
        return engine.token_ids(prompt, add_special_tokens=special)
    except ContextLengthError as error:
        raise TooLongError("messages", error.limit, error.tokens) from None
    except MtpbuildError as error:
        raise ApiError(400, str(error), find_leading_field(str(error)) or "messages") from None


class ChatAnswer(Answer):
    """An answer as chat messages."""

    kind, event_kind = "chatcmpl", "chat.completion.chunk"
    body: ChatBody

    def make_full_body(self) -> Json:
        choices = [self._make_choice(choice) for choice in self.choices]
        prompt = self._make_prompt_ids() | self.make_prompt_logprobs_field(self.choices[0])
        return (
            self.make_openai_object("chat.completion", choices) | prompt | self.make_usage_fields()
        )

    def _make_prompt_ids(self) -> Json:
        ids = {"prompt_token_ids": self.choices[0].ids}
        return ids if self.body.return_token_ids else {}

    def _make_choice(self, choice: AnswerChoice) -> Json:
        content = choice.join_text("content")
        message: Json = {"role": "assistant", "content": content or None, "refusal": None}
        calls = choice.tool_calls
        if not (calls or choice.has_cut_call or choice.params.split_thought):
            message["content"] = content
        thought = choice.join_text("reasoning")
        if thought and self.body.include_reasoning is not False:
            message |= {"reasoning_content": thought, "reasoning": thought}
        if calls:
            message["tool_calls"] = calls
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._make_logprobs(choice.logprobs) if self.body.logprobs else None,
            **choice.finish_fields,
        } | ({"token_ids": choice.token_ids} if self.body.return_token_ids else {})

    def make_opening_event(self, choice: AnswerChoice) -> Json:
        opening_event = self._make_event(choice, {"role": "assistant", "content": ""})
        return opening_event | (self._make_prompt_ids() if choice.index == 0 else {})

    def event(self, choice: AnswerChoice, chunk: Chunk, pieces: Pieces) -> Json | None:
        delta: Json = {}
        if calls := choice.call_deltas(pieces):
            delta["tool_calls"] = calls
        for piece in pieces:
            if piece.kind == "content":
                delta["content"] = delta.get("content", "") + piece.text
            elif piece.kind == "reasoning" and self.body.include_reasoning is not False:
                for name in ("reasoning_content", "reasoning"):
                    delta[name] = delta.get(name, "") + piece.text
        logprobs = self._make_logprobs(chunk.logprobs or ()) if self.body.logprobs else None
        if not (delta or chunk.finish_reason or logprobs or self.body.return_token_ids):
            return None
        event = self._make_event(choice, delta)
        (fields,) = event["choices"]
        fields["logprobs"] = logprobs
        if chunk.finish_reason is not None:
            fields |= choice.finish_fields
        if self.body.return_token_ids:
            spans = [[piece.text, piece.from_draft, piece.kind] for piece in pieces]
            fields |= {"token_ids": list(chunk.token_ids), "spans": spans}
        return event

    def _make_event(self, choice: AnswerChoice, delta: Json) -> Json:
        fields = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.make_openai_object(self.event_kind, [fields])

    def _make_logprobs(self, tokens: Sequence[TokenLogprobs]) -> Json:
        def entry(id: int, logprob: float) -> Json:
            text, raw = self.decode_for_logprobs(id)
            return {"token": text, "logprob": clamp_logprob(logprob), "bytes": raw}

        content = []
        for token in tokens:
            own = entry(token.token_id, token.logprob)
            top = [entry(*pair) for pair in token.top]
            if top and token.token_id not in (id for id, _ in token.top):
                top.append(own)
            content.append(own | {"top_logprobs": top})
        return {"content": content}
