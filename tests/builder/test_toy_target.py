"""A target that this package does not know: found by its entry point, built, run, refused."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtpbuild.builder.build import build
from mtpbuild.builder.verify.plain import load_plain
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import UsageError
from tests.reference.recompute import greedy
from tests.support.requests import build_request

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the target: the folder is on the path and says which entry point it has."""
    folder = tmp_path_factory.mktemp("site-packages")
    (info := folder / "toy_target-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-target\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[mtpbuild.targets]\ntoy = tests.support.toy_target.programs:TOY\n"
    )
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("nextn", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.export.load's own
def test_it_is_built_and_run(nextn: int, smallest: Path, tmp_path: Path) -> None:
    """The tokens are the plain model's, whatever is drafted; sampling has its program too."""
    request = build_request(smallest, (nextn,), target="toy", out=tmp_path / "toy", mark="abc")
    (built,) = build(request)
    assert read_manifest(built.folder).target.versions == {"mark": "abc"}
    (again,) = build(request)
    assert again.unchanged

    plain = load_plain(smallest)
    sampled = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=5)
    with Engine.load(built.folder, threads=1) as engine:
        for prompt in ([3, 1, 4], [5]):
            result = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0]
            assert list(result.token_ids) == greedy(plain, prompt, 8)
        drawn = [engine.generate([[3, 1, 4]], sampled)[0].token_ids for _ in range(2)]
    assert drawn[0] == drawn[1] != greedy(plain, [3, 1, 4], 8)


@pytest.mark.usefixtures("installed")
def test_its_flags_are_its_own(smallest: Path) -> None:
    with pytest.raises(UsageError) as caught:
        build(build_request(smallest, (0,), mark="abc"))
    assert str(caught.value) == "--mark abc is for target toy, not onnxruntime"
    with pytest.raises(UsageError, match=r"^--mark 1 is not a word$"):
        build(build_request(smallest, (0,), target="toy", mark="1"))
    with pytest.raises(UsageError, match=r"^--device cpu is for target inductor, not toy$"):
        build(build_request(smallest, (0,), target="toy", device="cpu"))


def test_the_command_line_has_its_flags(installed: Path) -> None:
    command = [sys.executable, "-m", "mtpbuild", "build", "--help"]
    path = os.pathsep.join((str(installed), str(ROOT)))
    shown = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path},
        cwd=installed,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0
    assert "Target toy" in shown.stdout
    assert "--mark" in shown.stdout
