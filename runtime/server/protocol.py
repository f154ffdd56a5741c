"""Defines the bodies of requests as OpenAI and vLLM name their fields; others are ignored."""

from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mtpbuild.runtime.sampling import SamplingParams, http_settings

Id = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """A part of a request; a value must have its JSON type: "1" is no number."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _describe(schema: dict[str, Any]) -> None:
    """Adds the settings to the fields in a body's JSON schema."""
    hints = get_type_hints(SamplingParams)
    for name, setting in http_settings().items():
        known = TypeAdapter(hints[name]).json_schema() if name in hints else {}
        schema["properties"][name] = known | ({"description": setting.help} if setting.help else {})


class Sampled(Body):
    """The fields that chats and completions share. Null stands for the default.

    A body also has the fields of `http_settings`.
    """

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra=_describe)

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    user: str | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None  # each event repeats it

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the body gives, not yet checked."""
        return {n: value for n, value in (self.model_extra or {}).items() if n in http_settings()}


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
