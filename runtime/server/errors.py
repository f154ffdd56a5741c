"""What a client is told when a request fails: OpenAI's error object, with the right status."""

from typing import Any

from starlette.responses import JSONResponse

KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A request that gets an error for an answer; `param` is the field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.headers = {"Retry-After": "1"} if status in (429, 503) else {}

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "InternalServerError")
        said = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return {"error": said}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)
