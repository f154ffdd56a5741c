"""Request bodies, with the field names of OpenAI and vLLM.

Unknown fields are ignored. Fields that change the answer on other servers, but that this server
does not implement, are refused.
"""

import reprlib
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from mtpbuild.runtime.sampling.params import SamplingParams, list_http_settings

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # one error is enough
Id = Annotated[int, Field(ge=0)]


REASONS = {  # reason why fields are refused, or advice -> the fields
    "an answer is text": "audio modalities",
    "an answer is tokens alone": "return_hidden_states return_routed_experts",
    "an engine has its model's own template": "chat_template task",
    "an engine has its own weights": "lora_path",
    "the server runs no code of its clients": (
        "custom_logit_processor custom_params logits_processors vllm_xargs"
    ),
    "the server has no tools of its own": "web_search_options",
    "the server keeps neither caches nor sessions of its clients": (
        "kv_transfer_params session_params"
    ),
    "there is no such sampler": (
        "dry_multiplier dynatemp_range length_penalty mirostat top_n_sigma typical_p "
        "use_beam_search xtc_probability"
    ),
    "there is no watermark": "watermarking",
    "a prompt is a text or token ids, and is taken whole": "prompt_embeds truncate_prompt_tokens",
    "a model continues a prompt, and fills no gaps": "suffix",
    "/v1/completions has it; continue_final_message goes on from a message": "echo",
    "/v1/completions takes token ids as its prompt": "input_ids",
    "/tokenize and /detokenize give it": "return_prompt_text",
    "use cache_salt": "extra_key",
    "use chat_template_kwargs": "enable_thinking thinking",
    "use chat_template_kwargs and reasoning_effort": "reasoning",
    "use include_stop_str_in_output": "no_stop_trim",
    "use max_tokens, which bounds thought and answer together": (
        "n_predict thinking_budget thinking_token_budget"
    ),
    "use max_tokens and stop": "repetition_detection",
    "use n": "best_of",
    "use repetition_penalty": "repeat_penalty",
    "use return_token_ids": "return_prompt_token_ids",
    "use stop, which has texts": "stop_regex",
    "use structured_outputs with `choice`": "guided_choice",
    "use structured_outputs with `grammar`": "ebnf grammar guided_grammar structural_tag",
    "use structured_outputs with `json`": "guided_json json_schema",
    "use structured_outputs with `regex`": "guided_regex regex",
    "use structured_outputs, whose JSON is without white space": "guided_whitespace_pattern",
    "use tools and tool_choice": "function_call functions",
    "use top_logprobs for the most probable tokens": "logprob_token_ids",
    "an option of the server, no_thinking_split, leaves thoughts in the text": "separate_reasoning",
}
REFUSED = {name: reason for reason, names in REASONS.items() for name in names.split()}
SAME: tuple[tuple[Any, str], ...] = (  # values of refused fields that change nothing
    (1, "best_of length_penalty repeat_penalty typical_p"),
    (0, "dry_multiplier dynatemp_range mirostat xtc_probability"),
    (False, "echo no_stop_trim return_hidden_states return_prompt_text return_prompt_token_ids"),
    (False, "return_routed_experts use_beam_search watermarking"),
    ([], "functions logits_processors"),
    (["text"], "modalities"),
    (True, "separate_reasoning"),
    ("", "suffix"),
    (-1, "top_n_sigma"),
)
NEUTRAL_VALUES = {name: value for value, names in SAME for name in names.split()}


class Body(BaseModel):
    """A part of a request; types are strict: "1" is not accepted as a number."""

    model_config = ConfigDict(strict=True, extra="ignore")


class OpenBody(Body):
    """A part of a request whose unknown fields are kept."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamedBody(Body):
    """The body of a request whose answer may be streamed."""

    model: str | None = None
    stream: bool | None = None

    @property
    def count(self) -> int:
        """The number of choices that the body asks for."""
        return 1


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _describe(schema: dict[str, Any]) -> None:
    """Add the sampling settings to the fields in a body's JSON schema."""
    hints = get_type_hints(SamplingParams)
    for name, setting in list_http_settings().items():
        known = TypeAdapter(hints[name]).json_schema() if name in hints else {}
        schema["properties"][name] = known | ({"description": setting.help} if setting.help else {})


def is_refused(name: str, value: Any) -> bool:
    """Tell whether a field is refused, as its value has an effect; false does not count as 0."""
    neutral = NEUTRAL_VALUES.get(name)
    same = value == neutral and isinstance(value, bool) is isinstance(neutral, bool)
    return name in REFUSED and value is not None and not same


class GenerationBody(StreamedBody, OpenBody):
    """The fields that chats and completions share; null means the default.

    The fields of `list_http_settings` are accepted as well, as extra fields.
    """

    model_config = ConfigDict(json_schema_extra=_describe)

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    user: str | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    request_id: Annotated[str, Field(max_length=256)] | None = None  # each event repeats it

    usual_tokens: ClassVar[int | None] = None  # default limit of the answer; None: all that fit

    @property
    def count(self) -> int:
        return self.n or 1

    @property
    def answer_limit(self) -> tuple[int | None, str]:
        """The limit of the answer's tokens, and the field that gives it."""
        return self.max_tokens, "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives per token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def echo_logprobs(self) -> int | None:
        """The number of alternatives per prompt token, if the answer repeats the prompt."""
        return None

    @property
    def usage_in(self) -> Literal["never", "last", "always"]:
        """Which events of a stream include the usage."""
        options = self.stream_options or StreamOptions()
        if not options.include_usage:
            return "never"
        return "always" if options.continuous_usage_stats else "last"

    @property
    def field_names(self) -> dict[str, str]:
        """Setting -> the field that gives it, where their names differ."""
        fields = {"max_tokens": self.answer_limit[1], "structured_outputs": "tool_choice"}
        if self.echo_logprobs is not None and "prompt_logprobs" not in self.settings:
            fields["prompt_logprobs"] = "echo"
        for name in ("structured_outputs", "response_format"):
            if (form := getattr(self, name)) and form.get("type") != "text":
                fields["structured_outputs"] = name
        return fields

    @property
    def settings(self) -> dict[str, Any]:
        """The sampling settings in the body, unchecked."""
        known = list_http_settings()
        return {name: v for name, v in (self.model_extra or {}).items() if name in known}


class Function(OpenBody):
    name: str
    description: str | None = None
    parameters: Annotated[
        dict[str, Any] | None, BeforeValidator(lambda schema: {} if schema is True else schema)
    ] = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

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
    stop_in_thought: bool | None = None  # whether stop strings also end a thought

    @property
    def answer_limit(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is None:
            return super().answer_limit
        return self.max_completion_tokens, "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _check_prompt_items(prompt: Any) -> Any:
    """Check a prompt and name its first wrong item.

    Without this, pydantic would report one error for each type of the union.
    """
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise ValueError("a prompt must be a text, token ids, or a list of these")
    if not prompt:
        raise ValueError("the prompt is empty")
    first = type(prompt[0]) if isinstance(prompt[0], str | list) else int
    for number, item in enumerate(prompt):
        if first is str and not isinstance(item, str):
            _refuse_item(number, "a text", item)
        if first is list and not isinstance(item, list):
            _refuse_item(number, "a list of token ids", item)
        for id in item if first is list else [item] if first is int else ():
            if type(id) is not int or id < 0:
                _refuse_item(number, "a token id, which is a whole number from 0", id)
    return prompt


def _refuse_item(number: int, wanted: str, value: Any) -> NoReturn:
    raise ValueError(f"item {number} must be {wanted}, not {reprlib.repr(value)}")


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        str | Many[str] | Many[Id] | Many[Many[Id]], BeforeValidator(_check_prompt_items)
    ]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    usual_tokens = 16

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echo_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or token ids."""
        single = isinstance(self.prompt, str) or isinstance(next(iter(self.prompt), None), int)
        return [self.prompt] if single else list(self.prompt)

    @property
    def count(self) -> int:
        return super().count * len(self.prompts)
