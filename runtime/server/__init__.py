"""OpenAI's and Anthropic's APIs over an engine: `mtpbuild serve`, and `make_app` for one's own."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mtpbuild.runtime.errors import UsageError, explain_missing_package

if TYPE_CHECKING:
    from fastapi import FastAPI

    from mtpbuild.runtime.engine.engine import Engine

__all__ = ["make_app"]


def make_app(
    engine: "Engine",
    *,
    served_model_name: str | None = None,
    api_key: str | None = None,
    max_queue: int = 256,
    request_timeout: float | None = None,
    max_body: int = 8 * 1024 * 1024,
    allow_origin: Sequence[str] = (),
    allowed_hosts: Sequence[str] = ("*",),
    tool_call_parser: str | None = None,
    split_thought: bool = True,
    defaults: Mapping[str, float | int] | None = None,
) -> "FastAPI":
    """Return an ASGI application with the routes of `mtpbuild serve`, to run or to mount.

        app = FastAPI()
        app.mount("/llm", make_app(engine))

    The caller keeps the engine, and closes it after the application has ended. `engine.aswap` is
    allowed. Raises UsageError for a wrong argument, and MissingDependencyError without the
    packages of the extra `serve`.

    Args:
        engine: answers all requests.
        served_model_name: the model's name to clients; None: its own.
        api_key: what clients must give; None: nothing.
        max_queue: requests that may wait; more get status 429.
        request_timeout: seconds that a request may take.
        max_body: bytes that a request's body may have.
        allow_origin: origins of pages that may ask (CORS).
        allowed_hosts: names by which clients may call; "*": any, as the application around it
            decides.
        tool_call_parser: the form of tool calls; None: as the chat template shows; "none": they
            stay in the text.
        split_thought: whether thoughts are apart from the text.
        defaults: sampling where a request says nothing; None: the model's own, else temperature 1.
    """
    with explain_missing_package("make_app", "serve"):
        from mtpbuild.runtime.server import app, service
    from mtpbuild.runtime.engine.engine import Engine
    from mtpbuild.runtime.sampling.defaults import VLLM_DEFAULTS, choose_sampling_defaults
    from mtpbuild.runtime.server.options import ServerOptions

    if not isinstance(engine, Engine):
        raise UsageError(f"make_app needs an Engine, not {engine!r:.80}: Engine.load(FOLDER)")
    if defaults is not None:
        defaults = _read_defaults(engine, defaults)
    elif engine.folder is not None:
        defaults = choose_sampling_defaults(engine.folder, engine.manifest)
    settings = ServerOptions(
        served_model_name=served_model_name,
        key=api_key,
        max_queue=max_queue,
        request_timeout=request_timeout,
        max_body=max_body,
        allow_origin=allow_origin,  # type: ignore[arg-type]  # it checks what it is given
        allowed_hosts=allowed_hosts,  # type: ignore[arg-type]
        tool_call_parser=tool_call_parser,
        no_thinking_split=not split_thought if split_thought in (True, False) else split_thought,
        defaults={**(VLLM_DEFAULTS if defaults is None else defaults)},
    )
    served = service.Service(settings)
    served.start(engine)
    return app.make_app(service.Services(served))


def _read_defaults(engine: "Engine", settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check sampling defaults as if a request had them; raise UsageError."""
    from mtpbuild.runtime.checks import check_object, did_you_mean
    from mtpbuild.runtime.sampling import params

    known = params.SETTINGS.keys() & params.list_http_settings().keys()
    try:
        for name in check_object(settings).keys() - known:
            raise UsageError(f"{name} is no setting of requests{did_you_mean(name, known)}")
        defaults = params.to_params_fields(settings, engine.manifest)
        engine.check(params.SamplingParams(**defaults), form=False)
    except (UsageError, ValueError) as error:
        raise UsageError(f"defaults: {error}") from None
    return defaults
