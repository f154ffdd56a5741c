"""The server process: it listens, loads the engine, serves, and shuts down on signals."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn

from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.server.app import make_app
from mtpbuild.runtime.server.connection import HEADERS, make_connection_class
from mtpbuild.runtime.server.service import Services

BACKLOG = 2048
ENDED_AT_ONCE = 130


@dataclass(frozen=True)
class Address:
    """The address to listen on, and the time limit for draining."""

    host: str
    port: int
    drain: float  # seconds that running requests have to finish at shutdown


class Listener(uvicorn.Server):
    """A uvicorn server without signal handlers: this process decides when to shut down."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Stop listening and let `serve` return."""
        self.should_exit = True

    def drop(self) -> None:
        """Abort the connections of clients that do not read their answers."""
        for connection in [*self.server_state.connections]:
            connection.transport.abort()


def listen(address: Address) -> socket.socket:
    """Open the socket; raises UsageError if the address is not available."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with the protocol TCP; accepted sockets inherit it.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address.host, address.port))
        sock.listen(BACKLOG)  # from now on clients wait instead of being refused
    except OSError as error:
        sock.close()
        where = f"{address.host}:{address.port}"
        raise UsageError(f"can't listen on {where} ({error.strerror or error})") from None
    return sock


def serve(services: Services, address: Address) -> None:
    """Serve until a signal; raises what loading raised, or EngineError if the engine fails."""
    settings = services.settings
    sock = listen(address)
    if settings.log_requests or settings.access_log:
        log = logging.getLogger("mtpbuild")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
    try:
        asyncio.run(_serve(services, address, sock))
    finally:
        sock.close()


def configuration(services: Services) -> uvicorn.Config:
    """Return uvicorn's configuration with this server's limits; warnings go to stderr."""
    return uvicorn.Config(
        make_app(services),
        http=make_connection_class(services.settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        h11_max_incomplete_event_size=HEADERS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
        server_header=False,
    )


async def _serve(services: Services, address: Address, sock: socket.socket) -> None:
    listener = Listener(configuration(services))
    endings: list[asyncio.Task[None]] = []

    async def end() -> None:
        if not await services.drain(address.drain):
            listener.drop()
        listener.stop()

    def signalled() -> None:
        """Drain at the first signal; exit at once at the second."""
        if endings:
            os._exit(ENDED_AT_ONCE)
        endings.append(asyncio.create_task(end()))

    on_signals(asyncio.get_running_loop(), signalled)
    for service in services.all:
        service.on_failure = listener.stop
    serving = asyncio.create_task(listener.serve([sock]))
    loading = asyncio.create_task(services.load())
    await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():  # a signal came while the engine was loading
        await serving
        return
    if loading.exception():
        listener.stop()
        await serving
    with contextlib.closing(services):
        loading.result()
        for service in services.all:
            print(f"{service.model}: {service.manifest.drafting}", file=sys.stderr)
        names = ", ".join(service.model for service in services.all)
        print(f"serving {names} on {_make_url(sock)}", file=sys.stderr, flush=True)
        watching = asyncio.create_task(services.watch())
        await serving
        watching.cancel()
    if services.failed is not None:
        raise services.failed


def _make_url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ignore_signals() -> None:
    """Ignore signals in ranks other than 0: launchers signal all ranks, and rank 0 ends them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def on_signals(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Run `call` in the loop's thread at SIGTERM and SIGINT, on Windows by other means."""
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, call)
        except NotImplementedError:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(call))
