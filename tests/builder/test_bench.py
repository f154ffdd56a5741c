"""`mtpbuild bench`: its arithmetic, its requests, what it writes. Never how fast anything was."""

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from mtpbuild.builder.bench import dataset, engines, measure, picture
from mtpbuild.builder.bench.bench import BenchRequest, bench
from mtpbuild.builder.bench.dataset import Asked, Prompt, group_up, load_groups, sized
from mtpbuild.builder.bench.engines import Wanted
from mtpbuild.builder.bench.figures import (
    ALL,
    Cost,
    Figures,
    Ratio,
    Row,
    disagreements,
    merged,
    percentile,
    recommendation,
    rows,
    speedup,
)
from mtpbuild.builder.bench.machine import describe_machine
from mtpbuild.builder.bench.measure import Contender, Measured, Sample
from mtpbuild.builder.bench.report import Report, print_report, spread, table, to_json
from mtpbuild.builder.cli import app
from mtpbuild.builder.pipeline import BuildRequest, Stages, build
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime import engine as engine_module
from mtpbuild.runtime.errors import MissingDependencyError, UsageError
from mtpbuild.runtime.manifest import Manifest
from mtpbuild.runtime.stats import Acceptance, SpeculativeDecoding
from tests.fakes import FakePrograms, fake_manifest, fake_tokenizer

VLLM_KEYS = {f"{s}_{m}_ms" for s in ("mean", "median", "std", "p99") for m in ("ttft", "tpot")}
VLLM_KEYS |= {f"{s}_{m}_ms" for s in ("mean", "median", "std", "p99") for m in ("itl", "e2el")}
VLLM_KEYS |= {
    "output_throughput",
    "spec_decode_acceptance_length",
    "spec_decode_acceptance_rate",
    "spec_decode_per_position_acceptance_rates",
}


def small_tokens(history: Sequence[int]) -> int:
    """Next tokens that even the smallest vocabulary has, and never an end of sequence."""
    return 2 + sum((i + 1) * t for i, t in enumerate(history)) % 50


def prompt(kind: str = "code", number: int = 0, length: int = 4, most: int = 8) -> Prompt:
    return Prompt(kind, number, [0, *range(2, length + 1)], SamplingParams(most))


def drafting(histogram: list[int], drafted: int) -> SpeculativeDecoding:
    acceptance = Acceptance(len(histogram) - 1)
    acceptance.histogram, acceptance.drafted = histogram, drafted
    return acceptance.report()


def sample(kind: str, times: Sequence[float], histogram: list[int], begun: float = 0.0) -> Sample:
    """A request whose whole steps' tokens were all kept."""
    tokens = sum((j + 1) * steps for j, steps in enumerate(histogram))
    assert sum(histogram) == len(times)
    nextn = len(histogram) - 1
    report = drafting(histogram, nextn * (len(times) - 1))
    return Sample(prompt(kind), begun, list(times), list(range(tokens)), report)


def by_hand() -> dict[int, Measured]:
    """Two requests. nextn 0: 5 tokens, 2 s each. nextn 2: the same 5 in 3 steps of 3 s, and 4."""
    base = [sample("code", [3, 5, 7, 9, 11], [5]), sample("talk", [2, 4, 6, 8, 10], [5])]
    fast = [sample("code", [4, 7, 10], [1, 2, 0]), sample("talk", [3, 6, 10, 13], [3, 1, 0])]
    return {
        0: Measured([[s] for s in base], steps=[2.0, 2.0, 9.0]),
        2: Measured([[s] for s in fast], steps=[3.0, 3.0, 1.0], verify=[2.5]),
    }


def fake_engine(nextn: int, **build: Any) -> Engine:
    manifest = fake_manifest(nextn=nextn, max_seq_len=1024, **build)
    return Engine(FakePrograms(manifest), manifest, fake_tokenizer())


def contender(nextn: int, **build: Any) -> Contender:
    verifier = fake_engine(nextn, **build) if nextn else None
    drafter = "mtp-eagle" if nextn else None
    return Contender(nextn, drafter, fake_engine(nextn, **build), verifier)


def report_of(measured: dict[int, Measured], made: list[Row]) -> Report:
    folders = {nextn: f"engines/fake_n{nextn}" for nextn in measured}
    return Report("fake", describe_machine(2), {"concurrency": 1}, folders, made, measured)


def made_by_hand() -> Report:
    measured = by_hand()
    return report_of(measured, rows([contender(0), contender(2)], measured))


# The arithmetic


def test_percentiles_are_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    values = [5.0, 1.0, 4.0, 2.5, 9.0, 7.0]
    for percent in (0, 2.5, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    assert percentile([3.0], 99) == 3
    assert spread([1.0, 3.0]) == {
        "mean": 2,
        "median": 2,
        "std": 1,
        "p50": 2,
        "p90": pytest.approx(2.8),
        "p99": pytest.approx(2.98),
    }


def test_figures_by_hand() -> None:
    base, fast = made_by_hand().rows
    assert base.overall.tokens_per_s == pytest.approx(8 / 16)
    assert base.overall.speedup == Ratio(1, 1, 1)
    assert (base.cost.v, base.cost.d, base.overall.predicted) == (1, 0, 1)
    assert (fast.cost.v, fast.cost.d) == (1.25, 0.25)
    assert fast.cost.draft_share == pytest.approx(1 / 6)
    code, talk, both = fast.kinds["code"], fast.kinds["talk"], fast.overall
    assert list(fast.kinds) == [ALL, "code", "talk"]
    assert code.tokens_per_s == pytest.approx(4 / 6)
    assert code.tokens_per_step == 2
    assert code.predicted == pytest.approx(2 / 1.5)
    assert code.speedup.value == pytest.approx((4 / 6) / (4 / 8))
    assert talk.speedup.value == pytest.approx((4 / 10) / (4 / 8))
    assert both.speedup.value == pytest.approx((8 / 16) / (8 / 16))
    assert both.speedup.low == pytest.approx(talk.speedup.value)  # only two requests to draw from
    assert both.speedup.high == pytest.approx(code.speedup.value)
    assert (code.ttft, code.e2el, code.itl) == ([4], [10], [3, 3])
    assert both.tpot == [pytest.approx(6 / 4), pytest.approx(10 / 4)]
    assert (both.requests, both.input_tokens, both.output_tokens) == (2, 8, 10)
    assert both.duration == 10 + 13
    assert both.same_output == 2


def test_acceptance_counts_all_steps() -> None:
    both = made_by_hand().rows[1].overall.drafting
    assert both.acceptance_histogram == [4, 3, 0]
    assert both.mean_acceptance_length == pytest.approx(1 + 3 / 7)
    assert both.per_position_acceptance_rates == [pytest.approx(3 / 7), 0]
    assert both.draft_acceptance_rate == pytest.approx(3 / 10)
    assert merged([drafting([2], 0)]).draft_acceptance_rate is None


def test_requests_that_ran_at_once_count_once() -> None:
    group = [sample("code", [1, 2, 4], [3], begun=0), sample("code", [1, 3, 5], [3], begun=0.5)]
    measured = {0: Measured([group], steps=[1.0])}
    (row,) = rows([contender(0)], measured)
    assert row.overall.duration == 5
    assert row.overall.tokens_per_s == pytest.approx(4 / 7)


def test_speedup_skips_draws_without_time() -> None:
    one = [sample("code", [1.0], [1])]
    two = [sample("code", [1.0, 2.0], [2])]
    assert speedup([one, two], [one, two]) == Ratio(1, 1, 1)


def test_nothing_to_time() -> None:
    measured = {0: Measured([[sample("code", [1.0], [1])]])}
    with pytest.raises(UsageError, match="no request gave two tokens"):
        rows([contender(0)], measured)


def row(nextn: int, **ratios: tuple[float, float, float]) -> Row:
    figures = made_by_hand().rows[1].overall
    names = {f.name: getattr(figures, f.name) for f in Figures.__dataclass_fields__.values()}
    kinds = {kind: Figures(**names | {"speedup": Ratio(*r)}) for kind, r in ratios.items()}
    return Row(nextn, "mtp-eagle" if nextn else None, Cost(1, 1.2, 1.5), kinds)


ONE = (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("rest", "nextn", "says"),
    [
        ([], 0, "only nextn 0 was measured"),
        (
            [row(1, all=(1.4, 1.3, 1.5)), row(3, all=(1.7, 1.6, 1.8))],
            3,
            "MTP pays: nextn 3, 1.70x (1.60..1.80); 1.60 tokens per step at 1.50 times the step's",
        ),
        ([row(1, all=(1.02, 0.9, 1.1))], 1, "MTP may pay, within the spread: nextn 1, 1.02x"),
        (
            [row(1, all=(0.8, 0.7, 0.9)), row(2, all=(0.6, 0.5, 0.7))],
            0,
            "MTP does not pay: nextn 0 is the fastest, then nextn 1, 0.80x (0.70..0.90)",
        ),
        (
            [
                row(2, all=(1.7, 1.6, 1.8), code=(1.5, 1.4, 1.6), talk=(1.8, 1.7, 1.9)),
                row(4, all=(1.6, 1.5, 1.7), code=(1.1, 1.0, 1.2), talk=(2.1, 2.0, 2.2)),
            ],
            2,
            "(talk: nextn 4, 2.10x)",
        ),
    ],
)
def test_recommendation(rest: list[Row], nextn: int, says: str) -> None:
    best, text = recommendation([row(0, all=ONE, code=ONE, talk=ONE), *rest])
    assert best == nextn
    assert says in text
    assert "\n" not in text


def test_disagreements() -> None:
    figures = made_by_hand().rows[1]
    assert figures.overall.predicted == pytest.approx(1.6 / 1.5)
    close, far = row(1, all=(1.1, 1.0, 1.2)), row(2, all=(1.3, 1.2, 1.4))
    assert disagreements([close]) is None
    assert "5 % apart: nextn 2 1.30x against 1.07x." in (disagreements([close, far]) or "")


# The requests


def test_the_built_in_prompts() -> None:
    asked = Asked(num_requests=96)
    groups = load_groups(asked, fake_engine(0, max_batch=2), 2)
    kinds = [group[0].kind for group in groups]
    assert kinds == ["code", "reasoning"] * 24
    assert all(p.kind == group[0].kind for group in groups for p in group)
    ids = [p.task_id for group in groups for p in group]
    assert len(set(ids)) == 96
    assert {p.params.max_tokens for group in groups for p in group} == {256}
    one_kind = load_groups(Asked("reasoning", output_len=7), fake_engine(0), 1)
    assert len(one_kind) == dataset.NUM_REQUESTS
    assert one_kind[0][0].params.max_tokens == 7


def test_groups() -> None:
    prompts = {"a": [prompt("a", i) for i in range(5)], "b": [prompt("b", i) for i in range(3)]}
    names = [[(p.kind, p.task_id) for p in group] for group in group_up(prompts, 2, None, None)]
    assert names == [[("a", 0), ("a", 1)], [("b", 0), ("b", 1)], [("a", 2), ("a", 3)]]
    assert len(group_up(prompts, 2, None, 3)) == 2
    assert len(group_up(prompts, 1, 4, None)) == 4
    for size, count, says in (
        (2, 3, "--num-requests 3 is not a multiple of --concurrency 2"),
        (1, 9, "--num-requests 9 is outside 1..8"),
        (1, 0, "--num-requests 0 is outside 1..8"),
        (6, None, "--concurrency 6 needs as many requests; the dataset has 5"),
    ):
        with pytest.raises(UsageError, match=says):
            group_up(prompts, size, count, None)


def test_input_len() -> None:
    short, long = prompt(length=3), prompt(length=7)  # [0, 2, 3] and [0, 2, 3, 4, 5, 6, 7]
    assert sized(long, 4, [], bos=0).token_ids == [0, 5, 6, 7]
    assert sized(long, 4, [], bos=None).token_ids == [4, 5, 6, 7]
    assert sized(long, 1, [], bos=0).token_ids == [7]
    assert sized(short, 6, [long], bos=0).token_ids == [0, 5, 6, 7, 2, 3]
    assert sized(short, 8, [short], bos=0).token_ids == [0, 3, 2, 3, 2, 3, 2, 3]


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_datasets_lines(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "mine.jsonl",
        {"task_id": 7, "input_ids": [5, 6, 7], "output_tokens": 9},
        {"task_id": "x", "prompt": "def f"},
    )
    (first,), (second,) = load_groups(Asked(str(path)), fake_engine(0), 1)
    assert (first.kind, first.task_id, first.token_ids) == ("mine", 7, [5, 6, 7])
    assert (first.params.max_tokens, second.params.max_tokens) == (9, dataset.OUTPUT_LEN)
    (cut,), _ = load_groups(Asked(str(path), input_len=2, output_len=3), fake_engine(0), 1)
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
        load_groups(Asked(str(tmp_path / "mine.jsonl"), **flags), fake_engine(0), 1)


# The measurement


@pytest.mark.parametrize("size", [1, 3])
def test_every_engine_gets_every_request(size: int) -> None:
    contenders = [contender(k, max_batch=size) for k in (0, 1, 3)]
    groups = [[prompt("code", size * i + j) for j in range(size)] for i in range(4)]
    seen = list[int]()
    measured = measure.measure(contenders, groups, seen.append)
    assert seen == [0, 1, 2, 3]
    for k, one in measured.items():
        assert [[s.prompt for s in group] for group in one.groups] == groups
        assert len(one.steps) == 4 * size * measure.TIMED_STEPS
        assert len(one.verify) == (len(one.steps) if k else 0)
        for s in (s for group in one.groups for s in group):
            assert s.drafting is not None
            assert s.drafting.num_spec_steps == len(s.times)
            assert len(s.token_ids) == 8
            assert s.begun <= s.times[0]
            assert s.times == sorted(s.times)
    made = rows(contenders, measured)
    assert [r.overall.same_output for r in made] == [4 * size] * 3
    lengths = [r.overall.drafting.mean_acceptance_length for r in made]
    assert lengths == [1, pytest.approx(9 / 5), 3]  # 8 tokens: 1+2+2+2+2, and 1+4+4, whole steps


def test_turns_go_round() -> None:
    contenders = [contender(k) for k in (0, 1, 2)]
    order = [[c.nextn for c in measure.rotated(contenders, i)] for i in range(4)]
    assert order == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


def test_contexts_lie_within_the_text() -> None:
    said = Sample(prompt(length=4), 0.0, token_ids=[11, 12, 13, 14])
    assert measure.contexts_within([said], 0.5, 99)[0].token_ids == [0, 2, 3, 4, 11, 12]
    assert measure.contexts_within([said], 0.5, 5)[0].token_ids == [0, 2, 3, 4, 11]
    assert measure.contexts_within([said], 0.5, -3)[0].token_ids == [0]


# What is written


def test_the_json() -> None:
    document = json.loads(json.dumps(to_json(made_by_hand())))
    assert document["recommended_nextn"] == 0
    assert {"cpu", "cores", "threads", "versions", "command"} <= set(document["machine"])
    assert document["machine"]["threads"] == 2
    assert "onnxruntime" in document["machine"]["versions"]
    base, fast = document["results"]
    for figures in (base, fast, base["kinds"]["talk"], fast["kinds"]["code"]):
        assert set(figures) >= VLLM_KEYS
    assert base["spec_decode_acceptance_rate"] is None
    assert fast["spec_decode_acceptance_rate"] == pytest.approx(30)
    assert fast["spec_decode_per_position_acceptance_rates"] == [pytest.approx(3 / 7), 0]
    assert fast["output_throughput"] == pytest.approx(10 / 23)
    assert fast["mean_ttft_ms"] == 3500
    assert fast["kinds"]["code"]["median_itl_ms"] == 3000
    assert fast["speedup"]["value"] == pytest.approx(1)
    assert (fast["verify_cost"], fast["draft_cost"]) == (1.25, 0.25)
    assert (fast["nextn"], fast["drafter"], fast["engine"]) == (2, "mtp-eagle", "engines/fake_n2")
    assert [r["kind"] for r in fast["requests"]] == ["code", "talk"]


def printed(report: Report, width: int) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(table(report, ALL))
    return out.getvalue()


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    report = made_by_hand()
    text = {
        line[:26].strip(): line[26:].split()
        for line in printed(report, 100).splitlines()
        if line.strip()
    }
    assert text["nextn"] == ["0", "2"]
    assert text["drafter"] == ["-", "eagle"]
    assert text["speedup over nextn 0"] == ["1.00x", "1.00x"]
    assert text["95 % interval"] == ["-", "0.80-1.33"]
    assert text["predicted, L / (v + d)"] == ["1.00x", "1.07x"]
    assert text["acceptance length"] == ["1.00", "1.43"]
    assert text["L: first step left out"] == ["1.00", "1.60"]
    assert text["accepted at position 1"] == ["0.43"]
    assert text["v: verify / nextn 0's step"] == ["1.00", "1.25"]
    assert text["d: draft / nextn 0's step"] == ["0.00", "0.25"]
    assert text["ms per step, median"] == ["2000.00", "3000.00"]
    assert text["drafting's share"] == ["0", "%", "17", "%"]
    assert text["ms per output token, p90"] == ["2000.00", "2400.00"]
    assert text["ms to first token, p50"] == ["2500.00", "3500.00"]
    print_report(report)
    everything = capsys.readouterr().out
    assert all(f"fake, {kind}: " in everything for kind in ("code", "talk", "all"))
    assert "2 threads" in everything
    assert recommendation(report.rows)[1].split(";")[0] in everything


def test_the_picture(tmp_path: Path) -> None:
    picture.draw(made_by_hand().rows, tmp_path / "x.png", "title", "note")
    data = (tmp_path / "x.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(data[16:20], "big") > 1000  # pixels wide


def test_matplotlib_is_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'mtpbuild\[bench\]'"):
        bench(BenchRequest(Wanted("deepseek-tiny", (0,)), out=tmp_path / "out"))
    assert not any(tmp_path.iterdir())


# Where engines are built


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def folders(model: Path, *nextn: int, **flags: Any) -> list[str]:
    built = engines.build_engines(Wanted(str(model), nextn, **flags), Stages())
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
    assert folders(smallest, 1, drafter="mtp-eagle") == [
        "engines/.bench/small_n0_mtp-eagle_b1",
        "engines/.bench/small_n1_mtp-eagle_b1",
        "engines/.bench/small_n1_none_b1",
    ]


@pytest.mark.usefixtures("here", "quick")
def test_the_users_engines_are_left_alone(smallest: Path) -> None:
    build(BuildRequest(str(smallest), (0,), max_seq_len=40))
    assert folders(smallest, 0) == ["engines/.bench/small_n0_default_b1"]
    Path("engines/small_n1").mkdir()
    assert folders(smallest, 1)[1] == "engines/.bench/small_n1_default_b1"


# The command


def invoke(*args: str | Path) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", *map(str, args)], env={"COLUMNS": "300"})
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.stdout, done.stderr


def test_frozen_flags() -> None:
    command = typer.main.get_command(app).commands["bench"]  # type: ignore[attr-defined]
    assert sorted(flag for option in command.params for flag in option.opts) == [
        "--concurrency",
        "--dataset",
        "--drafter",
        "--input-len",
        "--json",
        "--model",
        "--nextn",
        "--num-requests",
        "--out",
        "--output-len",
        "--threads",
    ]


@pytest.fixture
def lines_file(here: Path) -> Path:
    lines = [{"task_id": i, "input_ids": [5, 6, 7 + i], "output_tokens": 12} for i in range(4)]
    return write_lines(here / "ids.jsonl", *lines)


@pytest.fixture
def fake_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(folder: Path, manifest: Manifest, threads: int | None = None) -> FakePrograms:
        return FakePrograms(manifest, next_token=small_tokens)

    monkeypatch.setattr(engine_module, "load_programs", load)


@pytest.mark.usefixtures("quick", "fake_programs")
def test_the_command(smallest: Path, lines_file: Path) -> None:
    flags = ("--model", smallest, "--nextn", "1,3", "--dataset", lines_file)
    code, out, err = invoke(*flags, "--out", "results", "--concurrency", "2")
    assert (code, err) == (0, "")
    assert "small, ids: 4 requests, 12 prompt and 48 output tokens, concurrency 2" in out
    assert "same output as nextn 0" in out
    assert out.count("4 of 4") == 3
    assert "wrote results/bench.json and its picture" in out
    document = json.loads(Path("results/bench.json").read_text())
    assert [r["nextn"] for r in document["results"]] == [0, 1, 3]
    assert document["settings"]["num_requests"] == 4
    assert Path("results/bench.png").read_bytes().startswith(b"\x89PNG")
    code, out, err = invoke(*flags, "--out", "results", "--num-requests", "1", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["settings"]["num_requests"] == 1


@pytest.mark.usefixtures("quick", "fake_programs")
@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("--nextn 0,x", 2, "--nextn '0,x' is not a list of numbers such as 0,1,2,3"),
        ("--nextn 0,99", 2, "--nextn 99 is outside 0..15"),
        ("--nextn 1 --drafter none", 2, "--drafter none is unknown; supported: mtp-eagle"),
        ("--nextn 2 --drafter mtp-vanilla", 2, "needs 2 MTP modules for --nextn 2"),
        ("--nextn 0 --concurrency 0", 2, "--concurrency 0 is outside 1.."),
        ("--nextn 0 --dataset none.jsonl", 2, "none.jsonl: no such file; built in: code, reas"),
        ("--nextn 0", 2, "this engine was built without a tokenizer"),
        ("--nextn 0 --threads 0", 2, "threads must be a number from 1, not 0"),
        ("--nextn 0 --out ids.jsonl", 2, "--out ids.jsonl: can't write there"),
        ("--model nowhere", 2, "'nowhere' is neither a recipe nor a checkpoint folder"),
        ("--model .", 1, "no config.json"),
    ],
)
def test_errors_are_one_line(
    flags: str, code: int, says: str, smallest: Path, lines_file: Path
) -> None:
    model = () if "--model" in flags else ("--model", smallest)
    found, out, err = invoke(*model, *flags.split())
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1


def test_real_engines(smallest: Path, lines_file: Path) -> None:
    """All of it, on a random model: nothing is faked, and drafting changes no token."""
    wanted = Wanted(str(smallest), (1,))
    report = bench(BenchRequest(wanted, Asked(str(lines_file), num_requests=2), 1, Path("out")))
    assert [r.overall.same_output for r in report.rows] == [2, 2]
    assert report.rows[1].overall.drafting.num_draft_tokens > 0
    assert len(report.measured[1].verify) == len(report.measured[1].steps)
    assert (Path("out") / "bench.png").exists()
