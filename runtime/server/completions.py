"""POST /v1/completions: prompts as they are, texts as they come."""

from collections.abc import Sequence
from typing import Any

from mtpbuild.runtime.engine import Engine
from mtpbuild.runtime.errors import MtpbuildError
from mtpbuild.runtime.request import Chunk, TokenLogprobs
from mtpbuild.runtime.server.answers import Answer, Choice, seeded
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.protocol import CompletionBody
from mtpbuild.runtime.server.reasoning import Piece
from mtpbuild.runtime.server.sampled import read_sampled
from mtpbuild.runtime.server.service import Service

Json = dict[str, Any]
DEFAULT_TOKENS = 16


def read_completion(service: Service, engine: Engine, body: CompletionBody) -> "CompletionAnswer":
    """The choices that a body asks for; raises ApiError with the field that is wrong."""
    if body.suffix:
        raise ApiError(400, "suffix is not supported", "suffix")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs: a prompt's tokens have none here", "echo")
    if body.best_of not in (None, 1, body.n):
        raise ApiError(400, "best_of above n is not supported", "best_of")
    choices: list[Choice] = []
    for prompt in _prompts(body.prompt):
        try:
            ids = engine.token_ids(prompt)
        except MtpbuildError as error:
            raise ApiError(400, str(error), "prompt") from None
        most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        params = read_sampled(service, engine, body, len(ids), most, logprobs=body.logprobs)
        for own in seeded(params, body.n or 1):
            choices.append(Choice(len(choices), ids, own))
            if body.echo:
                choices[-1].echo = _echo(engine, prompt, choices[-1])
    answer = CompletionAnswer("cmpl", service.model, choices, body.n or 1, engine.tokenizer)
    answer.id = body.request_id or answer.id
    answer.with_logprobs, answer.with_ids = body.logprobs is not None, bool(body.return_token_ids)
    return answer


def _echo(engine: Engine, prompt: str | list[int], choice: Choice) -> str:
    """The prompt as a text; of token ids the text that they would be in an answer."""
    if isinstance(prompt, str):
        return prompt
    if engine.tokenizer is None:
        raise ApiError(400, "this engine was built without a tokenizer", "echo")
    return engine.tokenizer.text(prompt, choice.params.shown_tokens)


def _prompts(prompt: Any) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "the prompt is empty", "prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt


class CompletionAnswer(Answer):
    """An answer as texts."""

    with_logprobs = False
    with_ids = False

    def whole(self) -> Json:
        """The answer as one object."""
        told = []
        for choice in self.choices:
            text = choice.echo + choice.said["content"]
            logprobs = self._logprobs(choice.logprobs, 0) if self.with_logprobs else None
            told.append(self._told(choice, text, logprobs, choice.token_ids))
            told[-1] |= {"finish_reason": choice.reason, "stop_reason": choice.stop_reason}
        extra = {"usage": self.usage(), "metrics": self.metrics()}
        return self.head("text_completion") | {"choices": told} | extra

    def opening(self, choice: Choice) -> Json | None:
        """The prompt, if it is asked for; else a stream begins with the first text."""
        if not choice.echo:
            return None
        told = [self._told(choice, choice.echo, None, [])]
        return self.head("text_completion") | {"choices": told}

    def event(self, choice: Choice, chunk: Chunk, pieces: Sequence[Piece]) -> Json | None:
        """What a stream says of a step; None if nothing of it is certain yet."""
        text = "".join(piece.text for piece in pieces)
        logprobs = None
        if self.with_logprobs and chunk.logprobs:
            before = sum(len(self.token_text(t)[0]) for t in choice.token_ids)
            before -= sum(len(self.token_text(t)[0]) for t in chunk.token_ids)
            logprobs = self._logprobs(chunk.logprobs, before)
        if not (text or chunk.finish_reason or logprobs or self.with_ids):
            return None
        told = self._told(choice, text, logprobs, list(chunk.token_ids))
        if chunk.finish_reason is not None:
            told |= {"finish_reason": choice.reason, "stop_reason": choice.stop_reason}
        return self.head("text_completion") | {"choices": [told]}

    def trailer(self) -> Json:
        """The event behind the last one, with what the request used."""
        extra = {"usage": self.usage(), "metrics": self.metrics()}
        return self.head("text_completion") | {"choices": []} | extra

    def _told(self, choice: Choice, text: str, logprobs: Json | None, ids: list[int]) -> Json:
        told = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return told | ({"token_ids": ids} if self.with_ids else {})

    def _logprobs(self, tokens: Sequence[TokenLogprobs], offset: int) -> Json:
        """Four lists, an entry per token; offsets count the characters of the text."""
        told: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            text, _ = self.token_text(token.token_id)
            told["tokens"].append(text)
            told["token_logprobs"].append(max(token.logprob, -9999.0))
            top = {self.token_text(id)[0]: max(logprob, -9999.0) for id, logprob in token.top}
            told["top_logprobs"].append(top)
            told["text_offset"].append(offset)
            offset += len(text)
        return told
