"""README.md and docs/: their commands are ones, run as they stand, and print what is said.

In front of a block `<!-- not run: WHY -->` says why its commands are only parsed, `<!-- long:
WHY -->` that `make test-full` runs them, and `<!-- file: NAME -->` that commands read it as a file.
"""

import ast
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.exceptions import TyperException

from mtpbuild.builder.cli import app
from mtpbuild.runtime import Engine, RequestMetrics, Result, SpeculativeDecoding
from mtpbuild.runtime.contract.manifest import BuildInfo, Manifest, TargetInfo
from tests.support.fake_target import quick_target
from tests.support.forecasts import counted_once
from tests.support.inductor_engines import touch
from tests.support.invoke import invoke
from tests.support.live_server import live
from tests.support.scripts import load_script

pytestmark = pytest.mark.xdist_group("tiny")  # another worker would wait for the same engines
ROOT = Path(__file__).parents[1]
NAME = re.compile(r"`(\w+)`")
SERVER = "http://127.0.0.1:8000"
OF_A_RULE = re.compile(r" --typical-\w+ [\d.]+")  # what the package tests/support/typical.py brings
# Commands that are looked at and never run, in whatever block they stand.
ELSEWHERE = {
    "pip": "it would change the environment; tests/test_project.py holds the extras",
    "hf": "it needs the network",
    "python3": "it would make an environment; pip and the shell's `.` would change this one",
    ".": "see python3",
}


figures = load_script(ROOT / "tools/docs_figures.py")
DOCUMENTS: tuple[Path, ...] = figures.DOCUMENTS
BLOCKS: list[Any] = [block for path in DOCUMENTS for block in figures.blocks(path)]
NAMES = [path.name for path in DOCUMENTS]


def of(document: str, *marks: str | None) -> list[Any]:
    """List a document's blocks with one of these marks."""
    return [block for block in BLOCKS if block.document.name == document and block.mark in marks]


def documents(language: str, *marks: str | None) -> list[Any]:
    """List the documents that have such blocks."""
    found = {b.document.name for b in BLOCKS if b.language == language and b.mark in marks}
    return sorted(found)


def test_every_block_says_what_it_is() -> None:
    known = {"bash", "console", "diff", "json", "python", "text", "toml", "yaml"}
    assert [str(block) for block in BLOCKS if block.language not in known] == []
    fences = sum(len(re.findall(r"(?m)^ *```", path.read_text())) for path in DOCUMENTS)
    assert 2 * len(BLOCKS) == fences  # the expression finds them all
    commands = [block for block in BLOCKS if block.language in ("bash", "console")]
    assert len(commands) > 50
    assert sum(block.mark is None for block in commands) > 20


def test_diffs_stand_in_the_tree() -> None:
    parts = [p for b in BLOCKS if b.language == "diff" for p in b.text.split("+++ ")[1:]]
    assert len(parts) == 3
    for file, *lines in map(str.splitlines, parts):
        assert "\n".join(line[1:] for line in lines) in (ROOT / file).read_text(encoding="utf-8")


def test_every_page_has_its_line() -> None:
    """docs/README.md leads to all pages."""
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = {path.name for path in DOCUMENTS if f"]({path.name}" not in text} - {"README.md"}
    assert missing == set()


def test_pages_have_their_size() -> None:
    """The ways in are 60 lines at most, benchmarks 150; a cell of the status is a glance."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    lines = {name: text.count("\n") for name, text in pages.items()}
    assert max(lines[name] for name in lines if name.startswith("start-")) <= 60
    assert lines["benchmarks.md"] <= 150
    assert lines["glossary.md"] <= 35
    seen = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", pages["status.md"])  # links by their words
    cells = [cell for line in seen.splitlines() if line[:1] == "|" for cell in line.split(" | ")]
    assert [cell for cell in cells if len(cell.strip("| ")) > 200] == []


def parse(command: str) -> None:
    """Parse a command of mtpbuild as the program does; raise TyperException."""
    group: Any = typer.main.get_command(app)
    name, *args = shlex.split(command)[1:] or ["--help"]
    if name.startswith("-"):
        assert name in ("--help", "--version")
        return
    assert name in group.commands
    with group.make_context("mtpbuild", [name, *args]) as context:
        group.commands[name].make_context(name, args, parent=context)


def flags_of(command: str) -> set[str]:
    group: Any = typer.main.get_command(app)
    return {name for option in group.commands[command].params for name in option.opts}


def check(command: str) -> None:
    """Fail for a command that can't be meant: unknown flags, scripts, targets, files."""
    words = shlex.split(OF_A_RULE.sub("", command))
    if "mtpbuild" in words:
        parse(shlex.join(words[words.index("mtpbuild") :]))
        return
    match words:
        case ["python", "-m", module, *_]:
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
        case ["python", script, *flags]:
            code = (ROOT / script).read_text(encoding="utf-8")
            for flag in flags:
                assert not flag.startswith("--") or f'"{flag.partition("=")[0]}"' in code, flag
        case ["torchrun", "--nproc-per-node", _, *rest]:
            check(shlex.join(["python", *rest]))
        case ["node", script, *_]:
            assert (ROOT / script).is_file()
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case (
            ["python3", "-m", "venv", *_]
            | [".", _]
            | ["pip", "install", *_]
            | ["serve", "run", _]
            | ["curl" | "echo" | "hf" | "lm_eval" | "rsync", *_]
            | ["cc" | "npm" | "./generate", *_]
        ):
            pass
        case [script, *_] if script.startswith("tools/"):
            assert (ROOT / script).is_file()
        case ["pytest", *rest]:
            assert all((ROOT / word).exists() for word in rest if word.startswith("tests/"))
        case _:
            pytest.fail(f"nobody knows whether this is a command: {command}")


@pytest.mark.parametrize("document", NAMES)
def test_commands_are_commands(document: str) -> None:
    for block in of(document, None, "long", "not run"):
        if block.language in ("bash", "console"):
            for command in block.commands:
                try:
                    check(command)
                except (TyperException, AssertionError) as error:
                    pytest.fail(f"{block}: {command}: {error}")


@pytest.mark.parametrize("document", NAMES)
def test_commands_in_sentences_have_these_flags(document: str) -> None:
    """`mtpbuild COMMAND --flag` in a line of text: command and flags are there."""
    text = (ROOT / "docs" / document if document != "README.md" else ROOT / document).read_text()
    for output in re.findall(r"`mtpbuild (\w[\w-]*)([^`]*)`", text.replace("\n", " ")):
        command, rest = output
        group: Any = typer.main.get_command(app)
        assert command in group.commands, output
        wrong = set(re.findall(r"(?<![\w'-])--[a-z][a-z-]*", rest)) - flags_of(command)
        assert not wrong - {"--help"}, output


@pytest.fixture(scope="module")
def used(
    tmp_path_factory: pytest.TempPathFactory, tiny_engine: Callable[..., Path]
) -> Iterator[Path]:
    """Yield a folder with the engines that documents run."""
    folder = tmp_path_factory.mktemp("used")
    (folder / "engines").mkdir()
    for nextn in (0, 3):
        (folder / "engines" / f"tiny_n{nextn}").symlink_to(tiny_engine(nextn))
    with contextlib.chdir(folder), counted_once():
        yield folder


def write_files(document: str) -> None:
    for block in of(document, "file"):
        Path(block.why).write_text(block.text, encoding="utf-8")


@pytest.mark.parametrize("document", documents("bash", None))
def test_commands_run(document: str, used: Path, tmp_path: Path) -> None:
    """Builds are made up to the compiler, in a folder of their own; all else is as for a user."""
    write_files(document)
    for block in of(document, None):
        for command in block.commands if block.language == "bash" else ():
            run_here(command, tmp_path)


def run_here(command: str, builds: Path) -> None:
    name, *args = shlex.split(command)
    if name in ELSEWHERE:
        return
    if name == "curl":
        run_curl(args)
        return
    assert name == "mtpbuild", command
    if args[0] in ("build", "quantize"):
        files = [path for path in Path.cwd().iterdir() if path.is_file()]
        for path in files:
            shutil.copy(path, builds)
        with contextlib.chdir(builds), contextlib.ExitStack() as stack:
            stack.enter_context(quick_target("onnxruntime"))
            stack.enter_context(quick_target("inductor", lower=touch))
            code, out, err = invoke(*args)
    else:
        code, out, err = invoke(*args)
    assert code == 0, f"{command}: {err}"
    assert out


def run_curl(args: list[str]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with Engine.load("engines/tiny_n3", threads=1) as engine, live(engine) as server:
        words = [word.replace(SERVER, server.url) for word in args]
        done = subprocess.run(["curl", "-sSf", *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"choices"' in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("document", documents("bash", "long"))
def test_long_commands_run(document: str, used: Path) -> None:
    write_files(document)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for block in of(document, "long"):
        for command in block.commands if block.language == "bash" else ():
            run = ["bash", "-c", command]
            done = subprocess.run(run, env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{block}: {command}\n{done.stderr}"


@pytest.mark.parametrize("document", documents("python", None))
def test_python_runs(document: str, used: Path) -> None:
    """The examples of a document are one program; its server is at the address that they name."""
    pieces = [b.text for b in of(document, None) if b.language == "python"]
    program = "\n".join(pieces)
    ast.parse(program)
    if SERVER not in program:
        exec(compile(program, document, "exec"), {"__name__": "example"})
        return
    with Engine.load("engines/tiny_n3", threads=1) as engine, live(engine) as server:
        code = program.replace(SERVER, server.url)
        exec(compile(code, document, "exec"), {"__name__": "example"})


@pytest.mark.parametrize(
    ("document", "kinds"),
    [("engine-format.md", (Manifest, BuildInfo, TargetInfo)),
     ("cli-json.md", (Result, RequestMetrics, SpeculativeDecoding))],
)  # fmt: skip
def test_every_field_has_its_line(document: str, kinds: tuple[type[Any], ...]) -> None:
    """A row begins with each field, or is `target`'s; one is not printed, two are headings."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    cells = re.findall(r"(?m)^\| `target` .+|^\|[^|]+", text)
    named = {name for cell in cells for name in NAME.findall(cell)}
    fields = {name for kind in kinds for name in kind.__annotations__}
    assert fields - {"from_draft", "metrics", "speculative_decoding"} <= named


@pytest.mark.parametrize("mark", [None, pytest.param("long", marks=pytest.mark.full)])
@pytest.mark.parametrize("document", NAMES)
def test_figures_are_what_commands_print(document: str, mark: str | None, used: Path) -> None:
    path = next(path for path in DOCUMENTS if path.name == document)
    found = figures.differences(path, figures.rewritten(path, [mark]))
    assert not found, "python tools/docs_figures.py writes them:\n" + "\n".join(found)


def test_a_wrong_figure_is_found(used: Path, tmp_path: Path) -> None:
    right = (
        "$ mtpbuild build --model deepseek-tiny --nextn 16\nerror: --nextn 16 is outside 0..15\n"
    )
    wrong = f"```console\n{right.replace('15', '16')}```\n\n<!-- figures: cpu_engines -->\nx\n"
    copy = tmp_path / "wrong.md"
    copy.write_text(f"{wrong}<!-- end of figures -->\n")
    text = figures.rewritten(copy, [None])
    assert right in text
    assert figures.cpu_engines() in text
