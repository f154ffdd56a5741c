"""SamplingParams from a request's body, with the server's defaults."""

from collections.abc import Mapping
from typing import Any

from mtpbuild.runtime.errors import MissingDependencyError, RequestError
from mtpbuild.runtime.sampling.params import SamplingParams, list_http_settings, to_params_fields
from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs
from mtpbuild.runtime.server.errors import ApiError, TooLongError
from mtpbuild.runtime.server.protocol import ChatBody, CompletionBody, GenerationBody
from mtpbuild.runtime.server.service import Service

KINDS = ("json", "regex", "choice", "grammar", "json_object")  # of structured output


def read_params(
    service: Service,
    body: GenerationBody,
    prompt: int,
    calls: StructuredOutputs | None = None,
    **own: Any,
) -> SamplingParams:
    """Return the SamplingParams of a request; raise ApiError if the engine can't serve them.

    prompt: the prompt's number of tokens. calls: the grammar of an answer that must be tool calls.
    own: further fields of SamplingParams, which clients can't set.
    """
    engine = service.engine
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    check_refused(body)
    most, limit_field = body.answer_limit
    named = {"max_tokens": limit_field}  # setting -> the body's field that gives it
    room = engine.manifest.build.max_seq_len - prompt
    if most is not None and most > room:
        raise TooLongError(limit_field, prompt + room, prompt, most)
    try:
        settings = service.settings.defaults | to_params_fields(body.settings, engine.manifest)
    except RequestError as error:
        raise make_field_error(error, named) from None
    if body.echo_logprobs is not None and "prompt_logprobs" not in settings:
        settings["prompt_logprobs"], named["prompt_logprobs"] = body.echo_logprobs, "echo"
    if body.stream and settings.get("prompt_logprobs") is not None:
        field = named.get("prompt_logprobs", "prompt_logprobs")
        raise ApiError(400, f"{field} can't go with stream", field)
    if settings.get("stop") and engine.tokenizer is None:
        raise ApiError(400, "this engine was built without a tokenizer", "stop")
    form = read_structured(body)
    if form is not None and calls is not None:
        raise ApiError(400, f"{form[0]} can't go with a forced tool call", form[0])
    named["structured_outputs"], settings["structured_outputs"] = form or ("tool_choice", calls)
    if body.skip_special_tokens is False:
        settings["shown_tokens"] = [*engine.special_ids.values()]
    if settings.get("rejection_sample_method") == "synthetic":
        raise ApiError(400, "synthetic acceptance is for benchmarks", "rejection_sample_method")
    try:
        limit = min(room, body.usual_tokens or room) if most is None else most
        params = SamplingParams(max_tokens=limit, logprobs=body.num_logprobs, **settings, **own)
        engine.check(params, form=False)  # the grammar is compiled when the request is prepared
    except (RequestError, MissingDependencyError) as error:
        raise make_field_error(error, named) from None
    return params


def check_refused(body: GenerationBody) -> None:
    """Raise ApiError for a field that the server refuses."""
    if refused := body.refused:
        name, reason = refused
        raise ApiError(400, f"{name} is not supported: {reason}", name)


def make_field_error(error: Exception, names: Mapping[str, str]) -> ApiError:
    """Return the client's error for a setting; names: setting -> the field that sets it."""
    message, setting = str(error), find_leading_field(str(error))
    if setting is None:
        return ApiError(400, message)
    field = names.get(setting, setting)
    return ApiError(400, field + message.removeprefix(setting), field)


def find_leading_field(message: str) -> str | None:
    """Return the name of the field that a message begins with, if any."""
    first = message.split()[0].rstrip(":")
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields, *list_http_settings()}
    return first if first.partition(".")[0] in fields else None


def read_structured(body: GenerationBody) -> tuple[str, StructuredOutputs] | None:
    """Return the field that asks for structured output, and its value; None if no field does.

    Raises ApiError.
    """
    given = {"structured_outputs": body.structured_outputs}
    if body.response_format is not None:
        given["response_format"] = _parse_response_format(body.response_format)
    forms = {name: form for name, form in given.items() if form is not None}
    if len(forms) > 1:
        raise ApiError(400, "response_format can't go with structured_outputs", "response_format")
    for field, form in forms.items():
        if unknown := sorted(form.keys() - {*KINDS, "disable_any_whitespace"}):
            message = f"{field}: {unknown[0]} is not supported; known: {', '.join(KINDS)}"
            raise ApiError(400, message, field)
        try:
            return field, StructuredOutputs(**{k: form[k] for k in KINDS if k in form})
        except RequestError as error:
            raise ApiError(400, str(error), field) from None
    return None


def _parse_response_format(given: dict[str, Any]) -> dict[str, Any] | None:
    """Translate OpenAI's response_format into vLLM's structured_outputs."""
    kind, field = given.get("type"), "response_format"
    if kind in ("text", "json_object"):
        for name in ("schema", "json_schema"):
            if given.get(name) is not None:
                message = f"{field}.{name} is not supported: type json_schema has it"
                raise ApiError(400, message, field)
        return {"json_object": True} if kind == "json_object" else None
    if kind != "json_schema":
        message = f"{field}.type must be text, json_object or json_schema, not {kind!r:.60}"
        raise ApiError(400, message, field)
    match given.get("json_schema"):
        case {"schema": dict() | bool() as schema}:
            return {"json": schema}
    raise ApiError(400, f"{field}.json_schema.schema must be a JSON schema", field)
