"""The errors that clients get: a status with OpenAI's or Anthropic's error object."""

import json
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

INTERNAL = ("InternalServerError", "api_error")
TYPES = {  # status: OpenAI's and Anthropic's type of an error
    400: ("BadRequestError", "invalid_request_error"),
    401: ("AuthenticationError", "authentication_error"),
    403: ("PermissionDeniedError", "permission_error"),
    404: ("NotFoundError", "not_found_error"),
    405: ("MethodNotAllowedError", "invalid_request_error"),
    408: ("RequestTimeoutError", "timeout_error"),
    413: ("RequestTooLargeError", "request_too_large"),
    429: ("RateLimitError", "rate_limit_error"),
    431: ("HeadersTooLargeError", "api_error"),
    503: ("ServiceUnavailableError", "overloaded_error"),
}


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
        self.status, self.message, self.param = status, message, param
        self.code: int | str = status
        self.headers = {"Retry-After": "1"} if status in (429, 503) else {}
        if not retry:
            self.headers["x-should-retry"] = "false"

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the error object of the path's API."""
        openai, anthropic = TYPES.get(self.status, INTERNAL)
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {"type": anthropic, "message": self.message}}
        fields = {"message": self.message, "type": openai, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self, path: str = "") -> JsonResponse:
        return JsonResponse(self.body(path), self.status, self.headers)


class TooLongError(ApiError):
    """The error for a prompt that leaves no room for its answer, in words that clients parse."""

    def __init__(self, param: str, limit: int, prompt: int | None, most: int | None = None) -> None:
        """limit: tokens of prompt and answer together. prompt: its tokens; None: above the limit.

        most: tokens that the answer may have, if the client has set them.
        """
        count = f"more than {limit}" if prompt is None else prompt
        problem = f"the prompt has {count} tokens, this engine takes at most {limit - 1}"
        if prompt is None:
            prompt = limit + 1
        if most is not None:
            both = f"{prompt} in the prompt, {most} for the answer"
            problem = f"{prompt + most} were asked for ({both})"
        super().__init__(
            400, f"this model's maximum context length is {limit} tokens; {problem}", param
        )
        self.code = "context_length_exceeded"
        self._anthropic = f"prompt is too long: {prompt + (most or 0)} tokens > {limit} maximum"
        if most is not None:  # clients parse this and retry with fewer tokens
            self._anthropic += (
                f" (input length and `max_tokens` exceed context limit: {prompt} + {most} > "
                f"{limit}, decrease input length or `max_tokens` and try again)"
            )

    def body(self, path: str = "") -> dict[str, Any]:
        content = super().body(path)
        if path.startswith("/v1/messages"):
            content["error"]["message"] = self._anthropic
        return content
