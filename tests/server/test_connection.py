"""Connections that are too slow, too long or no HTTP; over sockets, as no client would do it."""

import asyncio
import contextlib
import itertools
import json
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.server import Address, listen
from tests.support.fakes import fake_engine
from tests.support.live_server import Live, live

SETTINGS = ServerOptions(header_timeout=0.4, send_timeout=0.5)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    sizes: Any = {"max_batch": 2, "max_seq_len": 50_000, "prefill_chunk": 50_000}
    engine, _ = fake_engine(next_token=lambda history: 7, **sizes)
    with engine, live(engine, SETTINGS) as running:
        yield running


@contextlib.contextmanager
def connected(server: Live, **options: int) -> Iterator[socket.socket]:
    own = socket.socket()
    for name, value in options.items():
        own.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    own.settimeout(10)
    address = server.url.removeprefix("http://").split(":")
    with own:
        own.connect((address[0], int(address[1])))
        yield own


def rest(own: socket.socket) -> bytes:
    """Read to the end; a connection that is broken off has ended too."""
    output = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := own.recv(65536):
            output += piece
    return output


def refused(said: bytes, status: int) -> str:
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), said
    error = json.loads(body)["error"]
    assert error["code"] == status
    return str(error["message"])


def ask(**body: Any) -> bytes:
    content = json.dumps({"prompt": "hello", "temperature": 0, **body}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content


def answer(own: socket.socket) -> bytes:
    """Read one answer that is not streamed."""
    output = b""
    while b"\r\n\r\n" not in output:
        output += own.recv(65536)
    head, _, body = output.partition(b"\r\n\r\n")
    (length,) = (line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
    while len(body) < int(length.split(b":")[1]):
        body += own.recv(65536)
    return head


def large(stream: bool) -> bytes:
    """Ask for an answer of some 10 MB: more than sockets hold."""
    return ask(prompt="hello" * 20_000, n=120, max_tokens=1, echo=True, stream=stream)


def test_headers_that_do_not_come(server: Live) -> None:
    began = time.monotonic()
    with connected(server) as own:
        own.sendall(HEAD)
        assert "headers did not come" in refused(rest(own), 408)
    with connected(server) as own:
        assert rest(own) == b"", "who says nothing is told nothing"
    assert time.monotonic() - began >= 0.8


@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/messages", b"/tokenize", b"/markdown"])
def test_a_client_that_goes_away_in_its_body(
    server: Live, path: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(server) as own:
        own.sendall(HEAD.replace(b"/v1/completions", path) + b"Content-Length: 9\r\n\r\n{")
        own.shutdown(socket.SHUT_WR)
        rest(own)
    with connected(server) as own:  # the server is past the other one
        own.sendall(ask(max_tokens=1))
        assert answer(own).startswith(b"HTTP/1.1 200")
    assert caplog.records == []


def test_headers_that_trickle(server: Live) -> None:
    """Each byte comes in time, the whole does not: the time must not begin anew with each."""
    with connected(server) as own:
        for byte in itertools.islice(itertools.cycle(HEAD), 1000):
            with contextlib.suppress(ConnectionError):
                own.sendall(bytes([byte]))
            answered, _, _ = select.select([own], [], [], 0.02)
            if answered:
                break
        assert answered, "20 s are over"
        assert refused(rest(own), 408)


def test_a_connection_that_is_used_again(server: Live) -> None:
    """The time limit begins with the first byte of the second request."""
    with connected(server) as own:
        for wait in (0.0, 0.6):  # longer than headers may take
            time.sleep(wait)
            own.sendall(ask(max_tokens=1)[:50])
            time.sleep(0.1)
            own.sendall(ask(max_tokens=1)[50:])
            assert answer(own).startswith(b"HTTP/1.1 200 ")
        own.sendall(HEAD)
        assert refused(rest(own), 408)


def test_small_pieces_are_not_held_back() -> None:
    """Else a stream's next piece waits until the client has confirmed the last one, up to 40 ms."""

    async def accepted() -> int:
        told = asyncio.get_running_loop().create_future()

        class Asked(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                own = transport.get_extra_info("socket")
                told.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        with listen(Address("127.0.0.1", 0, 0.0)) as own:
            listener = await asyncio.get_running_loop().create_server(Asked, sock=own)
            async with listener:
                _, writer = await asyncio.open_connection(*own.getsockname())
                with contextlib.closing(writer):
                    return int(await told)

    assert asyncio.run(accepted()) == 1


def test_a_body_has_its_own_time(server: Live) -> None:
    with connected(server) as own:
        output = ask(max_tokens=1)
        own.sendall(output[:-10])
        time.sleep(0.6)
        own.sendall(output[-10:])
        assert answer(own).startswith(b"HTTP/1.1 200 ")


def test_headers_that_are_too_long(server: Live) -> None:
    with connected(server) as own:
        own.sendall(HEAD + b"X: " + b"x" * 70_000)
        assert "longer than 65536 bytes" in refused(rest(own), 431)


def test_what_is_no_http(server: Live) -> None:
    with connected(server) as own:
        own.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert "not HTTP" in refused(rest(own), 400)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read(server: Live, stream: bool) -> None:
    """The answer is dropped: the server does not keep it for ever."""
    with connected(server, SO_RCVBUF=4096) as own:
        own.sendall(large(stream))
        end = time.monotonic() + 20
        while not server.service.open:
            assert time.monotonic() < end
        while server.service.open:
            assert time.monotonic() < end, "it is still being answered"
            time.sleep(0.02)
        time.sleep(0.7)
        assert not rest(own).endswith(b"0\r\n\r\n")
    with server.client() as client:
        assert client.get("/health").status_code == 200


def test_a_client_that_reads_slowly(server: Live) -> None:
    """It gets all: what counts is that it reads, not how fast."""
    with connected(server, SO_RCVBUF=262144) as own:
        own.sendall(
            large(False).replace(b"Host: localhost", b"Host: localhost\r\nConnection: close")
        )
        output, began = bytearray(), time.monotonic()
        while piece := own.recv(65536):
            output += piece
            time.sleep(0.02 if time.monotonic() - began < 2 else 0)
        assert len(json.loads(output.partition(b"\r\n\r\n")[2])["choices"]) == 120
        assert len(output) > 10_000_000
