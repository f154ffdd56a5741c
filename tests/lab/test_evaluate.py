"""`mtpbuild eval`: its problems, its arithmetic, the command. Never how fast it was."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.cli.measure import read_grid
from mtpbuild.lab.eval.evaluate import EvalRequest, choose_settings
from mtpbuild.lab.eval.problems import (
    NUM_PROBLEMS,
    extract_answer,
    load_problems,
)
from mtpbuild.lab.eval.report import (
    Evaluation,
    compare_accuracy,
    compute_mcnemar_p_value,
    make_rows,
    plot_evaluation,
    write_conclusion,
)
from mtpbuild.lab.measure.host import describe_machine
from mtpbuild.lab.measure.statistics import ALL, estimate_share
from mtpbuild.runtime import SamplingParams
from mtpbuild.runtime.contract.programs import Bools, StepOutput
from mtpbuild.runtime.errors import UsageError
from tests.support.bench_samples import fake_engine, graded_answers, write_lines
from tests.support.engines import write_engine
from tests.support.fakes import EOS, THINKING, FakePrograms, fake_manifest
from tests.support.invoke import invoke as command
from tests.support.invoke import refusal
from tests.support.registry import programs_by

THINK, CLOSE = THINKING
GREEDY = SamplingParams(8)

# The problems


def test_the_built_in_problems() -> None:
    """Different ones, the forms in turn, each with an answer; none is asked by bench."""
    engine = fake_engine(0)
    problems = load_problems("reasoning", engine, SamplingParams(8), 290)
    forms = [p.prompt.kind for p in problems]
    assert len(problems) == len({tuple(p.prompt.token_ids) for p in problems}) == 290
    assert sorted(forms[:6]) == sorted(set(forms))
    assert all(p.answer for p in problems)
    assert {p.prompt.params.max_tokens for p in problems} == {256}
    assert len(load_problems("reasoning", engine, SamplingParams(8), None)) == NUM_PROBLEMS


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "mine.jsonl",
        {"question": "1 + 2?", "answer": " 3\n"},
        {"prompt": "def f", "answer": "(x)", "task_id": "f", "form": "code", "output_tokens": 9},
        {"messages": [{"role": "user", "content": "1 + 2?"}], "answer": "3"},
    )
    hot = replace(GREEDY, temperature=0.5)
    first, second, third = load_problems(str(path), fake_engine(0), hot, None)
    assert (first.prompt.kind, first.prompt.task_id, first.answer) == ("all", 0, "3")
    assert first.prompt.token_ids == third.prompt.token_ids
    assert (second.prompt.kind, second.prompt.task_id) == ("code", "f")
    assert [p.prompt.params.max_tokens for p in (first, second)] == [8, 9]
    assert [p.prompt.params.seed for p in (first, second, third)] == [0, 1, 2]
    assert len(load_problems(str(path), fake_engine(0), hot, 2)) == 2


@pytest.mark.parametrize(
    ("line", "count", "says"),
    [
        ("{", None, "mine.jsonl:1: not JSON"),
        ('{"question": "a"}', None, "mine.jsonl:1: answer: Field required"),
        ('{"answer": "a"}', None, "mine.jsonl:1: give one of question, messages and prompt"),
        ('{"question": "a", "prompt": "b", "answer": "c"}', None, "mine.jsonl:1: give one of"),
        ('{"question": "a", "answer": "c", "x": 1}', None, "mine.jsonl:1: x: Extra inputs"),
        ('{"question": "a", "answer": "c", "output_tokens": 0}', None, "1: max_tokens"),
        ('{"question": "a", "answer": "c", "output_tokens": 1024}', None, "than the engine holds"),
        ("", None, "no requests in it"),
        ('{"question": "a", "answer": "c"}', 2, "--num-problems 2 is outside 1..1"),
        ('{"question": "a", "answer": "c"}', 0, "--num-problems 0 is outside 1..1"),
    ],
)
def test_tasks_that_are_refused(line: str, count: int | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UsageError, match=says):
        load_problems(str(path), fake_engine(0), GREEDY, count)


def test_the_answer_comes_after_the_thinking() -> None:
    engine = fake_engine(0)
    seven = engine.encode("7", add_special_tokens=False)
    asked = [5, THINK]
    assert extract_answer([9, CLOSE, *seven, EOS], asked, engine) == "7"
    assert extract_answer([9, CLOSE, 9, THINK, 9, CLOSE, *seven], asked, engine) == "7"
    assert extract_answer([9, *seven, EOS], asked, engine) is None
    assert extract_answer([*seven, EOS], [5], engine) == "7"
    assert extract_answer([*seven, THINK, 9], [5], engine) is None


# The arithmetic


def test_wilson() -> None:
    """Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for right, problems, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = estimate_share(right, problems)
        assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_mcnemar() -> None:
    assert compute_mcnemar_p_value(0, 0) == compute_mcnemar_p_value(3, 3) == 1
    assert compute_mcnemar_p_value(0, 5) == compute_mcnemar_p_value(5, 0) == pytest.approx(2 / 32)
    assert compute_mcnemar_p_value(1, 9) == pytest.approx(2 * 11 / 1024)


def test_a_paired_difference() -> None:
    ours, theirs = [True] * 6 + [False] * 4, [True] * 4 + [False] * 2 + [True] * 3 + [False]
    found = compare_accuracy(ours, theirs)
    assert (found["lost"], found["gained"]) == (3, 2)
    assert found["value"] == pytest.approx(-0.1)
    assert found["low"] < -0.1 < found["high"]
    same = compare_accuracy([True, False], [True, False])
    assert [same[name] for name in ("value", "low", "high", "p_value")] == [0, 0, 0, 1]


def test_rows_by_hand() -> None:
    """Strict: 5 tokens, 2 s a step of 2; relaxed: as many in steps of 1 s, and two answers lost."""
    strict = graded_answers("sum", "333", [1, 3, 5]) + graded_answers("sort", "31", [1, 3, 5])
    fast = graded_answers("sum", "313", [1, 2, 3]) + graded_answers("sort", "21", [1, 2, 3])
    first, second = make_rows({"strict": strict, "5 / 0.1": fast})
    assert list(first.forms) == [ALL, "sum", "sort"]
    assert [figures["right"] for figures in first.forms.values()] == [4, 3, 1]
    assert [figures["right"] for figures in second.forms.values()] == [2, 2, 0]
    assert second.overall["against_strict"] == {
        "value": -0.4, "low": -0.8, "high": 0, "lost": 2, "gained": 0, "p_value": 0.5,
    }  # fmt: skip
    assert second.speedup.value == 2
    assert [row.overall["user_tokens_per_s"] for row in (first, second)] == [1, 2]
    assert first.overall["spec_decode_acceptance_length"] == pytest.approx(5 / 3)
    assert write_conclusion([first, second]).endswith("seen to differ from strict's (p < 0.05)")
    assert "strict: 4 of 5 problems; fastest: 5 / 0.1, 2.00x. " in write_conclusion([first, second])
    slow = make_rows({"strict": fast, "5 / 0.1": strict})
    assert "; none is faster. " in write_conclusion(slow)
    lost = make_rows(
        {"strict": graded_answers("a", "3" * 9, [1, 2]), "x": graded_answers("a", "1" * 9, [1, 2])}
    )
    assert write_conclusion(lost).endswith("Other than strict's accuracy (p < 0.05): x")


def test_the_trade_has_a_point_per_setting() -> None:
    strict, relaxed = graded_answers("a", "3331", [1, 3, 5]), graded_answers("a", "3311", [1, 2, 3])
    rows = make_rows({"strict": strict, "2 / 0.1": relaxed})
    settings = {"num_problems": 4, "task": "reasoning"}
    report = Evaluation("e", fake_manifest(), describe_machine(1), settings, rows)
    (line,) = plot_evaluation(report).panels[2].lines
    assert [*line.x] == [1, 2]
    assert line.y == [row.accuracy for row in rows]
    assert [row.accuracy.value for row in rows] == [75, 50]
    assert line.notes == ["strict", "2 / 0.1"]


# The settings


def test_settings() -> None:
    request = EvalRequest(Path("e"), topk=(2, 5), delta=(0.1,))
    assert [*choose_settings(request)] == ["strict", "2 / 0.1", "5 / 0.1"]
    hot = replace(request, params=replace(GREEDY, temperature=0.6))
    assert [*choose_settings(hot)] == ["strict", "rejection"]


def test_the_grid() -> None:
    assert read_grid(None, None, {}) == ((2, 5, 10), (0.1, 0.3, 0.6))
    assert read_grid("3,3,4", "0", {}) == ((3, 4), (0.0,))
    on = {"use_relaxed_acceptance_for_thinking": True, "relaxed_topk": 10, "relaxed_delta": 0.6}
    assert read_grid(None, None, on) == ((10,), (0.6,))
    for topk, delta, settings, says in (
        ("3", None, on, "--relaxed-topk 3 and the configuration's 10; drop one"),
        ("1", None, {}, "is from 2"),
        ("2", "0.1,1.1", {}, "in 0..1"),
        ("2;3", None, {}, "is not a list of numbers such as 2,5,10"),
    ):
        with pytest.raises(UsageError, match=says):
            read_grid(topk, delta, settings)


# The command


class Careless(FakePrograms):
    """Thinks for a while, then answers 7; or 8, where it is relaxed with a top-k of 5 or more."""

    def step(self, active: Bools, rows: int) -> StepOutput:
        right = self.controls[0].relaxed_topk < 5 and not self.controls[0].rejection
        text = [9, 9, 9, 9, CLOSE, *answer_ids("7" if right else "8"), EOS]

        def next_token(history: Sequence[int]) -> int:
            return text[min(len(history) - self.begun, len(text) - 1)]

        self.next_token = next_token
        return super().step(active, rows)

    def begin(self, slot: int, length: int, *rest: Any) -> None:
        super().begin(slot, length, *rest)
        self.begun = length + 1


def answer_ids(text: str) -> list[int]:
    return fake_engine(0).encode(text, add_special_tokens=False)


invoke = partial(command, "eval")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield an engine, a task of eight problems of two forms, and nothing else."""
    monkeypatch.chdir(tmp_path)
    write_engine(tmp_path / "engine", fake_manifest(max_seq_len=400))
    write_engine(tmp_path / "n0", fake_manifest(nextn=0))
    lines = [
        {"prompt": "a" * (i + 1), "answer": "7", "form": f"form {i % 2}", "output_tokens": 12}
        for i in range(8)
    ]
    write_lines(tmp_path / "task.jsonl", *lines)
    with programs_by(Careless):
        yield tmp_path


def test_the_command(here: Path) -> None:
    flags = ("--engine", "engine", "--task", "task.jsonl", "--relaxed-topk", "2,5")
    code, out, err = invoke(*flags, "--relaxed-delta", "0.1")
    assert (code, err) == (0, "")
    assert "fake, nextn 3, mtp-eagle, task.jsonl: 8 problems" in out
    assert "Other than strict's accuracy (p < 0.05): 5 / 0.1" in out
    document = json.loads((here / "eval_results" / "eval.json").read_text())
    found = {r["setting"]: (r["right"], r["problems_asked"]) for r in document["results"]}
    assert found == {"strict": (8, 8), "2 / 0.1": (8, 8), "5 / 0.1": (0, 8)}
    last = document["results"][-1]
    assert last["against_strict"]["lost"] == 8
    assert {form: f["right"] for form, f in last["forms"].items()} == {"form 0": 0, "form 1": 0}
    assert {p["answer"] for p in last["problems"]} == {"8"}
    assert (here / "eval_results" / "eval.png").read_bytes().startswith(b"\x89PNG")


def test_above_temperature_0(here: Path) -> None:
    flags = ("--engine", "engine", "--task", "task.jsonl", "--temperature", "0.6", "--json")
    code, out, err = invoke(*flags, "--num-problems", "6", "--out", "hot")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert [r["setting"] for r in document["results"]] == ["strict", "rejection"]
    assert [r["right"] for r in document["results"]] == [6, 0]
    assert document["settings"]["sampling"]["temperature"] == 0.6


SYNTHETIC = "--temperature 1 --rejection-sample-method synthetic --synthetic-acceptance-length 2"


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("--engine nowhere", 1, "no such engine directory"),
        ("--engine n0", 2, "n0 drafts nothing: there is nothing to accept"),
        ("--engine engine --task none.jsonl", 2, "--task none.jsonl: can't be read (No such file"),
        ("--engine engine --temperature 1 --relaxed-topk 5", 2, "set --temperature to 0"),
        ("--engine engine --acceptance rejection", 2, "--acceptance: eval compares strict"),
        ("--engine engine --relaxed-topk x", 2, "--relaxed-topk 'x' is not a list of numbers such"),
        ("--engine engine --spec-decode-nextn 2", 2, "asks for nextn 2, the engine was built with"),
        ("--engine engine --out task.jsonl", 2, "--out task.jsonl: can't write there"),
        (f"--engine engine {SYNTHETIC}", 2, "synthetic acceptance gives meaningless texts"),
    ],
)
def test_errors_are_one_line(flags: str, code: int, says: str, here: Path) -> None:
    assert says in refusal("eval", *flags.split(), code=code)
    assert not (here / "eval_results" / "eval.json").exists()
