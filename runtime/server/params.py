"""SamplingParams from a request's body; defaults are the model's, then vLLM's."""

from collections.abc import Mapping, Sequence
from typing import Any

from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.errors import MissingDependencyError, RequestError
from mtpbuild.runtime.sampling.params import SamplingParams, http_settings, to_params_fields
from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs
from mtpbuild.runtime.server.errors import ApiError, TooLongError
from mtpbuild.runtime.server.protocol import ChatBody, CompletionBody, GenerationBody
from mtpbuild.runtime.server.service import Service
from mtpbuild.runtime.server.structured import read_structured

DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}


def read_params(
    service: Service,
    engine: Engine,
    body: GenerationBody,
    prompt: int,
    most: int | None,
    *,
    usual: int | None = None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    calls: StructuredOutputs | None = None,
    markers: Sequence[str] = (),
    names: Mapping[str, str] | None = None,
    **own: Any,
) -> SamplingParams:
    """Return the SamplingParams of a request; raises ApiError for those the engine can't serve.

    prompt: its number of tokens. most: the answer's token limit; None: `usual`, capped by the room
    that the context has left. prompt_logprobs: the default if the body does not set it. calls: the
    grammar of an answer that must be tool calls. markers: texts that the answer must show even if
    they are special tokens. names: setting -> the body's field that sets it, where they differ.
    own: further fields of SamplingParams, which clients can't set.
    """
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    check_refused(body)
    named = dict(names or {})
    room = engine.manifest.build.max_seq_len - prompt
    if most is not None and most > room:
        raise TooLongError(named.get("max_tokens", "max_tokens"), prompt + room, prompt, most)
    settings = DEFAULTS | service.settings.defaults | to_params_fields(body.settings)
    settings.setdefault("prompt_logprobs", prompt_logprobs)
    if body.stream and settings["prompt_logprobs"] is not None:
        field = named.get("prompt_logprobs", "prompt_logprobs")
        raise ApiError(400, f"{field} can't go with stream", field)
    if settings.get("stop") and engine.tokenizer is None:
        raise ApiError(400, "this engine was built without a tokenizer", "stop")
    form = read_structured(body)
    if form is not None and calls is not None:
        raise ApiError(400, f"{form[0]} can't go with a forced tool call", form[0])
    named["structured_outputs"], settings["structured_outputs"] = form or ("tool_choice", calls)
    every = body.skip_special_tokens is False
    special = engine.special_ids.items()
    settings["shown_tokens"] = [id for name, id in special if every or name in markers]
    if settings.get("rejection_sample_method") == "synthetic":
        raise ApiError(400, "synthetic acceptance is for benchmarks", "rejection_sample_method")
    try:
        limit = min(room, usual or room) if most is None else most
        params = SamplingParams(max_tokens=limit, logprobs=logprobs, **settings, **own)
        engine.check(params, form=False)  # the grammar is compiled when the request is prepared
    except (RequestError, MissingDependencyError) as error:
        raise field_error(error, named) from None
    return params


def check_refused(body: GenerationBody) -> None:
    """Raise ApiError for a field that the server refuses."""
    if refused := body.refused:
        name, reason = refused
        raise ApiError(400, f"{name} is not supported: {reason}", name)


def field_error(error: Exception, names: Mapping[str, str]) -> ApiError:
    """Return the client's error for a setting; names: setting -> the field that sets it."""
    message, setting = str(error), leading_field(str(error))
    if setting is None:
        return ApiError(400, message)
    field = names.get(setting, setting)
    return ApiError(400, field + message.removeprefix(setting), field)


def leading_field(message: str) -> str | None:
    """Return the field's name with which a message begins; None if it begins otherwise."""
    first = message.split()[0].rstrip(":")
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields, *http_settings()}
    return first if first.partition(".")[0] in fields else None
