"""A target that this package does not know: found by its entry point, built, run, refused."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import UsageError
from tests.reference.recompute import greedy
from tests.support.fake_target import quick_target
from tests.support.installed import ROOT
from tests.support.installed import installed as package
from tests.support.requests import build, build_request

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export.load's


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the target."""
    at, folder = "tests.support.toy_target:TOY", tmp_path_factory.mktemp("site-packages")
    with package(folder, "mtpbuild.targets", "toy", at):
        yield folder


@pytest.mark.usefixtures("installed", "quick")
@pytest.mark.parametrize("nextn", [0, pytest.param(1, marks=pytest.mark.full)])
def test_it_is_built_and_run(nextn: int, smallest: Path, tmp_path: Path) -> None:
    """The tokens are the plain model's, whatever is drafted; sampling has its program too.

    Its options at load are its own.
    """
    request = build_request(smallest, (nextn,), target="toy", out=tmp_path / "toy", toy_mark="abc")
    (built,) = build(request)
    assert read_manifest(built.folder).target.versions == {"mark": "abc"}
    (again,) = build(request)
    assert again.unchanged

    plain = load_plain(smallest)
    sampled = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=5)
    log = tmp_path / "log"
    with Engine.load(built.folder, threads=1, toy_log=log) as engine:
        for prompt in ([3, 1, 4], [5]):
            result = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0]
            assert list(result.token_ids) == greedy(plain, prompt, 8)
        drawn = [engine.generate([[3, 1, 4]], sampled)[0].token_ids for _ in range(2)]
    assert {*log.read_text().split()} == {"prefill", "decode", "decode_mixed"}
    assert drawn[0] == drawn[1] != greedy(plain, [3, 1, 4], 8)
    with pytest.raises(UsageError, match=r"^provider cuda is for target onnxruntime, not toy$"):
        Engine.load(built.folder, provider="cuda")
    with pytest.raises(UsageError, match=r"^colour red: no target has this option$"):
        Engine.load(built.folder, colour="red")
    with quick_target("onnxruntime"):
        (other,) = build(build_request(smallest, (0,), out=tmp_path / "other"))
    with pytest.raises(UsageError, match=r"^toy_log x is for target toy, not onnxruntime$"):
        Engine.load(other.folder, toy_log="x")


@pytest.mark.usefixtures("installed")
def test_its_flags_are_its_own(smallest: Path) -> None:
    with pytest.raises(UsageError) as caught:
        build(build_request(smallest, (0,), toy_mark="abc"))
    assert str(caught.value) == "--toy-mark abc is for target toy, not onnxruntime"
    with pytest.raises(UsageError, match=r"^--toy-mark 1 is not a word$"):
        build(build_request(smallest, (0,), target="toy", toy_mark="1"))
    with pytest.raises(UsageError, match=r"^--device cpu is for target inductor, not toy$"):
        build(build_request(smallest, (0,), target="toy", device="cpu"))


HELP = """
from typer.testing import CliRunner
from mtpbuild.builder.cli import app
for command in ("build", "run", "serve"):
    shown = CliRunner().invoke(app, [command, "--help"])
    print(shown.exit_code, *(word in shown.stdout for word in ("Target toy", "--toy-")))
"""


@pytest.mark.parametrize("there", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_command_line_has_its_flags(there: bool, installed: Path) -> None:
    """Only where the target is installed; the other tests' commands are without it."""
    path = os.pathsep.join((str(installed), str(ROOT)))
    shown = subprocess.run(
        [sys.executable, "-c", HELP],
        env=os.environ | ({"PYTHONPATH": path} if there else {}),
        cwd=installed.parent,
        capture_output=True,
        text=True,
    )
    assert shown.stdout == 3 * f"0 {there} {there}\n", shown.stderr
