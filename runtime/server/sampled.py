"""Makes SamplingParams from a body; a missing field has the model's default, else vLLM's."""

from collections.abc import Sequence
from typing import Any

from mtpbuild.runtime.engine import Engine
from mtpbuild.runtime.errors import MissingDependencyError, RequestError
from mtpbuild.runtime.sampling import SamplingParams, as_fields
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.protocol import Sampled
from mtpbuild.runtime.server.service import Service
from mtpbuild.runtime.server.structured import read_structured
from mtpbuild.runtime.structured import StructuredOutputs

DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}


def read_sampled(
    service: Service,
    engine: Engine,
    body: Sampled,
    prompt: int,
    most: int | None,
    *,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    calls: StructuredOutputs | None = None,
    markers: Sequence[str] = (),
) -> SamplingParams:
    """Makes the settings of a request; raises ApiError for one that the engine can't do.

    prompt: the number of its tokens. most: how many tokens the answer may have; None: as many as
    the engine has room for. prompt_logprobs: where the body has none of its own. calls: the form of
    an answer that must be tool calls. markers: texts that the answer must show, even where they are
    special tokens.
    """
    service.check_model(body.model)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if refused := body.refused:
        name, reason = refused
        raise ApiError(400, f"{name} is not supported: {reason}", name)
    room = engine.manifest.build.max_seq_len - prompt
    if most is not None and most > room:
        message = (
            f"this model's maximum context length is {prompt + room} tokens; {prompt + most} were "
            f"asked for ({prompt} in the prompt, {most} for the answer)"
        )
        raise ApiError(400, message, "max_tokens")
    asked = DEFAULTS | service.settings.defaults | as_fields(body.settings)
    asked.setdefault("prompt_logprobs", prompt_logprobs)
    if body.stream and asked["prompt_logprobs"] is not None:
        raise ApiError(400, "prompt_logprobs can't go with stream", "prompt_logprobs")
    if asked.get("stop") and engine.tokenizer is None:
        raise ApiError(400, "this engine was built without a tokenizer", "stop")
    form = read_structured(body)
    if form is not None and calls is not None:
        raise ApiError(400, f"{form[0]} can't go with a forced tool call", form[0])
    field, asked["structured_outputs"] = form or ("tool_choice", calls)
    special = engine.tokenizer.special_ids if engine.tokenizer else {}
    every = body.skip_special_tokens is False
    asked["shown_tokens"] = [id for name, id in special.items() if every or name in markers]
    if asked.get("rejection_sample_method") == "synthetic":
        raise ApiError(400, "synthetic acceptance is for benchmarks", "rejection_sample_method")
    try:
        params = SamplingParams(
            max_tokens=room if most is None else most, logprobs=logprobs, **asked
        )
        engine.check(params, form=False)  # the form is compiled once the request is prepared
    except (RequestError, MissingDependencyError) as error:
        raise field_error(error, field) from None
    return params


def field_error(error: Exception, form_field: str) -> ApiError:
    """Return the client's error for a setting; form_field: the one that asked for a form."""
    message = str(error)
    if message.startswith("structured_outputs"):
        message = form_field + message.removeprefix("structured_outputs")
    return ApiError(400, message, message.partition(" ")[0].rstrip(":"))
