"""Responses that read a request's body, run its engine requests, and send their answer."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.requests.request import Chunk
from mtpbuild.runtime.server.answers import Answer, merge_streams
from mtpbuild.runtime.server.errors import ERRORS, ApiError, JsonResponse, encode_json
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.params import translate_errors
from mtpbuild.runtime.server.protocol import StreamedBody
from mtpbuild.runtime.server.service import Service

log = logging.getLogger("mtpbuild")
MAX_CHOICES_READ_INLINE = 4  # up to which a short body is read on the event loop
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
ANSWERS: dict[int | str, dict[str, Any]] = {  # in the OpenAPI schema
    200: {
        "description": "The answer; with `stream` as server-sent events",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    **ERRORS,
}
Read = Callable[[Engine, ServerOptions, Any], Answer]


def answer(request: Request, body: StreamedBody, read: Read) -> Response:
    """Return the response that has a body's prompts read and runs them when it is sent."""
    service = request.app.state.services.find(body.model)
    service.admit(body.count)
    return AnswerResponse(service, body, read, long=request.state.long)


async def convert(request: Request, body: Any, function: Callable[[Engine, Any], Any]) -> Response:
    """Return what a function makes of the body, without a generation."""
    service = request.app.state.services.find(body.model)
    service.admit(0)
    async with service.loaded():
        converted = service.reading.run(object(), function, service.engine, body)
        return JsonResponse(await converted)


class AnswerResponse(StreamingResponse):
    """A response that counts its choices as open until it is sent or its client disconnects."""

    def __init__(self, service: Service, body: StreamedBody, read: Read, *, long: bool) -> None:
        """read: reads prompts and settings. long: whether the body takes long to tokenise."""
        super().__init__((), headers=STREAM_HEADERS, media_type="text/event-stream")
        self._service, self._body = service, body
        self._read, self._long = read, long

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.admitted(self._body.count):
            running = asyncio.create_task(self._run(scope, receive, send))
            watching = asyncio.create_task(self.listen_for_disconnect(receive))
            try:
                await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
            finally:
                running.cancel()
                watching.cancel()
                await asyncio.gather(running, watching, return_exceptions=True)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._service.loaded():
            with self._service.engine.pinned() as engine:
                answer = await self._make_answer(engine)
                chunks = merge_streams([self._service.stream(r) for r in answer.requests])
                if self._body.stream:
                    await self._send_stream(answer, chunks, send)
                    return
                async with self._service.limit_time(), contextlib.aclosing(chunks):
                    async for number, chunk in chunks:
                        answer.choices[number].take(chunk)
                await JsonResponse(answer.make_full_body())(scope, receive, send)

    async def _make_answer(self, engine: Engine) -> Answer:
        """Read the body and create the engine requests; raises ApiError.

        Prompts are read in one pool and grammars compiled in another, so that no prompt waits for
        another request's grammar.
        """
        if self._long or self._body.count > MAX_CHOICES_READ_INLINE:
            answer = await self._service.reading.run(object(), self._read_body, engine)
        else:
            answer = self._read_body(engine)
        if form := answer.choices[0].params.structured_outputs:
            await self._service.compiling.run(form, _prepare, engine, answer)
        engine.totals.add("request_params_n", answer.body.n or 1)
        return answer

    def _read_body(self, engine: Engine) -> Answer:
        """Read prompts and settings, but leave a grammar to be compiled later; raise ApiError."""
        answer = self._read(engine, self._service.settings, self._body)
        if self._service.settings.log_requests:
            fields = self._body.model_dump(exclude_none=True)
            log.info("%s", json.dumps({"id": answer.id} | fields))
        if answer.choices[0].params.structured_outputs is None:
            _prepare(engine, answer)
        return answer

    async def _send_stream(
        self, answer: Answer, chunks: AsyncGenerator[tuple[int, Chunk], None], send: Send
    ) -> None:
        """Send the answer as server-sent events.

        An error becomes the last event before [DONE]; the status is 200 even then.
        """

        async def write(events: Iterable[dict[str, Any]]) -> None:
            if body := b"".join(map(_encode_event, events)):
                await send({"type": "http.response.body", "body": body, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with self._service.limit_time(), contextlib.aclosing(chunks):
                await write(answer.make_first_events())
                async for number, chunk in chunks:
                    choice = answer.choices[number]
                    await write(answer.events(choice, chunk, choice.take(chunk)))
            last = [*map(_encode_event, answer.make_last_events())]
        except ApiError as error:
            last = [_encode_event(answer.failure(error))]
        except Exception:
            log.exception("an answer could not be sent")
            last = [_encode_event(answer.failure(ApiError(500, "the server failed")))]
        if answer.ends_with_done:
            last.append(b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"".join(last), "more_body": False})


def _prepare(engine: Engine, answer: Answer) -> None:
    """Create the engine requests of an answer."""
    with translate_errors(names=answer.field_names):
        answer.requests = [engine.prepare(choice.ids, choice.params) for choice in answer.choices]


def _encode_event(event: dict[str, Any]) -> bytes:
    """Encode a server-sent event, whose name is its `type`."""
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return name + b"data: " + encode_json(event) + b"\n\n"
