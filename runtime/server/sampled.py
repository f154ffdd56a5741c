"""From a body's fields to SamplingParams; what is missing comes from the model, then from vLLM."""

from collections.abc import Sequence
from typing import Any

from mtpbuild.runtime.engine import Engine
from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.sampling import SamplingParams
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.protocol import ChatBody, CompletionBody, Sampled
from mtpbuild.runtime.server.service import Service

DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}
PLAIN = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos", "acceptance"),
    *("rejection_sample_method", "draft_sample_method", "relaxed_topk", "relaxed_delta"),
    "stop_token_ids",
)
# What the engine can't do, and the value that asks for nothing.
MISSING = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "structured_outputs": {},
}


def read_sampled(
    service: Service,
    engine: Engine,
    body: Sampled,
    prompt: int,
    most: int | None,
    *,
    logprobs: int | None,
    markers: Sequence[str] = (),
) -> SamplingParams:
    """A request's settings for a prompt of so many tokens; raises ApiError.

    markers: what is looked for in the text, also where they are special tokens.
    """
    assert isinstance(body, ChatBody | CompletionBody)
    if body.model is not None and body.model != service.model:
        raise ApiError(404, f"The model `{body.model}` does not exist.", "model")
    for name, nothing in MISSING.items():
        if getattr(body, name) not in (None, nothing):
            raise ApiError(400, f"{name} is not supported by this server", name)
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    room = engine.manifest.build.max_seq_len - prompt
    if most is not None and most > room:
        message = (
            f"this model's maximum context length is {prompt + room} tokens; {prompt + most} were "
            f"asked for ({prompt} in the prompt, {most} for the answer)"
        )
        raise ApiError(400, message, "max_tokens")
    given = {name: getattr(body, name) for name in PLAIN}
    asked = DEFAULTS | service.settings.defaults
    asked |= {name: value for name, value in given.items() if value is not None}
    asked["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if asked["stop"] and engine.tokenizer is None:
        raise ApiError(400, "this engine was built without a tokenizer", "stop")
    special = engine.tokenizer.special_ids if engine.tokenizer else {}
    every = body.skip_special_tokens is False
    asked["shown_tokens"] = [id for name, id in special.items() if every or name in markers]
    if asked.get("rejection_sample_method") == "synthetic":
        raise ApiError(400, "synthetic acceptance is for benchmarks", "rejection_sample_method")
    if asked.get("rejection_sample_method") is not None:
        asked.setdefault("acceptance", "rejection")
    try:
        params = SamplingParams(
            max_tokens=room if most is None else most, logprobs=logprobs, **asked
        )
        engine.check(params)
    except RequestError as error:
        raise ApiError(400, str(error), str(error).partition(" ")[0].rstrip(":")) from None
    return params
