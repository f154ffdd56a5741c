"""A synthetic engine directory: everything real but the programs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import write_engine
from tests.support.fakes import FakePrograms, fake_manifest
from tests.support.registry import programs_by


@pytest.fixture
def fake_target() -> Iterator[None]:
    """Make Engine.load give fake programs."""
    with programs_by(FakePrograms):
        yield


@pytest.fixture
def engine_dir(tmp_path: Path, fake_target: None) -> Path:
    folder = tmp_path / "fake_n3"
    write_engine(folder, fake_manifest())
    return folder
