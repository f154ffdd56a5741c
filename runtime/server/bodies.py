"""Parsing of request bodies: strict JSON within limits, in a thread if a body is long."""

import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, get_type_hints

import numpy as np
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from mtpbuild.runtime.constraints.json_schema import parse_finite
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.service import Pool

LONG = 16 * 1024  # bytes of a body that is read in a thread
MOST_VALUES, MOST_LISTS = 500_000, 100_000  # lists and objects; both limits bound memory
DEEPEST = 128
MOST_DIGITS = 309  # of an integer: as many as the largest float has
NO_JSON = "the body is not JSON"


def make_route_class(pool: Pool) -> type[APIRoute]:
    """Return a route class that passes `body` and `request`; long bodies are parsed in the pool.

    FastAPI itself parses a body on the event loop and collects the errors of all its parts.
    """

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            answer: Callable[..., Awaitable[Response]] = self.endpoint
            kind = TypeAdapter[Any](get_type_hints(answer)["body"])

            async def handle(request: Request) -> Response:
                try:
                    raw = b"".join([piece async for piece in request.stream()])
                except ClientDisconnect:  # nobody reads this
                    raise ApiError(400, "the client closed the connection") from None
                request.state.long = len(raw) > LONG
                if request.state.long:
                    body = await pool.run(object(), read_body, raw, kind)
                else:
                    body = read_body(raw, kind)
                return await answer(body=body, request=request)

            return handle

    return BodyRoute


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
    parts, kinds = map(str, first["loc"]), ("str", "int", "bool")
    place = ".".join(p for p in parts if not ("[" in p or p in kinds or p.endswith("Body")))
    if not place:
        return ApiError(400, f"{NO_JSON}: {first['msg']}")
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
    if sum(map(raw.count, (b",", b"[", b"{"))) <= DEEPEST:
        return
    code = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    code = code[np.cumsum(code == ord('"'), dtype=np.uint8) & 1 == 0]  # outside strings
    opened, closed = ((code == ord(one)) | (code == ord(two)) for one, two in ("[{", "]}"))
    if np.count_nonzero(opened) > MOST_LISTS:
        raise ApiError(400, f"the body has more than {MOST_LISTS} lists and objects")
    if np.count_nonzero(code == ord(",")) > MOST_VALUES:
        raise ApiError(400, f"the body has more than {MOST_VALUES} values")
    steps = (opened.astype(np.int8) - closed)[opened | closed]
    if np.cumsum(steps, dtype=np.int32).max(initial=0) > DEEPEST:
        raise ApiError(400, f"the body is nested deeper than {DEEPEST} levels")


def _parse_int(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number has {len(text)} digits, {MOST_DIGITS} at most can be read")
    return int(text)


STRICT = json.JSONDecoder(
    parse_constant=parse_finite, parse_float=parse_finite, parse_int=_parse_int
)
