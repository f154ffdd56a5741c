"""The instruments of a build: what is done with a finished engine."""

from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.stages import Stages
from mtpbuild.lab.measure import checks
from mtpbuild.lab.measure.workbench import WORKBENCH
from mtpbuild.runtime import programs
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.engine import step_times
from tests.support.engines import write_engine
from tests.support.fakes import FakePrograms, fake_manifest


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("exact", [False, None])
def test_an_engine_is_probed_and_timed(
    *, exact: bool | None, adaptive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that can't be exact is not probed, but its steps are timed all the same."""
    manifest, done = fake_manifest(nextn=3), list[str]()
    state = {"exact": exact, "adaptive": adaptive}
    manifest = manifest.model_copy(update={"build": manifest.build.model_copy(update=state)})
    write_engine(folder := tmp_path / "engine", manifest)

    def probe(folder: Path) -> checks.ProbeResult:
        done.append("probe")
        return checks.ProbeResult(("threads",))

    def time_steps(loaded: Any, *others: object) -> None:
        assert isinstance(loaded, FakePrograms)
        done.append("times")

    monkeypatch.setattr(checks, "probe", probe)
    monkeypatch.setattr(programs, "load_programs", lambda folder, manifest: FakePrograms(manifest))
    monkeypatch.setattr(step_times, "open_step_times", time_steps)
    WORKBENCH.finish(folder, "e", Stages(), exact=False)
    assert done == ["probe"] * (exact is None) + ["times"] * adaptive
    assert read_manifest(folder).build.exact is (exact is None)
