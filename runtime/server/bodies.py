"""Parsing of request bodies: strict JSON within limits, in a thread if a body is long."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

import numpy as np
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from mtpbuild.runtime.constraints.json_schema import parse_finite
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.options import ServerOptions

LONG = 16 * 1024  # bytes of a body that is read in a thread
MAX_VALUES = 500_000  # bounds memory, like the next one
MAX_LISTS = 100_000  # lists and objects
MAX_DEPTH = 128
MAX_DIGITS = 309  # of an integer: as many as the largest float has
NO_JSON = "the body is not JSON"


class BodyRoute(APIRoute):
    """A route whose function is given `body`, JSON of any Content-Type, and `request`.

    FastAPI itself parses a body on the event loop and collects the errors of all its parts.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        kind = TypeAdapter[Any](get_type_hints(self.endpoint)["body"])

        async def handle(request: Request) -> Response:
            services = request.app.state.services
            raw = await _receive(request, services.settings)
            request.state.long = len(raw) > LONG
            if request.state.long:
                body = await services.reading.run(object(), read_body, raw, kind)
            else:
                body = read_body(raw, kind)
            response: Response = await self.endpoint(body=body, request=request)
            return response

        return handle


async def _receive(request: Request, settings: ServerOptions) -> bytes:
    """Receive a body within the limits of size and time; raises ApiError."""
    too_long = ApiError(413, f"the body is longer than {settings.max_body} bytes")
    size = request.headers.get("content-length", "0")
    if not size.isdigit() or int(size) > settings.max_body:
        raise too_long
    raw = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout):
            async for piece in request.stream():
                raw += piece
                if len(raw) > settings.max_body:
                    raise too_long
    except ClientDisconnect:  # nobody reads this
        raise ApiError(400, "the client closed the connection") from None
    except TimeoutError:
        raise ApiError(
            408, f"the request's body did not come within {settings.body_timeout:g} s"
        ) from None
    return bytes(raw)


def read_body(raw: bytes, kind: TypeAdapter[Any]) -> Any:
    """Parse and validate a body; raises ApiError."""
    try:
        return kind.validate_python(read_json(raw))
    except ValidationError as error:
        raise make_invalid_body_error(error) from None


def make_invalid_body_error(error: ValidationError) -> ApiError:
    """Return the client's error for the first wrong field, without the wrong value."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    # pydantic's path may contain the type of a union that was tried: str, list[int].
    kinds = ("str", "int", "bool")
    parts = [part for part in map(str, first["loc"]) if "[" not in part and part not in kinds]
    place = ".".join(part for part in parts if not part.endswith("Body"))
    if not place:
        return ApiError(400, f"the body must be an object with this route's fields: {first['msg']}")
    return ApiError(400, f"{place}: {first['msg'].removeprefix('Value error, ')}", place)


def read_json(raw: bytes) -> Any:
    """Parse JSON in UTF-8; raises ApiError if it is invalid or beyond the limits."""
    if not json.detect_encoding(raw).startswith("utf-8"):
        raise ApiError(400, f"{NO_JSON}: it must be UTF-8")
    _check_size(raw)
    try:
        return STRICT.decode(raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise ApiError(400, f"{NO_JSON}: {error}") from None


def _check_size(raw: bytes) -> None:
    """Limit values and levels before parsing, as lists of one number take 30 times their text."""
    if sum(map(raw.count, (b",", b"[", b"{"))) <= MAX_DEPTH:
        return
    code = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    code = code[np.cumsum(code == ord('"'), dtype=np.uint8) & 1 == 0]  # outside strings
    opened = (code == ord("[")) | (code == ord("{"))
    closed = (code == ord("]")) | (code == ord("}"))
    levels = np.cumsum((opened.astype(np.int8) - closed)[opened | closed], dtype=np.int32)
    for count, limit, what in (
        (np.count_nonzero(opened), MAX_LISTS, f"has more than {MAX_LISTS} lists and objects"),
        (np.count_nonzero(code == ord(",")), MAX_VALUES, f"has more than {MAX_VALUES} values"),
        (levels.max(initial=0), MAX_DEPTH, f"is nested deeper than {MAX_DEPTH} levels"),
    ):
        if count > limit:
            raise ApiError(400, f"the body {what}")


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits, {MAX_DIGITS} at most can be read")
    return int(text)


STRICT = json.JSONDecoder(
    parse_constant=parse_finite, parse_float=parse_finite, parse_int=_parse_int
)
