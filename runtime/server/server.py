"""The process: it listens, loads the engine, and ends as a supervisor wants it."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.engine import Engine
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.server.app import make_app
from mtpbuild.runtime.server.connection import HEADERS, limited
from mtpbuild.runtime.server.service import Service, Settings

BACKLOG = 2048
ENDED_AT_ONCE = 130


@dataclass(frozen=True)
class Address:
    """Where the server listens, and how long it takes to end."""

    host: str
    port: int
    drain: float  # seconds in which running requests may end


class Listener(uvicorn.Server):
    """uvicorn without its signals: this process decides itself when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(address: Address) -> socket.socket:
    """The socket; raises UsageError if it can't be had."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # asyncio switches off delays of small writes only for sockets that say TCP here; those that are
    # accepted take it over.
    own = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((address.host, address.port))
        own.listen(BACKLOG)  # who comes from now on waits, and is not refused
    except OSError as error:
        own.close()
        where = f"{address.host}:{address.port}"
        raise UsageError(f"can't listen on {where} ({error.strerror or error})") from None
    return own


def generation_defaults(folder: Path) -> dict[str, float | int]:
    """What the model's generation_config.json says of sampling, as vLLM reads it."""
    try:
        said = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found: dict[str, float | int] = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = said.get(name) if isinstance(said, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found


def engine_defaults(folder: Path) -> dict[str, float | int]:
    """The model's settings that its engine can apply; says on standard error what it can't."""
    defaults = generation_defaults(folder)
    repetition = defaults.get("repetition_penalty", 1)
    if repetition != 1 and Feature.PENALISE not in read_manifest(folder).features:
        del defaults["repetition_penalty"]
        what = "generation_config.json's repetition_penalty is not applied"
        print(f"warning: {what}, as this engine has no penalties", file=sys.stderr, flush=True)
    return defaults


def serve(folder: Path, load: Callable[[], Engine], settings: Settings, address: Address) -> None:
    """Serve until a signal. Raises what loading raises, and EngineError if the engine fails."""
    settings, own = replace(settings, defaults=engine_defaults(folder)), listen(address)
    if settings.log_requests:
        log = logging.getLogger("mtpbuild")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
    try:
        asyncio.run(_serve(load, settings, address, own))
    finally:
        own.close()


def configuration(service: Service) -> uvicorn.Config:
    """uvicorn, with this server's limits; what it warns of goes to standard error."""
    return uvicorn.Config(
        make_app(service),
        http=limited(service.settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        h11_max_incomplete_event_size=HEADERS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=5,
        server_header=False,
    )


async def _serve(
    load: Callable[[], Engine], settings: Settings, address: Address, own: socket.socket
) -> None:
    service = Service(settings)
    listener = Listener(configuration(service))
    ending = _Ending(service, listener, address.drain)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.ask)

    def failed() -> None:
        listener.should_exit = True

    service.on_failure = failed
    serving = asyncio.create_task(listener.serve([own]))
    loading = _in_a_thread(load)
    await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():  # a signal: there is nobody to wait for
        await serving
        return
    if loading.exception():
        listener.should_exit = True
        await serving
    with loading.result() as engine:
        service.start(engine)
        print(f"serving {service.model} on {_url(own)}", file=sys.stderr, flush=True)
        watching = asyncio.create_task(service.watch())
        await serving
        watching.cancel()
    if service.failed is not None:
        raise service.failed


def _in_a_thread(load: Callable[[], Engine]) -> asyncio.Future[Engine]:
    """Load while the server answers; a process that ends does not wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Engine] = loop.create_future()

    def told(engine: Engine | None, error: BaseException | None) -> None:
        if engine is not None:
            future.set_result(engine)
        elif error is not None:
            future.set_exception(error)

    def run() -> None:
        engine, error = None, None
        try:
            engine = load()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(told, engine, error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _url(own: socket.socket) -> str:
    host, port = own.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Ending:
    """The first signal lets running requests end, the second ends at once."""

    def __init__(self, service: Service, listener: uvicorn.Server, drain: float) -> None:
        self._service, self._listener, self._drain = service, listener, drain
        self._task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._end())
            return
        os._exit(ENDED_AT_ONCE)

    async def _end(self) -> None:
        await self._service.drained(self._drain)
        self._listener.should_exit = True


def outlive_signals() -> None:
    """Let this process, a rank that follows, go on until rank 0 ends: a launcher tells all."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def read_key(file: Path | None) -> str | None:
    """The API key: a file's first line, or the environment's MTPBUILD_API_KEY; None: no key."""
    if file is None:
        return os.environ.get("MTPBUILD_API_KEY") or None
    try:
        lines: list[Any] = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key {file}: can't be read ({error})") from None
    key = str(lines[0]).strip() if lines else ""
    if not key or not key.isascii():
        raise UsageError(f"--api-key {file}: the first line is the key, in ASCII")
    return key
