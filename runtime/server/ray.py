"""Replicas under Ray Serve (dependency group `ray`): `serve run examples/serve/ray.yaml`."""

import os
import socket
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from fastapi import FastAPI
from pydantic import ConfigDict, create_model
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.target_options import load_options, make_option_flags
from mtpbuild.runtime.sampling.defaults import choose_sampling_defaults
from mtpbuild.runtime.server.app import make_app
from mtpbuild.runtime.server.options import ReplicaFlags, ServerOptions, read_key
from mtpbuild.runtime.server.service import Service, Services


def _list_fields(kind: type[Any]) -> dict[str, Any]:
    """Return the types and defaults of a group of flags."""
    hints = get_type_hints(kind)
    return {entry.name: (hints[entry.name], entry.default) for entry in fields(kind)}


REPLICA_FIELDS = _list_fields(ReplicaFlags)
LOAD_FIELDS = _list_fields(make_option_flags(load_options))
Arguments: Any = create_model(
    "Arguments",
    __config__=ConfigDict(frozen=True, extra="forbid"),
    __doc__="The application's `args`, the same for all replicas; files lie on every machine.",
    engine=(str, ...),
    **REPLICA_FIELDS,
    **LOAD_FIELDS,
)


class ReplicaNameHeader:
    """Middleware that adds a header with the replica's host and process to each answer."""

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
    """An engine and the server's routes, in a process that Ray Serve starts."""

    def __init__(self, arguments: Arguments) -> None:
        folder = Path(arguments.engine)
        settings = ServerOptions(
            **{name: getattr(arguments, name) for name in REPLICA_FIELDS},
            key=read_key(arguments.api_key),
            defaults=choose_sampling_defaults(folder, read_manifest(folder)),
        )
        self._service = Service(settings)
        options = {name: getattr(arguments, name) for name in LOAD_FIELDS}
        self._service.start(settings.load_engine(folder, **options))

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = make_app(Services(self._service))
        app.add_middleware(ReplicaNameHeader, name=f"{socket.gethostname()}:{os.getpid()}")
        return app

    def check_health(self) -> None:
        """Raise the engine's failure; Ray Serve then replaces this replica."""
        if self._service.failed is not None:
            raise self._service.failed


def app(arguments: Arguments) -> Any:
    """Return the application for a configuration file's `import_path`."""
    deployment: Any = Replica  # the decorators turned the class into a deployment
    return deployment.bind(arguments)
