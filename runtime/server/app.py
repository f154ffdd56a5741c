"""The server's application, for clients of OpenAI and Anthropic, vLLM's dashboards and browsers."""

import asyncio
from collections.abc import Mapping
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from mtpbuild.runtime.server import chat, completions, messages, page, responses, tokens
from mtpbuild.runtime.server.errors import COMMON_ERRORS, ERRORS, ApiError, find_route_path
from mtpbuild.runtime.server.gate import RequestGate
from mtpbuild.runtime.server.service import Services

ROUTERS = [module.router for module in (chat, completions, responses, messages, tokens, page)]
router = APIRouter()


async def _find_services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Running = Annotated[Services, Depends(_find_services)]


def make_app(services: Services) -> FastAPI:
    """Return the server's application, which answers 503 until its engine is loaded."""
    app = FastAPI(
        title="mtpbuild",
        version=version("mtpbuild"),
        docs_url=None,
        redoc_url=None,
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _answer_error),
    )
    app.state.services = services
    for part in (*ROUTERS, router):
        app.include_router(part)
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


@router.get("/v1/models", responses=COMMON_ERRORS)
async def list_models(services: Running) -> dict[str, Any]:
    """List the models."""
    return {"object": "list", "data": services.cards()}


@router.get("/v1/models/{name:path}", responses={404: ERRORS[404], **COMMON_ERRORS})
async def describe_model(name: str, services: Running) -> dict[str, Any]:
    """Describe one model."""
    model = services.find(name).model
    return next(card for card in services.cards() if card["id"] == model)


@router.post("/v1/embeddings", include_in_schema=False)
async def embed() -> Response:
    raise ApiError(400, "/v1/embeddings is not supported: these engines only generate text")


@router.get("/health", responses={503: ERRORS[503]})
@router.head("/health", include_in_schema=False)
@router.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
async def check_health(services: Running) -> Response:
    """Answer 200 if the server takes requests."""
    return Response(status_code=200 if services.ready else 503)


@router.get("/load")
async def count_open(services: Running) -> dict[str, int]:
    """Count the answers that are under way or wait."""
    return {"server_load": services.open}


@router.post("/reset_prefix_cache", responses=COMMON_ERRORS)
async def reset_prefix_cache(services: Running) -> Response:
    """Let the next prompts be filled in from their beginning."""
    for service in services.all:
        service.admit(0)
        if service.is_loaded:
            await asyncio.to_thread(service.engine.reset_prefix_cache)
    return Response()


@router.get("/version")
async def read_version() -> dict[str, str]:
    return {"version": version("mtpbuild")}


@router.get("/metrics", responses=COMMON_ERRORS)
async def read_metrics(services: Running) -> Response:
    """Answer with Prometheus's text, under vLLM's names."""
    services.cards()  # raises while the engine is being loaded
    return Response(services.write_metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer any exception with the error object of the route's API."""
    headers: Mapping[str, str] = {}
    if isinstance(error, HTTPException):
        headers = error.headers or {}
        error = ApiError(error.status_code, str(error.detail))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "the server failed")
    response = error.response(find_route_path(request.scope))
    response.headers.update(headers)
    return response
