"""The prefix cache over fake programs: who finds what, and how much is saved."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpbuild.runtime import SamplingParams
from mtpbuild.runtime.contract.state import BLOCK
from mtpbuild.runtime.errors import NotFiniteError, RequestError
from mtpbuild.runtime.limits import Limits
from mtpbuild.runtime.prefix_cache.cache import choose_default_limit
from tests.support.fakes import continuation, fake_engine, fake_manifest

ROW = 4  # bytes
ONE = SamplingParams(max_tokens=1)


class Fakes:
    """An engine over fakes with a cache of so many rows."""

    def __init__(self, rows: int, *, slots: int = 2, lookahead: int = 1, length: int = 600) -> None:
        sizes: Any = {"max_batch": slots, "lookahead": lookahead, "max_seq_len": length}
        self.engine, self.programs = fake_engine(
            limit=rows * ROW, prefill_chunk=64, width=1, **sizes
        )
        cache = self.engine._loaded.loop.prefix_cache
        assert cache is not None
        self.tree = cache.tree

    def filled(self) -> int:
        """Return how many rows were filled in since the last call."""
        count = sum(len(tokens) - self.programs.lookahead for _, _, tokens in self.programs.chunks)
        self.programs.chunks.clear()
        return count

    def check(self) -> None:
        """Check that what is counted is there, and no more than may be."""
        saved = [*self.tree.entries()]
        assert len({e.number for e in saved}) == len(saved)
        assert {e.number for e in saved} == set(self.programs.saved_rows)
        assert sum(map(len, self.programs.saved_rows.values())) * ROW == self.tree.used
        assert self.programs.most_saved * ROW <= self.tree.limit
        order = [*self.tree._order]
        assert set(order) == set(saved)
        for entry in saved:
            assert entry.parent is not None
            parent = entry.parent
            assert parent.parent is None or order.index(entry) < order.index(parent)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(1, 3),
    lookahead=st.integers(0, 3),
    rows=st.sampled_from([0, 1, 40, 64, 100, 200, 1000]),
)
def test_any_order_gives_each_prompt_its_own_tokens(
    seed: int, slots: int, lookahead: int, rows: int
) -> None:
    """Prompts branch from what was said before, under two salts, and some are cancelled."""
    rng = random.Random(seed)
    own = Fakes(rows, slots=slots, lookahead=lookahead, length=300)
    texts = [[rng.randint(2, 99) for _ in range(150)]]
    for _ in range(8):
        prompts, streams = [], []
        for _ in range(rng.randint(1, 3)):
            base = rng.choice(texts)
            new = [rng.randint(2, 99) for _ in range(rng.randint(0, 60))]
            prompts.append((base[: rng.randint(1, len(base))] + new)[:200])
            salt = rng.choice([None, None, "a", "b"])
            params = SamplingParams(max_tokens=rng.randint(1, 70), cache_salt=salt)
            streams.append(own.engine.stream(prompts[-1], params))
        if rng.random() < 0.3:
            streams[rng.randrange(len(streams))].cancel()
        if rng.random() < 0.1:
            own.engine.reset_prefix_cache()
        for prompt, stream in zip(prompts, streams, strict=True):
            got = stream.result()
            assert got.token_ids == continuation(prompt, len(got.token_ids))
            texts.append(prompt + got.token_ids)
    own.engine._loaded.loop.step()
    own.check()


def test_prompts_that_begin_alike_share_their_blocks() -> None:
    own = Fakes(10_000)
    system = [7 + n % 90 for n in range(3 * BLOCK + 1)]
    for n in range(10):
        own.engine.generate([*system, 100 + n, 5], ONE)
    own.engine._loaded.loop.step()
    assert own.tree.used == ROW * (3 * BLOCK + 10 * 3)
    own.check()


def test_what_was_used_longest_ago_goes_first_and_its_end_before_its_beginning() -> None:
    own = Fakes(6 * BLOCK, slots=1)
    a, b, c = ([n] * (2 * BLOCK + 2) for n in (5, 6, 7))
    for prompt in (a, b, a, c, [9]):  # c needs room: the end of b is given up, then the rest
        own.engine.generate(prompt, ONE)
    own.filled()
    for prompt, rows in ((a, 0), (c, 0), (b, BLOCK)):
        own.engine.generate([*prompt, 3], ONE)
        assert own.filled() <= rows + 2, prompt[0]
        own.check()


def test_salts_keep_users_apart() -> None:
    """A request without a salt is a user of its own."""
    own = Fakes(10_000, slots=2)
    prompt = list(range(10, 200))
    cached = []
    for salt in (None, "a", "b", "a", None, "b"):
        result = own.engine.generate(prompt, SamplingParams(max_tokens=3, cache_salt=salt))
        cached.append(result.metrics.cached_tokens)
        assert result.token_ids == continuation(prompt, 3)
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) >= len(prompt) - 2
    wrong: list[Any] = ["", "x" * 257, 5]
    for salt in wrong:
        with pytest.raises(RequestError, match="cache_salt must be a text"):
            SamplingParams(cache_salt=salt)


def test_salts_that_nobody_uses_any_more_leave_nothing() -> None:
    own = Fakes(100, slots=1)
    for n in range(50):
        own.engine.generate([5] * 60, SamplingParams(max_tokens=1, cache_salt=str(n)))
    own.engine._loaded.loop.step()
    assert len(own.tree.roots) <= 2
    own.check()


@pytest.mark.full
def test_a_long_prompt_is_a_long_path() -> None:
    """Longer than Python's stack is deep, in blocks."""
    own = Fakes(100_000, slots=1, length=90_000)
    prompt = [2 + n % 200 for n in range(80_000)]
    own.engine.generate(prompt, ONE)
    own.engine.generate([5], ONE)
    assert own.tree.used > 79_990 * ROW
    own.engine.reset_prefix_cache()
    assert own.tree.used == 0
    own.check()


def test_what_is_not_finite_leaves_nothing() -> None:
    """Nobody begins with its rows, nor with those that it may have begun with; others go on."""
    own = Fakes(1000, slots=2)
    asked = list(range(10, 150))
    own.engine.generate(asked, ONE)
    own.programs.damage = 299
    other = own.engine.stream([7] * 80, SamplingParams(max_tokens=40))
    with pytest.raises(NotFiniteError):
        own.engine.generate([*asked, 299, 5], ONE)
    assert other.result().token_ids == continuation([7] * 80, 40)
    assert own.programs.cleared
    result = own.engine.generate(asked, ONE)
    assert result.metrics.cached_tokens == 0
    assert result.token_ids == continuation(asked, 1)
    assert own.engine.generate([*[7] * 80, 9], ONE).metrics.cached_tokens >= 79
    own.check()


def test_a_failed_step_leaves_the_pool() -> None:
    """Slots may hold anything then; copies are what they were."""
    own = Fakes(1000, slots=2)
    prompt = list(range(10, 200))
    own.engine.generate(prompt, ONE)
    own.engine.generate([5], ONE)
    own.programs.fail = RuntimeError("lost")
    with pytest.raises(Exception, match="lost"):
        own.engine.generate([5, 6], ONE)
    own.programs.fail = None
    own.programs.history = [[] for _ in own.programs.history]
    result = own.engine.generate(prompt, ONE)
    assert result.token_ids == continuation(prompt, 1)
    assert result.metrics.cached_tokens >= len(prompt) - 2


def test_a_conversation_fills_in_what_is_new() -> None:
    """Ten turns; each prompt is all that was said before, and five tokens more."""
    own, output = Fakes(1000, slots=1, length=200), list[int]()
    for turn in range(10):
        output += range(20 * turn, 20 * turn + 5)
        known = len(output) - 5
        result = own.engine.generate(output, SamplingParams(max_tokens=6))
        assert result.token_ids == continuation(output, 6)
        # The last known token is in no row, the last of the prompt needs none.
        assert own.filled() == (4 if turn == 0 else 5)
        assert result.metrics.cached_tokens == max(0, known - 1)
        output += result.token_ids
    own.check()


def test_prompts_at_once_share_rows() -> None:
    """The second and third begin with what the first one has filled in, while it runs."""
    own, prompt = Fakes(1000, slots=3), list(range(10, 150))
    nine = SamplingParams(max_tokens=9)
    results = own.engine.generate([[*prompt, n] for n in (1, 2, 3)], nine)
    assert [r.token_ids for r in results] == [continuation([*prompt, n], 9) for n in (1, 2, 3)]
    assert [r.metrics.cached_tokens for r in results] == [0, 139, 139]


def test_no_row_is_copied_twice() -> None:
    """But those of a block that has become longer; nothing is copied without room for it."""
    own = Fakes(1000)
    copied = list[int]()
    save = own.programs.save_rows

    def counting(slot: int, start: int, pieces: Any) -> bool:
        copied.append(sum(count for _, count in pieces))
        return save(slot, start, pieces)

    own.programs.save_rows = counting  # type: ignore[method-assign]
    prompt = [2 + n % 200 for n in range(3 * BLOCK + 10)]
    own.engine.generate(prompt, SamplingParams(max_tokens=20))
    own.engine._loaded.loop.step()
    assert copied == [BLOCK, BLOCK, BLOCK, 9, 9 + 20]
    own.engine.generate(prompt, ONE)
    own.engine._loaded.loop.step()
    assert len(copied) == 5
    nothing = Fakes(0)
    nothing.programs.save_rows = counting  # type: ignore[method-assign]
    nothing.engine.generate(prompt, ONE)
    assert len(copied) == 5


def test_a_prompt_that_is_longer_than_the_cache_keeps_its_beginning() -> None:
    """While it is filled in, others' rows go, but not its own."""
    own = Fakes(5 * BLOCK, slots=1)
    for token in (5, 6):
        own.engine.generate([token] * 200, ONE)
    prompt = [2 + n % 200 for n in range(8 * BLOCK)]
    own.engine.generate(prompt, ONE)
    assert own.engine.generate(prompt, ONE).metrics.cached_tokens == 5 * BLOCK
    own.check()


def test_rows_of_a_prompt_that_was_cancelled_count() -> None:
    own, prompt = Fakes(1000, slots=1), [2 + n % 200 for n in range(400)]
    stream = own.engine.stream(prompt, ONE)
    for _ in range(2):
        own.engine._loaded.loop.step()
    stream.cancel()
    assert own.filled() == 2 * BLOCK
    assert own.engine.generate(prompt, ONE).metrics.cached_tokens == 2 * BLOCK


def test_rows_that_are_not_finite_are_not_saved() -> None:
    """Neither at a chunk nor at the end of a prompt; those of the chunks before it are right."""
    own = Fakes(1000, slots=1)
    prompt = [2 + n % 200 for n in range(400)]
    own.programs.damage = prompt[70]
    stream = own.engine.stream(prompt[:180], ONE)
    for _ in range(2):
        own.engine._loaded.loop.step()
    assert own.tree.used == BLOCK * ROW
    with pytest.raises(NotFiniteError):
        stream.result()
    own.engine._loaded.loop.step()
    assert own.tree.used == 0


@pytest.mark.parametrize(
    ("free", "ranks", "limit"),
    [(80_000, 1, 10_000), (800, 1, 240), (300, 1, 150), (80_000, 4, 2_500)],
    ids=["a share", "a conversation", "half", "several ranks"],
)
def test_the_default_size(
    free: int, ranks: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(None, free, 2)
    monkeypatch.setattr("mtpbuild.runtime.prefix_cache.cache.measure_limits", lambda: limits)
    manifest = fake_manifest(max_seq_len=60, width=1)
    build = manifest.build.model_copy(update={"tp": ranks})
    assert choose_default_limit(manifest.model_copy(update={"build": build})) == limit
