"""The text output of `mtpbuild diff`: each request of two traces and its first difference."""

from collections.abc import Callable, Iterator
from pathlib import Path

from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.text.tokenizer import load_tokenizer
from mtpbuild.runtime.trace.diff import RequestDiff, TraceDiff, TracedToken
from mtpbuild.runtime.trace.lines import TraceFile

Spell = Callable[[int], str]


def make_speller(engine: Path | None) -> Spell:
    """Return a function that spells a token with the engine's tokenizer, if any, or as its id."""
    if engine is None:
        return str
    tokenizer = load_tokenizer(engine, read_manifest(engine))
    if tokenizer is None:
        raise UsageError(f"--engine {engine}: it was built without a tokenizer")

    def spell(token: int) -> str:
        text = tokenizer.token_bytes(token).decode("utf-8", "replace")
        return f"{token} {tokenizer.special_name(token) or repr(text)}"

    return spell


def describe_diff(
    found: TraceDiff, traces: tuple[TraceFile, TraceFile], spell: Spell
) -> Iterator[str]:
    """Yield lines about equal and different requests of two traces."""
    for name, trace in zip("ab", traces, strict=True):
        first = next(iter(trace.requests.values())).request
        drafter = f", {first.drafter}" if first.drafter else ""
        yield f"{name}: {trace.path}: {first.model}, nextn {first.nextn}{drafter}, {first.target}"
    yield from (f"note: {note}" for note in found.notes)
    for request in found.requests:
        yield from _request(request, spell)
    equal = sum(request.verdict == "equal" for request in found.requests)
    yield f"{equal} of {len(found.requests)} requests are equal"


def _request(found: RequestDiff, spell: Spell) -> Iterator[str]:
    name = f"request {found.task_id}"
    if found.verdict == "missing":
        yield f"{name}: only in {'a' if found.tokens_a else 'b'}"
        return
    measured = ""
    if found.largest_logprob_difference is not None:
        measured = f"; log-probabilities within {found.largest_logprob_difference:.2g}"
    if token := found.token:
        tie = "a near-tie" if token.near_tie else "no near-tie"
        yield f"{name}: another token at position {token.position}, {tie}"
        yield f"  a: {_place(token.a, spell)}"
        yield f"  b: {_place(token.b, spell)}"
        yield f"  {found.equal_tokens} tokens before it are equal{measured}"
    elif found.verdict == "shorter":
        shorter = "a" if found.tokens_a < found.tokens_b else "b"
        yield f"{name}: {shorter} ends after {found.equal_tokens} tokens, equal so far{measured}"
    else:
        yield f"{name}: {found.equal_tokens} equal tokens{measured}"
    drafts = found.drafts
    if drafts and drafts.a != drafts.b:
        yield f"  other drafts in step {drafts.step}, after position {drafts.position}"
        yield f"  a: {', '.join(map(spell, drafts.a))}; {drafts.accepted_a} accepted"
        yield f"  b: {', '.join(map(spell, drafts.b))}; {drafts.accepted_b} accepted"
    elif drafts and not token:
        yield (
            f"  the same drafts in step {drafts.step}, after position {drafts.position}, but "
            f"{drafts.accepted_a} accepted in a, {drafts.accepted_b} in b"
        )


def _place(place: TracedToken, spell: Spell) -> str:
    def number(value: float | None) -> str:
        return "infinite" if value is None else f"{value:.3g}"

    origin = "an accepted draft" if place.from_draft else "the model's own"
    return (
        f"{spell(place.token)}, {origin}, in step {place.step}: margin {number(place.margin)}, "
        f"log-probability {number(place.logprob)}"
    )
