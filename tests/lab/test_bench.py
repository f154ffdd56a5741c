"""`mtpbuild bench`: its requests, its turns, its engines, the command. Never how fast it was."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.plan.plan import Nextn
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.lab.bench import engines, measure
from mtpbuild.lab.bench.bench import BenchRequest, bench
from mtpbuild.lab.bench.figures import (
    make_rows,
)
from mtpbuild.lab.measure.prompts import (
    NUM_REQUESTS,
    OUTPUT_LEN,
    Dataset,
    load_groups,
    make_groups,
    resize_prompt,
)
from mtpbuild.lab.measure.runs import TimedAnswer, rotate
from mtpbuild.lab.show import results
from mtpbuild.runtime import SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import UsageError
from tests.support.bench_samples import contender, fake_engine, prompt, small_tokens, write_lines
from tests.support.fakes import FakePrograms
from tests.support.invoke import invoke as command
from tests.support.invoke import refusal
from tests.support.registry import programs_by
from tests.support.requests import build

# The requests


def test_the_built_in_prompts() -> None:
    asked = Dataset(num_requests=96)
    groups = load_groups(asked, fake_engine(0, max_batch=2), 2)
    kinds = [group[0].kind for group in groups]
    assert kinds == ["code", "reasoning"] * 24
    assert all(p.kind == group[0].kind for group in groups for p in group)
    ids = [p.task_id for group in groups for p in group]
    assert len(set(ids)) == 96
    assert {p.params.max_tokens for group in groups for p in group} == {256}
    one_kind = load_groups(Dataset("reasoning", output_len=7), fake_engine(0), 1)
    assert len(one_kind) == NUM_REQUESTS
    assert one_kind[0][0].params.max_tokens == 7


def test_groups() -> None:
    prompts = {"a": [prompt("a", i) for i in range(5)], "b": [prompt("b", i) for i in range(3)]}
    names = [[(p.kind, p.task_id) for p in group] for group in make_groups(prompts, 2, None, None)]
    assert names == [[("a", 0), ("a", 1)], [("b", 0), ("b", 1)], [("a", 2), ("a", 3)]]
    assert len(make_groups(prompts, 2, None, 3)) == 2
    assert len(make_groups(prompts, 1, 4, None)) == 4
    for size, count, says in (
        (2, 3, "--num-requests 3 is not a multiple of --concurrency 2"),
        (1, 9, "--num-requests 9 is outside 1..8"),
        (1, 0, "--num-requests 0 is outside 1..8"),
        (6, None, "--concurrency 6 needs as many requests; the dataset has 5"),
    ):
        with pytest.raises(UsageError, match=says):
            make_groups(prompts, size, count, None)


def test_input_len() -> None:
    """And contexts of timed steps lie within prompt, text and engine."""
    output = TimedAnswer(prompt(length=4), 0.0, token_ids=[11, 12, 13, 14])
    for length, tokens in ((99, [0, 2, 3, 4, 11, 12]), (5, [0, 2, 3, 4, 11]), (-3, [0])):
        (context,) = measure.make_contexts([prompt(length=4)], [output], 0.5, length)
        assert context.token_ids == tokens
    short, long = prompt(length=3), prompt(length=7)  # [0, 2, 3] and [0, 2, 3, 4, 5, 6, 7]
    assert resize_prompt(long, 4, [], bos=0).token_ids == [0, 5, 6, 7]
    assert resize_prompt(long, 4, [], bos=None).token_ids == [4, 5, 6, 7]
    assert resize_prompt(long, 1, [], bos=0).token_ids == [7]
    assert resize_prompt(short, 6, [long], bos=0).token_ids == [0, 5, 6, 7, 2, 3]
    assert resize_prompt(short, 8, [short], bos=0).token_ids == [0, 3, 2, 3, 2, 3, 2, 3]


def test_a_datasets_lines(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "mine.jsonl",
        {"task_id": 7, "input_ids": [5, 6, 7], "output_tokens": 9},
        {"task_id": "x", "prompt": "def f"},
    )
    (first,), (second,) = load_groups(Dataset(str(path)), fake_engine(0), 1)
    assert (first.kind, first.task_id, first.token_ids) == ("mine", 7, [5, 6, 7])
    assert (first.params.max_tokens, second.params.max_tokens) == (9, OUTPUT_LEN)
    (cut,), _ = load_groups(Dataset(str(path), input_len=2, output_len=3), fake_engine(0), 1)
    assert (cut.token_ids, cut.params.max_tokens) == ([6, 7], 3)


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ('{"input_ids": [5, 6]', {}, "mine.jsonl:1: not JSON"),
        ('{"task_id": 1}', {}, "mine.jsonl:1: give one of prompt"),
        ('{"input_ids": [999]}', {}, "mine.jsonl:1: token id 999 is outside the vocabulary"),
        ("\n", {}, "--dataset .*mine.jsonl: no requests in it"),
        ('{"input_ids": [5]}', {"output_len": 0}, "--output-len 0 is outside 1..1024"),
        ('{"input_ids": [5]}', {"input_len": 0}, "--input-len 0 is outside 1..1024"),
        ('{"input_ids": [5]}', {"output_len": 1024}, "1 prompt and 1024 output tokens are more"),
    ],
)
def test_datasets_that_are_refused(
    text: str, flags: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.jsonl").write_text(text)
    with pytest.raises(UsageError, match=says):
        load_groups(Dataset(str(tmp_path / "mine.jsonl"), **flags), fake_engine(0), 1)


# The measurement


@pytest.mark.parametrize("size", [1, 3])
def test_every_engine_gets_every_request(size: int) -> None:
    contenders = [contender(k, max_batch=size) for k in (0, 1, 3)]
    order = [[c.nextn for c in rotate(contenders, i)] for i in range(4)]
    assert order == [[0, 1, 3], [1, 3, 0], [3, 0, 1], [0, 1, 3]]
    groups = [[prompt("code", size * i + j) for j in range(size)] for i in range(4)]
    seen = list[str]()
    measured = measure.measure(contenders, groups, seen.append)
    at_once = f", {size} at once" if size > 1 else ""
    assert seen == [f"request {size * i + 1} of {4 * size}{at_once}" for i in range(4)]
    for k, one in measured.items():
        assert [[s.prompt for s in group] for group in one.groups] == groups
        assert len(one.steps) == 4 * size * measure.TIMED_STEPS
        assert len(one.verify) == (len(one.steps) if k else 0)
        for s in (s for group in one.groups for s in group):
            assert s.drafting.num_spec_steps == len(s.times)
            assert len(s.token_ids) == 8
            assert s.submitted <= s.times[0]
            assert s.times == sorted(s.times)
    made = make_rows(contenders, measured)
    assert [r.overall["same_output_as_nextn_0"] for r in made] == [4 * size] * 3
    lengths = [r.overall["spec_decode_acceptance_length"] for r in made]
    assert lengths == [1, 8 / 5, 8 / 3]  # 1+2+2+2+1 tokens are kept, and 1+4+3


def test_nextn_0_is_never_relaxed() -> None:
    """Without drafts a relaxed rule only chooses the slower mixed program: others look faster."""
    contenders = [contender(k) for k in (0, 1)]
    asked = prompt()
    asked = replace(asked, params=replace(asked.params, relaxed_topk=10, relaxed_delta=0.6))
    measured = measure.measure(contenders, [[asked]])
    asked_for = [measured[k].groups[0][0].prompt.params.relaxed_topk for k in (0, 1)]
    assert asked_for == [1, 10]


def test_sampled_requests_have_seeds(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "mine.jsonl",
        {"input_ids": [5]},
        {"input_ids": [6], "seed": 9},
        {"input_ids": [7]},
    )
    hot = SamplingParams(8, temperature=0.6)
    for params, seeds in ((hot, [0, 9, 2]), (replace(hot, seed=4), [4, 9, 4])):
        groups = load_groups(Dataset(str(path), params=params), fake_engine(0), 1)
        assert [group[0].params.seed for group in groups] == seeds
    greedy = load_groups(Dataset(str(path)), fake_engine(0), 1)
    assert [group[0].params.seed for group in greedy] == [None, 9, None]


# Where engines are built


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def folders(model: Path, *nextn: Nextn, **flags: Any) -> list[str]:
    built = engines.build_engines(BuildRequest(str(model), nextn, **flags), Stages())
    return [str(folder) for one in built for folder in (one.folder, one.verifier) if folder]


@pytest.mark.usefixtures("here", "quick")
def test_engines_and_their_verifiers(smallest: Path) -> None:
    assert folders(smallest, 2) == [
        "engines/small_n0",
        "engines/small_n2",
        "engines/.bench/small_n2_none_b1",
    ]
    before = Path("engines/small_n2/engine.json").stat()
    folders(smallest, 2)
    assert Path("engines/small_n2/engine.json").stat().st_ino == before.st_ino  # reused
    assert folders(smallest, 0, max_batch=2) == ["engines/.bench/small_n0_default_b2"]
    assert folders(smallest, "auto") == ["engines/small_n0", "engines/small_nauto"]
    names = ("n0_mtp-eagle", "n1_mtp-eagle", "n1_none")
    built = folders(smallest, 1, drafter="mtp-eagle")
    assert built == [f"engines/.bench/small_{name}_b1" for name in names]
    build(BuildRequest(str(smallest), (3,), max_seq_len=40))  # the user's engines are left alone
    Path("engines/small_n1").mkdir()
    for nextn in (1, 3):
        assert folders(smallest, nextn)[1] == f"engines/.bench/small_n{nextn}_default_b1"


@pytest.mark.usefixtures("here", "quick", "quick_inductor")
def test_engines_of_another_target(smallest: Path) -> None:
    """They stand beside those of the usual one, and have the flags that were given."""
    wide = "engines/.bench/small_n0_default_b1_inductor"
    narrow = f"{wide}_dtype-bfloat16"
    assert folders(smallest, 0, target="inductor") == [wide]
    assert folders(smallest, 0, target="inductor", options={"dtype": "bfloat16"}) == [narrow]
    manifest = read_manifest(Path(narrow))
    assert (manifest.target.name, manifest.build.dtype) == ("inductor", "bfloat16")
    assert folders(smallest, 0) == ["engines/small_n0"]
    with pytest.raises(UsageError, match=r"^--dtype bfloat16 is for target .*, not onnxruntime$"):
        folders(smallest, 0, options={"dtype": "bfloat16"})
    build(BuildRequest(str(smallest), (1,), target="inductor"))
    assert folders(smallest, 1)[1] == "engines/.bench/small_n1_default_b1", "the user's stays"


# The command


invoke = partial(command, "bench")


@pytest.fixture
def lines_file(here: Path) -> Path:
    lines = [{"task_id": i, "input_ids": [5, 6, 7 + i], "output_tokens": 12} for i in range(4)]
    return write_lines(here / "ids.jsonl", *lines)


@pytest.fixture
def fake_programs() -> Iterator[None]:
    with programs_by(partial(FakePrograms, next_token=small_tokens)):
        yield


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing them is most of a small benchmark's time."""
    monkeypatch.setattr(results, "explain_no_pictures", lambda: "nobody looks at them")


@pytest.mark.usefixtures("quick", "fake_programs")
def test_the_command(smallest: Path, lines_file: Path) -> None:
    flags = ("--model", smallest, "--nextn", "auto,1", "--dataset", lines_file)
    code, out, err = invoke(*flags, "--out", "results", "--concurrency", "2")
    assert (code, err) == (0, "")
    assert "small, ids: 4 requests, 12 prompt and 48 output tokens, concurrency 2" in out
    assert "same output as nextn 0" in out
    assert out.count("4 of 4") == 3
    assert "wrote results/bench.json and its picture" in out
    document = json.loads(Path("results/bench.json").read_text())
    assert [r["nextn"] for r in document["results"]] == [0, 1, "auto"]
    costs = [r["verify_cost"] is None for r in document["results"]]  # it has no verifier
    assert costs == [False, False, True]
    assert document["settings"]["num_requests"] == 4
    assert Path("results/bench.png").read_bytes().startswith(b"\x89PNG")
    code, out, err = invoke(*flags, "--out", "results", "--num-requests", "1", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["settings"]["num_requests"] == 1


@pytest.mark.usefixtures("quick", "fake_programs")
def test_several_concurrencies(smallest: Path, lines_file: Path) -> None:
    """One engine per nextn, the same requests at each, two tables, one more picture."""
    flags = ("--model", smallest, "--nextn", "3", "--dataset", lines_file, "--concurrency", "4,1,2")
    code, out, err = invoke(*flags)
    assert (code, err) == (0, "")
    assert "small: 4 requests" in out
    assert "wrote bench_results/bench.json and its pictures" in out
    lines = [" ".join(line.split()[:2]) for line in out.splitlines()]
    for size in (1, 2, 4):
        assert lines.count(f"concurrency {size}") == 2
        assert lines.count(f"concurrency {size}:") == 1
    document = json.loads(Path("bench_results/bench.json").read_text())
    order = [(size, nextn) for size in (1, 2, 4) for nextn in (0, 3)]
    assert [(b["concurrency"], b["nextn"]) for b in document["batches"]] == order
    for size, run in zip((1, 2, 4), document["runs"], strict=True):
        assert run["settings"]["concurrency"] == size
        for result in run["results"]:
            assert result["engine"] == f"engines/.bench/small_n{result['nextn']}_default_b4"
            assert [r["task_id"] for r in result["requests"]] == [0, 1, 2, 3]
            told = document["batches"][order.index((size, result["nextn"]))]
            for key in ("output_throughput", "user_tokens_per_s", "speedup"):
                assert told[key] == result[key]
    for picture in ("bench.png", "bench_steps.png", "bench_batches.png"):
        assert Path("bench_results", picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("quick", "fake_programs", "no_pictures")
@pytest.mark.parametrize(
    ("flags", "seen", "says"),
    [
        ("--temperature 0.6 --seed 3", {"temperature": 0.6, "seed": 3}, None),
        (
            "--temperature 0.6 --acceptance rejection",
            {"temperature": 0.6, "acceptance": "rejection"},
            "rejection: the distribution of nextn 0, not its text; equal outputs are by chance",
        ),
        (
            "--relaxed",
            {"relaxed_topk": 10, "relaxed_delta": 0.6},
            "relaxed: within <think> the text may differ from nextn 0's, which is strict",
        ),
        ("--relaxed_topk 3", {"relaxed_topk": 3, "relaxed_delta": 0.0}, "relaxed: within <think>"),
    ],
)
def test_sampling_flags(
    flags: str, seen: dict[str, Any], says: str | None, smallest: Path, lines_file: Path
) -> None:
    """They reach every request, and the report says whether outputs have to be equal."""
    marks = "begin_thinking_phase_token: 7, end_thinking_phase_token: 8"
    Path("llm.yaml").write_text(f"speculative_config: {{decoding_type: MTP, {marks}}}\n")
    asked = ("--model", smallest, "--nextn", 1, "--dataset", lines_file, *flags.split())
    code, out, err = invoke(*map(str, asked), "--config", "llm.yaml")
    assert (code, "error" in err) == (0, False)
    document = json.loads(Path("bench_results/bench.json").read_text())
    assert document["same_output_expected"] == (says is None)
    phase: dict[str, Any] = {"begin_thinking_phase_token": 7, "end_thinking_phase_token": 8}
    params = SamplingParams(**seen, **(phase if "relaxed_topk" in seen else {}))
    assert document["settings"]["sampling"] == json.loads(json.dumps(asdict(params)))
    assert says is None or says in out


@pytest.mark.usefixtures("quick", "fake_programs", "no_pictures")
def test_a_configuration_says_nextn(smallest: Path, lines_file: Path) -> None:
    asked = ("--model", smallest, "--dataset", lines_file, "--num-requests", 1, "--json")
    for flags in (
        ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'),
        ("--spec_decode_nextn", 2),
    ):
        code, out, _ = invoke(*map(str, asked), *map(str, flags))
        assert (code, [r["nextn"] for r in json.loads(out)["results"]]) == (0, [0, 2])


@pytest.mark.usefixtures("quick", "fake_programs", "lines_file")
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--nextn 0,x", "--nextn '0,x' is not a list of numbers such as 0,1,2,3"),
        ("--nextn 1 --drafter none", "--drafter none is unknown; supported: mtp-eagle"),
        ("--nextn 0 --concurrency 0", "--concurrency 0 is outside 1.."),
        ("--nextn 0 --concurrency 2,x", "--concurrency '2,x' is not a list of numbers such as"),
        ("--nextn 0 --concurrency 3,4", "--concurrency 3 does not divide 4: groups of the la"),
        ("--nextn 0 --dataset none.jsonl", "can't be read (No such file or directory); built i"),
        ("--nextn 0 --out ids.jsonl", "--out ids.jsonl: can't write there"),
        ("--nextn 1 --spec-decode-nextn 2", "--nextn says 1, --spec-decode-nextn says 2; drop"),
        ("--relaxed --relaxed-topk 3", "--relaxed says 10, --relaxed-topk says 3; drop one"),
    ],
)
def test_errors_are_one_line(flags: str, says: str, smallest: Path) -> None:
    assert says in refusal("bench", "--model", smallest, *flags.split())


@pytest.mark.full
def test_real_engines(smallest: Path, lines_file: Path) -> None:
    """All of it, on a random model: nothing is faked, and drafting changes no token."""
    dataset = Dataset(str(lines_file), num_requests=2)
    request = BuildRequest(str(smallest), (1,))
    [report] = bench(BenchRequest(request, dataset, threads=1, out=Path("out")))
    assert [r.overall["same_output_as_nextn_0"] for r in report.rows] == [2, 2]
    assert report.rows[1].overall["spec_decode_draft_tokens"] > 0
    assert report.rows[1].overall["verify_step_ms"] > 0
    assert (Path("out") / "bench.json").exists()  # the command draws the pictures
