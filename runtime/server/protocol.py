"""Defines the bodies of requests as OpenAI and vLLM name their fields.

A field that nobody knows is ignored; one that would change the answer elsewhere is refused.
"""

from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mtpbuild.runtime.sampling import SamplingParams, http_settings

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # one error is enough
Id = Annotated[int, Field(ge=0)]
FORM = "structured_outputs has it as `{}`"
REFUSED = {  # what a client means who sends it, or what does it here
    "chat_template": "an engine has its model's own template",
    "function_call": "tool_choice takes its place",
    "functions": "tools take their place",
    "grammar": FORM.format("grammar"),
    "guided_choice": FORM.format("choice"),
    "guided_grammar": FORM.format("grammar"),
    "guided_json": FORM.format("json"),
    "guided_regex": FORM.format("regex"),
    "json_schema": FORM.format("json"),
    "length_penalty": "it belongs to beam search, which is not there",
    "logits_processors": "a server runs no code of its clients",
    "n_predict": "max_tokens takes its place",
    "repeat_penalty": "repetition_penalty takes its place",
    "truncate_prompt_tokens": "a prompt is taken whole or not at all",
    "use_beam_search": "beam search is not there",
}


class Body(BaseModel):
    """Is a part of a request; a value must have its JSON type: "1" is no number."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamedBody(Body):
    """Is the body of a request whose answer may come in pieces."""

    model: str | None = None
    stream: bool | None = None

    @property
    def count(self) -> int:
        """Count the choices that the body asks for."""
        return 1


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _describe(schema: dict[str, Any]) -> None:
    """Adds the settings to the fields in a body's JSON schema."""
    hints = get_type_hints(SamplingParams)
    for name, setting in http_settings().items():
        known = TypeAdapter(hints[name]).json_schema() if name in hints else {}
        schema["properties"][name] = known | ({"description": setting.help} if setting.help else {})


class Sampled(StreamedBody):
    """Holds the fields that chats and completions share. Null stands for the default.

    A body also has the fields of `http_settings`.
    """

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra=_describe)

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    user: str | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None  # each event repeats it

    @property
    def count(self) -> int:
        return self.n or 1

    @property
    def usage_in(self) -> Literal["never", "last", "always"]:
        """Says which of a stream's events have the usage."""
        options = self.stream_options or StreamOptions()
        if not options.include_usage:
            return "never"
        return "always" if options.continuous_usage_stats else "last"

    @property
    def refused(self) -> tuple[str, str] | None:
        """Returns a field that the server refuses and that asks for something, with the reason."""
        given = (self.model_extra or {}).items()
        return next(((n, REFUSED[n]) for n, value in given if n in REFUSED and value), None)

    @property
    def settings(self) -> dict[str, Any]:
        """Returns the settings that the body gives, not yet checked."""
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
    """Is the body of POST /v1/chat/completions."""

    messages: Many[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Many[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: Many[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None


class ChatTokensBody(ChatBody):
    """Is the body of POST /tokenize for a conversation."""

    return_token_strs: bool | None = None


class TextTokensBody(Body):
    """Is the body of POST /tokenize for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokensBody(Body):
    """Is the body of POST /detokenize."""

    model: str | None = None
    tokens: Many[Id]


class CompletionBody(Sampled):
    """Is the body of POST /v1/completions."""

    prompt: str | Many[str] | Many[Id] | Many[Many[Id]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def count(self) -> int:
        several = isinstance(self.prompt, list) and not isinstance(next(iter(self.prompt), 0), int)
        return super().count * (len(self.prompt) if several else 1)
