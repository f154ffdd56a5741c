"""`mtpbuild diff`: every verdict, on traces that fake programs and small changes make."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.runtime import SamplingParams, Trace
from tests.support import run_command
from tests.support.engines import write_engine
from tests.support.fakes import fake_engine, fake_manifest

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=9)

Lines = list[dict[str, Any]]


call = partial(run_command.call, "diff")


def trace(path: Path, *, nextn: int = 2, params: SamplingParams = PARAMS, wrong: int = 8) -> Path:
    """Two requests; the draft for position `wrong` is rejected. Margins 1, log-probabilities -1."""
    engine, _ = fake_engine(nextn=nextn, draft_is_right=lambda position: position != wrong)
    with engine, Trace(engine, path) as recorder:
        for prompt in (PROMPT, [9]):
            engine.stream(prompt, params, observer=recorder.request()).result()

    def number(lines: Lines) -> None:
        for line in steps(lines):
            line["margins"], line["logprobs"] = [1.0] * line["n"], [-1.0] * line["n"]

    return edit(path, number)


def edit(path: Path, change: Callable[[Lines], object], out: Path | None = None) -> Path:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    change(lines)
    out = out or path
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return out


def steps(lines: Lines, task_id: int | None = None) -> Lines:
    wanted = (None, task_id) if task_id is None else (task_id,)
    return [x for x in lines if x["kind"] == "step" and (None in wanted or x["task_id"] in wanted)]


def compare(a: Path, b: Path, *flags: object) -> tuple[int, dict[str, Any]]:
    result = call(a, b, "--json", *flags)
    assert result.stderr == ""
    return result.exit_code, json.loads(result.stdout)


def refused(message: str, *paths: Path) -> None:
    result = call(*paths)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return trace(tmp_path / "a.jsonl")


@pytest.fixture
def b(tmp_path: Path) -> Path:
    return tmp_path / "b.jsonl"


def test_equal(a: Path, b: Path) -> None:
    trace(b)
    code, found = compare(a, b)
    assert code == 0
    same = {"verdict": "equal", "tokens_a": 9, "tokens_b": 9, "equal_tokens": 9}
    same |= {"largest_logprob_difference": 0.0, "token": None, "drafts": None}
    requests = [{"task_id": task_id} | same for task_id in (0, 1)]
    assert found == {"equal": True, "requests": requests, "notes": []}
    printed = call(a, b)
    assert printed.exit_code == 0
    assert printed.stdout.splitlines() == [
        f"a: {a}: fake, nextn 2, mtp-eagle, onnxruntime",
        f"b: {b}: fake, nextn 2, mtp-eagle, onnxruntime",
        "request 0: 9 equal tokens; log-probabilities within 0",
        "request 1: 9 equal tokens; log-probabilities within 0",
        "2 of 2 requests are equal",
    ]


@pytest.mark.parametrize("nextn", [0, 1, 3])
def test_another_nextn_is_compared_by_tokens(a: Path, b: Path, nextn: int) -> None:
    code, found = compare(a, trace(b, nextn=nextn))
    assert code == 0
    assert [request["equal_tokens"] for request in found["requests"]] == [9, 9]


@pytest.mark.parametrize(
    ("margin", "shift", "tie"),
    [(1.0, 0.0, False), (0.9e-5, 0.0, True), (1.1e-5, 0.0, False), (0.39, 0.1, True)],
)
def test_another_token(a: Path, b: Path, margin: float, shift: float, tie: bool) -> None:
    """The last token of request 0's second step; a tie is judged by what was measured before."""

    def change(lines: Lines) -> None:
        for line in steps(lines):
            line["logprobs"] = [x - shift for x in line["logprobs"]]
        second = steps(lines, 0)[1]
        second["tokens"][-1] += 1
        second["margins"][-1] = margin
        del lines[lines.index(second) + 1 : lines.index(steps(lines, 1)[0]) - 1]

    code, found = compare(a, edit(a, change, b))
    assert code == 1
    first, second = found["requests"]
    assert (first["verdict"], second["verdict"]) == ("different", "equal")
    place = first["token"]
    assert place["near_tie"] == tie
    assert (place["position"], first["equal_tokens"]) == (6, 3)
    assert place["b"]["token"] == place["a"]["token"] + 1
    assert (place["a"]["margin"], place["b"]["margin"]) == (1.0, margin)
    assert (place["a"]["step"], place["a"]["from_draft"]) == (1, False)
    assert first["largest_logprob_difference"] == pytest.approx(shift)
    printed = call(a, b)
    assert printed.exit_code == 1
    lines = printed.stdout.splitlines()
    word = "a near-tie" if tie else "no near-tie"
    assert lines[-6] == f"request 0: another token at position 6, {word}"
    assert lines[-5].startswith(f"  a: {place['a']['token']}, the model's own, in step 1: margin 1")
    assert lines[-3].startswith("  3 tokens before it are equal")
    assert lines[-1] == "1 of 2 requests are equal"


def test_other_drafts(a: Path, b: Path) -> None:
    """The same text by other steps: a difference where nextn and drafter are the same."""
    code, found = compare(a, trace(b, wrong=5))
    assert code == 1
    first = found["requests"][0]
    assert (first["verdict"], first["equal_tokens"], first["token"]) == ("different", 9, None)
    drafts = first["drafts"]
    assert (drafts["step"], drafts["position"]) == (1, 3)
    assert (drafts["accepted_a"], drafts["accepted_b"]) == (2, 1)
    assert drafts["a"][0] == drafts["b"][0]
    assert drafts["a"][1] != drafts["b"][1]
    assert "other drafts in step 1, after position 3" in call(a, b).stdout


def test_other_judging(a: Path, b: Path) -> None:
    """Equal drafts, of which one trace accepted fewer."""

    def change(lines: Lines) -> None:
        step = steps(lines, 0)[1]
        del lines[lines.index(step) + 1 : lines.index(steps(lines, 1)[0]) - 1]
        for name in ("tokens", "margins", "logprobs"):
            step[name].pop()
        step["n"] = 2

    code, found = compare(a, edit(a, change, b))
    assert code == 1
    drafts = found["requests"][0]["drafts"]
    assert drafts["a"] == drafts["b"]
    assert "but 2 accepted in a, 1 in b" in call(a, b).stdout


def test_one_ends_earlier(a: Path, b: Path) -> None:
    trace(b, params=replace(PARAMS, max_tokens=4))
    code, found = compare(a, b)
    assert code == 1
    verdicts = {(r["verdict"], r["tokens_a"], r["tokens_b"]) for r in found["requests"]}
    assert verdicts == {("shorter", 9, 4)}
    assert "request 0: b ends after 4 tokens, equal so far" in call(a, b).stdout


def test_an_interrupted_run(a: Path, b: Path) -> None:
    """The common part is compared; half a last line is left out."""
    whole = a.read_bytes()
    second = [n for n, line in enumerate(whole.splitlines()) if b'"request"' in line][1]
    b.write_bytes(b"\n".join(whole.splitlines()[: second - 2]) + b'\n{"kind": "st')
    code, found = compare(a, b)
    assert code == 1
    assert [request["verdict"] for request in found["requests"]] == ["shorter", "missing"]
    assert found["notes"] == [f"{b}: its run was interrupted"]
    printed = call(b, a).stdout
    assert f"note: {b}: its run was interrupted" in printed
    assert "request 1: only in b" in printed


@pytest.mark.parametrize(
    ("changed", "notes"),
    [({"acceptance": "rejection"}, ["acceptance: strict | rejection"]),
     ({"relaxed_topk": 4}, ["relaxed_topk: 1 | 4"]), ({"max_tokens": 10, "stop": ["x"]}, [])],
)  # fmt: skip
def test_what_may_differ_is_noted(
    a: Path, b: Path, changed: dict[str, object], notes: list[str]
) -> None:
    edit(a, lambda lines: [x["params"].update(changed) for x in lines if "params" in x], b)
    code, found = compare(a, b)
    assert (code, found["notes"]) == (0, notes)


def test_rejection_depends_on_nextn(tmp_path: Path) -> None:
    params = replace(PARAMS, temperature=1.0, seed=1, acceptance="rejection")
    pair = [trace(tmp_path / f"{n}.jsonl", nextn=n, params=params) for n in (1, 2)]
    code, found = compare(*pair)
    assert code == 0  # the fakes don't sample
    assert found["notes"] == ["rejection sampling gives another text for another nextn or drafter"]


def test_weights_are_noted(a: Path, b: Path) -> None:
    edit(a, lambda lines: [x.update(weights="0") for x in lines if x["kind"] == "request"], b)
    assert compare(a, b)[1]["notes"] == ["the engines have different weights files"]


def test_what_can_not_be_compared(a: Path, b: Path) -> None:
    def first(**changes: object) -> Path:
        return edit(a, lambda lines: lines[0].update(changes), b)

    refused("request 0: model fake in ", a, first(model="other"))
    params = json.loads(a.read_text(encoding="utf-8").splitlines()[0])["params"]
    refused("request 0: top_p 1.0 in ", a, first(params=params | {"top_p": 0.5}))
    form = {"structured_outputs": {"json_object": True}}
    refused("request 0: structured_outputs None in ", a, first(params=params | form))
    hot = params | {"temperature": 1.0, "seed": 1}
    refused("request 0: temperature 0.0 in ", a, first(params=hot))
    refused("request 0: seed 1 in ", b, edit(b, lambda x: x[0]["params"].update(seed=2), a))


def test_other_prompts(a: Path, b: Path) -> None:
    def change(lines: Lines) -> None:
        lines[0]["prompt"][1] = 8

    refused("request 0: the prompt 3 tokens, [6] at 1 in ", a, edit(a, change, b))
    edit(a, lambda lines: [x.update(task_id="z") for x in lines if x.get("task_id") == 1], b)
    refused(f"request 1 of {a} is not in {b}", a, b)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", ": no requests in it"), ("no newline", ": no requests in it"),
     ("x\n", ":1: not a line of a trace (Invalid JSON"), ("[]\n", ":1: not a line of a trace ("),
     ('{"kind": "step"}\n', ":1: not a line of a trace (task_id: Field required)"),
     ('{"kind": "other"}\n', ":1: not a line of a trace (Input tag 'other'")],
)  # fmt: skip
def test_damaged_files(a: Path, b: Path, text: str, message: str) -> None:
    b.write_text(text, encoding="utf-8")
    refused(f"{b}{message}", a, b)
    refused(f"{b}{message}", b, a)


def test_no_file(a: Path, tmp_path: Path) -> None:
    refused("nothing.jsonl: can't be read (No such file", a, tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines.pop(0), ":1: request 0 has not begun"),
        (lambda lines: lines.pop(2), ":3: must be step 1, after token"),
        (lambda lines: lines.insert(1, lines[0]), ":2: request 0 began in an earlier line"),
        (lambda lines: lines.append(lines[0]), ": after the summary"),
        (lambda lines: lines[2]["tokens"].append(5), "don't have the lengths they say"),
        (lambda lines: lines[2].update(num_drafts=1), "don't have the lengths they say"),
        (lambda lines: lines[2].update(draft_ranks=[1]), "don't have the lengths they say"),
        (lambda lines: lines[0].update(version=2), "version: Input should be 1"),
        (lambda lines: lines[0].update(prompt=[]), "prompt: List should have at least 1 item"),
    ],
)
def test_lines_that_do_not_fit(
    a: Path, b: Path, change: Callable[[Lines], object], message: str
) -> None:
    refused(message, a, edit(a, change, b))


def test_a_later_version_may_say_more(a: Path, b: Path) -> None:
    code, _ = compare(a, edit(a, lambda lines: [x.update(more=1) for x in lines], b))
    assert code == 0


def test_texts(a: Path, b: Path, tmp_path: Path) -> None:
    def change(lines: Lines) -> None:
        steps(lines, 0)[0]["tokens"][0] = 1
        del lines[2 : lines.index(steps(lines, 1)[0]) - 2]

    edit(a, change, b)
    write_engine(tmp_path / "engine", fake_manifest())
    printed = call(a, b, "--engine", tmp_path / "engine").stdout
    assert "  b: 1 </s>, the model's own, in step 0" in printed
    write_engine(tmp_path / "ids", fake_manifest(), tokenizer=False)
    result = call(a, b, "--engine", tmp_path / "ids")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "built without a tokenizer" in result.stderr
    assert call(a, b, "--engine", tmp_path / "none").exit_code == 1
