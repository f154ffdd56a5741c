"""A server over fake programs that a file's tests share if they leave nothing behind."""

from collections.abc import Iterator

import httpx2
import pytest

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
