"""The lines of a trace file and their parser; docs/trace.md explains each field."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from mtpbuild.runtime.contract.manifest import describe_first_error
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.requests.stats import compute_acceptance_length
from mtpbuild.runtime.sampling.params import DEFAULTS

VERSION: Literal[1] = 1

TaskId = str | int
Number = float | None  # None stands for an infinity, which JSON cannot express


class _Line(BaseModel):
    # Later versions only add fields, so unknown fields are ignored.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class RequestLine(_Line):
    """The first line of a request: prompt, parameters and engine."""

    kind: Literal["request"] = "request"
    version: Literal[1] = VERSION
    task_id: TaskId
    model: str
    nextn: int
    drafter: str | None
    target: str
    hardware: str
    fingerprint: str
    weights: str | None
    prompt: list[int] = Field(min_length=1)
    params: dict[str, Any]

    @property
    def greedy(self) -> bool:
        return not self.params.get("temperature")

    @property
    def drafting(self) -> tuple[int, str | None]:
        return self.nextn, self.drafter

    def setting(self, name: str) -> Any:
        """Return a setting; if an older trace lacks it, return its default."""
        return self.params.get(name, DEFAULTS[name])


class Uniforms(_Line):
    """The random numbers for the window's rows, [num_drafts + 1] for each purpose."""

    draft: list[float]
    accept: list[float]
    recover: list[float]


class StepLine(_Line):
    """A decode step of a request: m drafts were verified, n tokens emitted."""

    kind: Literal["step"] = "step"
    task_id: TaskId
    step: int  # from 0
    position: int  # of window[0] among the request's tokens, the prompt's first being 0
    num_drafts: int
    window: list[int]  # [m + 1] the newest token, then the drafts
    n: int
    tokens: list[int]  # [n] n - 1 accepted drafts, then the model's own token
    logprobs: list[Number]  # [n]
    margins: list[Number]  # [n]
    entropies: list[Number] | None = None  # [n] of the rows, with logprobs
    # [m] of all drafts, with logprobs; older traces have none
    draft_logprobs: list[Number] | None = None
    draft_ranks: list[int] | None = None
    draft_q: list[Number] | None = None  # of a request that samples
    uniforms: Uniforms | None

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        lists = (self.tokens, self.logprobs, self.margins, self.entropies or self.tokens)
        lengths = {len(values) for values in lists}
        of_drafts = (self.window[1:], self.draft_logprobs, self.draft_ranks, self.draft_q)
        counts = {len(values) for values in of_drafts if values is not None}
        if not self.window or counts != {self.num_drafts} or lengths != {self.n}:
            raise ValueError("window, tokens and numbers don't have the lengths they say")
        if not 1 <= self.n <= self.num_drafts + 1:
            raise ValueError(f"n {self.n} is outside 1..{self.num_drafts + 1}, num_drafts plus one")
        return self


class EndLine(_Line):
    """The end of a request."""

    kind: Literal["end"] = "end"
    task_id: TaskId
    finish_reason: str
    output_tokens: int  # the number of tokens that the request kept
    speculative_decoding: dict[str, Any]


class SummaryLine(_Line):
    """The last line of a complete trace."""

    kind: Literal["summary"] = "summary"
    requests: int
    steps: int
    output_tokens: int


Line = RequestLine | StepLine | EndLine | SummaryLine
_ANY: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])


@dataclass(slots=True)
class TracedRequest:
    """The lines of one request; `end` is None if it was interrupted."""

    request: RequestLine
    steps: list[StepLine] = field(default_factory=list)
    end: EndLine | None = None

    def rows(self) -> Iterator[tuple[StepLine, int]]:
        """Yield (step, row) of each token that the request kept."""
        rows = [(step, row) for step in self.steps for row in range(step.n)]
        yield from rows if self.end is None else rows[: self.end.output_tokens]

    @property
    def acceptance_length(self) -> float | None:
        return compute_acceptance_length(len(list(self.rows())), len(self.steps))

    def add(self, line: StepLine | EndLine) -> None:
        """Append a line; raise ValueError if it does not follow the last one."""
        if self.end is not None:
            raise ValueError("this line comes after the last one of its request")
        if isinstance(line, EndLine):
            self.end = line
            return
        last = self.steps[-1] if self.steps else None
        number = last.step + 1 if last else 0
        position = last.position + last.n if last else len(self.request.prompt) - 1
        newest = last.tokens[-1] if last else self.request.prompt[-1]
        if (line.step, line.position, line.window[0]) != (number, position, newest):
            raise ValueError(f"must be step {number}, after token {newest} at position {position}")
        self.steps.append(line)


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The contents of a trace file; `complete` is false if its run was interrupted."""

    path: Path
    requests: dict[TaskId, TracedRequest]
    complete: bool


def read_trace(path: Path) -> TraceFile:
    """Parse a JSONL trace; raise UsageError that names file and line.

    A last line without a newline is ignored: the process died while writing it.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise UsageError(f"{path}: can't be read ({error.strerror})") from None
    requests: dict[TaskId, TracedRequest] = {}
    complete = False
    for number, text in enumerate(lines, 1):
        try:
            if complete:
                raise ValueError("after the summary, which is the last line of a trace")
            complete = isinstance(add_line(_ANY.validate_json(text), requests), SummaryLine)
        except ValidationError as error:
            what = f"not a line of a trace ({describe_first_error(error, slice(1, 2))})"
            raise UsageError(f"{path}:{number}: {what}") from None
        except ValueError as error:
            raise UsageError(f"{path}:{number}: {error}") from None
    if not requests:
        raise UsageError(f"{path}: no requests in it; `mtpbuild run --trace FILE.jsonl` writes one")
    return TraceFile(path, requests, complete)


def add_line(line: Line, requests: dict[TaskId, TracedRequest]) -> Line:
    """Add a line to its request; raise ValueError if it does not belong there."""
    if isinstance(line, RequestLine):
        if line.task_id in requests:
            raise ValueError(f"request {line.task_id} began in an earlier line")
        requests[line.task_id] = TracedRequest(line)
    elif not isinstance(line, SummaryLine):
        if line.task_id not in requests:
            raise ValueError(f"request {line.task_id} has not begun")
        requests[line.task_id].add(line)
    return line
