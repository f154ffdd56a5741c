"""Makes the error that a client gets: OpenAI's error object, with the right status."""

import json
from typing import Any

from starlette.responses import JSONResponse

KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    503: "ServiceUnavailableError",
}


def as_json(content: Any) -> bytes:
    """Writes JSON; half a surrogate pair, which a client may have sent, becomes an escape."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class Told(JSONResponse):
    """An object as JSON."""

    def render(self, content: Any) -> bytes:
        return as_json(content)


class ApiError(Exception):
    """A request that gets an error as its answer; `param` is the field that is wrong.

    retry: whether the same request may succeed later; clients otherwise go by the status alone.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, *, retry: bool = True
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.headers = {"Retry-After": "1"} if status in (429, 503) else {}
        if not retry:
            self.headers["x-should-retry"] = "false"

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "InternalServerError")
        said = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return {"error": said}

    def response(self) -> Told:
        return Told(self.body(), self.status, self.headers)
