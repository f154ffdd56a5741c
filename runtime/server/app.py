"""The server's routes, for clients of OpenAI and Anthropic, vLLM's dashboards and browsers."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any, TypeAlias

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from mtpbuild.runtime.server import protocol
from mtpbuild.runtime.server.answering import AnswerResponse, EventStream, Read
from mtpbuild.runtime.server.bodies import make_route_class
from mtpbuild.runtime.server.chat import read_chat
from mtpbuild.runtime.server.completions import read_completion
from mtpbuild.runtime.server.errors import ApiError, JsonResponse, find_route_path
from mtpbuild.runtime.server.gate import RequestGate
from mtpbuild.runtime.server.messages import (
    MessagesBody,
    MessagesPrompt,
    count_prompt_tokens,
    read_message,
)
from mtpbuild.runtime.server.page import FILES, read_page, render_body
from mtpbuild.runtime.server.responses import ResponsesBody, read_response
from mtpbuild.runtime.server.service import Service
from mtpbuild.runtime.server.services import Services
from mtpbuild.runtime.server.tokens import detokenize_body, tokenize_body

EVENTS = {
    "description": "The answer; with `stream` as server-sent events",
    "content": {"application/json": {}, "text/event-stream": {}},
}
Convert: TypeAlias = Callable[[Service, Any], Any]
Statuses: TypeAlias = dict[int | str, dict[str, Any]]
ERRORS: Statuses = {
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
FEW: Statuses = {status: ERRORS[status] for status in (401, 503)}


def make_app(services: Services) -> FastAPI:
    """Return the server's application, which answers 503 until its engine is loaded."""
    app = FastAPI(
        title="mtpbuild",
        version=version("mtpbuild"),
        docs_url=None,
        redoc_url=None,
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _answer_error),
    )
    bodies = APIRouter(route_class=make_route_class(services.reading))
    chat = "Continue a conversation"
    generate = partial(_add_generation_route, bodies, services)
    generate("/v1/chat/completions", protocol.ChatBody, read_chat, f"{chat}.")
    generate("/v1/completions", protocol.CompletionBody, read_completion, "Continue texts.")
    generate("/v1/responses", ResponsesBody, read_response, f"{chat}, by OpenAI's newer API.")
    generate("/v1/messages", MessagesBody, read_message, f"{chat}, by Anthropic's API.")
    convert = partial(_add_token_routes, bodies, services)
    convert("/v1/messages/count_tokens", MessagesPrompt, count_prompt_tokens, "Count tokens.")
    prompt = protocol.TextTokensBody | protocol.ChatTokensBody
    convert("/tokenize", prompt, tokenize_body, "Turn a text, or a chat's prompt, into token ids.")
    convert("/detokenize", protocol.TokensBody, detokenize_body, "Turn token ids into text.")

    @bodies.post("/markdown", responses=ERRORS)
    async def render(body: protocol.MarkdownBody, request: Request) -> Response:
        """Render markdown, for the page."""
        return JsonResponse(await services.reading.run(object(), render_body, body))

    app.include_router(bodies)

    @app.post("/v1/embeddings", include_in_schema=False)
    async def embed() -> Response:
        raise ApiError(400, "/v1/embeddings is not supported: these engines only generate text")

    _add_status_routes(app, services)
    app.add_middleware(RequestGate, settings=services.settings)
    if services.settings.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=services.settings.allow_origin,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
        )
    return app


def _add_generation_route(
    bodies: APIRouter, services: Services, path: str, kind: Any, read: Read, about: str
) -> None:
    """Add a route whose response reads the body's prompts and runs them when it is sent."""

    @bodies.post(path, name=path, description=about, responses={200: EVENTS, **ERRORS})
    async def generate(body: kind, request: Request) -> Response:
        service = services.find(body.model)
        service.admit(body.count)
        response = EventStream if body.stream else AnswerResponse
        return response(service, read, body, long=request.state.long)


def _add_token_routes(
    bodies: APIRouter, services: Services, path: str, kind: Any, convert: Convert, about: str
) -> None:
    @bodies.post(path, name=path, description=about, responses=ERRORS)
    async def convert_tokens(body: kind, request: Request) -> Response:
        service = services.find(body.model)
        service.admit(0)
        async with service.loaded():
            return JsonResponse(await service.reading.run(object(), convert, service, body))


def _add_status_routes(app: FastAPI, services: Services) -> None:
    @app.get("/v1/models", responses=FEW)
    async def models() -> dict[str, Any]:
        """List the models."""
        return {"object": "list", "data": services.cards()}

    @app.get("/v1/models/{name:path}", responses={404: ERRORS[404], **FEW})
    async def model(name: str) -> dict[str, Any]:
        """Describe one model."""
        found = services.find(name)
        return next(card for card in services.cards() if card["id"] == found.model)

    @app.get("/health", responses={503: ERRORS[503]})
    async def health() -> Response:
        """Answer 200 if the server takes requests."""
        return Response(status_code=200 if services.ready else 503)

    app.head("/health", include_in_schema=False)(health)
    app.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)(health)

    @app.get("/load")
    async def load() -> dict[str, int]:
        """Count the answers that are under way or wait."""
        return {"server_load": services.open}

    @app.post("/reset_prefix_cache", responses=FEW)
    async def reset_prefix_cache() -> Response:
        """Let the next prompts be filled in from their beginning."""
        for service in services.each:
            service.admit(0)
            if service.is_loaded:
                await asyncio.to_thread(service.engine.reset_prefix_cache)
        return Response()

    @app.get("/version")
    async def read_version() -> dict[str, str]:
        return {"version": version("mtpbuild")}

    @app.get("/metrics", responses=FEW)
    async def metrics() -> Response:
        """Answer with Prometheus's text, under vLLM's names."""
        services.cards()  # raises while the engine is being loaded
        return Response(services.write_metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    for path in FILES:
        answer = partial(read_page, path)
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(answer)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer any exception with the error object of the route's API."""
    headers: Mapping[str, str] = {}
    if isinstance(error, HTTPException):
        headers, error = error.headers or {}, ApiError(error.status_code, str(error.detail))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed")
    response = error.response(find_route_path(request.scope))
    response.headers.update(headers)
    return response
