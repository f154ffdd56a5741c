"""The comparison of two traces of the same requests, and the text output of `mtpbuild diff`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.sampling.params import SETTINGS
from mtpbuild.runtime.text.tokenizer import load_tokenizer
from mtpbuild.runtime.trace.lines import RequestLine, StepLine, TaskId, TracedRequest, TraceFile

# A margin counts as a near-tie if it is at most this many times the largest difference of
# log-probabilities, since rounding may decide it.
TIE_FACTOR = 4
LEAST_TIE = 1e-5  # if no difference was measured, or the same engine ran twice

# Traces that differ in one of these, or in the seed, cannot be compared.
SAMPLING = [name for name, setting in SETTINGS.items() if setting.differs == "refused"]
# These may change tokens too, but the user may want to see just that change.
NOTED = [name for name, setting in SETTINGS.items() if setting.differs == "noted"]

Spell = Callable[[int], str]
Verdict = Literal["equal", "different", "shorter", "missing"]


@dataclass(frozen=True, slots=True)
class TracedToken:
    """A token in one of the traces."""

    step: int
    token: int
    logprob: float | None
    margin: float | None
    from_draft: bool


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first token that differs."""

    position: int  # the prompt's first token is 0
    a: TracedToken
    b: TracedToken
    near_tie: bool


@dataclass(frozen=True, slots=True)
class DraftDifference:
    """The first step with other drafts, or with another number accepted of the same drafts."""

    step: int
    position: int  # of the step's newest token
    a: list[int]
    b: list[int]
    accepted_a: int
    accepted_b: int


@dataclass(frozen=True, slots=True)
class RequestDiff:
    """The comparison of a request; drafts are compared if nextn and drafter are the same."""

    task_id: TaskId
    verdict: Verdict
    tokens_a: int
    tokens_b: int
    equal_tokens: int  # before the first difference
    largest_logprob_difference: float | None  # over the equal tokens; None if there are none
    token: TokenDifference | None = None
    drafts: DraftDifference | None = None


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """The comparison of all requests, in the first trace's order; `notes` list its limitations."""

    requests: list[RequestDiff]
    notes: list[str]

    @property
    def equal(self) -> bool:
        return all(request.verdict == "equal" for request in self.requests)

    def to_json(self) -> str:
        return json.dumps({"equal": self.equal} | asdict(self))


def diff_traces(a: TraceFile, b: TraceFile) -> TraceDiff:
    """Compare two traces; raise UsageError if models, prompts or sampling settings differ."""
    notes = [f"{trace.path}: its run was interrupted" for trace in (a, b) if not trace.complete]
    requests = []
    for task_id in dict.fromkeys([*a.requests, *b.requests]):
        left, right = a.requests.get(task_id), b.requests.get(task_id)
        if left and right:
            _check_same(a, b, left.request, right.request)
            notes += [n for n in _list_notes(left.request, right.request) if n not in notes]
            requests.append(_compare(left, right))
        else:
            requests.append(_report_missing(task_id, a, b))
    return TraceDiff(requests, notes)


def _check_same(a: TraceFile, b: TraceFile, left: RequestLine, right: RequestLine) -> None:
    """Raise UsageError for requests with different models, prompts or sampling settings."""

    def refuse(what: str, mine: object, other: object) -> None:
        raise UsageError(
            f"request {left.task_id}: {what} {mine} in {a.path}, {other} in {b.path}: "
            "these traces can't be compared"
        )

    if left.model != right.model:
        refuse("model", left.model, right.model)
    if left.prompt != right.prompt:
        prompts = (left.prompt, right.prompt)
        pairs = enumerate(zip(*prompts, strict=False))
        same = next((i for i, (t, u) in pairs if t != u), min(map(len, prompts)))
        refuse("the prompt", *(f"{len(p)} tokens, {p[same : same + 1]} at {same}" for p in prompts))
    for name in SAMPLING if left.greedy else (*SAMPLING, "seed"):
        if (mine := left.setting(name)) != (other := right.setting(name)):
            refuse(name, mine, other)


def _list_notes(left: RequestLine, right: RequestLine) -> list[str]:
    both = ((name, left.setting(name), right.setting(name)) for name in NOTED)
    notes = [f"{name}: {mine} | {other}" for name, mine, other in both if mine != other]
    if left.weights != right.weights:
        notes.append("the engines have different weights files")
    by_drafts = left.params.get("acceptance") == "rejection" and not left.greedy
    if by_drafts and left.drafting != right.drafting:
        notes.append("rejection sampling gives another text for another nextn or drafter")
    return notes


def _compare(a: TracedRequest, b: TracedRequest) -> RequestDiff:
    rows_a, rows_b = list(a.rows()), list(b.rows())
    equal, largest, token = 0, None, None
    for row_a, row_b in zip(rows_a, rows_b, strict=False):
        left, right = _make_traced_token(*row_a), _make_traced_token(*row_b)
        if left.token != right.token:
            tie = _is_near_tie(left, right, largest or 0.0)
            position = len(a.request.prompt) + equal
            token = TokenDifference(position, left, right, tie)
            break
        equal += 1
        if left.logprob is not None and right.logprob is not None:
            largest = max(largest or 0.0, abs(left.logprob - right.logprob))
    drafts = _draft_difference(a, b)
    verdict: Verdict = "different" if token or drafts else "equal"
    if verdict == "equal" and len(rows_a) != len(rows_b):
        verdict = "shorter"
    return RequestDiff(
        a.request.task_id, verdict, len(rows_a), len(rows_b), equal, largest, token, drafts
    )


def _make_traced_token(step: StepLine, row: int) -> TracedToken:
    return TracedToken(
        step.step, step.tokens[row], step.logprobs[row], step.margins[row], row < step.n - 1
    )


def _is_near_tie(a: TracedToken, b: TracedToken, measured: float) -> bool:
    margins = [token.margin for token in (a, b) if token.margin is not None]
    return min(margins, default=float("inf")) <= max(LEAST_TIE, TIE_FACTOR * measured)


def _draft_difference(a: TracedRequest, b: TracedRequest) -> DraftDifference | None:
    if a.request.drafting != b.request.drafting:
        return None
    for left, right in zip(a.steps, b.steps, strict=False):
        if left.position != right.position or left.window[0] != right.window[0]:
            return None  # the tokens differ before this step
        if (left.window, left.n) != (right.window, right.n):
            return DraftDifference(
                left.step, left.position, left.window[1:], right.window[1:], left.n - 1, right.n - 1
            )
    return None


def _report_missing(task_id: TaskId, a: TraceFile, b: TraceFile) -> RequestDiff:
    """Report a request that one trace lacks; that trace must have been interrupted."""
    has, lacks = (a, b) if task_id in a.requests else (b, a)
    if lacks.complete:
        raise UsageError(f"request {task_id} of {has.path} is not in {lacks.path}")
    count = len(list(has.requests[task_id].rows()))
    tokens = (count, 0) if has is a else (0, count)
    return RequestDiff(task_id, "missing", *tokens, equal_tokens=0, largest_logprob_difference=None)


def make_speller(engine: Path | None) -> Spell:
    """Return a function that spells a token: its id and, if an engine is given, its text."""
    if engine is None:
        return str
    tokenizer = load_tokenizer(engine, read_manifest(engine))
    if tokenizer is None:
        raise UsageError(f"--engine {engine}: it was built without a tokenizer")

    def spell(token: int) -> str:
        text = tokenizer.decode_token(token).decode("utf-8", "replace")
        return f"{token} {tokenizer.find_special_name(token) or repr(text)}"

    return spell


def describe_diff(
    differences: TraceDiff, traces: tuple[TraceFile, TraceFile], spell: Spell
) -> Iterator[str]:
    """Yield lines about equal and different requests of two traces."""
    for name, trace in zip("ab", traces, strict=True):
        first = next(iter(trace.requests.values())).request
        drafter = f", {first.drafter}" if first.drafter else ""
        yield f"{name}: {trace.path}: {first.model}, nextn {first.nextn}{drafter}, {first.target}"
    yield from (f"note: {note}" for note in differences.notes)
    for request in differences.requests:
        yield from _describe_request(request, spell)
    equal = sum(request.verdict == "equal" for request in differences.requests)
    yield f"{equal} of {len(differences.requests)} requests are equal"


def _describe_request(request: RequestDiff, spell: Spell) -> Iterator[str]:
    name = f"request {request.task_id}"
    if request.verdict == "missing":
        yield f"{name}: only in {'a' if request.tokens_a else 'b'}"
        return
    measured = ""
    if request.largest_logprob_difference is not None:
        measured = f"; log-probabilities within {request.largest_logprob_difference:.2g}"
    if token := request.token:
        tie = "a near-tie" if token.near_tie else "no near-tie"
        yield f"{name}: another token at position {token.position}, {tie}"
        yield f"  a: {_describe_token(token.a, spell)}"
        yield f"  b: {_describe_token(token.b, spell)}"
        yield f"  {request.equal_tokens} tokens before it are equal{measured}"
    elif request.verdict == "shorter":
        shorter = "a" if request.tokens_a < request.tokens_b else "b"
        yield f"{name}: {shorter} ends after {request.equal_tokens} tokens, equal so far{measured}"
    else:
        yield f"{name}: {request.equal_tokens} equal tokens{measured}"
    drafts = request.drafts
    if drafts and drafts.a != drafts.b:
        yield f"  other drafts in step {drafts.step}, after position {drafts.position}"
        yield f"  a: {', '.join(map(spell, drafts.a))}; {drafts.accepted_a} accepted"
        yield f"  b: {', '.join(map(spell, drafts.b))}; {drafts.accepted_b} accepted"
    elif drafts and not token:
        yield (
            f"  the same drafts in step {drafts.step}, after position {drafts.position}, but "
            f"{drafts.accepted_a} accepted in a, {drafts.accepted_b} in b"
        )


def _describe_token(place: TracedToken, spell: Spell) -> str:
    def number(value: float | None) -> str:
        return "infinite" if value is None else f"{value:.3g}"

    origin = "an accepted draft" if place.from_draft else "the model's own"
    return (
        f"{spell(place.token)}, {origin}, in step {place.step}: margin {number(place.margin)}, "
        f"log-probability {number(place.logprob)}"
    )
