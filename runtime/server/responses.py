"""POST /v1/responses, OpenAI's newer API; no responses are stored between requests."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mtpbuild.runtime.requests.answer import AnswerBlock, make_tool_call
from mtpbuild.runtime.server.answering import ANSWERS, answer
from mtpbuild.runtime.server.answers import Json
from mtpbuild.runtime.server.blocks import BlockAnswer, TranslatedBody, read_translated
from mtpbuild.runtime.server.bodies import BodyRoute
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.protocol import ChatBody, Many, OpenBody

router = APIRouter(route_class=BodyRoute)
STATELESS = "the server keeps no responses: send the whole conversation as input"
ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user")


class Reasoning(OpenBody):
    effort: str | None = None


class Text(OpenBody):
    format: Json | None = None


class ResponsesBody(TranslatedBody):
    """The body of POST /v1/responses."""

    names = {  # noqa: RUF012  (a ClassVar of the base class)
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }
    refused = {  # noqa: RUF012
        "background": "an answer is given to the request that asks for it",
        "conversation": STATELESS,
        "previous_response_id": STATELESS,
        "prompt": "the server keeps no prompts",
    }

    input: str | Many[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Many[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    include: Many[str] | None = None

    @property
    def functions(self) -> list[tuple[Json, Any]]:
        """The functions of the body and of its items `additional_tools`, with their namespaces.

        Raises ApiError if an entry of `tools` is neither a function nor a namespace. An item
        `additional_tools` lists all tools of the client: those of other kinds are left out.
        """
        tools = [*(self.tools or ())]
        for number, tool in enumerate(tools):
            if (kind := tool.get("type")) not in ("function", "namespace"):
                only = "only functions are supported, the server has no"
                raise ApiError(400, f"tools.{number}: {only} {kind!r:.60}", "tools")
        for item in self.input if isinstance(self.input, list) else ():
            if item.get("type") == "additional_tools":
                tools += _list_objects(item.get("tools"))
        return [*_list_functions(tools)]

    def conversation(self) -> list[tuple[str, Json]]:
        messages: list[tuple[str, Json]] = []
        if self.instructions:
            messages.append(("instructions", {"role": "system", "content": self.instructions}))
        if isinstance(self.input, str):
            return [*messages, ("input", {"role": "user", "content": self.input})]
        for number, item in enumerate(self.input):
            _add_item(messages, number, item)
        return messages

    def chat_body(self) -> ChatBody:
        if "message.output_text.logprobs" in (self.include or ()):
            message = "include: /v1/chat/completions has log-probabilities"
            raise ApiError(400, message, "include")
        template = Json()
        if self.reasoning and (effort := self.reasoning.effort):
            thinks = effort != "none"
            template = {"reasoning_effort": effort, "thinking": thinks, "enable_thinking": thinks}
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
            choice = {"type": "function", "function": {"name": choice["name"]}}
        form = (self.text.format if self.text else None) or None
        if form and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        return self.make_chat_body(
            template,
            max_tokens=self.max_output_tokens,
            tools=[_read_function(tool) for tool, _ in self.functions] or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=form,
        )


@router.post("/v1/responses", responses=ANSWERS)
async def respond(body: ResponsesBody, request: Request) -> Response:
    """Continue a conversation, by OpenAI's newer API."""
    return answer(request, body, partial(read_translated, ResponsesAnswer))


def _add_item(messages: list[tuple[str, Json]], number: int, item: Json) -> None:
    """Add an item to the conversation.

    Consecutive reasoning, text and function calls of the assistant become one message.
    """
    last = messages[-1][1] if messages else {}
    turn = last if last.get("role") == "assistant" else None
    unfinished = turn is not None and "content" not in turn
    place = f"input.{number}.content"
    match item:
        case {"type": "additional_tools"}:
            pass
        case {"type": "reasoning"}:
            thought = _join_texts(item.get("content")) or _join_texts(item.get("summary"))
            if turn is None or not unfinished:
                messages.append((place, turn := {"role": "assistant"}))
            earlier = turn.get("reasoning_content")
            turn["reasoning_content"] = f"{earlier}\n{thought}" if earlier else thought
        case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(a)}:
            if turn is None:
                messages.append((place, turn := {"role": "assistant"}))
            turn.setdefault("tool_calls", []).append(make_tool_call(id, name, a))
        case {"type": "function_call_output", "call_id": str(id)}:
            answer = {"role": "tool", "tool_call_id": id, "content": item.get("output")}
            messages.append((f"input.{number}.output", answer))
        case {"role": "assistant", "content": content} if turn is not None and unfinished:
            turn["content"] = content
            messages[-1] = place, turn
        case {"role": str(role), "content": content}:
            messages.append((place, {"role": role, "content": content}))
        case _:
            where = f"input.{number}"
            kind = f"{item.get('type')!r:.60}"
            raise ApiError(400, f"{where}: no item of type {kind} can be read", where)


def _join_texts(parts: Any) -> str:
    """Join the texts of a reasoning item; an encrypted item has none."""
    return "".join(str(part.get("text") or "") for part in _list_objects(parts))


def _list_functions(tools: Iterable[Json], namespace: Any = None) -> Iterator[tuple[Json, Any]]:
    """Yield the functions among the tools, each with its outermost namespace; None: it has none."""
    for tool in tools:
        match tool:
            case {"type": "function"}:
                yield tool, namespace
            case {"type": "namespace"}:
                inner = _list_objects(tool.get("tools"))
                yield from _list_functions(inner, namespace or tool.get("name"))


def _list_objects(values: Any) -> list[Json]:
    return [v for v in values if isinstance(v, dict)] if isinstance(values, list) else []


def _read_function(tool: Json) -> Json:
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


class ResponsesAnswer(BlockAnswer):
    """An answer as a response object, whose output is a list of items."""

    kind = "resp"
    asked: ResponsesBody
    _events = -1  # the number of the newest event

    def make_full_body(self) -> Json:
        blocks = [block for block in self.choice.blocks if self.is_shown(block)]
        output = [self._make_item(block, self._is_complete(block)) for block in blocks]
        return self._make_response("incomplete" if self._is_cut else "completed", output)

    @property
    def _is_cut(self) -> bool:
        return self.choice.reason == "length" or self.choice.has_cut_call

    def _is_complete(self, block: AnswerBlock) -> bool:
        """Return whether nothing of a block is missing; a call may be closed in a cut answer."""
        whole = not block.cut if block.kind == "call" else not self._is_cut
        return whole or block is not self.choice.blocks[-1]

    def make_first_events(self) -> Iterator[Json]:
        for name in ("created", "in_progress"):
            yield self._make_event(name, response=self._make_response("in_progress", []))

    def open_events(self, block: AnswerBlock) -> Iterator[Json]:
        empty = self._make_item(AnswerBlock(block.kind, block.id, block.name), None)
        yield self._make_event("output_item.added", output_index=self.index, item=empty)
        if block.kind != "call":
            yield self._make_event("content_part.added", block, part=_make_part(block.kind, ""))

    def make_delta_event(self, block: AnswerBlock, text: str) -> Json:
        return self._make_event(
            f"{TEXTS[block.kind]}.delta", block, delta=text, **LOGPROBS[block.kind]
        )

    def close_events(self, block: AnswerBlock) -> Iterator[Json]:
        name = f"{TEXTS[block.kind]}.done"
        if block.kind == "call" and not block.cut:
            yield self._make_event(name, block, arguments=block.text, name=block.name)
        elif block.kind != "call":
            yield self._make_event(name, block, text=block.text, **LOGPROBS[block.kind])
            yield self._make_event(
                "content_part.done", block, part=_make_part(block.kind, block.text)
            )
        item = self._make_item(block, self._is_complete(block))
        yield self._make_event("output_item.done", output_index=self.index, item=item)

    def make_last_events(self) -> Iterator[Json]:
        yield from self.close()
        response = self.make_full_body()
        yield self._make_event(response["status"], response=response)

    def failure(self, error: ApiError) -> Json:
        """Return the error event with OpenAI's fields and the error object its client raises."""
        fields = {"code": str(error.status), "message": error.message, "param": error.param}
        return self._make_event("error", None, **fields, **error.body()) | {"type": "error"}

    def _make_event(self, kind: str, block: AnswerBlock | None = None, /, **fields: Any) -> Json:
        """Return the next event; with a block, include the item's id and indices."""
        place: Json = {}
        if block is not None:
            place = {"item_id": _make_item_id(block), "output_index": self.index}
            place |= {} if block.kind == "call" else {"content_index": 0}
        self._events += 1
        return {"type": f"response.{kind}", "sequence_number": self._events} | place | fields

    def _make_item(self, block: AnswerBlock, complete: bool | None) -> Json:
        """Return a block as an output item; `complete` is None if it has just begun."""
        status = {None: "in_progress", True: "completed", False: "incomplete"}[complete]
        head = {"id": _make_item_id(block), "status": status}
        parts = [] if complete is None else [_make_part(block.kind, block.text)]
        match block.kind:
            case "reasoning":
                return head | {"type": "reasoning", "summary": [], "content": parts}
            case "content":
                return head | {"type": "message", "role": "assistant", "content": parts}
        call = {"call_id": block.id, "name": block.name, "arguments": block.text}
        for function, namespace in self.asked.functions:
            if namespace is not None and function.get("name") == block.name:
                call["namespace"] = namespace
        return head | {"type": "function_call"} | call

    def _make_response(self, status: str, output: list[Json]) -> Json:
        asked = self.asked.model_dump(exclude_unset=True)
        cut = {"reason": "max_output_tokens"} if self.choice.reason == "length" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "output": output,
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": asked.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._make_usage(),
            "metrics": self.metrics(),
        } | {name: asked.get(name) for name in ECHOED}

    def _make_usage(self) -> Json:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


TEXTS = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}
IDS = {"reasoning": "rs", "content": "msg", "call": "fc"}
LOGPROBS: dict[str, Json] = {"reasoning": {}, "content": {"logprobs": []}, "call": {}}


def _make_item_id(block: AnswerBlock) -> str:
    return IDS[block.kind] + block.id.removeprefix("call")


def _make_part(kind: str, text: str) -> Json:
    part: Json = {"type": TEXTS[kind], "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "content" else part
