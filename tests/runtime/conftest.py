"""A synthetic engine directory: everything real but the programs."""

from pathlib import Path

import pytest

from mtpbuild.runtime import engine as engine_module
from tests.support.engines import write_engine
from tests.support.fakes import FakePrograms, fake_manifest


@pytest.fixture
def fake_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Engine.load give fake programs."""
    monkeypatch.setattr(
        engine_module,
        "load_programs",
        lambda folder, manifest, **options: FakePrograms(manifest),
    )


@pytest.fixture
def engine_dir(tmp_path: Path, fake_target: None) -> Path:
    folder = tmp_path / "fake_n3"
    write_engine(folder, fake_manifest())
    return folder
