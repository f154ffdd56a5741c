"""A chat's answer: thought, text and calls of tools apart, as they arrive."""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from mtpbuild.runtime.requests.request import Chunk, FinishReason, Result
from mtpbuild.runtime.requests.stats import RequestMetrics
from mtpbuild.runtime.text.reasoning import AnswerPiece

if TYPE_CHECKING:
    from mtpbuild.runtime.tool_calls.calls import ToolCallParser

ToolCall: TypeAlias = dict[str, Any]  # as OpenAI's messages have it
CALL = {"name": "call", "arguments": "call"}  # kind of a piece -> kind of its block


@dataclass(eq=False)
class AnswerBlock:
    """A part of an answer received so far: reasoning, text, or a tool call."""

    kind: str  # reasoning, content or call
    id: str  # of a call
    name: str = ""  # of the tool
    cut: bool = False  # a call that the answer's end has cut
    _parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; for a call, its arguments."""
        self._parts[:] = ["".join(self._parts)]
        return self._parts[0]

    def add(self, text: str) -> None:
        self._parts.append(text)


@dataclass(eq=False, kw_only=True)
class AnswerParser:
    """A parser of the chunks of one answer, with the blocks received so far.

    calls: parses calls of tools; None: an answer has none.
    """

    calls: "ToolCallParser | None" = None
    blocks: list[AnswerBlock] = field(default_factory=list)
    metrics: RequestMetrics | None = None
    reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def take(self, chunk: Chunk) -> list[AnswerPiece]:
        """Add a chunk and return the pieces of the answer that are now final."""
        last = chunk.finish_reason is not None
        pieces = [
            AnswerPiece(span.kind, span.text, from_draft=span.from_draft)
            for span in chunk.spans
            if span.kind in ("reasoning", "content")
        ]
        if self.calls is not None:
            text = "".join(p.text for p in pieces if p.kind == "content")
            pieces = [p for p in pieces if p.kind != "content"]
            pieces += self.calls.feed(text, last=last)
        pieces = [self._add_to_block(piece) for piece in pieces if piece.text]
        if last:
            self.metrics, self.reason = chunk.metrics, chunk.finish_reason
            self.stop_reason = chunk.stop_reason
            if self.calls is not None and self.calls.cut_named:
                self.blocks[-1].cut = True
            if self.reason == "stop" and not self.has_cut_call and self.tool_calls:
                self.reason = "tool_calls"
        return pieces

    def read_chunk(self, chunk: Chunk) -> "ChatChunk":
        """Add a chunk and return its final part of the answer."""
        pieces = tuple(self.take(chunk))
        reason = None if chunk.finish_reason is None else self.reason
        return ChatChunk(pieces, self.call_deltas(pieces), reason, chunk)

    @property
    def has_cut_call(self) -> bool:
        """Whether the answer's end has cut a call, which is then no call."""
        return self.calls is not None and self.calls.cut is not None

    @property
    def whole_blocks(self) -> list[AnswerBlock]:
        """The blocks of a whole answer: a call that was cut is its text, or is left out."""
        blocks = [block for block in self.blocks if not block.cut]
        if len(blocks) < len(self.blocks) and self.calls and self.calls.cut:
            blocks.append(AnswerBlock("content", self.blocks[-1].id, _parts=[self.calls.cut]))
        return blocks

    def join_text(self, kind: str) -> str:
        """Join the texts of a whole answer's blocks of one kind."""
        return "".join(block.text for block in self.whole_blocks if block.kind == kind)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The complete calls, in the form that messages have."""
        calls = [block for block in self.whole_blocks if block.kind == "call"]
        return [make_tool_call(call.id, call.name, call.text) for call in calls]

    def call_deltas(self, pieces: Iterable[AnswerPiece]) -> list[ToolCall]:
        """Return pieces of calls as OpenAI streams them: the first has id, type and name."""
        deltas: list[ToolCall] = []
        for piece in pieces:
            if piece.kind == "name":
                call = make_tool_call(self.blocks[piece.block].id, piece.text, "")
                deltas.append({"index": piece.call} | call)
            elif piece.kind == "arguments" and deltas and deltas[-1]["index"] == piece.call:
                deltas[-1]["function"]["arguments"] += piece.text
            elif piece.kind == "arguments":
                deltas.append({"index": piece.call, "function": {"arguments": piece.text}})
        return deltas

    def _add_to_block(self, piece: AnswerPiece) -> AnswerPiece:
        """Add a piece to the last block or a new block; return it with the block's index."""
        kind = CALL.get(piece.kind, piece.kind)
        if piece.kind == "name" or not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(AnswerBlock(kind, f"call_{uuid.uuid4().hex[:24]}"))
        if piece.kind == "name":
            self.blocks[-1].name = piece.text
        else:
            self.blocks[-1].add(piece.text)
        last = len(self.blocks) - 1
        return piece._replace(block=last) if last else piece  # in most answers it is the first


def make_tool_call(id: str, name: str, arguments: str) -> ToolCall:
    """Return a tool call in the form that messages have."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """The part of a chat's answer that became final with one decode step.

    pieces: the new text, and names and arguments of tool calls, in their order. tool_calls: the
    same pieces of calls as OpenAI streams them; join the arguments of equal `index`. chunk: the
    step's tokens; its `spans` also have the marks of thoughts and calls.
    """

    pieces: tuple[AnswerPiece, ...]
    tool_calls: list[ToolCall]
    finish_reason: FinishReason | None  # set in the last chunk alone, like `chunk.metrics`
    chunk: Chunk = field(repr=False)

    @property
    def content(self) -> str:
        """The new text of the answer, without thought and calls."""
        return "".join(piece.text for piece in self.pieces if piece.kind == "content")

    @property
    def reasoning_content(self) -> str:
        """The new text of the thought."""
        return "".join(piece.text for piece in self.pieces if piece.kind == "reasoning")


@dataclass(frozen=True, slots=True)
class ChatResult(Result):
    """The result of a chat.

    `text` is the whole answer with the thought, the calls and their marks; `content`,
    `reasoning_content` and `tool_calls` have them apart.
    """

    content: str = ""
    reasoning_content: str = ""  # the thought, if the model marks it
    tool_calls: Sequence[ToolCall] = ()

    @classmethod
    def of(cls, result: Result, parser: AnswerParser) -> Self:
        """Join a request's result with the parts of its answer."""
        values = {field.name: getattr(result, field.name) for field in fields(Result)}
        return cls(
            **values | {"finish_reason": parser.reason or result.finish_reason},
            content=parser.join_text("content"),
            reasoning_content=parser.join_text("reasoning"),
            tool_calls=parser.tool_calls,
        )

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message
