"""Reading of files of requests, one JSON object per line; all are checked before the first runs.

`run --input FILE.jsonl` runs as many at once as there are slots; bench, verify and eval read such
files too.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from mtpbuild.runtime.checks import format_value
from mtpbuild.runtime.contract.manifest import describe_first_error
from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.errors import RequestError, UsageError
from mtpbuild.runtime.requests.request import Observer, Result
from mtpbuild.runtime.sampling.params import SamplingParams, list_http_settings, to_params_fields
from mtpbuild.runtime.text.chat_template import ChatOptions, Message

if TYPE_CHECKING:
    from mtpbuild.runtime.trace.recorder import Trace


class PromptLine(BaseModel):
    """The fields that lines of every kind of file can have.

    A line has exactly one of the fields `PROMPTS`; those in `CHATS` are conversations.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    PROMPTS: ClassVar[tuple[str, ...]]
    CHATS: ClassVar[tuple[str, ...]] = ("messages",)

    task_id: str | int | None = None
    prompt: str | None = None  # a text to continue
    messages: list[dict[str, Any]] | None = None
    output_tokens: int | None = None
    # The options of a conversation, as in `ChatOptions`.
    tools: list[Any] | None = None
    documents: list[Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_one_prompt(self) -> Self:
        *some, last = self.PROMPTS
        if sum(getattr(self, name) is not None for name in self.PROMPTS) != 1:
            raise ValueError(f"give one of {', '.join(some)} and {last}")
        if all(getattr(self, name) is None for name in self.CHATS):
            for name in self.chat_options():
                raise ValueError(f"{name} goes with {' or '.join(self.CHATS)}")
        return self

    def chat_options(self) -> ChatOptions:
        """Return the options of the line's conversation."""
        given = {name: getattr(self, name) for name in ChatOptions.__annotations__}
        return cast(ChatOptions, {n: value for n, value in given.items() if value is not None})

    def token_ids(self, engine: Engine) -> list[int]:
        """Return the token ids of `prompt` or `messages`."""
        if self.messages is not None:
            return self.chat_ids(engine, self.messages)
        return engine.token_ids(self.prompt or "")

    def chat_ids(self, engine: Engine, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, rendered with the line's options."""
        return engine.chat_ids(messages, **self.chat_options())


Kind = TypeVar("Kind", bound=PromptLine)
Taken = TypeVar("Taken")


def read_lines(
    path: Path, flag: str, kind: type[Kind], take: Callable[[Kind, int], Taken], hint: str = ""
) -> list[Taken]:
    """Call `take` with each line and its number; a UsageError names file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{flag}: can't be read ({error.strerror}){hint}") from None
    taken: list[Taken] = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            try:
                taken.append(take(_parse(kind, text), len(taken)))
            except RequestError as error:
                raise RequestError(f"{path}:{number}: {error}") from None
    if not taken:
        raise UsageError(f"{flag}: no requests in it")
    return taken


def _parse(kind: type[Kind], text: bytes) -> Kind:
    try:
        return kind.model_validate(json.loads(text))
    except ValidationError as error:
        raise RequestError(describe_first_error(error, slice(1))) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON ({error})") from None


BATCH = ("custom_id", "method", "url", "body")  # the keys of a line in OpenAI's batch files
BATCH_PROMPTS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
LENGTHS = ("output_tokens", "max_tokens", "max_completion_tokens")  # names of the same field
# Fields of batch files that are dropped if they have this value, as JSON, which is the default of
# every line.
DONE = {
    "n": "1",
    "stream": "false",
    "logprobs": "false",
    "echo": "false",
    "best_of": "1",
    "tool_choice": '"auto"',
    "response_format": '{"type": "text"}',
}


class InputLine(PromptLine):
    """A line of the file; settings that it omits come from the command line."""

    PROMPTS = ("prompt", "input_ids", "messages")

    input_ids: list[int] | None = None
    model: str | None = None  # ignored: the engine is chosen for the whole file
    settings: dict[str, Any] = {}  # the line's own settings, each of which is a key of the line

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, raw: Any) -> Any:
        """Collect the line's settings, which SamplingParams checks later, under one key."""
        if not isinstance(raw, dict):
            return raw
        if "settings" in raw:
            raise ValueError("settings: unknown; each setting is a key of the line")
        if not raw.keys().isdisjoint(BATCH):
            raw = _convert_batch_line(raw)
        lengths = {name: raw[name] for name in LENGTHS if raw.get(name) is not None}
        if len(lengths) > 1:
            raise ValueError(f"{' and '.join(lengths)} are the same: give one")
        settings = {name: value for name, value in raw.items() if name in list_http_settings()}
        rest = {n: v for n, v in raw.items() if n not in (*settings, *LENGTHS)}
        max_tokens = next(iter(lengths.values()), None)
        return rest | {"output_tokens": max_tokens, "settings": settings}


def _convert_batch_line(line: dict[str, Any]) -> dict[str, Any]:
    """Convert the fields of a line of OpenAI's batch files to those of `InputLine`."""
    for name in sorted(line.keys() ^ set(BATCH)):
        wrong = "unknown" if name in line else "missing"
        raise ValueError(f"{name:.60}: {wrong}; a line of a batch has {', '.join(BATCH)}")
    name, method, url, body = (line[key] for key in BATCH)
    if method != "POST" or not isinstance(url, str) or url not in BATCH_PROMPTS:
        known, request = " or ".join(BATCH_PROMPTS), f"{format_value(method)} {format_value(url)}"
        raise ValueError(f"a line of a batch is a POST to {known}, not {request}")
    if not isinstance(body, dict):
        raise ValueError(f"body: must be an object, not {format_value(body)}")
    if BATCH_PROMPTS[url] not in body or "task_id" in body:
        raise ValueError(f"body: {url} has {BATCH_PROMPTS[url]}, and no task_id")
    given = {n: value for n, value in body.items() if value is not None}
    fields = {n: value for n, value in given.items() if json.dumps(value) != DONE.get(n)}
    if isinstance(fields.get("prompt"), list):
        fields["input_ids"] = fields.pop("prompt")
    return fields | {"task_id": name}


@dataclass(frozen=True, slots=True)
class FileRequest:
    """A request that was checked against the engine."""

    task_id: str | int  # the line's own, or its number among the requests, from 0
    token_ids: list[int]
    params: SamplingParams


def read_requests(
    path: Path,
    engine: Engine,
    defaults: SamplingParams,
    flag: str = "--input",
    hint: str = "",
    *,
    check: bool = False,
) -> list[FileRequest]:
    """Read all requests of a file; raise UsageError that names file and line.

    check: whether this engine must support the settings of each request.
    """

    def take(line: InputLine, index: int) -> FileRequest:
        ids = line.token_ids(engine) if line.input_ids is None else engine.token_ids(line.input_ids)
        settings = line.settings | {"max_tokens": line.output_tokens}
        given = to_params_fields(settings, engine.manifest)
        params = replace(defaults, **given)
        if params.stop and engine.tokenizer is None:
            raise RequestError("stop: this engine was built without a tokenizer", "stop")
        if check:
            engine.check(params)
        return FileRequest(index if line.task_id is None else line.task_id, ids, params)

    return read_lines(path, f"{flag} {path}", InputLine, take, hint)


def generate_all(
    engine: Engine, requests: list[FileRequest], trace: "Trace | None" = None
) -> Iterator[tuple[FileRequest, Result]]:
    """Yield results in the order of the requests; as many run at a time as there are slots."""
    observers = [trace.request(request.task_id) if trace else None for request in requests]

    def generate(request: FileRequest, observer: Observer | None) -> Result:
        return engine.stream(request.token_ids, request.params, observer=observer).result()

    with ThreadPoolExecutor(engine.manifest.build.slots) as pool:
        try:
            yield from zip(requests, pool.map(generate, requests, observers), strict=True)
        except BaseException:
            engine.close()  # so that the pool's threads end now
            raise
