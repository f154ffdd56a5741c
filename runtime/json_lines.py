"""Files of requests, one JSON object per line, all checked before the first one runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from mtpbuild.runtime.errors import RequestError, UsageError

if TYPE_CHECKING:
    from mtpbuild.runtime.engine import Engine


class AskingLine(BaseModel):
    """A line of any kind of file asks for something: it has one of the fields `PROMPTS`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    PROMPTS: ClassVar[tuple[str, ...]]

    task_id: str | int | None = None
    prompt: str | None = None  # a text to continue
    messages: list[dict[str, Any]] | None = None
    output_tokens: int | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        *some, last = self.PROMPTS
        if sum(getattr(self, name) is not None for name in self.PROMPTS) != 1:
            raise ValueError(f"give one of {', '.join(some)} and {last}")
        return self

    def token_ids(self, engine: "Engine") -> list[int]:
        """The token ids of `prompt` or `messages`."""
        if self.messages is not None:
            return engine.chat_ids(self.messages)
        return engine.token_ids(self.prompt or "")


Line = TypeVar("Line", bound=AskingLine)
Request = TypeVar("Request")


def read_lines(
    path: Path, flag: str, kind: type[Line], take: Callable[[Line, int], Request], hint: str = ""
) -> list[Request]:
    """Hands each line and its number to `take`; raises UsageError that names file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{flag}: can't be read ({error.strerror}){hint}") from None
    taken: list[Request] = []
    for number, text in enumerate(lines, 1):
        if text.strip():
            try:
                taken.append(take(_parse(kind, text), len(taken)))
            except RequestError as error:
                raise RequestError(f"{path}:{number}: {error}") from None
    if not taken:
        raise UsageError(f"{flag}: no requests in it")
    return taken


def _parse(kind: type[Line], text: bytes) -> Line:
    try:
        return kind.model_validate(json.loads(text))
    except ValidationError as error:
        raise RequestError(first_error(error)) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON ({error})") from None


def first_error(error: ValidationError, tags: int = 0) -> str:
    """The field, behind so many tags of a union, and what pydantic says of it."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    return ": ".join([*map(str, first["loc"][tags : tags + 1]), message])
