"""POST /v1/completions, which continues prompts without a chat template."""

from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from itertools import takewhile
from math import isnan, nan

from fastapi import APIRouter, Request
from starlette.responses import Response

from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.requests.request import Chunk, TokenLogprobs
from mtpbuild.runtime.server.answering import ANSWERS, answer
from mtpbuild.runtime.server.answers import (
    Answer,
    AnswerChoice,
    Json,
    Pieces,
    clamp_logprob,
    seed_choices,
)
from mtpbuild.runtime.server.bodies import BodyRoute
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.params import read_params, translate_errors
from mtpbuild.runtime.server.protocol import CompletionBody

router = APIRouter(route_class=BodyRoute)


@router.post("/v1/completions", responses=ANSWERS)
async def continue_text(body: CompletionBody, request: Request) -> Response:
    """Continue texts."""
    return answer(request, body, read_completion)


def read_completion(
    engine: Engine, settings: ServerOptions, body: CompletionBody
) -> "CompletionAnswer":
    """Create the answer for a body; ApiError names the wrong field."""
    if body.best_of not in (None, 1, body.n):
        raise ApiError(400, f"best_of must be n ({body.n or 1}) or left out", "best_of")
    choices: list[AnswerChoice] = []
    for prompt in body.prompts:
        ids = _encode_prompt(engine, prompt, body)
        params = read_params(engine, settings.defaults, body, len(ids))
        for seeded in seed_choices(params, body.n or 1):
            echo = _write_echo(engine, prompt, seeded.shown_tokens) if body.echo else ""
            choices.append(AnswerChoice(len(choices), ids, seeded, echo))
    return CompletionAnswer(settings.served_model_name, body, choices, engine.tokenizer)


def _encode_prompt(engine: Engine, prompt: str | list[int], body: CompletionBody) -> list[int]:
    """Return a prompt's token ids; an empty text has only the special tokens (such as BOS)."""
    special = body.add_special_tokens is not False
    with translate_errors("prompt"):
        if prompt == "":
            prompt = engine.encode(prompt, add_special_tokens=special)
        return engine.token_ids(prompt, add_special_tokens=special)


def _write_echo(engine: Engine, prompt: str | list[int], shown: Sequence[int]) -> str:
    """Return the prompt as text; token ids are decoded as in an answer."""
    if isinstance(prompt, str):
        return prompt
    if engine.tokenizer is None:
        raise ApiError(400, "this engine was built without a tokenizer", "echo")
    return engine.tokenizer.text(prompt, shown)


class CompletionAnswer(Answer):
    """An answer as plain text."""

    kind = "cmpl"
    event_kind = "text_completion"
    body: CompletionBody

    def make_full_body(self) -> Json:
        choices = []
        for choice in self.choices:
            text = choice.echo + choice.join_text("content")
            logprobs = None
            if self.body.logprobs is not None:
                tokens = choice.logprobs
                starts = [len(choice.echo) + start for start in choice.starts]
                if choice.echo:
                    first = TokenLogprobs(choice.ids[0], nan, ())
                    tokens = [first, *choice.prompt_logprobs, *tokens]
                    starts = [*self._find_prompt_starts(choice), *starts]
                logprobs = self._make_logprobs(tokens, starts, len(text))
            fields = self._make_choice(choice, text, logprobs, choice.token_ids, first=True)
            choices.append(fields | choice.finish_fields | self.make_prompt_logprobs_field(choice))
        return self.make_openai_object(self.event_kind, choices) | self.make_usage_fields()

    def make_opening_event(self, choice: AnswerChoice) -> Json | None:
        """Return the event with the echoed prompt; None if the request does not ask for it."""
        if not choice.echo:
            return None
        fields = self._make_choice(choice, choice.echo, None, [], first=True)
        return self.make_openai_object(self.event_kind, [fields])

    def event(self, choice: AnswerChoice, chunk: Chunk, pieces: Pieces) -> Json | None:
        text = "".join(piece.text for piece in pieces)
        logprobs = self._take_final_logprobs(choice, last=chunk.finish_reason is not None)
        if not (text or chunk.finish_reason or logprobs or self.body.return_token_ids):
            return None
        first = not choice.echo and len(choice.token_ids) == len(chunk.token_ids)
        fields = self._make_choice(choice, text, logprobs, list(chunk.token_ids), first=first)
        if chunk.finish_reason is not None:
            fields |= choice.finish_fields
        return self.make_openai_object(self.event_kind, [fields])

    def _make_choice(
        self, choice: AnswerChoice, text: str, logprobs: Json | None, ids: list[int], *, first: bool
    ) -> Json:
        """Return an object of a choice; the choice's `first` object also has the prompt's ids."""
        fields = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if not self.body.return_token_ids:
            return fields
        return fields | {"token_ids": ids} | ({"prompt_token_ids": choice.ids} if first else {})

    def _take_final_logprobs(self, choice: AnswerChoice, *, last: bool) -> Json | None:
        """Return the log-probabilities that a stream has not sent yet; None if there are none.

        A token whose text may be the start of a stop string is held back.
        """
        first = choice.sent_logprobs
        starts = choice.starts[first : len(choice.logprobs)]
        if not last:
            starts = [*takewhile(lambda start: start <= choice.chars, starts)]
        if self.body.logprobs is None or not starts:
            return None
        choice.sent_logprobs += len(starts)
        tokens = choice.logprobs[first : choice.sent_logprobs]
        before = len(choice.echo)
        starts = [before + start for start in starts]
        return self._make_logprobs(tokens, starts, before + choice.chars)

    def _find_prompt_starts(self, choice: AnswerChoice) -> Iterator[int]:
        """Yield the offset in the echoed prompt at which each token's text begins."""
        assert self.tokenizer is not None
        at = 0
        utf8 = getincrementaldecoder("utf-8")("replace")
        for id in choice.ids:
            yield at
            if raw := self.tokenizer.decode_token(id):
                at += len(utf8.decode(raw))
            elif choice.echo.startswith(name := self.tokenizer.find_special_name(id) or "", at):
                at += len(name)

    def _make_logprobs(
        self, tokens: Sequence[TokenLogprobs], starts: Sequence[int], length: int
    ) -> Json:
        """Return the log-probabilities as four lists with an entry per token.

        starts: offsets of the tokens' texts in the choice's text. length: of that text; offsets
        are capped at it, because a stop string is cut off. The first token of a prompt has no
        log-probability: NaN.
        """
        fields: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, start in zip(tokens, starts, strict=True):
            text, _ = self.decode_for_logprobs(token.token_id)
            fields["tokens"].append(text)
            first = isnan(token.logprob)
            fields["token_logprobs"].append(None if first else clamp_logprob(token.logprob))
            top: dict[str, float] = {}
            for id, logprob in ((token.token_id, token.logprob), *token.top):
                # If several tokens have the same text, the most probable one is kept.
                top.setdefault(self.decode_for_logprobs(id)[0], clamp_logprob(logprob))
            fields["top_logprobs"].append(None if first else top)
            fields["text_offset"].append(min(start, length))
        return fields
