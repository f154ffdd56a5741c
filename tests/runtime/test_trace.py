"""`run --trace`: what the lines say, on fake programs; what an interrupted run leaves."""

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.runtime import Engine, EngineError, SamplingParams, Trace
from mtpbuild.runtime.contract.controls import StepControls
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.requests.request import Request
from mtpbuild.runtime.trace.lines import read_trace
from tests.support.fakes import FakePrograms, continuation, fake_engine, fake_manifest, mixed
from tests.support.run_command import call, type_in

PROMPT = [5, 6, 7]


def make_engine(**sizes: Any) -> Engine:
    """Two drafts; every fourth position's is wrong."""
    return fake_engine(nextn=2, draft_is_right=lambda position: position % 4 != 0, **sizes)[0]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_line(tmp_path: Path) -> None:
    """Lines agree with plain decoding at positions 3 to 9; the drafts for 4 and 8 are wrong."""
    path, params = tmp_path / "out.jsonl", SamplingParams(max_tokens=7)
    t = [*PROMPT, *continuation(PROMPT, 9)]
    with make_engine() as engine, Trace(engine, path) as trace:
        result = engine.stream(PROMPT, params, observer=trace.request("a")).result()
    begin, *steps, end, summary = lines_of(path)
    assert begin == {
        "kind": "request", "version": 1, "task_id": "a", "model": "fake", "nextn": 2,
        "drafter": "mtp-eagle", "target": "onnxruntime", "hardware": "cpu", "fingerprint": "0",
        "weights": None, "prompt": PROMPT, "params": json.loads(json.dumps(asdict(params))),
    }  # fmt: skip
    wrong = [(mixed(t[:i]) + 1) % 250 for i in range(len(t))]
    behind = mixed([*t[:4], wrong[4]])  # the fake drafts on behind its wrong draft
    expected = [
        (2, [t[2]], [t[3]]),
        (3, [t[3], wrong[4], behind], [t[4]]),
        (4, [t[4], t[5], t[6]], [t[5], t[6], t[7]]),
        (7, [t[7], wrong[8], mixed([*t[:8], wrong[8]])], [t[8]]),
        (8, [t[8], t[9], t[10]], [t[9], t[10], t[11]]),
    ]
    assert [(s["position"], s["window"], s["tokens"]) for s in steps] == expected
    for number, step in enumerate(steps):
        assert step == {
            "kind": "step", "task_id": "a", "step": number, "position": step["position"],
            "num_drafts": len(step["window"]) - 1, "window": step["window"],
            "n": len(step["tokens"]), "tokens": step["tokens"], "logprobs": [0.0] * step["n"],
            "margins": [0.0] * step["n"], "entropies": None, "uniforms": None,
            "draft_logprobs": None, "draft_ranks": None, "draft_q": None,
        }  # fmt: skip
    assert end == {
        "kind": "end", "task_id": "a", "finish_reason": "length", "output_tokens": 7,
        "speculative_decoding": asdict(result.metrics.speculative_decoding),
    }  # fmt: skip
    assert summary == {"kind": "summary", "requests": 1, "steps": 5, "output_tokens": 7}


def test_what_is_read_is_what_the_request_got(tmp_path: Path) -> None:
    """The output is cut within the last step; the trace has the whole step and says where."""
    path = tmp_path / "out.jsonl"
    with make_engine() as engine, Trace(engine, path) as trace:
        params = [SamplingParams(max_tokens=n) for n in (6, 1)]
        streams = [engine.stream(PROMPT, each, observer=trace.request()) for each in params]
        results = [stream.result() for stream in streams]
    read = read_trace(path)
    assert read.complete
    assert list(read.requests) == [0, 1]
    for traced, result in zip(read.requests.values(), results, strict=True):
        rows = list(traced.rows())
        assert [step.tokens[row] for step, row in rows] == result.token_ids
        assert [row < step.n - 1 for step, row in rows] == result.from_draft


def test_a_sampled_request_says_what_it_drew(tmp_path: Path) -> None:
    """The numbers of the positions that each row decides, exactly, and the seed that was drawn."""
    path, params = tmp_path / "out.jsonl", SamplingParams(max_tokens=12, temperature=0.7)
    with make_engine() as engine, Trace(engine, path) as trace:
        result = engine.stream(PROMPT, params, observer=trace.request()).result()
    (traced,) = read_trace(path).requests.values()
    seed = traced.request.params["seed"]
    assert seed == result.seed
    numbers = StepControls(temperature=0.7, seed=seed).uniforms(64)
    for step in traced.steps:
        decided = slice(step.position + 1, step.position + 1 + step.num_drafts + 1)
        assert step.uniforms is not None
        drawn = (step.uniforms.draft, step.uniforms.accept, step.uniforms.recover)
        for mine, stream in zip(drawn, numbers, strict=True):
            assert [numbers.dtype.type(x) for x in mine] == stream[decided].tolist()


def test_the_end_is_recorded_before_the_request_has_ended(tmp_path: Path) -> None:
    """A thread that waits for a request may read its trace as soon as it has the result."""
    seen = list[bool]()
    manifest = fake_manifest()

    class Watching:
        def step(self, request: Request, output: object, slot: int) -> None:
            seen.append(request.ended)

        def end(self, request: Request, reason: str) -> None:
            seen.append(request.ended)

    engine = Engine(FakePrograms(manifest), manifest)
    engine.stream(PROMPT, SamplingParams(max_tokens=2), observer=Watching()).result()
    assert seen == [False, False, False]


def test_a_request_that_nobody_waited_for(tmp_path: Path) -> None:
    """Cancelled while it runs: an end that says so. While it waits: nothing has happened."""
    path = tmp_path / "out.jsonl"
    with make_engine() as engine, Trace(engine, path) as trace:
        running = engine.stream(PROMPT, observer=trace.request("running"))
        waiting = engine.stream(PROMPT, observer=trace.request("waiting"))
        next(running)
        waiting.cancel()
        running.cancel()
        assert running.result().finish_reason == "cancelled"
    read = read_trace(path)
    assert list(read.requests) == ["running"]
    end = read.requests["running"].end
    assert end is not None
    assert (end.finish_reason, end.output_tokens) == ("cancelled", 1)


def test_an_interrupted_run_leaves_what_it_had(tmp_path: Path) -> None:
    """All steps so far, no summary: it doesn't look whole. Nothing comes after closing."""
    jsonl, html = tmp_path / "out.jsonl", tmp_path / "out.html"
    engine = make_engine()
    with contextlib.suppress(KeyboardInterrupt), Trace(engine, jsonl, html) as trace:
        stream = engine.stream(PROMPT, observer=trace.request())
        next(stream)
        next(stream)
        raise KeyboardInterrupt
    read = read_trace(jsonl)
    assert not read.complete
    assert len(read.requests[0].steps) == 2
    assert read.requests[0].end is None
    before = html.read_text(encoding="utf-8"), jsonl.read_bytes()
    assert stream.result().token_ids
    assert before == (html.read_text(encoding="utf-8"), jsonl.read_bytes())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.html", "out.jsonl"]


def test_closed_before_its_request_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with make_engine() as engine:
        with Trace(engine, path) as trace:
            stream = engine.stream(PROMPT, observer=trace.request())
            next(stream)
        assert stream.result().token_ids
    assert not read_trace(path).complete


def test_many_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with make_engine(max_batch=3) as engine, Trace(engine, path) as trace:
        streams = [engine.stream(PROMPT, observer=trace.request()) for _ in range(7)]
        with ThreadPoolExecutor(7) as pool:
            assert len([*pool.map(lambda stream: stream.result(), streams)]) == 7
    read = read_trace(path)
    assert read.complete
    assert sorted(map(int, read.requests)) == list(range(7))
    tokens = [[s.tokens[r] for s, r in traced.rows()] for traced in read.requests.values()]
    assert all(ids == tokens[0] for ids in tokens)


def test_a_file_that_fails_fails_its_request_alone(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "out.jsonl"
    path.parent.mkdir()
    with make_engine() as engine, Trace(engine, path) as trace:
        path.parent.rmdir()
        stream = engine.stream(PROMPT, observer=trace.request())
        with pytest.raises(EngineError, match=r"out\.jsonl: can't be written"):
            stream.result()
        assert engine.generate(PROMPT).token_ids


def test_two_requests_of_one_name(tmp_path: Path) -> None:
    with make_engine() as engine, Trace(engine, tmp_path / "out.jsonl") as trace:
        trace.request("a")
        with pytest.raises(UsageError, match="two requests have task_id a"):
            trace.request("a")
    assert not list(tmp_path.iterdir())


def test_the_command_line(engine_dir: Path, tmp_path: Path) -> None:
    """One prompt, a chat, ids: the trace is of the tokens that --json prints."""
    for flags in (["--prompt", "hello"], ["--chat", "hello"], ["--prompt-ids", "5,6,7"]):
        path, page = tmp_path / "out.jsonl", tmp_path / "out.html"
        traces = ["--json", "--trace", path, "--trace", page]
        result = call("run", "--engine", engine_dir, *flags, *traces)
        assert result.exit_code == 0, result.output
        (traced,) = read_trace(path).requests.values()
        answer = json.loads(result.stdout)
        assert [s.tokens[r] for s, r in traced.rows()] == answer["token_ids"]
        assert page.is_file()
        shown = call("run", "--engine", engine_dir, *flags, "--trace", path)
        assert shown.stdout == answer["text"] + "\n"


def test_a_file_of_requests(engine_dir: Path, tmp_path: Path) -> None:
    asked, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text('{"input_ids": [5], "task_id": "a"}\n{"prompt": "hi"}\n', encoding="utf-8")
    flags = ["run", "--engine", engine_dir, "--input", asked, "--trace", path, "--json"]
    result = call(*flags)
    assert result.exit_code == 0, result.output
    read = read_trace(path)
    for answer in map(json.loads, result.stdout.splitlines()):
        traced = read.requests[answer["task_id"]]
        assert [s.tokens[r] for s, r in traced.rows()] == answer["token_ids"]
    path.unlink()
    asked.write_text('{"prompt": "a", "task_id": 1}\n{"prompt": "b"}\n', encoding="utf-8")
    result = call(*flags)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: two requests have task_id 1")
    assert not path.exists()


@pytest.mark.parametrize(
    ("file", "message"),
    [("out.txt", "must end in .jsonl or .html"), ("out", "must end in .jsonl or .html"),
     ("no/out.jsonl", "can't be written (no folder "), (".html", "must end in .jsonl or .html"),
     ("folder.html", "can't be written (it is a folder)")],
)  # fmt: skip
def test_refused_files(engine_dir: Path, tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / "folder.html").mkdir()
    before = sorted(tmp_path.rglob("*"))
    result = call("run", "--engine", engine_dir, "--prompt", "a", "--trace", tmp_path / file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_given_twice(engine_dir: Path, tmp_path: Path) -> None:
    files = [part for _ in range(2) for part in ("--trace", tmp_path / "out.jsonl")]
    result = call("run", "--engine", engine_dir, "--prompt", "a", *files)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("out.jsonl: given twice\n")


def test_a_conversation_is_not_traced(engine_dir: Path, tmp_path: Path) -> None:
    result = type_in([], "run", "--engine", engine_dir, "--trace", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert result.stderr == "error: --json and --trace need a prompt: a conversation has neither\n"


def test_nothing_ran_nothing_written(engine_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    result = call("run", "--engine", engine_dir, "--prompt-ids", "999", "--trace", path)
    assert result.exit_code == 2
    assert not path.exists()
