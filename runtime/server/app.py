"""The server's routes, for clients of OpenAI and Anthropic, vLLM's dashboards and browsers."""

import asyncio
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response

from mtpbuild.runtime.server.answering import AnswerResponse, EventStream, Read
from mtpbuild.runtime.server.bodies import make_route_class
from mtpbuild.runtime.server.chat import read_chat
from mtpbuild.runtime.server.completions import read_completion
from mtpbuild.runtime.server.errors import ApiError, JsonResponse
from mtpbuild.runtime.server.gate import RequestGate
from mtpbuild.runtime.server.messages import (
    MessagesBody,
    MessagesPrompt,
    count_prompt_tokens,
    read_message,
)
from mtpbuild.runtime.server.protocol import (
    ChatBody,
    ChatTokensBody,
    CompletionBody,
    StreamedBody,
    TextTokensBody,
    TokensBody,
)
from mtpbuild.runtime.server.responses import ResponsesBody, read_response
from mtpbuild.runtime.server.service import Service
from mtpbuild.runtime.server.tokens import detokenize_body, tokenize_body

PAGE = Path(__file__).with_name("page.html")
EVENTS = {
    "description": "The answer; with `stream` as server-sent events",
    "content": {"application/json": {}, "text/event-stream": {}},
}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request can't be done; `param` names the reason"},
    401: {"description": "No API key"},
    403: {"description": "The request comes from a page of another origin"},
    404: {"description": "No such model"},
    408: {"description": "It took too long"},
    413: {"description": "The body is too long"},
    429: {"description": "Too many requests wait"},
    500: {"description": "The engine failed"},
    503: {"description": "Loading, or shutting down"},
}


FEW: dict[int | str, dict[str, Any]] = {status: ERRORS[status] for status in (401, 503)}


def make_app(service: Service) -> FastAPI:
    """Return the server's application, which answers 503 until the service has an engine."""
    app = FastAPI(
        title="mtpbuild",
        version=version("mtpbuild"),
        docs_url=None,
        redoc_url=None,
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _error),
    )
    bodies = APIRouter(route_class=make_route_class(service.reading))
    _add_generation(bodies, service)
    _add_translated(bodies, service)
    _add_tokens(bodies, service)
    app.include_router(bodies)
    _add_state(app, service)
    app.add_middleware(RequestGate, settings=service.settings)
    if service.settings.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.allow_origin,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


def _add_generation(bodies: APIRouter, service: Service) -> None:
    responses: dict[int | str, dict[str, Any]] = {200: EVENTS, **ERRORS}

    @bodies.post("/v1/chat/completions", responses=responses)
    async def chat(body: ChatBody, request: Request) -> Response:
        """Continue a conversation."""
        return await _answer(service, read_chat, body, request)

    @bodies.post("/v1/completions", responses=responses)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue texts."""
        return await _answer(service, read_completion, body, request)


def _add_translated(bodies: APIRouter, service: Service) -> None:
    responses: dict[int | str, dict[str, Any]] = {200: EVENTS, **ERRORS}

    @bodies.post("/v1/responses", responses=responses)
    async def respond(body: ResponsesBody, request: Request) -> Response:
        """Continue a conversation, as OpenAI's newer API says it."""
        return await _answer(service, read_response, body, request)

    @bodies.post("/v1/messages", responses=responses)
    async def messages(body: MessagesBody, request: Request) -> Response:
        """Continue a conversation, as Anthropic's API says it."""
        return await _answer(service, read_message, body, request)

    @bodies.post("/v1/messages/count_tokens", responses=ERRORS)
    async def count_tokens(body: MessagesPrompt, request: Request) -> Response:
        """Count the tokens of a prompt."""
        return JsonResponse(await service.reading.run(object(), count_prompt_tokens, service, body))


def _add_state(app: FastAPI, service: Service) -> None:
    def card() -> dict[str, Any]:
        if service.engine is None:
            raise ApiError(503, "the engine is being loaded")
        return {
            "id": service.model,
            "object": "model",
            "created": 0,
            "owned_by": "mtpbuild",
            "max_model_len": service.engine.manifest.build.max_seq_len,
        }

    @app.get("/v1/models", responses=FEW)
    async def models() -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}", responses={404: ERRORS[404], **FEW})
    async def model(name: str) -> dict[str, Any]:
        """Describe the one model."""
        found = card()
        service.check_model(name)
        return found

    @app.get("/health", responses={503: ERRORS[503]})
    async def health() -> Response:
        """Answer 200 if the server takes requests."""
        return Response(status_code=200 if service.ready else 503)

    app.head("/health", include_in_schema=False)(health)
    app.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)(health)

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Count the answers that are under way or wait."""
        return {"server_load": service.open}

    @app.post("/reset_prefix_cache", responses=FEW)
    async def reset_prefix_cache() -> Response:
        """Let the next prompts be filled in from their beginning."""
        await asyncio.to_thread(service.admit(0).reset_prefix_cache)
        return Response()

    @app.get("/version")
    async def told_version() -> dict[str, str]:
        return {"version": version("mtpbuild")}

    @app.get("/metrics", responses=FEW)
    async def metrics() -> Response:
        """Answer with Prometheus's text, under vLLM's names."""
        if service.engine is None:
            raise ApiError(503, "the engine is being loaded")
        text, kind = service.metrics.text()
        return Response(text, headers={"Content-Type": kind})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))


def _add_tokens(bodies: APIRouter, service: Service) -> None:
    @bodies.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TextTokensBody | ChatTokensBody, request: Request) -> Response:
        """Turn a text, or a conversation as its prompt, into token ids."""
        return JsonResponse(await service.reading.run(object(), tokenize_body, service, body))

    @bodies.post("/detokenize", responses=ERRORS)
    async def detokenize(body: TokensBody, request: Request) -> Response:
        """Turn token ids into text."""
        return JsonResponse(await service.reading.run(object(), detokenize_body, service, body))


async def _answer(service: Service, read: Read, body: StreamedBody, request: Request) -> Response:
    """Return a response that reads the body's prompts and runs them when it is sent."""
    service.admit(body.count)
    kind = EventStream if body.stream else AnswerResponse
    return kind(service, read, body, long=request.state.long)


async def _error(request: Request, error: Exception) -> Response:
    """Answer any exception with the error object of the route's API."""
    match error:
        case ApiError():
            return error.response(request.url.path)
        case HTTPException():
            response = ApiError(error.status_code, str(error.detail)).response(request.url.path)
            response.headers.update(error.headers or {})
            return response
    return ApiError(500, "the server failed").response(request.url.path)
