"""The process: it listens, loads the engine, and ends as a supervisor wants it."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn

from mtpbuild.runtime.engine import Engine
from mtpbuild.runtime.errors import MtpbuildError, UsageError
from mtpbuild.runtime.manifest import read_manifest
from mtpbuild.runtime.sampling import can_penalise
from mtpbuild.runtime.server.app import make_app
from mtpbuild.runtime.server.service import Service, Settings

HEADERS = 64 * 1024  # bytes of a request's headers
FAILED, ENDED_AT_ONCE = 1, 130


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
    own = socket.socket(family)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((address.host, address.port))
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


def serve(folder: Path, load: Callable[[], Engine], settings: Settings, address: Address) -> int:
    """Serve until a signal; returns the process's exit code. Raises what loading raises."""
    defaults = generation_defaults(folder)
    if not can_penalise(read_manifest(folder)) and defaults.pop("repetition_penalty", 1) != 1:
        what = "generation_config.json's repetition_penalty is not applied"
        print(f"warning: {what}, as this engine has no penalties", file=sys.stderr, flush=True)
    settings, own = replace(settings, defaults=defaults), listen(address)
    try:
        return asyncio.run(_serve(load, settings, address, own))
    finally:
        own.close()


async def _serve(
    load: Callable[[], Engine], settings: Settings, address: Address, own: socket.socket
) -> int:
    service = Service(settings)
    config = uvicorn.Config(
        make_app(service),
        http="h11",
        lifespan="off",
        log_config=None,
        access_log=False,
        h11_max_incomplete_event_size=HEADERS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=5,
        server_header=False,
    )
    listener, code = Listener(config), [0]
    ending = _Ending(service, listener, address.drain, code)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.ask)

    def failed() -> None:
        print(f"error: the engine has failed: {service.failed}", file=sys.stderr, flush=True)
        code[0] = FAILED
        listener.should_exit = True

    service.on_failure = failed
    serving = asyncio.create_task(listener.serve([own]))
    try:
        engine = await asyncio.to_thread(load)
    except MtpbuildError:
        listener.should_exit = True
        await serving
        raise
    with engine:
        service.start(engine)
        host, port = own.getsockname()[:2]
        print(f"serving {service.model} on http://{host}:{port}", file=sys.stderr, flush=True)
        await serving
    return code[0]


class _Ending:
    """The first signal lets running requests end, the second ends at once."""

    def __init__(
        self, service: Service, listener: uvicorn.Server, drain: float, code: list[int]
    ) -> None:
        self._service, self._listener, self._drain, self._code = service, listener, drain, code
        self._task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._end())
            return
        os._exit(ENDED_AT_ONCE)

    async def _end(self) -> None:
        await self._service.drained(self._drain)
        self._listener.should_exit = True


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
