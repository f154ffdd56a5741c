"""What tests share if they leave nothing behind: a server over fake programs, a real engine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from mtpbuild.runtime import Engine
from tests.support.fakes import FakePrograms
from tests.support.live_server import Live
from tests.support.served import served


@pytest.fixture(scope="module")
def shared_server() -> Iterator[tuple[Live, FakePrograms]]:
    with served() as (server, programs):
        yield server, programs


@pytest.fixture
def programs(shared_server: tuple[Live, FakePrograms]) -> FakePrograms:
    """Return the shared server's programs."""
    return shared_server[1]


@pytest.fixture
def client(shared_server: tuple[Live, FakePrograms]) -> Iterator[httpx2.Client]:
    """Ask the shared server."""
    with shared_server[0].client() as made:
        yield made


@pytest.fixture(scope="session")
def engine(tiny_engine: Callable[..., Path]) -> Iterator[Engine]:
    """Load deepseek-tiny with three drafts."""
    with Engine.load(tiny_engine(3), threads=1, prefix_cache=True) as loaded:
        yield loaded
