"""Replicas by Ray Serve: `serve run examples/serve/ray.yaml`, the dependency group `ray`."""

import os
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, create_model
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtpbuild.runtime.engine import Engine
from mtpbuild.runtime.server.app import make_app
from mtpbuild.runtime.server.server import engine_defaults, read_key
from mtpbuild.runtime.server.service import Service, Settings
from mtpbuild.runtime.target_options import load_options, option_flags


class ServeArguments(BaseModel):
    """Flags of `mtpbuild serve` that every target has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str  # its directory, on every machine
    served_model_name: str | None = None
    api_key: str | None = None  # a file, on every machine
    max_queue: int = 256  # of one replica
    request_timeout: float | None = None
    max_body: int = 8 * 1024 * 1024
    allow_origin: tuple[str, ...] = ()
    no_prefix_cache: bool = False
    no_thinking_split: bool = False
    tool_call_parser: str | None = None
    threads: int | None = None


def _load_fields() -> dict[str, Any]:
    """Types and defaults of the options that targets have when an engine is loaded."""
    kind = option_flags(load_options)
    return {option.name: (option.type, option.default) for option in fields(kind)}


Arguments: Any = create_model(
    "Arguments",
    __base__=ServeArguments,
    __doc__="The application's `args`, the same for all replicas.",
    **_load_fields(),
)


class Named:
    """Says in a header of each answer which replica gave it: host and process."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app, self._header = app, (b"x-replica", name.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self._header]}
            await send(message)

        await self._app(scope, receive, named)


@serve.deployment(
    name="mtpbuild",
    max_ongoing_requests=256,  # the engine's own queue; Ray Serve's default is 5
    health_check_period_s=2,
    graceful_shutdown_timeout_s=60,
)
@serve.ingress()
class Replica:
    """An engine, and the server's routes over it, in a process that Ray Serve starts."""

    def __init__(self, arguments: Arguments) -> None:
        folder = Path(arguments.engine)
        settings = Settings(
            model=arguments.served_model_name,
            api_key=read_key(Path(arguments.api_key) if arguments.api_key else None),
            max_queue=arguments.max_queue,
            request_timeout=arguments.request_timeout,
            max_body=arguments.max_body,
            cors=arguments.allow_origin,
            thinking=not arguments.no_thinking_split,
            tool_parser=arguments.tool_call_parser,
            defaults=engine_defaults(folder),
        )
        self._service = Service(settings)
        self._service.start(
            Engine.load(
                folder,
                threads=arguments.threads,
                prefix_cache=not arguments.no_prefix_cache,
                **{name: getattr(arguments, name) for name in _load_fields()},
            )
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        made = make_app(self._service)
        made.add_middleware(Named, name=f"{socket.gethostname()}:{os.getpid()}")
        return made

    def check_health(self) -> None:
        """Ray Serve replaces a replica whose engine can't go on."""
        if self._service.failed is not None:
            raise self._service.failed


def app(arguments: Arguments) -> Any:
    """The application of a configuration file's `import_path`."""
    deployment: Any = Replica  # what the decorators made of it
    return deployment.bind(arguments)
