"""Runs a server over any engine on the loopback interface, in a thread of the test's process."""

import asyncio
import contextlib
import http.client
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx2

from mtpbuild.runtime import Engine
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.server import Address, Listener, configuration, listen
from mtpbuild.runtime.server.service import Service, Services

if TYPE_CHECKING:
    from openai import OpenAI


@dataclass(frozen=True)
class Live:
    """A running server: its address, and the objects behind it."""

    url: str
    services: Services
    loop: asyncio.AbstractEventLoop

    @property
    def service(self) -> Service:
        """The first service."""
        return self.services.all[0]

    def client(self, **settings: object) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=30, trust_env=False, **settings)  # type: ignore[arg-type]

    def openai(self) -> "OpenAI":
        """Make a client of OpenAI's package; its key is k."""
        import openai

        url, transport = f"{self.url}/v1", self.client()
        return openai.OpenAI(base_url=url, api_key="k", max_retries=0, http_client=transport)


@contextlib.contextmanager
def live(engine: Engine | None, settings: ServerOptions | None = None) -> Iterator[Live]:
    """Serve until the block ends; engine None means that it is still being loaded."""
    service = Service(settings or ServerOptions())
    if engine is not None:
        service.start(engine)
    with live_services(Services(service)) as server:
        yield server


@contextlib.contextmanager
def live_services(services: Services) -> Iterator[Live]:
    """Serve until the block ends."""
    own = listen(Address("127.0.0.1", 0, 0.0))
    config = configuration(services)
    config.timeout_graceful_shutdown = 1
    listener, loop = Listener(config), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(listener.serve([own]),))
    thread.start()
    try:
        yield Live(f"http://127.0.0.1:{own.getsockname()[1]}", services, loop)
    finally:
        listener.should_exit = True
        thread.join(20)
        own.close()
        loop.close()
        assert not thread.is_alive(), "the server did not end"


def post(address: str, path: str, body: bytes | str, timeout: float = 30) -> tuple[int, bytes]:
    """Send a body as it is; read all of the answer."""
    with contextlib.closing(http.client.HTTPConnection(address, timeout=timeout)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()


def until(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait until a condition holds; fail if it takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


def url_of(process: subprocess.Popen[str]) -> str:
    """Read what `mtpbuild serve` says at its start; return where it listens."""
    assert process.stderr is not None
    output = []
    for line in process.stderr:
        if line.startswith("serving"):
            return line.split()[-1]
        output.append(line)
    raise AssertionError(f"the server ended: {''.join(output)}")
