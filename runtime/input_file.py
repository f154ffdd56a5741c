"""`run --input FILE.jsonl`: one request per line, all checked before the first one runs."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from mtpbuild.runtime.engine import Engine
from mtpbuild.runtime.errors import RequestError, UsageError
from mtpbuild.runtime.request import Observer, Result
from mtpbuild.runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from mtpbuild.runtime.trace.recorder import Trace


class Line(BaseModel):
    """What a line may say; the other settings come from the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    task_id: str | int | None = None
    prompt: str | None = None
    input_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    output_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> "Line":
        given = [p for p in (self.prompt, self.input_ids, self.messages) if p is not None]
        if len(given) != 1:
            raise ValueError("give one of prompt, input_ids and messages")
        return self


@dataclass(frozen=True, slots=True)
class FileRequest:
    """A request that the engine can take."""

    task_id: str | int  # the line's own, or its number among the requests, from 0
    token_ids: list[int]
    params: SamplingParams


def read_requests(
    path: Path, engine: Engine, defaults: SamplingParams, *, flag: str = "--input"
) -> list[FileRequest]:
    """All requests of a file; raises UsageError that names file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{flag} {path}: can't be read ({error})") from None
    requests: list[FileRequest] = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            try:
                requests.append(_request(_parse(text), len(requests), engine, defaults))
            except RequestError as error:
                raise RequestError(f"{path}:{number}: {error}") from None
    if not requests:
        raise UsageError(f"{flag} {path}: no requests in it")
    return requests


def generate_all(
    engine: Engine, requests: list[FileRequest], trace: "Trace | None" = None
) -> Iterator[tuple[FileRequest, Result]]:
    """Results in the order of the requests; as many run at once as the engine has slots."""
    observers = [trace.request(request.task_id) if trace else None for request in requests]

    def generate(request: FileRequest, observer: Observer | None) -> Result:
        return engine.stream(request.token_ids, request.params, observer=observer).result()

    with ThreadPoolExecutor(engine.manifest.build.slots) as pool:
        try:
            yield from zip(requests, pool.map(generate, requests, observers), strict=True)
        except BaseException:
            engine.close()  # so that the pool's threads end now
            raise


def _parse(text: bytes) -> Line:
    try:
        return Line.model_validate(json.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][:1])
        message = first["msg"].removeprefix("Value error, ")
        raise RequestError(f"{where}: {message}" if where else message) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON ({error})") from None


def _request(line: Line, index: int, engine: Engine, defaults: SamplingParams) -> FileRequest:
    if line.messages is not None:
        ids = engine.chat_ids(line.messages)
    else:
        ids = engine.token_ids(line.prompt if line.prompt is not None else line.input_ids or [])
    changes: dict[str, Any] = {"max_tokens": line.output_tokens, "stop": line.stop}
    changes["seed"] = line.seed
    given = {name: value for name, value in changes.items() if value is not None}
    params = replace(defaults, **given)
    if params.stop and engine.tokenizer is None:
        raise RequestError("this engine was built without a tokenizer: it has no stop strings")
    return FileRequest(index if line.task_id is None else line.task_id, ids, params)
