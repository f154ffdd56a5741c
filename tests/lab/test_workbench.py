"""The instruments of a build: what is done with a finished engine."""

from pathlib import Path

import pytest

from mtpbuild.builder.stages import Stages
from mtpbuild.lab.measure import checks, workbench
from mtpbuild.runtime.contract.manifest import read_manifest
from tests.support.engines import write_engine
from tests.support.fakes import fake_manifest


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

    monkeypatch.setattr(checks, "probe", probe)
    monkeypatch.setattr(workbench, "time_steps", lambda folder, manifest: done.append("times"))
    workbench.WORKBENCH.finish(folder, "e", Stages(), exact=False)
    assert done == ["probe"] * (exact is None) + ["times"] * adaptive
    assert read_manifest(folder).build.exact is (exact is None)
