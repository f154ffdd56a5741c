"""The answer to a client, collected from its requests' chunks: choices, pieces and usage."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeAlias

from mtpbuild.runtime.requests.answer import AnswerParser
from mtpbuild.runtime.requests.request import Chunk, Request, TokenLogprobs
from mtpbuild.runtime.sampling.params import SamplingParams
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.protocol import GenerationBody
from mtpbuild.runtime.text.reasoning import AnswerPiece
from mtpbuild.runtime.text.tokenizer import Tokenizer

Json: TypeAlias = dict[str, Any]
Pieces: TypeAlias = Sequence[AnswerPiece]


@dataclass(eq=False)
class AnswerChoice(AnswerParser):
    """A choice of an answer, as far as it has been received."""

    index: int
    ids: list[int]  # the prompt
    params: SamplingParams
    echo: str = ""  # the prompt, if the answer repeats it
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # offset of each token's text
    chars: int = 0  # of the content
    sent_logprobs: int = 0  # number of log-probabilities that a stream has sent
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    reasoning_tokens: int = 0

    def take(self, chunk: Chunk) -> list[AnswerPiece]:
        """Add a chunk and return the pieces of the answer that are now final."""
        self.reasoning_tokens = chunk.reasoning_tokens
        self.token_ids += chunk.token_ids
        self.starts += chunk.starts or (self.chars,) * len(chunk.token_ids)
        self.logprobs += chunk.logprobs or ()
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        pieces = super().take(chunk)
        self.chars += sum(len(piece.text) for piece in pieces if piece.kind == "content")
        return pieces

    @property
    def finish_fields(self) -> Json:
        """The fields with the reason why the choice ended."""
        return {"finish_reason": self.reason, "stop_reason": self.stop_reason}


def clamp_logprob(logprob: float) -> float:
    """Return a log-probability that JSON can represent: -inf becomes -9999."""
    return max(logprob, -9999.0)


def seed_choices(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return the settings of each choice; seeds count up from the request's seed, modulo 2**64."""
    if params.seed is None:
        return [params] * count
    return [params.with_seed((params.seed + i) % 2**64) for i in range(count)]


async def merge_streams(
    streams: Sequence[AsyncGenerator[Chunk, None]],
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield the chunks of several streams as they arrive, each with its stream's index.

    An error in one stream, or closing this generator, ends all streams.
    """
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for chunk in stream:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | BaseException | None]] = asyncio.Queue()

    async def forward(number: int, stream: AsyncGenerator[Chunk, None]) -> None:
        try:
            async for chunk in stream:
                queue.put_nowait((number, chunk))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(forward(*numbered)) for numbered in enumerate(streams)]
    try:
        running = len(streams)
        while running:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(eq=False)
class Answer:
    """The base class of the answers of all routes."""

    kind: ClassVar[str]  # the prefix of an answer's id
    event_kind: ClassVar[str] = ""  # the type of the objects in a stream
    ends_with_done: ClassVar[bool] = True  # whether a stream sends [DONE] after its events

    model: str | None
    body: GenerationBody
    choices: list[AnswerChoice]
    tokenizer: Tokenizer | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    requests: list[Request] = field(default_factory=list)  # one for each choice

    def __post_init__(self) -> None:
        self.id = self.body.request_id or f"{self.kind}-{uuid.uuid4().hex}"
        self.field_names = self.body.field_names

    def make_full_body(self) -> Json:
        """Return the answer as one object."""
        raise NotImplementedError

    def make_opening_event(self, choice: AnswerChoice) -> Json | None:
        """Return the event that opens a choice; None if it needs no event."""
        raise NotImplementedError

    def event(self, choice: AnswerChoice, chunk: Chunk, pieces: Pieces) -> Json | None:
        """Return a step's event; None if no text of the step is final yet."""
        raise NotImplementedError

    def make_first_events(self) -> Iterator[Json]:
        for choice in self.choices:
            if opening_event := self.make_opening_event(choice):
                yield opening_event | self._count_partial_usage(choice)

    def events(self, choice: AnswerChoice, chunk: Chunk, pieces: Pieces) -> Iterator[Json]:
        if event := self.event(choice, chunk, pieces):
            if self.body.usage_in == "never" and chunk.finish_reason:
                event["metrics"] = self.metrics()
            yield event | self._count_partial_usage(choice)

    def make_last_events(self) -> Iterator[Json]:
        if self.body.usage_in != "never":
            yield self.make_openai_object(self.event_kind, []) | self.make_usage_fields()

    def failure(self, error: ApiError) -> Json:
        """Return the event that ends a stream after an error."""
        return error.body()

    def _count_partial_usage(self, choice: AnswerChoice) -> Json:
        if self.body.usage_in == "never":
            return {}
        return {"usage": self.usage(choice) if self.body.usage_in == "always" else None}

    def make_openai_object(self, what: str, choices: list[Json]) -> Json:
        """Return an OpenAI object of type `what` with these choices."""
        head = {"id": self.id, "object": what, "created": self.created, "model": self.model}
        return head | {"choices": choices}

    def make_usage_fields(self) -> Json:
        """Return the fields with the request's usage and times."""
        return {"usage": self.usage(), "metrics": self.metrics()}

    def usage(self, choice: AnswerChoice | None = None) -> Json:
        """Count the tokens so far, of all choices or of one; a prompt counts once."""
        choices = [choice] if choice else self.choices
        firsts = choices[:: self.body.n or 1]
        prompt = sum(len(choice.ids) for choice in firsts)
        completion = sum(len(choice.token_ids) for choice in choices)
        cached = sum(self.requests[first.index].cached_tokens for first in firsts if self.requests)
        thought = sum(choice.reasoning_tokens for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": thought},
        }

    def metrics(self) -> Json | None:
        """Return vLLM's metrics of a request; None if it has several choices."""
        metrics = self.choices[0].metrics
        if len(self.choices) > 1 or metrics is None or metrics.ttft_s is None:
            return None
        decode = (metrics.tpot_s or 0.0) * (metrics.output_tokens - 1)
        steps = metrics.speculative_decoding.num_spec_steps
        return {
            "time_to_first_token_ms": 1000 * metrics.ttft_s,
            "generation_time_ms": 1000 * decode,
            "queue_time_ms": 1000 * (metrics.queue_s or 0.0),
            "mean_itl_ms": 1000 * decode / (steps - 1) if steps > 1 else None,
            "tokens_per_second": metrics.tokens_per_s,
            "forced_tokens": metrics.forced_tokens,
            "speculative_decoding": asdict(metrics.speculative_decoding),
        }

    def make_prompt_logprobs_field(self, choice: AnswerChoice) -> Json:
        """Return the field with a prompt's log-probabilities as in vLLM, if requested.

        It has one entry per token; the first entry is None.
        """
        if choice.params.prompt_logprobs is None:
            return {}
        entries: list[Any] = [None]
        for token in choice.prompt_logprobs:
            ranked = [(token.token_id, token.logprob, token.rank)]
            ranked += [(id, logprob, rank) for rank, (id, logprob) in enumerate(token.top, 1)]
            entry = {}
            for id, logprob, rank in ranked:
                value = {"logprob": clamp_logprob(logprob), "rank": rank}
                entry[str(id)] = value | {"decoded_token": self.decode_for_logprobs(id)[0]}
            entries.append(entry)
        return {"prompt_logprobs": entries}

    def decode_for_logprobs(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's text for logprobs, and its bytes; a special token has no bytes."""
        raw = self.tokenizer.decode_token(token) if self.tokenizer else b""
        if self.tokenizer is None or self.body.return_tokens_as_token_ids:
            return f"token_id:{token}", list(raw) or None
        if not raw:
            return self.tokenizer.find_special_name(token) or "", None
        return raw.decode("utf-8", "replace"), list(raw)
