"""The pool behind an exact engine's slots: a warm start says what a cold one says, to the bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.runtime import Engine, SamplingParams
from tests.support.conversations import Users, check_found, check_same, with_prefix
from tests.support.engines import EngineBuilder

pytestmark = [pytest.mark.xdist_group("tiny")]
SMALL = 1_000_000  # bytes, a fifth of what twelve users leave
LONG = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=1)
TEXT = "You add and sort numbers. Say what you do, and end with the answer. " * 8


@pytest.fixture(scope="module")
def folder(tiny_engine: Callable[..., Path]) -> Path:
    return tiny_engine(3)


@pytest.fixture(scope="module")
def cold(folder: Path) -> Iterator[Engine]:
    with Engine.load(folder, threads=1, prefix_cache=False) as engine:
        assert engine.manifest.build.exact
        yield engine


@contextmanager
def warm(folder: Path, **options: Any) -> Iterator[Engine]:
    """Load an engine that keeps rows; in the end they take the memory that is counted."""
    with Engine.load(folder, threads=1, prefix_cache=True, **options) as engine:
        yield engine
        engine._loaded.loop.step()
        held = engine._loaded.loop.programs._saved.values()  # type: ignore[attr-defined]
        size = sum(array.nbytes for arrays in held for array in arrays.values())
        assert 0 < size == engine.stats.prefix_bytes <= engine.stats.prefix_limit


@pytest.mark.full
def test_each_turn_finds_the_last_one(folder: Path, cold: Engine) -> None:
    """Twelve users over four slots: greedy, sampled, with penalties and under a grammar."""
    users = Users(12)
    with warm(folder) as engine:
        users.ask(engine)
        check_found(users.ask(engine), engine.manifest.lookahead)
    users.check(cold)


@pytest.mark.full
@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_48_users_of_4_turns_over_8_slots(weights: str, build_engine: EngineBuilder) -> None:
    flags = {} if weights == "float32" else {"weights": weights}
    folder = build_engine("deepseek-tiny", 3, max_batch=8, **flags)
    users = Users(48, longest=80)
    with warm(folder) as engine:
        users.ask(engine)
        for _ in range(3):
            check_found(users.ask(engine), engine.manifest.lookahead)
    with Engine.load(folder, threads=1, prefix_cache=False) as cold:
        assert cold.manifest.build.exact
        users.check(cold)


@pytest.mark.full
def test_a_pool_that_gives_rows_up(folder: Path, cold: Engine) -> None:
    users = Users(12)
    with warm(folder, prefix_cache_bytes=SMALL) as engine:
        turns = users.ask(engine) + users.ask(engine)
        assert engine.stats.prefix_hits < sum(turn.before for turn in turns) / 2
    users.check(cold)


@pytest.mark.full
def test_a_restart_between_turns(folder: Path, cold: Engine, tmp_path: Path) -> None:
    users = Users(5)
    with warm(folder, prefix_cache_dir=tmp_path / "kept") as engine:
        users.ask(engine)
    with warm(folder, prefix_cache_dir=tmp_path / "kept") as engine:
        check_found(users.ask(engine), engine.manifest.lookahead)
    users.check(cold)


@pytest.mark.full
def test_users_behind_a_prefix_of_the_engine(folder: Path, cold: Engine, tmp_path: Path) -> None:
    """Its tokens count for penalties as any others of a prompt."""
    beginning = cold.encode(TEXT)
    users = Users(5, beginning=beginning)
    with Engine.load(
        with_prefix(folder, tmp_path / "own", beginning), threads=1, prefix_cache=False
    ) as engine:
        check_found(users.ask(engine), engine.manifest.lookahead)
    users.check(cold)


def test_cancelled_requests_leave_what_they_had(folder: Path, cold: Engine) -> None:
    """One is cancelled in the middle of its prompt, the other in the middle of its answer."""
    with warm(folder) as engine:
        first, second = engine.encode(TEXT), engine.encode("def f(x):\n    " * 40)
        answering, import_lazily = engine.stream(first, LONG), engine.stream(second, LONG)
        begun = [token for _ in range(len(first) // 32 + 6) for token in next(answering).token_ids]
        import_lazily.cancel()
        begun += next(answering).token_ids
        answering.cancel()
        assert len(begun) < LONG.max_tokens
        for prompt, least in ((second, 32), ([*first, *begun, 9, 10], len(first) + len(begun) - 9)):
            result = engine.generate(prompt, LONG)
            assert least <= result.metrics.cached_tokens < len(prompt) - 3
            check_same(result, cold.generate(prompt, LONG), LONG)
