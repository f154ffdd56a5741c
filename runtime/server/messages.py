"""POST /v1/messages, Anthropic's API: bodies become chats, answers become its messages."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.requests.answer import AnswerBlock, make_tool_call
from mtpbuild.runtime.requests.request import Chunk
from mtpbuild.runtime.server.answering import ANSWERS, answer, convert
from mtpbuild.runtime.server.answers import AnswerChoice, Json, Pieces
from mtpbuild.runtime.server.blocks import BlockAnswer, TranslatedBody, read_translated
from mtpbuild.runtime.server.bodies import BodyRoute
from mtpbuild.runtime.server.chat import encode_prompt
from mtpbuild.runtime.server.errors import ERRORS, ApiError
from mtpbuild.runtime.server.protocol import Body, ChatBody, Many

router = APIRouter(route_class=BodyRoute)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
DELTAS = {  # kind of block -> the type of its deltas, and their field
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Turn(Body):
    role: str
    content: str | Many[Json]


class AnthropicTool(Body):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: Json | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: str


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: str | None = None


class MessagesPrompt(TranslatedBody):
    """The body of POST /v1/messages/count_tokens."""

    names = {  # noqa: RUF012  (a ClassVar of the base class)
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "include_reasoning": "thinking",
        "continue_final_message": "messages",
    }
    refused = {  # noqa: RUF012
        "container": "the server runs no code",
        "mcp_servers": "the server has no tools of its own",
    }

    messages: Many[Turn]
    max_tokens: int | None = None
    stop_sequences: Many[str] | None = None
    system: str | Many[Json] | None = None
    tools: Many[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # an older name of output_config.format

    def conversation(self) -> list[tuple[str, Json]]:
        system = [("system", {"role": "system", "content": self.system})] if self.system else []
        turns = [
            (f"messages.{number}.content", message)
            for number, turn in enumerate(self.messages)
            for message in _chat_messages(number, turn)
        ]
        return [*system, *turns]

    def chat_body(self) -> ChatBody:
        fields = Json(max_tokens=self.max_tokens, stop=self.stop_sequences)
        template = Json()
        last = self.conversation()[-1][1] if self.messages else {}
        if last.get("role") == "assistant" and "tool_calls" not in last:
            fields["continue_final_message"] = True
        if self.tools:
            fields["tools"] = [_read_tool(*numbered) for numbered in enumerate(self.tools)]
        if choice := self.tool_choice:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            fields["tool_choice"] = CHOICES.get(choice.type, named)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        config = self.output_config or OutputConfig()
        if form := config.format or self.output_format:
            schema = {"schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if config.effort:
            template["reasoning_effort"] = config.effort
        if self.thinking:
            fields["include_reasoning"] = thinks = self.thinking.type != "disabled"
            template |= {"thinking": thinks, "enable_thinking": thinks}
        return self.make_chat_body(template, **fields)


class MessagesBody(MessagesPrompt):
    """The body of POST /v1/messages."""

    max_tokens: int


@router.post("/v1/messages", responses=ANSWERS)
async def continue_conversation(body: MessagesBody, request: Request) -> Response:
    """Continue a conversation, by Anthropic's API."""
    return answer(request, body, partial(read_translated, MessagesAnswer))


@router.post("/v1/messages/count_tokens", responses=ERRORS)
async def count_tokens(body: MessagesPrompt, request: Request) -> Response:
    """Count a prompt's tokens."""
    return await convert(request, body, _count_tokens)


def _count_tokens(engine: Engine, body: MessagesPrompt) -> Json:
    with body.name_own_fields():
        return {"input_tokens": len(encode_prompt(engine, body.chat_body()))}


def _chat_messages(number: int, turn: Turn) -> list[Json]:
    """Return a turn as chat messages; tool results come before the user's text."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results: list[Json] = []
    message: Json = {"role": turn.role, "content": []}
    for block in turn.content:
        match block:
            case {"type": "text", "text": str(text)}:
                message["content"].append({"type": "text", "text": text})
            case {"type": "thinking", "thinking": str(thought)}:
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case {"type": "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(arguments)}:
                call = make_tool_call(id, name, json.dumps(arguments, ensure_ascii=False))
                message.setdefault("tool_calls", []).append(call)
            case {"type": "tool_result", "tool_use_id": str(id)}:
                result = block.get("content") or ""
                content = _read_result(result, failed=block.get("is_error") is True)
                results.append({"role": "tool", "tool_call_id": id, "content": content})
            case _:
                where = f"messages.{number}.content"
                kind = f"{block.get('type')!r:.60}"
                raise ApiError(400, f"{where}: no block of type {kind} can be read", where)
    said = len(message) > 2 or message["content"]
    return [*results, message] if said or not results else results


def _read_result(content: Any, *, failed: bool) -> Any:
    """Return a tool's result; a failure is marked in the text, as chat templates have no flag."""
    if not failed:
        return content
    if isinstance(content, list):
        return [{"type": "text", "text": "Error:"}, *content]
    return f"Error: {content}" if content else "Error"


def _read_tool(number: int, tool: AnthropicTool) -> Json:
    if tool.type not in (None, "custom"):
        message = f"tools.{number}: a server has no tool {tool.type:.60} of its own"
        raise ApiError(400, message, f"tools.{number}.type")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


class MessagesAnswer(BlockAnswer):
    """An answer as Anthropic's message."""

    kind = "msg"
    _started = False

    def make_full_body(self) -> Json:
        blocks = [_make_content_block(b) for b in self.choice.whole_blocks if self.is_shown(b)]
        counts = {"usage": self._make_usage(), "metrics": self.metrics()}
        return self._make_message(blocks) | self._end_fields() | counts

    def make_first_events(self) -> Iterator[Json]:
        yield from ()

    def events(self, choice: AnswerChoice, chunk: Chunk, pieces: Pieces) -> Iterator[Json]:
        if not self._started:  # with the first step it is known how much of the prompt was cached
            self._started = True
            end = {"stop_reason": None, "stop_sequence": None, "usage": self._make_usage()}
            yield {"type": "message_start", "message": self._make_message([]) | end}
        yield from super().events(choice, chunk, pieces)

    def open_events(self, block: AnswerBlock) -> Iterator[Json]:
        empty = _make_content_block(AnswerBlock(block.kind, block.id, block.name))
        yield {"type": "content_block_start", "index": self.index, "content_block": empty}

    def make_delta_event(self, block: AnswerBlock, text: str) -> Json:
        kind, field = DELTAS[block.kind]
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    def close_events(self, block: AnswerBlock) -> Iterator[Json]:
        yield {"type": "content_block_stop", "index": self.index}

    def make_last_events(self) -> Iterator[Json]:
        yield from self.close()
        counts = {"usage": self._make_usage(), "metrics": self.metrics()}
        yield {"type": "message_delta", "delta": self._end_fields()} | counts
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> Json:
        return error.body("/v1/messages")

    def _make_message(self, content: list[Json]) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return head | {"content": content}

    def _end_fields(self) -> Json:
        text = self.choice.stop_reason
        if self.choice.reason == "stop" and isinstance(text, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": text}
        return {"stop_reason": REASONS[self.choice.reason or "stop"], "stop_sequence": None}

    def _make_usage(self) -> Json:
        """Return Anthropic's counts, in which input_tokens excludes cached tokens."""
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        }


def _make_content_block(block: AnswerBlock) -> Json:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "content":
            return {"type": "text", "text": block.text}
    # Valid JSON, as ToolCallParser writes the arguments of a whole call as an object.
    arguments = json.loads(block.text or "{}")
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": arguments}
