"""Problems with one right answer: built in, or a file's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from mtpbuild.builder.bench.dataset import FOLDER, Prompt, seeded
from mtpbuild.builder.checks import in_range
from mtpbuild.builder.recipe import recipe_folder
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.errors import RequestError, UsageError

TASKS = ("reasoning",)
NUM_PROBLEMS = 60  # of a built-in task


class Line(BaseModel):
    """A line of a task's file (docs/eval.md)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    answer: str
    question: str | None = None  # a chat's first message
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None  # a text to continue
    task_id: str | int | None = None
    form: str | None = None  # problems of one form are reported together
    output_tokens: int | None = None

    @model_validator(mode="after")
    def _one_question(self) -> "Line":
        if sum(q is not None for q in (self.question, self.messages, self.prompt)) != 1:
            raise ValueError("give one of question, messages and prompt")
        return self


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked, and the answer; its prompt's kind is its form."""

    prompt: Prompt
    answer: str


def load_problems(
    task: str, engine: Engine, params: SamplingParams, count: int | None
) -> list[Problem]:
    """The first `count` problems of a task; raises UsageError that names file and line."""
    path = recipe_folder() / FOLDER / f"eval_{task}.jsonl" if task in TASKS else Path(task)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(
            f"--task {task}: can't be read ({error.strerror}); built in: {', '.join(TASKS)}"
        ) from None
    problems: list[Problem] = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            try:
                problems.append(_problem(_parse(text), len(problems), engine, params))
            except RequestError as error:
                raise RequestError(f"{path}:{number}: {error}") from None
    if not problems:
        raise UsageError(f"--task {task}: no problems in it")
    if count is None and task in TASKS:
        count = min(NUM_PROBLEMS, len(problems))
    if count is None:
        return problems
    return problems[: in_range(1, count, len(problems), "--num-problems")]


def answer_of(token_ids: Sequence[int], prompt: Sequence[int], engine: Engine) -> str | None:
    """The text behind the thinking phase, stripped; None if the phase was never closed."""
    manifest, tokenizer = engine.manifest, engine.tokenizer
    assert tokenizer is not None, "problems are texts"
    said = list(token_ids)
    if said and said[-1] in manifest.model.eos_token_ids:
        said.pop()
    if manifest.model.thinking_token_ids is not None:
        begin, end = manifest.model.thinking_token_ids
        if end in said:
            said = said[len(said) - said[::-1].index(end) :]
        elif next((t == begin for t in [*prompt, *said][::-1] if t in (begin, end)), False):
            return None
    return b"".join(map(tokenizer.token_bytes, said)).decode("utf-8", "replace").strip()


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


def _problem(line: Line, number: int, engine: Engine, params: SamplingParams) -> Problem:
    if line.prompt is not None:
        ids = engine.token_ids(line.prompt)
    else:
        ids = engine.chat_ids(line.messages or [{"role": "user", "content": line.question or ""}])
    if line.output_tokens is not None:
        params = replace(params, max_tokens=line.output_tokens)
    capacity = engine.manifest.build.max_seq_len
    if len(ids) + params.max_tokens > capacity:
        raise RequestError(
            f"{len(ids)} prompt and {params.max_tokens} output tokens are more than the engine "
            f"holds ({capacity})"
        )
    name = number if line.task_id is None else line.task_id
    own = Prompt(line.form or "all", name, ids, seeded(params, number))
    return Problem(own, line.answer.strip())
