"""`run --input FILE.jsonl` reads one request per line, and runs as many at once as it can."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpbuild.runtime.engine import Engine
from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.json_lines import AskingLine, read_lines
from mtpbuild.runtime.request import Observer, Result
from mtpbuild.runtime.sampling import SamplingParams

if TYPE_CHECKING:
    from mtpbuild.runtime.trace.recorder import Trace


class Line(AskingLine):
    """A line of the file; settings that it leaves out come from the command line."""

    PROMPTS = ("prompt", "input_ids", "messages")

    input_ids: list[int] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class FileRequest:
    """A request that the engine can take."""

    task_id: str | int  # the line's own, or its number among the requests, from 0
    token_ids: list[int]
    params: SamplingParams


def read_requests(
    path: Path, engine: Engine, defaults: SamplingParams, flag: str = "--input", hint: str = ""
) -> list[FileRequest]:
    """Reads all requests of a file; raises UsageError that names file and line."""

    def take(line: Line, index: int) -> FileRequest:
        ids = line.token_ids(engine) if line.input_ids is None else engine.token_ids(line.input_ids)
        changes = {"max_tokens": line.output_tokens, "stop": line.stop, "seed": line.seed}
        given: dict[str, Any] = {n: value for n, value in changes.items() if value is not None}
        params = replace(defaults, **given)
        if params.stop and engine.tokenizer is None:
            raise RequestError("this engine was built without a tokenizer: it has no stop strings")
        return FileRequest(index if line.task_id is None else line.task_id, ids, params)

    return read_lines(path, f"{flag} {path}", Line, take, hint)


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
