"""Serves POST /v1/completions, which continues prompts as they are."""

from collections.abc import Sequence
from math import isnan, nan
from typing import Any

from mtpbuild.runtime.engine import Engine
from mtpbuild.runtime.errors import MtpbuildError
from mtpbuild.runtime.reasoning import Piece
from mtpbuild.runtime.request import Chunk, TokenLogprobs
from mtpbuild.runtime.server.answers import Answer, Choice, finite, seeded
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.protocol import CompletionBody
from mtpbuild.runtime.server.sampled import read_sampled
from mtpbuild.runtime.server.service import Service
from mtpbuild.runtime.server.structured import form_field

Json = dict[str, Any]
DEFAULT_TOKENS = 16
KIND = "text_completion"


def read_completion(service: Service, engine: Engine, body: CompletionBody) -> "CompletionAnswer":
    """Makes the choices that a body asks for; an ApiError names the field that is wrong."""
    if body.suffix:
        raise ApiError(400, "suffix is not supported", "suffix")
    if body.best_of not in (None, 1, body.n):
        raise ApiError(400, "best_of above n is not supported", "best_of")
    choices: list[Choice] = []
    for prompt in _prompts(body.prompt):
        try:
            ids = engine.token_ids(prompt)
        except MtpbuildError as error:
            raise ApiError(400, str(error), "prompt") from None
        most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        params = read_sampled(
            service,
            engine,
            body,
            len(ids),
            most,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        for own in seeded(params, body.n or 1):
            choices.append(Choice(len(choices), ids, own))
            if body.echo:
                choices[-1].echo = _echo(engine, prompt, choices[-1])
    return CompletionAnswer(
        service.model,
        choices,
        body.n or 1,
        engine.tokenizer,
        with_logprobs=body.logprobs is not None,
        with_ids=bool(body.return_token_ids),
        id=body.request_id,
        usage_in=body.usage_in,
        form_field=form_field(body),
    )


def _echo(engine: Engine, prompt: str | list[int], choice: Choice) -> str:
    """Returns the prompt as text; token ids become the text that they would be in an answer."""
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
    """Is an answer as texts."""

    kind = "cmpl"

    def whole(self) -> Json:
        told = []
        for choice in self.choices:
            text = choice.echo + choice.said("content")
            scored = [TokenLogprobs(choice.ids[0], nan, ()), *choice.prompt_logprobs]
            tokens = [*(scored if choice.echo else ()), *choice.logprobs]
            logprobs = self._logprobs(tokens, 0) if self.with_logprobs else None
            own = self._told(choice, text, logprobs, choice.token_ids, first=True)
            told.append(own | choice.end | self.of_prompt(choice))
        return self.said(KIND, told) | self.used()

    def opening(self, choice: Choice) -> Json | None:
        """Returns the prompt, if it is to be repeated; else the first text opens the stream."""
        if not choice.echo:
            return None
        return self.said(KIND, [self._told(choice, choice.echo, None, [], first=True)])

    def event(self, choice: Choice, chunk: Chunk, pieces: Sequence[Piece]) -> Json | None:
        text = "".join(piece.text for piece in pieces)
        logprobs = None
        if self.with_logprobs and chunk.logprobs:
            logprobs = self._logprobs(chunk.logprobs, choice.offset)
            choice.offset += sum(map(len, logprobs["tokens"]))
        if not (text or chunk.finish_reason or logprobs or self.with_ids):
            return None
        first = not choice.echo and len(choice.token_ids) == len(chunk.token_ids)
        told = self._told(choice, text, logprobs, list(chunk.token_ids), first=first)
        if chunk.finish_reason is not None:
            told |= choice.end
        return self.said(KIND, [told])

    def trailer(self) -> Json:
        return self.said(KIND, []) | self.used()

    def _told(
        self, choice: Choice, text: str, logprobs: Json | None, ids: list[int], *, first: bool
    ) -> Json:
        """Returns a choice; the `first` event of one also has the prompt's ids."""
        told = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if not self.with_ids:
            return told
        return told | {"token_ids": ids} | ({"prompt_token_ids": choice.ids} if first else {})

    def _logprobs(self, tokens: Sequence[TokenLogprobs], offset: int) -> Json:
        """Returns four lists with an entry per token; offsets count the text's characters.

        The first token of a prompt has no log-probability.
        """
        told: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            text, _ = self.token_text(token.token_id)
            told["tokens"].append(text)
            first = isnan(token.logprob)
            told["token_logprobs"].append(None if first else finite(token.logprob))
            # Of tokens with the same text the most probable one counts.
            top = {self.token_text(id)[0]: finite(logprob) for id, logprob in reversed(token.top)}
            told["top_logprobs"].append(None if first else top)
            told["text_offset"].append(offset)
            offset += len(text)
        return told
