"""The bodies of requests, in the words of OpenAI and vLLM; what else a body says is ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr

Id = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """A part of a request: JSON's types as they are, no text that is a number."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(Body):
    """What chats and completions have in common. Nothing, and null, is the default."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StrictStr | list[StrictStr] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # vLLM's:
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None  # each event repeats it
    # How drafts are accepted, as in SamplingParams:
    acceptance: str | None = None
    rejection_sample_method: str | None = None
    draft_sample_method: str | None = None
    relaxed_topk: int | None = None
    relaxed_delta: float | None = None


class Function(Body):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class ChatBody(Sampled):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None


class CompletionBody(Sampled):
    """The body of POST /v1/completions."""

    prompt: str | list[str] | list[Id] | list[list[Id]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
