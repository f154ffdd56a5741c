"""Shared parts of the APIs that are translated into chats and stream answers block by block."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from mtpbuild.runtime.requests.request import Chunk
from mtpbuild.runtime.server.answers import Answer, AnswerBlock, AnswerChoice
from mtpbuild.runtime.server.bodies import invalid_body
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.protocol import ChatBody, StreamedBody
from mtpbuild.runtime.text.reasoning import AnswerPiece

Json = dict[str, Any]
CHAT_ALONE: dict[str, Any] = {"n": 1, "logprobs": False, "top_logprobs": 0}


def make_chat_body(body: StreamedBody, kwargs: Json, /, **fields: Any) -> ChatBody:
    """Return a chat's body with these fields and the body's extra fields.

    kwargs: for the chat template, which ignores those that it does not read.
    """
    given = dict(body.model_extra or {})
    given |= {name: value for name, value in fields.items() if value is not None}
    for name, nothing in CHAT_ALONE.items():
        if given.pop(name, None) not in (None, nothing):
            raise ApiError(400, f"{name} is not supported: /v1/chat/completions has it", name)
    given |= {"model": body.model, "stream_options": None}
    own = given.get("chat_template_kwargs")
    if kwargs and isinstance(own, dict | None):
        given["chat_template_kwargs"] = kwargs | (own or {})
    try:
        return ChatBody.model_validate(given)
    except ValidationError as error:
        raise invalid_body(error) from None


@contextmanager
def rename_error_fields(
    body: StreamedBody, names: Mapping[str, str], places: Callable[[], Sequence[str]]
) -> Iterator[None]:
    """Rename the fields in errors raised by the block to those that the client sent.

    names: chat field -> the API's field. places: gives the path of each message's content.
    """

    def renamed(place: str) -> str:
        first, _, rest = place.partition(".")
        if first in (body.model_extra or {}):
            return place
        number, _, content = rest.partition(".")
        if first == "messages" and content == "content":
            return places()[int(number)]
        if first == "tools":
            return place.replace(".function", "")
        return names[first] + place.removeprefix(first) if first in names else place

    try:
        yield
    except ApiError as error:
        if error.param is not None:
            told, error.param = error.param, renamed(error.param)
            if error.message.startswith(told):
                error.message = error.param + error.message.removeprefix(told)
        raise


class BlockAnswer(Answer):
    """An answer that is streamed block by block: each one is opened, grows and is closed."""

    ends = None
    index = -1  # of the newest block in the stream
    _open: AnswerBlock | None = None

    def open_events(self, block: AnswerBlock) -> Iterator[Json]:
        """Yield the events that start an empty block."""
        raise NotImplementedError

    def delta_event(self, block: AnswerBlock, text: str) -> Json:
        """Return the event with a block's next text."""
        raise NotImplementedError

    def close_events(self, block: AnswerBlock) -> Iterator[Json]:
        """Yield the events that end a block."""
        raise NotImplementedError

    def end_events(self) -> Iterator[Json]:
        """Yield the events after the last block."""
        raise NotImplementedError

    @property
    def choice(self) -> AnswerChoice:
        return self.choices[0]

    @property
    def blocks(self) -> list[AnswerBlock]:
        """The blocks that are shown to the client."""
        return [b for b in self.choice.blocks if self.reasoning or b.kind != "reasoning"]

    def events(
        self, choice: AnswerChoice, chunk: Chunk, pieces: Sequence[AnswerPiece]
    ) -> Iterator[Json]:
        for number, found in groupby(pieces, lambda piece: piece.block):
            block = choice.blocks[number]
            if block.kind == "reasoning" and not self.reasoning:
                continue
            if block is not self._open:
                yield from self._close()
                self._open, self.index = block, self.index + 1
                yield from self.open_events(block)
            if text := "".join(piece.text for piece in found if piece.kind != "name"):
                yield self.delta_event(block, text)

    def last_events(self) -> Iterator[Json]:
        yield from self._close()
        yield from self.end_events()

    def _close(self) -> Iterator[Json]:
        if self._open is not None:
            yield from self.close_events(self._open)
