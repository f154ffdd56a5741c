"""Ranks of an engine: which process has its requests, and which repeats rank 0's calls."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.runtime.programs import follow
from tests.support.fakes import fake_manifest

PLACE = Path("an engine")


@pytest.mark.parametrize(
    ("ranks", "rank", "leads", "calls"),
    [
        (1, None, True, []),
        (2, None, True, ["start the others"]),
        (2, "0", True, []),
        (2, "1", False, ["get ready", "follow"]),
    ],
)
def test_who_leads_and_who_follows(
    ranks: int, rank: str | None, leads: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's variables say which rank a process is; without them the others are started."""
    seen = list[str]()

    @contextlib.contextmanager
    def start(*given: Any) -> Iterator[None]:
        seen.append("start the others")
        yield

    monkeypatch.setattr(follow, "start_ranks", start)
    monkeypatch.setattr(follow, "follow", lambda *given: seen.append("follow"))
    for name, value in (("RANK", rank), ("WORLD_SIZE", None if rank is None else "2")):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    ready = partial(seen.append, "get ready")
    with follow.lead_or_follow(PLACE, fake_manifest(ranks=ranks), 1, ready) as leading:
        assert (leading, seen) == (leads, calls)
