"""The errors that clients get: a status with OpenAI's or Anthropic's error object."""

import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

INTERNAL = ("InternalServerError", "api_error", "The engine failed")
STATUSES = {  # status: OpenAI's and Anthropic's type of an error, and what it means
    400: ("BadRequestError", "invalid_request_error", "It can't be done; `param` names the reason"),
    401: ("AuthenticationError", "authentication_error", "No API key"),
    403: (
        "PermissionDeniedError",
        "permission_error",
        "The page's origin or the host is not allowed",
    ),
    404: ("NotFoundError", "not_found_error", "No such model"),
    405: ("MethodNotAllowedError", "invalid_request_error", ""),
    408: ("RequestTimeoutError", "timeout_error", "It took too long"),
    413: ("RequestTooLargeError", "request_too_large", "The body is too long"),
    429: ("RateLimitError", "rate_limit_error", "Too many requests wait"),
    431: ("HeadersTooLargeError", "api_error", ""),
    500: INTERNAL,
    503: ("ServiceUnavailableError", "overloaded_error", "Loading, or shutting down"),
}
# Responses in the OpenAPI schema: of a route with a body, and of any route.
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": meaning} for status, (_, _, meaning) in STATUSES.items() if meaning
}
COMMON_ERRORS: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 503)}
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_json(content: Any) -> bytes:
    """Encode as JSON in UTF-8; a lone surrogate, which a client may have sent, is escaped."""
    return ENCODER.encode(content).encode("utf-8", "backslashreplace")


def find_route_path(scope: Scope) -> str:
    """Return a request's path below the place where the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class JsonResponse(JSONResponse):
    """A JSON response encoded by `encode_json`."""

    def render(self, content: Any) -> bytes:
        return encode_json(content)


class ApiError(Exception):
    """An error that is sent to the client; `param` names the wrong field.

    retry: False tells the client not to retry; otherwise it decides by the status.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, *, retry: bool = True
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code: int | str = status
        self.headers = {"Retry-After": "1"} if status in (429, 503) else {}
        if not retry:
            self.headers["x-should-retry"] = "false"

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the error object of the path's API."""
        openai, anthropic, _ = STATUSES.get(self.status, INTERNAL)
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {"type": anthropic, "message": self.message}}
        fields = {"message": self.message, "type": openai, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self, path: str = "") -> JsonResponse:
        return JsonResponse(self.body(path), self.status, self.headers)


class TooLongError(ApiError):
    """The error for a prompt that leaves no room for its answer, in words that clients parse."""

    def __init__(
        self, param: str, limit: int, prompt: int | None, max_tokens: int | None = None
    ) -> None:
        """limit: tokens of prompt and answer together. prompt: its tokens; None: above the limit.

        max_tokens: what the client allows the answer, if it says so.
        """
        count = f"more than {limit}" if prompt is None else prompt
        problem = f"the prompt has {count} tokens, this engine takes at most {limit - 1}"
        tokens = limit + 1 if prompt is None else prompt
        if max_tokens is not None:
            parts = f"{tokens} in the prompt, {max_tokens} for the answer"
            problem = f"{tokens + max_tokens} were asked for ({parts})"
        super().__init__(
            400, f"this model's maximum context length is {limit} tokens; {problem}", param
        )
        self.code = "context_length_exceeded"
        self._anthropic = (
            f"prompt is too long: {tokens + (max_tokens or 0)} tokens > {limit} maximum"
        )
        if max_tokens is not None:  # clients parse this and retry with fewer tokens
            self._anthropic += (
                f" (input length and `max_tokens` exceed context limit: {tokens} + {max_tokens} > "
                f"{limit}, decrease input length or `max_tokens` and try again)"
            )

    def body(self, path: str = "") -> dict[str, Any]:
        content = super().body(path)
        if path.startswith("/v1/messages"):
            content["error"]["message"] = self._anthropic
        return content
