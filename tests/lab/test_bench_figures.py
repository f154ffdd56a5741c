"""The arithmetic of `mtpbuild bench` against figures made by hand, and how it is written down."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.cli.shared import print_written_results
from mtpbuild.builder.plan.plan import Nextn
from mtpbuild.lab.bench.figures import (
    NextnResult,
    find_disagreements,
    make_rows,
    recommend_nextn,
)
from mtpbuild.lab.bench.measure import Measurements
from mtpbuild.lab.bench.report import (
    list_pictures,
    list_rows,
    make_bench_json,
    plot_steps,
    print_benchmark,
)
from mtpbuild.lab.measure.statistics import (
    ALL,
    Estimate,
    compute_speedup,
    sum_drafting,
    summarise,
)
from mtpbuild.lab.show.results import check_writable, write_results
from mtpbuild.runtime.errors import UsageError
from tests.support.bench_samples import answer, by_hand, contender, made_by_hand
from tests.support.stand_ins import importing

VLLM_KEYS = {
    f"{s}_{m}_ms"
    for s, m in product(("mean", "median", "std", "p99"), ("ttft", "tpot", "itl", "e2el"))
} | {
    "output_throughput",
    *(f"spec_decode_{x}" for x in ("acceptance_length", "acceptance_rate")),
    "spec_decode_per_position_acceptance_rates",
}


def test_a_spread() -> None:
    found = summarise([1.0, 3.0])
    assert list(found) == ["mean", "median", "std", "p50", "p90", "p99"]
    assert [*found.values()] == pytest.approx([2, 2, 1, 2, 2.8, 2.98])


def test_figures_by_hand() -> None:
    base, fast = made_by_hand().rows
    assert base.overall["user_tokens_per_s"] == pytest.approx(8 / 16)
    assert base.speedup() == Estimate(1, 1, 1)
    costs = ("verify_cost", "draft_cost", "predicted_speedup")
    assert [base.overall[name] for name in costs] == [1, 0, 1]
    code, talk, both = fast.kinds["code"], fast.kinds["talk"], fast.overall
    assert [both[name] for name in ("step_cost", *costs[:2])] == [1.5, 1.25, 0.25]
    assert both["draft_share"] == pytest.approx(1 / 6)
    assert list(fast.kinds) == [ALL, "code", "talk"]
    assert code["user_tokens_per_s"] == pytest.approx(4 / 6)
    assert code["tokens_per_step"] == 2
    assert code["predicted_speedup"] == pytest.approx(2 / 1.5)
    assert code["speedup"]["value"] == pytest.approx((4 / 6) / (4 / 8))
    assert talk["speedup"]["value"] == pytest.approx((4 / 10) / (4 / 8))
    assert fast.speedup().value == pytest.approx((8 / 16) / (8 / 16))
    assert fast.speedup().low == pytest.approx(fast.speedup("talk").value)  # two to draw from
    assert fast.speedup().high == pytest.approx(fast.speedup("code").value)
    assert [code[f"median_{name}_ms"] for name in ("ttft", "e2el", "itl")] == [4000, 10000, 3000]
    assert (both["p50_tpot_ms"], both["std_tpot_ms"]) == (pytest.approx(2000), pytest.approx(500))
    counts = ("completed", "total_input_tokens", "total_output_tokens", "duration")
    assert [both[name] for name in counts] == [2, 8, 10, 10 + 13]
    assert both["same_output_as_nextn_0"] == 2


def test_acceptance_counts_all_steps() -> None:
    (first, second) = by_hand()[2].groups
    both = sum_drafting([*first, *second])
    assert both.acceptance_histogram == [4, 3, 0]
    assert both.mean_acceptance_length == pytest.approx(1 + 3 / 7)
    assert both.per_position_acceptance_rates == [pytest.approx(3 / 7), 0]
    assert both.draft_acceptance_rate == pytest.approx(3 / 10)
    assert sum_drafting([answer("code", [1, 2], [2])]).draft_acceptance_rate is None


def test_requests_that_ran_at_once_count_once() -> None:
    group = [answer("code", [1, 2, 4], [3], begun=0), answer("code", [1, 3, 5], [3], begun=0.5)]
    measured: dict[Nextn, Measurements] = {0: Measurements([group], steps=[1.0])}
    (row,) = make_rows([contender(0)], measured)
    assert row.overall["duration"] == 5
    assert row.overall["user_tokens_per_s"] == pytest.approx(4 / 7)


def test_speedup_skips_draws_without_time() -> None:
    one = [answer("code", [1.0], [1])]
    two = [answer("code", [1.0, 2.0], [2])]
    assert compute_speedup([one, two], [one, two]) == Estimate(1, 1, 1)
    assert compute_speedup([two], [two]) == Estimate(1, None, None)
    assert Estimate(1, None, None).interval == "-"


def test_nothing_to_time() -> None:
    measured: dict[Nextn, Measurements] = {0: Measurements([[answer("code", [1.0], [1])]])}
    with pytest.raises(UsageError, match="no request gave two tokens"):
        make_rows([contender(0)], measured)


def row(nextn: int, **ratios: tuple[float, float, float]) -> NextnResult:
    figures = made_by_hand().rows[1].overall
    kinds = {kind: figures | {"speedup": Estimate(*r)._asdict()} for kind, r in ratios.items()}
    return NextnResult(nextn, "mtp-eagle" if nextn else None, kinds)


ONE = (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("rest", "nextn", "says"),
    [
        ([], 0, "only nextn 0 was measured"),
        (
            [row(1, all=(1.4, 1.3, 1.5)), row(3, all=(1.7, 1.6, 1.8))],
            3,
            "MTP pays: nextn 3, 1.70x (1.60-1.80); 1.60 tokens per step at 1.50 times the step's",
        ),
        ([row(1, all=(1.02, 0.9, 1.1))], 1, "MTP may pay, too few requests to be sure: nextn 1, 1"),
        (
            [row(1, all=(0.8, 0.7, 0.9)), row(2, all=(0.6, 0.5, 0.7))],
            0,
            "MTP does not pay: nextn 0 is the fastest, then nextn 1, 0.80x (0.70-0.90)",
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
def test_recommendation(rest: list[NextnResult], nextn: int, says: str) -> None:
    best, text = recommend_nextn([row(0, all=ONE, code=ONE, talk=ONE), *rest])
    assert best == nextn
    assert says in text
    assert "\n" not in text


def test_disagreements() -> None:
    figures = made_by_hand().rows[1]
    assert figures.overall["predicted_speedup"] == pytest.approx(1.6 / 1.5)
    close, far = row(1, all=(1.1, 1.0, 1.2)), row(2, all=(1.3, 1.2, 1.4))
    assert find_disagreements([close]) is None
    assert "5 % apart: nextn 2 1.30x against 1.07x." in (find_disagreements([close, far]) or "")


# What is written


def test_the_json() -> None:
    document = json.loads(json.dumps(make_bench_json(made_by_hand())))
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


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    report = made_by_hand()
    text = {str(name).strip(): [*map(str, cells)] for name, *cells in list_rows(report, ALL)}
    wanted = {
        "nextn": "0 2",
        "drafter": "- eagle",
        "speedup over nextn 0": "1.00x 1.00x",
        "95 % interval": "- 0.80-1.33",
        "predicted, L / (v + d)": "1.00x 1.07x",
        "acceptance length": "1.00 1.43",
        "L: first step left out": "1.00 1.60",
        "accepted at position 1": " 0.43",
        "v: verify / nextn 0's step": "1.00 1.25",
        "d: draft / nextn 0's step": "0.00 0.25",
        "ms per step, median": "2000.00 3000.00",
        "drafting's share": "0 % 17 %",
        "ms per output token, p90": "2000.00 2400.00",
        "ms to first token, p50": "2500.00 3500.00",
    }
    assert {name: " ".join(text[name]) for name in wanted} == wanted
    print_benchmark(report)
    everything = capsys.readouterr().out
    assert all(f"fake, {kind}: " in everything for kind in ("code", "talk", "all"))
    assert "2 threads" in everything
    assert recommend_nextn(report.rows)[1].split(";")[0] in everything


def test_without_matplotlib_there_are_figures_and_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with importing({"matplotlib": None}):
        check_writable(tmp_path / "out")
        write_results(tmp_path / "out", "bench", make_bench_json(made_by_hand()))
        pictures = list_pictures([made_by_hand()])
        path = tmp_path / "out" / "bench.json"
        print_written_results(path, False, lambda: print("tables"), pictures)
    printed = capsys.readouterr()
    assert printed.out == f"tables\nwrote {tmp_path / 'out' / 'bench.json'}\n"
    assert printed.err.startswith("note: pictures need matplotlib, which is not installed: pip ")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"bench.json"}


def test_the_picture_of_steps_has_all_of_them() -> None:
    """Each nextn's shares add up to 1, and its accepted drafts are those of the table."""
    report = made_by_hand()
    times, rates = plot_steps(report).panels
    heights: list[Any] = [line.y for line in times.lines]
    assert [sum(each) for each in heights] == pytest.approx([1, 1])
    name = "spec_decode_per_position_acceptance_rates"
    assert [line.y for line in rates.lines] == [row.overall[name] for row in report.rows]
    assert rates.lines[1].y
