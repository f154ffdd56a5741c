"""Connections of uvicorn with time limits, and with errors in the API's format."""

import asyncio
import json
import logging
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.options import ServerOptions

access = logging.getLogger("mtpbuild.access")  # uvicorn writes a line for each request to it
HEADERS = 64 * 1024  # bytes of a request's headers


class AccessFilter(logging.Filter):
    """A log filter that drops query strings, which may contain a client's key.

    It also drops the lines of `/markdown`, which the page asks several times a second.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            client, method, path, *rest = record.args
            record.args = (client, method, str(path).partition("?")[0], *rest)
            return record.args[2] != "/markdown"
        return True


access.addFilter(AccessFilter())


class TimedConnection(H11Protocol):
    """A connection of uvicorn with time limits.

    A request's headers must be complete `header_timeout` seconds after the connection was made or,
    on a reused connection, after their first byte. The connection is dropped if 64 KiB or the end
    of an answer wait for the client, and it reads nothing for `send_timeout` seconds.
    """

    settings: ClassVar[ServerOptions]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_logger = access
        self.access_log = self.settings.access_log

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if not self.flow.write_paused:
            self._stop("sending")  # a client that sends a request also reads
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop("headers")
        elif "headers" not in self._timers:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("headers")
        self._stop("sending")
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._stop("sending")
        super().resume_writing()

    def on_response_complete(self) -> None:
        if self.transport.get_write_buffer_size():
            self._await_reader()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error in the API's format."""
        if len(self.conn.trailing_data[0]) > HEADERS:
            self._refuse(ApiError(431, f"the headers are longer than {HEADERS} bytes"))
        else:
            self._refuse(ApiError(400, "this is not HTTP"))

    def _await_headers(self) -> None:
        timeout = self.loop.call_later(self.settings.header_timeout, self._refuse_slow_headers)
        self._timers["headers"] = timeout

    def _refuse_slow_headers(self) -> None:
        if not self.transport.is_closing():
            begun = bool(self.conn.trailing_data[0])
            self._refuse(ApiError(408, "the request's headers did not come") if begun else None)

    def _stop(self, timer: str) -> None:
        if running := self._timers.pop(timer, None):
            running.cancel()

    def _await_reader(self) -> None:
        if "sending" not in self._timers:
            left = self.transport.get_write_buffer_size()
            timeout = self.loop.call_later(self.settings.send_timeout, self._check_progress, left)
            self._timers["sending"] = timeout

    def _check_progress(self, before: int) -> None:
        """Abort if the client has read none of the `before` bytes that were waiting."""
        del self._timers["sending"]
        left = self.transport.get_write_buffer_size()
        if left >= before > 0:
            self.transport.abort()
        elif left:
            self._await_reader()

    def _refuse(self, error: ApiError | None) -> None:
        """Send the error, if a response can still be sent, and close."""
        if error and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body()).encode()
            kind = [(b"Content-Type", b"application/json"), (b"Connection", b"close")]
            size = (b"Content-Length", str(len(body)).encode())
            head = h11.Response(status_code=error.status, headers=[*kind, size])
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def make_connection_class(settings: ServerOptions) -> type[TimedConnection]:
    """Return the class of connections with these settings, for `uvicorn.Config(http=..)`."""
    return type("Connection", (TimedConnection,), {"settings": settings})
