"""SamplingParams from a request's body, with the server's defaults."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.errors import (
    ContextLengthError,
    MissingDependencyError,
    RequestError,
    UsageError,
)
from mtpbuild.runtime.sampling.params import SamplingParams, to_params_fields
from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs
from mtpbuild.runtime.server.errors import ApiError, TooLongError
from mtpbuild.runtime.server.protocol import REFUSED, GenerationBody, is_refused

KINDS = ("json", "regex", "choice", "grammar", "json_object")  # of structured output


def read_params(
    engine: Engine,
    defaults: Mapping[str, Any],
    body: GenerationBody,
    prompt_tokens: int,
    calls: StructuredOutputs | None = None,
    **more: Any,
) -> SamplingParams:
    """Return the SamplingParams of a request; raise ApiError for a wrong field.

    Whether the engine supports them is checked when the request is prepared. calls: the grammar of
    an answer that must be tool calls. more: further fields of SamplingParams, which clients can't
    set.
    """
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    check_refused(body)
    names = body.field_names
    max_tokens, limit_field = body.answer_limit
    room = engine.manifest.build.max_seq_len - prompt_tokens
    if max_tokens is None:
        max_tokens = min(room, body.usual_tokens or room)
    elif max_tokens > room:
        raise TooLongError(limit_field, prompt_tokens + room, prompt_tokens, max_tokens)
    form = _read_structured(body)
    if form is not None and calls is not None:
        field = names["structured_outputs"]
        raise ApiError(400, f"{field} can't go with a forced tool call", field)
    with translate_errors(names=names):
        settings = {**defaults, **to_params_fields(body.settings, engine.manifest)}
        if body.echo_logprobs is not None:
            settings.setdefault("prompt_logprobs", body.echo_logprobs)
        if body.stream and settings.get("prompt_logprobs") is not None:
            raise RequestError("prompt_logprobs can't go with stream", "prompt_logprobs")
        if body.skip_special_tokens is False:
            settings["shown_tokens"] = [*engine.special_ids.values()]
        if settings.get(method := "rejection_sample_method") == "synthetic":
            raise RequestError(f"{method}: synthetic acceptance is for benchmarks", method)
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=body.num_logprobs,
            structured_outputs=form or calls,
            **settings,
            **more,
        )


def check_refused(body: GenerationBody) -> None:
    """Raise ApiError for a field that the server refuses."""
    for name, value in (body.model_extra or {}).items():
        if is_refused(name, value):
            raise ApiError(400, f"{name} is not supported: {REFUSED[name]}", name)


@contextmanager
def translate_errors(
    param: str | None = None, names: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Turn an error of the block into the client's, which names the field at fault.

    param: the field if the error names no setting. names: setting -> the field that sets it.
    """
    try:
        yield
    except ContextLengthError as error:
        raise TooLongError(param or "prompt", error.limit, error.tokens) from None
    except RequestError as error:
        field = (names or {}).get(error.setting, error.setting)
        message = field + str(error).removeprefix(error.setting)
        raise ApiError(400, message, field or param) from None
    except (MissingDependencyError, UsageError) as error:
        raise ApiError(400, str(error), param) from None


def _read_structured(body: GenerationBody) -> StructuredOutputs | None:
    """Return the structured output that a body asks for; raise ApiError."""
    forms = {"structured_outputs": body.structured_outputs}
    if body.response_format is not None:
        forms["response_format"] = _parse_response_format(body.response_format)
    fields = [name for name, form in forms.items() if form is not None]
    if len(fields) > 1:
        raise ApiError(400, "response_format can't go with structured_outputs", "response_format")
    for field in fields:
        form = forms[field] or {}
        if unknown := sorted(form.keys() - {*KINDS, "disable_any_whitespace"}):
            message = f"{field}: {unknown[0]} is not supported; known: {', '.join(KINDS)}"
            raise ApiError(400, message, field)
        with translate_errors(field, {"structured_outputs": field}):
            return StructuredOutputs(**{kind: form[kind] for kind in KINDS if kind in form})
    return None


def _parse_response_format(form: dict[str, Any]) -> dict[str, Any] | None:
    """Translate OpenAI's response_format into vLLM's structured_outputs."""
    field = "response_format"
    match form:
        case {"type": "text" | "json_object" as kind}:
            for name in ("schema", "json_schema"):
                if form.get(name) is not None:
                    message = f"{field}.{name} is not supported: type json_schema has it"
                    raise ApiError(400, message, field)
            return {"json_object": True} if kind == "json_object" else None
        case {"type": "json_schema", "json_schema": {"schema": dict() | bool() as schema}}:
            return {"json": schema}
        case {"type": "json_schema"}:
            raise ApiError(400, f"{field}.json_schema.schema must be a JSON schema", field)
    message = f"{field}.type must be text, json_object or json_schema"
    raise ApiError(400, f"{message}, not {form.get('type')!r:.60}", field)
