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
ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def as_json(content: Any) -> bytes:
    """Writes JSON; half a surrogate pair, which a client may have sent, becomes an escape."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class Told(JSONResponse):
    """Is an object as JSON."""

    def render(self, content: Any) -> bytes:
        return as_json(content)


class ApiError(Exception):
    """Is a request that gets an error as its answer; `param` is the field that is wrong.

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

    def body(self, path: str = "") -> dict[str, Any]:
        """Returns the error as the API of the path has it."""
        if path.startswith("/v1/messages"):
            kind = ANTHROPIC.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = KINDS.get(self.status, "InternalServerError")
        said = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return {"error": said}

    def response(self, path: str = "") -> Told:
        return Told(self.body(path), self.status, self.headers)
