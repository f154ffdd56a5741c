"""Responses that read a request's body, run its engine requests, and send their answer."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, ClassVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mtpbuild.runtime.errors import MissingDependencyError, RequestError
from mtpbuild.runtime.server.answers import Answer, merge_streams
from mtpbuild.runtime.server.errors import ApiError, JsonResponse, encode_json
from mtpbuild.runtime.server.params import make_field_error
from mtpbuild.runtime.server.protocol import StreamedBody
from mtpbuild.runtime.server.service import Service

log = logging.getLogger("mtpbuild")
FEW = 4  # choices up to which a short body is read on the event loop
Read = Callable[[Service, Any], Answer]


class AnswerResponse(Response):
    """A response that counts its choices as open until it is sent or its client disconnects.

    read: reads the body's prompts and settings. long: whether the body takes long to tokenise.
    """

    own_headers: ClassVar[dict[str, str]] = {}

    def __init__(self, service: Service, read: Read, body: StreamedBody, *, long: bool) -> None:
        super().__init__(headers=self.own_headers)
        del self.headers["content-length"]
        self._service, self._read, self._body, self._long = service, read, body, long

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.admitted(self._body.count):
            await _race(self._run(scope, receive, send), receive)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._service.loaded():
            with self._service.pinned() as service:
                await self._answer_with(service, scope, receive, send)

    async def _answer_with(
        self, service: Service, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Create the engine requests and send their answer.

        Prompts are read in one pool and grammars compiled in another, so that no prompt waits for
        another request's grammar.
        """
        if self._long or self._body.count > FEW:
            answer = await service.reading.run(object(), self._read_body, service)
        else:
            answer = self._read_body(service)
        if form := answer.choices[0].params.structured_outputs:
            await service.compiling.run(form, self._prepare, service, answer)
        service.engine.totals.add("request_params_n", answer.body.n or 1)
        self._answer = answer
        streams = [self._service.stream(request) for request in answer.requests]
        self._chunks = merge_streams(streams)
        await self._send(scope, receive, send)

    def _read_body(self, service: Service) -> Answer:
        """Read prompts and settings, but leave a grammar to be compiled later; raise ApiError."""
        answer = self._read(service, self._body)
        if self._service.settings.log_requests:
            given = self._body.model_dump(exclude_none=True)
            log.info("%s", json.dumps({"id": answer.id} | given))
        if answer.choices[0].params.structured_outputs is None:
            self._prepare(service, answer)
        return answer

    def _prepare(self, service: Service, answer: Answer) -> None:
        """Create the engine requests of an answer."""
        prepare = service.engine.prepare
        try:
            answer.requests = [prepare(each.ids, each.params) for each in answer.choices]
        except (RequestError, MissingDependencyError) as error:
            raise make_field_error(error, {"structured_outputs": answer.form_field}) from None

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer as one object; an error sets the status."""
        async with self._service.limit_time(), contextlib.aclosing(self._chunks) as chunks:
            async for number, chunk in chunks:
                self._answer.choices[number].take(chunk)
        await JsonResponse(self._answer.make_full_body())(scope, receive, send)


class EventStream(AnswerResponse):
    """The answer as server-sent events.

    An error becomes the last event before [DONE]; the status is 200 even then. An event with a
    `type` is sent with the type as its event name.
    """

    media_type = "text/event-stream"
    own_headers: ClassVar = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await self._send_events(send)
            last = _encode(answer.make_last_events())
        except ApiError as error:
            last = _encode([answer.failure(error)])
        except Exception:
            log.exception("an answer could not be sent")
            last = _encode([answer.failure(ApiError(500, "the server failed"))])
        done = b"data: [DONE]\n\n" if answer.ends_with_done else b""
        await send({"type": "http.response.body", "body": last + done, "more_body": False})

    async def _send_events(self, send: Send) -> None:
        """Send the events of each chunk at once."""

        async def write(events: Iterable[dict[str, Any]]) -> None:
            if body := _encode(events):
                await send({"type": "http.response.body", "body": body, "more_body": True})

        answer = self._answer
        async with self._service.limit_time(), contextlib.aclosing(self._chunks) as chunks:
            await write(answer.make_first_events())
            async for number, chunk in chunks:
                choice = answer.choices[number]
                await write(answer.events(choice, chunk, choice.take(chunk)))


def _encode(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(map(_encode_event, events))


def _encode_event(event: dict[str, Any]) -> bytes:
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return name + b"data: " + encode_json(event) + b"\n\n"


async def _race(work: Coroutine[Any, Any, None], receive: Callable[[], Awaitable[Any]]) -> None:
    """Do the work, and cancel it if the client disconnects."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
