"""The check of every request before its route: host, key, origin, size and time."""

import asyncio
import hmac
import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtpbuild.runtime.server.errors import ApiError, find_route_path
from mtpbuild.runtime.server.options import ServerOptions
from mtpbuild.runtime.server.page import FILES

FREE = {*FILES, "/health", "/ping", "/version"}  # without a key


class RequestGate:
    """Middleware that refuses requests without key, from foreign pages, too long or too slow.

    Every body is treated as JSON, whatever its Content-Type is: curl's default is a form.
    """

    def __init__(self, app: ASGIApp, settings: ServerOptions) -> None:
        self._app, self._settings = app, settings
        hosts = settings.allowed_hosts or ()
        self._names = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusals: list[ApiError] = []

        async def unless_refused(message: Message) -> None:
            """Forward the application's answer, unless the body was refused."""
            if not refusals:
                await send(message)

        try:
            self._check(scope, headers)
            headers[b"content-type"] = b"application/json"
            scope = {**scope, "headers": [*headers.items()]}
            await self._app(scope, self._limit_receive(receive, refusals), unless_refused)
        except ApiError as error:
            refusals = refusals or [error]
        if refusals:
            await refusals[0].response(find_route_path(scope))(scope, receive, send)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        self._check_host(headers.get(b"host", b"").decode("latin-1"))
        key = self._settings.key
        if key is not None and find_route_path(scope) not in FREE and scope["method"] != "OPTIONS":
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            keys = [headers.get(b"x-api-key", b"")]  # of Anthropic's clients, which may send both
            keys += [token] if scheme.lower() == b"bearer" else []
            if not any(hmac.compare_digest(each.strip(), key.encode()) for each in keys):
                raise ApiError(401, "this server needs an API key: Authorization: Bearer KEY")
        self._check_page(scope, headers)
        size = headers.get(b"content-length", b"0")
        if not size.isdigit() or int(size) > self._settings.max_body:
            raise self._make_too_large_error()

    def _check_host(self, host: str) -> None:
        """Refuse unknown names in the header Host, which a web page can cause by DNS rebinding."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            raise ApiError(400, "the header Host is no name with a port") from None
        if name and not _is_address(name) and not {name, "*"} & self._names:
            raise ApiError(403, f"this server is not called {name:.60} (allowed_hosts)")

    def _check_page(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse POST from pages of other origins: CORS prevents reading, but not sending."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        site = headers.get(b"sec-fetch-site")
        foreign = site in (b"cross-site", b"same-site")
        if site is None and origin:  # an old browser, or a program that sends Origin
            foreign = origin.partition("://")[2] != headers.get(b"host", b"").decode("latin-1")
        foreign = foreign and scope["method"] == "POST"
        if foreign and not {origin, "*"} & set(self._settings.allow_origin or ()):
            raise ApiError(403, "a page of another origin asks (allow_origin)")

    def _limit_receive(self, receive: Receive, refusals: list[ApiError]) -> Receive:
        """Wrap `receive` so that a body's size and time are limited.

        A body beyond the limits raises an ApiError, which is also added to `refusals`.
        """
        received, complete = 0, False
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.body_timeout

        async def limited() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                refusals.append(ApiError(408, "the request's body did not come"))
                raise refusals[0] from None
            received += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if received > self._settings.max_body:
                refusals.append(self._make_too_large_error())
                raise refusals[0]
            return message

        return limited

    def _make_too_large_error(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._settings.max_body} bytes")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
