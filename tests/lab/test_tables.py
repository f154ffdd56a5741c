"""What the commands print at several widths: no figure, unit or name is cut; pipes are wide."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mtpbuild.builder.cli.tables import print_engines, print_fitting, print_quantized
from mtpbuild.builder.compiler.build import BuiltEngine
from mtpbuild.builder.compiler.quantize import Portion, Quantized
from mtpbuild.builder.plan.machine import Disk, Machine
from mtpbuild.lab.bench.report import print_benchmark, print_benchmarks
from mtpbuild.lab.eval.report import Evaluation, make_rows, print_evaluation
from mtpbuild.lab.eval.study import Bin, TraceStudy, print_study
from mtpbuild.lab.forecast.cpu import forecast_cpu, print_cpu_forecast
from mtpbuild.lab.forecast.fitting import FittingEngine
from mtpbuild.lab.forecast.forecast import ForecastRequest, forecast
from mtpbuild.lab.forecast.report import print_forecast
from mtpbuild.lab.measure.compare import Finding
from mtpbuild.lab.verify.checks import CHECKS
from mtpbuild.lab.verify.verify import Verification, print_verification
from mtpbuild.runtime.cli.engines import ListedEngine, print_engine_list
from mtpbuild.runtime.trace.lines import TraceFile
from tests.support.bench_samples import graded_answers, made_by_hand
from tests.support.fakes import fake_manifest

MACHINE = Machine(25 * 10**9, 24 * 10**9, Disk(1, 70 * 10**9), Disk(2, 7 * 10**9))
CPU = ForecastRequest("gigachat3-10b-a1.8b-bf16", (0, 1, 2, 3, 4, 5), bandwidth=20)


def print_fitted() -> None:
    found = forecast_cpu(CPU, MACHINE)
    print_fitting(
        [FittingEngine(found, engine) for engine in found.engines if engine.fits], 2e10, False
    )


def print_evaluated() -> None:
    forms = {"arithmetic": "333", "sorting of many": "31"}
    problems = [a for form in forms for a in graded_answers(form, forms[form], [1, 3, 5])]
    rows = make_rows({"strict": problems, "10 / 0.6": problems[::-1]})
    settings = {"task": "reasoning", "num_problems": 5}
    print_evaluation(Evaluation("e", fake_manifest(), {}, settings, rows))


def print_studied() -> None:
    bins = [Bin(0.001234, 123456.0, 9.0, 1234567, 1234000), Bin(2e5, 2e5, 2e5, 10, 9)]
    trace = TraceFile(Path("traces/of/yesterday.jsonl"), {}, complete=True)
    print_study([TraceStudy(trace, [], {"entropy": bins})])


def print_verified() -> None:
    details = "log-probabilities of the same tokens are up to 0.0123 apart: [build] other weights"
    findings = zip([True, False, None] * 4, CHECKS, strict=False)
    checks = {name: Finding(passed, details) for passed, name in findings}
    print_verification(Verification(Path("engines/e"), fake_manifest(), Path("engines/n0"), checks))


def print_listed() -> None:
    name = "qwen3.5_4b_n3_int4_with_a_long_name"
    engine = ListedEngine(name, "qwen", "3", "int4", size=10**9, context=131_072, last_use=0)
    print_engine_list([engine])


def print_built() -> None:
    name = Path("engines/qwen3.5_4b_n3_int4")
    formats = "trunk int4, head and MTP module as in the checkpoint, embedding bfloat16, and so on"
    print_engines([BuiltEngine(name, fake_manifest(), unchanged=True, formats=formats)])


def print_written() -> None:
    portions = {"int4": Portion(1234, 123_456_789), "as in the checkpoint": Portion(9, 1000)}
    print_quantized(Quantized(Path("a/folder"), portions, ["model.layers.0.norm.weight"], 12345))


PRINTED: dict[str, Callable[[], None]] = {
    "bench": lambda: print_benchmark(made_by_hand()),
    "bench --concurrency 1,2": lambda: print_benchmarks([made_by_hand(), made_by_hand(2)]),
    "build": print_built,
    "eval": print_evaluated,
    "list": print_listed,
    "plan": lambda: print_forecast(forecast(ForecastRequest("mimo-7b-rl", (0, 1, 2, 3)))),
    "plan --cpu": lambda: print_cpu_forecast(forecast_cpu(CPU, MACHINE)),
    "quantize": print_written,
    "recipes --fits": print_fitted,
    "study": print_studied,
    "verify": print_verified,
}


def list_words(text: str) -> set[str]:
    return {word.rstrip(":") for word in text.replace("─", " ").split()}


@pytest.mark.parametrize("command", PRINTED)
def test_nothing_is_cut(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At every width there are the same words; in cells a figure stands beside its unit."""

    def read(width: int) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        PRINTED[command]()
        return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)

    piped = read(80)
    assert read(40) == piped
    assert max(map(len, piped.splitlines())) > 80 or command in ("bench --concurrency 1,2", "study")
    cells = {cell for line in piped.splitlines() for cell in re.split(r" {2,}", line)}
    figures = {cell for cell in cells if re.fullmatch(r"[\d.,]+ \w+|[\d.,]+ %", cell)}
    monkeypatch.setenv("FORCE_COLOR", "1")
    for width in (80, 40):
        shown = read(width)
        assert max(map(len, shown.splitlines())) <= width
        assert "…" not in shown
        assert list_words(shown) == list_words(piped)
        assert all(figure in shown for figure in figures)
