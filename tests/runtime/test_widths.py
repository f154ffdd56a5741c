"""Help and tables at 80 and 40 columns and in a pipe: nothing is cut, and a pipe is not wrapped."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mtpbuild.builder.cli import app
from mtpbuild.builder.plan.machine import Disk, Machine
from mtpbuild.builder.plan.recipe import load_recipes
from mtpbuild.lab.forecast.fitting import find_fitting
from mtpbuild.runtime.files import format_size
from tests.support.run_command import ScreenRunner

COMMANDS = {**typer.main.get_command(app).commands}  # type: ignore[attr-defined]
COMMANDS |= {f"prefix {name}": command for name, command in COMMANDS["prefix"].commands.items()}
WIDTHS = [80, 40, None]
PANELS = {
    "run": "Arguments Prompt Sampling Drafts Output Engine Target Target Other Options",
    "build": "Model Weights Drafts Engine Output Ranks Target Target Target Other Options",
    "bench": "Options Requests Sampling Drafts Engine Output Target Target Target Other",
}


def show(args: Sequence[object], width: int | None) -> str:
    """Return what a command prints on a terminal of this width, or in a pipe."""
    runner = CliRunner() if width is None else ScreenRunner()
    environment = {"COLUMNS": str(width or 40), "TERM": "xterm", "NO_COLOR": "1"}
    done = runner.invoke(app, [str(arg) for arg in args], env=environment)
    assert done.exit_code == 0, done.output
    shown = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert "…" not in shown
    assert not re.search(r"\w\.\.\.", shown.replace("traces...", ""))  # of the usage
    return shown


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_whole(command: str | None, width: int | None) -> None:
    shown = show([*(command or "").split(), "--help"], width)
    parameters = COMMANDS[command].params if command else []
    names = [name for parameter in parameters for name in parameter.opts]
    flags = ["--help", *(name for name in names if name.startswith("-"))]
    assert all(re.search(rf"(^|[ ,]){flag}([ ,\n]|$)", shown) for flag in flags)
    lines = shown.splitlines()
    wide = [line for line in lines if len(line) > (width or 10_000)]
    assert [line for line in wide if not line.lstrip().startswith("-")] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_in_a_pipe_has_a_line_for_each_flag(command: str) -> None:
    shown = show([*command.split(), "--help"], None)
    assert all((parameter.help or "") in shown for parameter in COMMANDS[command].params)


@pytest.mark.parametrize("command", PANELS)
def test_flags_are_in_groups(command: str) -> None:
    lines = show([command, "--help"], 80).splitlines()
    titles = [line.split()[0].rstrip(":") for line in lines if re.match(r"[A-Z].*:$", line)]
    assert " ".join(titles) == PANELS[command]


@pytest.mark.parametrize("width", WIDTHS)
def test_recipes_are_a_line_each(width: int | None) -> None:
    lines = show(["recipes"], width).splitlines()
    assert [re.split("  +", line) for line in lines] == [
        [r.name, r.summary] for r in load_recipes()
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_recipes_that_fit_have_whole_figures(
    width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(1, 70 * 10**9)
    machine = Machine(8 * 10**9, 7 * 10**9, disk, disk)
    monkeypatch.setattr("mtpbuild.builder.plan.machine.measure_machine", lambda: machine)
    monkeypatch.setattr("mtpbuild.lab.measure.host.measure_bandwidth", lambda: 20e9)
    shown = show(["recipes", "--fits"], width)
    for row in find_fitting(load_recipes(), machine, 20e9):
        assert row.forecast.name in shown
        sizes = row.forecast.download, row.engine.bytes
        assert all(format_size(size) in shown for size in sizes)
        assert f" {row.engine.context:,}" in shown
    lines = len(shown.splitlines())
    assert width is not None or lines == 4 + len(find_fitting(load_recipes(), machine, 20e9))


@pytest.mark.parametrize("width", WIDTHS)
def test_engines_have_whole_names_and_figures(
    width: int | None, engine_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(engine_dir.parent)
    name = "qwen3.5_4b_n3_int4_with_a_long_name"
    shutil.copytree(engine_dir, Path("engines") / name)
    shown = show(["list"], width)
    facts = "fake", "float32", " MB", " 64", "now"
    assert all(fact in shown for fact in facts)
    assert name in shown
    lines = [line for line in shown.splitlines() if name in line]
    assert width is not None or all(fact in lines[0] for fact in facts)
    shown = show(["inspect", engine_dir], width)
    parts = "DeepseekV3ForCausalLM", "mtp-eagle", "decode.onnx", "weights.safetensors", "1,900"
    assert all(part in shown for part in parts)
