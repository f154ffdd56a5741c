"""Shared parts of the APIs that are translated into chats and stream answers block by block."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.requests.answer import AnswerBlock
from mtpbuild.runtime.requests.request import Chunk
from mtpbuild.runtime.server.answers import Answer, AnswerChoice, Json, Pieces
from mtpbuild.runtime.server.bodies import make_invalid_body_error
from mtpbuild.runtime.server.chat import read_chat
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.protocol import ChatBody, OpenBody, StreamedBody

CHAT_ONLY: dict[str, Any] = {"n": 1, "logprobs": False, "top_logprobs": 0}  # field -> neutral value


class TranslatedBody(StreamedBody, OpenBody):
    """The body of an API that is translated into a chat's; extra fields are the chat's own."""

    names: ClassVar[Mapping[str, str]]  # chat field -> this API's
    refused: ClassVar[Mapping[str, str]]  # field -> why it is refused

    def conversation(self) -> list[tuple[str, Json]]:
        """Return the chat messages, each with the path of its content in this body."""
        raise NotImplementedError

    def chat_body(self) -> ChatBody:
        """Translate the body; raises ApiError for fields that a chat lacks."""
        raise NotImplementedError

    def make_chat_body(self, template: Json, **fields: Any) -> ChatBody:
        """Return a chat's body with these fields and the extra fields.

        template: variables for the chat template, which may not read them.
        """
        chat = dict(self.model_extra or {})
        for name, reason in self.refused.items():
            if chat.get(name):
                raise ApiError(400, f"{name} is not supported: {reason}", name)
        chat |= {name: value for name, value in fields.items() if value is not None}
        for name, neutral in CHAT_ONLY.items():
            if chat.pop(name, None) not in (None, neutral):
                raise ApiError(400, f"{name} is not supported: /v1/chat/completions has it", name)
        chat |= {"model": self.model, "stream": self.stream, "stream_options": None}
        chat["messages"] = [message for _, message in self.conversation()]
        kwargs = chat.get("chat_template_kwargs")
        if template and isinstance(kwargs, dict | None):
            chat["chat_template_kwargs"] = template | (kwargs or {})
        try:
            return ChatBody.model_validate(chat)
        except ValidationError as error:
            raise make_invalid_body_error(error) from None

    @contextmanager
    def name_own_fields(self) -> Iterator[None]:
        """Name the client's fields, not a chat's, in ApiErrors that the block raises."""
        try:
            yield
        except ApiError as error:
            if error.param is not None:
                chat_field = error.param
                error.param = self._find_own_field(chat_field)
                if error.message.startswith(chat_field):
                    error.message = error.param + error.message.removeprefix(chat_field)
            raise

    def _find_own_field(self, place: str) -> str:
        """Return the field of this body that a field of the chat comes from."""
        first, _, rest = place.partition(".")
        if first in (self.model_extra or {}):
            return place
        number, _, content = rest.partition(".")
        if first == "messages" and content == "content":
            return self.conversation()[int(number)][0]
        if first == "tools":
            return place.replace(".function", "")
        return self.names.get(first, first) + place.removeprefix(first)


class BlockAnswer(Answer):
    """An answer that is streamed block by block: a block is opened, grows and is closed."""

    ends_with_done = False
    asked: TranslatedBody
    body: ChatBody
    index = -1  # of the newest block in the stream
    _open: AnswerBlock | None = None

    def open_events(self, block: AnswerBlock) -> Iterator[Json]:
        """Yield the events that start an empty block."""
        raise NotImplementedError

    def make_delta_event(self, block: AnswerBlock, text: str) -> Json:
        """Return the event with a block's next text."""
        raise NotImplementedError

    def close_events(self, block: AnswerBlock) -> Iterator[Json]:
        """Yield the events that end a block."""
        raise NotImplementedError

    @property
    def choice(self) -> AnswerChoice:
        return self.choices[0]

    def events(self, choice: AnswerChoice, chunk: Chunk, pieces: Pieces) -> Iterator[Json]:
        for number, of_block in groupby(pieces, lambda piece: piece.block):
            block = choice.blocks[number]
            if not self.is_shown(block):
                continue
            if block is not self._open:
                yield from self.close()
                self._open = block
                self.index += 1
                yield from self.open_events(block)
            if text := "".join(piece.text for piece in of_block if piece.kind != "name"):
                yield self.make_delta_event(block, text)

    def close(self) -> Iterator[Json]:
        """Yield the events that end the block that is open, if any."""
        if self._open is not None:
            yield from self.close_events(self._open)

    def is_shown(self, block: AnswerBlock) -> bool:
        """Return whether the client wants to see a block."""
        return block.kind != "reasoning" or self.body.include_reasoning is not False


Translated = TypeVar("Translated", bound=BlockAnswer)


def read_translated(
    kind: type[Translated], engine: Engine, settings: ServerOptions, body: TranslatedBody
) -> Translated:
    """Create the answer for a body; ApiError names the wrong field."""
    with body.name_own_fields():
        answer = read_chat(kind, engine, settings, body.chat_body())
    answer.asked = body
    fields = answer.field_names
    answer.field_names = {name: body.names.get(field, field) for name, field in fields.items()}
    return answer
