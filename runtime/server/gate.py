"""The check of every request before its route: host, key and origin."""

import hmac
import socket
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mtpbuild.runtime.server.errors import ApiError, find_route_path
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.page import FILES

FREE = {*FILES, "/health", "/ping", "/version"}  # without a key


class RequestGate:
    """Middleware that refuses requests to unknown hosts, without key and from foreign pages."""

    def __init__(self, app: ASGIApp, settings: ServerOptions) -> None:
        self._app = app
        self._key = settings.key
        self._origins = {*(settings.allow_origin or ())}
        hosts = settings.allowed_hosts or ()
        self._hosts = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http":
            try:
                self._check(Request(scope))
            except ApiError as error:
                answer = error.response(find_route_path(scope))
        await answer(scope, receive, send)

    def _check(self, request: Request) -> None:
        self._check_host(request.headers.get("host", ""))
        free = find_route_path(request.scope) in FREE or request.method == "OPTIONS"
        if self._key is not None and not free:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            keys = [request.headers.get("x-api-key", "")]  # Anthropic's clients may send both
            keys += [token] if scheme.lower() == "bearer" else []
            right = self._key.encode()
            if not any(hmac.compare_digest(key.strip().encode(), right) for key in keys):
                raise ApiError(401, "this server needs an API key: Authorization: Bearer KEY")
        if request.method == "POST":
            self._check_page(request)

    def _check_host(self, host: str) -> None:
        """Refuse unknown names in the header Host, which a web page can cause by DNS rebinding."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            raise ApiError(400, "the header Host is no name with a port") from None
        # An address is no name: browsers read a name of digits and dots as IPv4.
        is_address = ":" in name or name.replace(".", "").isdecimal()
        if name and not is_address and not {name, "*"} & self._hosts:
            raise ApiError(403, f"this server is not called {name:.60}: add it to allowed_hosts")

    def _check_page(self, request: Request) -> None:
        """Refuse POST from pages of other origins: CORS prevents reading, but not sending."""
        origin = request.headers.get("origin", "")
        site = request.headers.get("sec-fetch-site")
        foreign = site in ("cross-site", "same-site")
        if site is None and origin:  # an old browser, or a program that sends Origin
            foreign = origin.partition("://")[2] != request.headers.get("host", "")
        if foreign and not {origin, "*"} & self._origins:
            raise ApiError(
                403, f"a page of another origin asks ({origin:.60}): add it to allow_origin"
            )
