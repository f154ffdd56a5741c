"""Warm starts against cold ones: a loop over programs of a real model, and what its requests get.

The oracle compares a request's steps with those that the same request makes where nothing is kept.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.plan import DrafterName, Plan
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.programs import Ints, Piece, StepOutput
from mtpbuild.runtime.contract.state import StateSpec
from mtpbuild.runtime.engine.loop import Loop
from mtpbuild.runtime.prefix_cache.cache import PrefixCache
from mtpbuild.runtime.requests.request import FinishReason, Request
from mtpbuild.runtime.sampling.params import SamplingParams
from tests.reference.eager import EagerPrograms
from tests.support.checkpoints import lower
from tests.support.fakes import fake_manifest

NEXTN, SLOTS, VOCABULARY = 3, 3, 61
DRAFTERS: tuple[DrafterName | None, ...] = (None, "mtp-eagle", "mtp-vanilla")
COMMON = (1, 3, 4, 5, 9, 12, 19, 23, 26, 27, 28)  # of 27 rows; the prompt has 20 tokens
Steps = list[tuple[list[int], list[int], list[float]]]  # window, emitted tokens, their margins
# How the oracle's messages begin; a planted bug is caught by one of them and by nothing else.
WARM = "a warm start differs from a cold one"
FILLED = "the number of rows that were filled in differs"
COUNTED = "the cache counts something else than what is there"


class Counted:
    """Programs whose chunks are counted, in rows; what it does not count goes to them."""

    def __init__(self, programs: Any) -> None:
        self.own, self.rows, self.lookahead = programs, 0, programs.lookahead
        self.features = programs.features & {Feature.PREFIX_CACHE}
        self.saved: dict[int, int] = {}  # number -> rows that are saved under it, 0: states
        self.copied = 0  # rows that were ever saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def check_rows(self, wanted: int) -> None:
        assert self.rows == wanted, f"{FILLED}: {self.rows}, not {wanted}"

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self.rows += len(tokens) - self.lookahead
        self.own.prefill(slot, start, tokens)

    def save_rows(self, slot: int, start: int, pieces: Sequence[Piece]) -> bool:
        self.saved |= dict(pieces)
        self.copied += sum(count for _, count in pieces)
        return bool(self.own.save_rows(slot, start, pieces))

    def save_states(self, slot: int, number: int) -> bool:
        self.saved[number] = 0
        return bool(self.own.save_states(slot, number))

    def discard(self, number: int) -> None:
        self.saved.pop(number, None)
        self.own.discard(number)


class Noted:
    """The steps of a request."""

    def __init__(self) -> None:
        self.steps: Steps = []

    def step(self, request: Request, output: StepOutput, slot: int) -> None:
        window = output.window[slot, : 1 + output.num_drafts[slot]]
        n = output.num_tokens[slot]
        emitted, margins = output.tokens[slot, :n], output.margins[slot, :n]
        self.steps.append((window.tolist(), emitted.tolist(), margins.tolist()))

    def end(self, request: Request, reason: FinishReason) -> None:
        """Note nothing of the end."""


def check_same(steps: Steps, wanted: Steps, where: str) -> None:
    """Assert that tokens and drafts are equal, margins nearly: a row a little wrong shows there."""
    assert len(steps) == len(wanted), f"{WARM}: {where}, {len(steps)} steps, not {len(wanted)}"
    for (window, emitted, margins), other in zip(steps, wanted, strict=True):
        assert (window, emitted) == other[:2], f"{WARM}: {where}"
        np.testing.assert_allclose(margins, other[2], atol=1e-3, err_msg=f"{WARM}: {where}")


class Service:
    """A loop over programs of a real model, and what its requests get.

    pool: bytes of its prefix cache, whose rows are of these states; 0: there is none.
    """

    def __init__(
        self, programs: Any, chunk: int = 4, *, pool: int = 0, state: Sequence[StateSpec] = ()
    ) -> None:
        self.programs = Counted(programs)
        nextn = NEXTN if programs.lookahead else 0
        self.manifest = fake_manifest(
            nextn=nextn, max_batch=SLOTS, max_seq_len=200, prefill_chunk=chunk, eos=()
        ).model_copy(update={"state": tuple(state)})
        counted: Any = self.programs
        own = PrefixCache(counted, self.manifest, pool) if pool else None
        self.loop = Loop(counted, self.manifest, prefix_cache=own)

    @property
    def cache(self) -> PrefixCache:
        assert self.loop.prefix_cache is not None
        return self.loop.prefix_cache

    def check_pool(self) -> None:
        """Check that the tree counts what the programs keep, within the limit."""
        tree = self.cache.tree
        found = [*tree.entries()]
        assert {kept.number for kept in found} == set(self.programs.saved), f"{COUNTED}: numbers"
        assert sum(kept.size for kept in found) == tree.used <= tree.limit, COUNTED
        bytes_of = (self.programs.own.saved(kept.number).values() for kept in found)
        held = sum(array.nbytes for arrays in bytes_of for array in arrays)
        assert held == tree.used, f"{COUNTED}: {held} bytes, not {tree.used}"

    def ask(
        self, prompt: Sequence[int], count: int, salt: str | None = None
    ) -> tuple[Request, Steps]:
        noted = Noted()
        params = SamplingParams(max_tokens=count, ignore_eos=True, cache_salt=salt)
        request = Request(list(prompt), params, self.manifest, None, observer=noted)
        self.loop.scheduler.add(request)
        return request, noted.steps

    def run(self) -> None:
        while self.loop.scheduler.waiting or self.loop.scheduler.admitted:
            self.loop.step()
        self.loop.release()

    def answer(self, prompt: Sequence[int], count: int = 8) -> Steps:
        _, steps = self.ask(prompt, count)
        self.run()
        return steps


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(9, VOCABULARY, count).tolist()


def eager(predictable: PlainDeepseek, drafter: DrafterName | None) -> EagerPrograms:
    torch.set_num_threads(1)
    plan = Plan(predictable.config, NEXTN if drafter else 0, drafter, SLOTS, 200, 4)
    return EagerPrograms(plan, lower(predictable))


class Traffic:
    """Requests that come and go; in the end each must have got what it gets alone."""

    def __init__(self, programs: Any, **options: Any) -> None:
        self.service, self.cold = Service(programs, **options), Service(programs)
        self.asked: list[tuple[list[int], int, Request, Steps]] = []

    def ask(self, prompt: list[int], count: int) -> Request:
        request, steps = self.service.ask(prompt, count)
        self.asked.append((prompt, count, request, steps))
        return request

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.service.loop.step()

    def ended(self, request: Request) -> None:
        while not request.ended:
            self.service.loop.step()

    def go_on(self, request: Request) -> None:
        """Run the conversation's next turn to its end.

        Three tokens have no rows yet, and the last of them needs none.
        """
        programs = self.service.programs
        before = programs.rows
        self.ended(self.ask([*request.prompt, *request.token_ids, 33, 34], 6))
        assert programs.rows <= before + 2 + programs.lookahead, FILLED

    def check(self) -> None:
        self.service.run()
        self.service.check_pool()
        for prompt, count, request, steps in self.asked:
            wanted = self.cold.answer(prompt, count)
            check_same(steps, wanted[: len(steps)], f"{len(prompt)} and {count} tokens")
            assert len(steps) == len(wanted) or request.finish_reason == "cancelled"
        assert self.service.programs.rows < self.cold.programs.rows


def a_gap_is_closed(traffic: Traffic) -> None:
    """End the first of two: the other one takes its slot, where its rows were."""
    first, second = traffic.ask(tokens(1, 20), 40), traffic.ask(tokens(2, 25), 60)
    traffic.ended(first)
    traffic.steps(3)
    traffic.go_on(first)
    traffic.ended(second)
    traffic.go_on(second)


def the_layout_grows(traffic: Traffic) -> None:
    """One of two that run outgrows the rows that both have; a third one's are kept meanwhile."""
    kept = traffic.ask(tokens(3, 60), 4)
    traffic.ended(kept)
    both = traffic.ask(tokens(2, 100), 60), traffic.ask(tokens(1, 20), 60)
    for request in (*both, kept):
        traffic.ended(request)
    for request in (kept, *both):
        traffic.go_on(request)


def a_prompt_is_cancelled(traffic: Traffic) -> None:
    """Cancel it between its chunks, as others run; what it had filled in is used."""
    running = traffic.ask(tokens(5, 6), 60)
    traffic.steps(2)
    late = traffic.ask(tokens(6, 40), 5)
    traffic.steps(5)
    traffic.service.loop.scheduler.cancel(late)
    traffic.steps(1)
    traffic.ended(traffic.ask(late.prompt, 8))
    traffic.ended(running)


def a_prompt_comes_where_two_ended(traffic: Traffic) -> None:
    """Replace the older rows; those of the other, which steps computed too, stay."""
    first = traffic.ask(tokens(1, 9), 90)
    second, third = traffic.ask(tokens(2, 12), 4), traffic.ask(tokens(3, 30), 9)
    traffic.ended(second)
    traffic.ended(third)
    traffic.ended(traffic.ask(tokens(4, 12), 4))
    traffic.go_on(third)
    traffic.ended(first)


def some_share_their_beginning(traffic: Traffic) -> None:
    """They come at once: the later ones begin with a copy of the rows of one that runs."""
    for n in range(4):
        traffic.ask([*tokens(7, 30), 40 + n, 41], 12)


STORIES = (
    a_gap_is_closed, the_layout_grows, a_prompt_is_cancelled, a_prompt_comes_where_two_ended,
    some_share_their_beginning,
)  # fmt: skip


def check_traffic(programs: Any, **options: Any) -> None:
    for story in STORIES:
        traffic = Traffic(programs, **options)
        story(traffic)
        traffic.check()
