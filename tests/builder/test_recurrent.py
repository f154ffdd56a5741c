"""Recurrent states: advanced by the tokens that are emitted, on both CPU targets.

The oracle computes every sum anew from the tokens.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from mtpbuild.builder.models import register
from mtpbuild.builder.models.common import causal_lm
from mtpbuild.builder.models.common.layers import State
from mtpbuild.builder.plan.plan import DrafterName, Plan
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest, read_manifest
from mtpbuild.runtime.contract.programs import PrefixCaching, Programs
from mtpbuild.runtime.prefix_cache.cache import PrefixCache
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.inductor_cpu import InductorPrograms
from tests.reference.recompute import greedy
from tests.support.checkpoints import lower, write_checkpoint
from tests.support.eager_package import EagerPackage, manifest_of
from tests.support.engines import EngineBuilder, greedy_ids
from tests.support.inductor_engines import compiled_soon
from tests.support.planted import Patch, replaced, wrapped
from tests.support.recurrent_family import (
    CONFIG,
    SUMS,
    PlainSumming,
    RunningSum,
    SummingConfig,
    make_summing,
)
from tests.support.steps import check_family

CHUNK, SLOTS, NEXTN = 4, 3, 3
TOKENS = "tokens differ from greedy's"
DRAFTERS: dict[int, DrafterName | None] = {0: None, 1: "mtp-vanilla", 2: "mtp-eagle"}
EAGLE: DrafterName = "mtp-eagle"


@pytest.fixture(scope="module")
def plain() -> PlainSumming:
    torch.set_num_threads(1)
    register(SUMS)
    return make_summing()


@pytest.fixture(scope="module")
def folder(plain: PlainSumming, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sums") / "sums", CONFIG, plain)


def traced(plain: PlainSumming, nextn: int = NEXTN) -> tuple[InductorPrograms, Manifest]:
    """Return target inductor's programs on a CPU, run eagerly in place of compiled ones."""
    drafter = DRAFTERS.get(nextn, EAGLE)
    plan = Plan(SummingConfig.parse(CONFIG), nextn, drafter, SLOTS, 96, CHUNK)
    programs = {p.name: p for p in make_programs(plan, lower(plain))}
    manifest = manifest_of(plan, tuple(programs.values()))

    def opener(device: str) -> Callable[[str], EagerPackage]:
        return lambda name: EagerPackage(programs[name])

    return InductorPrograms(manifest, 1, opener), manifest


class Slots:
    """Drives slots by hand, and knows what was said in each."""

    def __init__(self, programs: Programs, nextn: int) -> None:
        self.programs, self.window = programs, nextn + 1
        self.said: dict[int, list[int]] = {}

    def fill(self, slot: int, prompt: Sequence[int], start: int, stop: int) -> None:
        """Fill in tokens start .. stop - 1 of a prompt, chunk by chunk."""
        known = np.array([*prompt, *[0] * self.programs.lookahead], np.int64)
        for at in range(start, stop, CHUNK):
            end = min(at + CHUNK, stop)
            self.programs.prefill(slot, at, known[at : end + self.programs.lookahead])

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        self.programs.begin(slot, len(prompt) - 1, prompt[-1])
        self.said[slot] = list(prompt)

    def step(self, *slots: int, times: int = 1) -> None:
        active = np.zeros(SLOTS, np.bool_)
        active[list(slots)] = True
        for _ in range(times):
            rows = max(len(self.said[s]) for s in slots) + self.window
            output = self.programs.step(active, rows)
            for slot in slots:
                self.said[slot] += output.tokens[slot, : output.num_tokens[slot]].tolist()

    def move(self, source: int, target: int) -> None:
        self.programs.move(source, target)
        self.said[target] = self.said.pop(source)


def check_slots(programs: Programs, plain: PlainSumming, nextn: int) -> None:
    """Check a slot that idles amid its prompt and its text, moves, and is used again."""
    slots, rng = Slots(programs, nextn), np.random.default_rng(7)
    a, b, c, d = (rng.integers(0, CONFIG["vocab_size"], n).tolist() for n in (11, 7, 1, 6))
    prompts: list[tuple[list[int], list[int]]] = []

    def end(slot: int, prompt: list[int]) -> None:
        prompts.append((prompt, slots.said.pop(slot)))

    slots.fill(1, b, 0, len(b) - 1)
    slots.begin(1, b)
    slots.fill(0, a, 0, CHUNK)
    slots.step(1, times=2)  # slot 0 idles behind a chunk
    slots.fill(0, a, CHUNK, len(a) - 1)
    slots.begin(0, a)
    slots.step(0, 1, times=2)
    slots.step(1, times=2)  # slot 0 idles in the middle of its text
    slots.begin(2, c)  # one token: nothing is filled in
    slots.step(0, 1, 2, times=3)
    end(0, a)
    slots.move(2, 0)
    slots.step(0, 1, times=2)
    end(1, b)
    slots.fill(1, d, 0, len(d) - 1)  # where b was
    slots.begin(1, d)
    slots.step(0, 1, times=2)
    end(1, d)
    slots.begin(1, [5])  # where d was, at position 0
    slots.step(0, 1, times=2)
    end(0, c)
    end(1, [5])
    for prompt, output in prompts:
        assert output == [*prompt, *greedy(plain, prompt, len(output) - len(prompt))], TOKENS


@pytest.mark.parametrize("nextn", [0, 1, 2, pytest.param(3, marks=pytest.mark.full)])
def test_steps(nextn: int, plain: PlainSumming) -> None:
    """Every number of accepted tokens and every chunk; the states are those of the tokens."""
    check_family(plain, nextn, DRAFTERS.get(nextn, EAGLE))


@pytest.mark.parametrize("nextn", range(4))
def test_slots_of_inductor(nextn: int, plain: PlainSumming) -> None:
    programs, _ = traced(plain, nextn)
    check_slots(programs, plain, nextn)


@pytest.mark.full
@pytest.mark.parametrize("nextn", range(4))
def test_onnxruntime(
    nextn: int, plain: PlainSumming, folder: Path, build_engine: EngineBuilder
) -> None:
    drafter = DRAFTERS.get(nextn, EAGLE)
    check_engine(build_engine(folder, nextn, drafter, prefill_chunk=CHUNK, max_batch=SLOTS), plain)


@pytest.mark.full
@pytest.mark.xdist_group("inductor")
def test_inductor(plain: PlainSumming, folder: Path, build_engine: EngineBuilder) -> None:
    flags = {"target": "inductor", "prefill_chunk": CHUNK, "max_batch": SLOTS}
    with compiled_soon():
        engine = build_engine(folder, 2, EAGLE, **flags)
    check_engine(engine, plain)


def check_engine(engine: Path, plain: PlainSumming) -> None:
    manifest = read_manifest(engine)
    roles = {s.name: (s.role, s.owner, s.kept) for s in manifest.state}
    assert {n for n, (role, _, _) in roles.items() if role == "recurrent"} == {"sum.0", "sum.2"}
    assert roles["sum.2"] == ("recurrent", "layers.2", False)
    assert "kv.0" not in roles
    check_slots(load_programs(engine, manifest, threads=1), plain, manifest.build.nextn)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, CONFIG["vocab_size"], n).tolist() for n in (9, 1, 2, 14, 5)]
    for prompt, output in zip(prompts, greedy_ids(engine, prompts, 20), strict=True):
        assert output == greedy(plain, prompt, 20), TOKENS


def test_prefixes_are_copies(plain: PlainSumming) -> None:
    """A sum is not kept at earlier tokens, so copies are saved at some."""
    programs, manifest = traced(plain)
    assert Feature.PREFIX_CACHE in programs.features
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    for cache in (None, PrefixCache(cast(PrefixCaching, programs), manifest, 1 << 20)):
        with Engine(programs, manifest, prefix_cache=cache) as engine:
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            results = [engine.generate(prompt, params) for _ in range(2)]
            longer = [*prompt, *results[0].token_ids, 7]
            assert engine.generate(longer, params).token_ids == greedy(plain, longer, 8)
            hits = engine.stats.prefix_hits
            programs = engine._loaded.loop.programs  # type: ignore[assignment]
        for result in results:
            assert list(result.token_ids) == greedy(plain, prompt, 8)
        assert hits == (0 if cache is None else 2 * (len(prompt) - 1))


def advanced_by(count: Callable[[Tensor, int], Tensor]) -> Patch:
    """Advance sums by another number of tokens: count(n, T)."""

    def wrong(advance: Any, layer: RunningSum, state: State, tokens: State, n: Tensor) -> State:
        return advance(layer, state, tokens, count(n, tokens["sums"].shape[1]))

    return wrapped(RunningSum, "advance", wrong)


def without_sums(carry: Any, programs: InductorPrograms, source: int, target: int) -> None:
    sums = {n: a[target].copy() for n, a in programs.state.items() if n.startswith("sum.")}
    carry(programs, source, target)
    for name, array in sums.items():
        programs.state[name][target] = array


BUGS: dict[str, Patch] = {
    "by all of the window": advanced_by(lambda n, T: torch.where(n > 0, T, n)),
    "by one token less": advanced_by(lambda n, T: (n - 1).clamp(min=0)),
    "though the slot idles": advanced_by(lambda n, T: n.clamp(min=1)),
    "a request moves, and its sums don't": wrapped(InductorPrograms, "_carry", without_sums),
    "a request begins with another's sums": replaced(
        causal_lm, "zero_new_slots", lambda state, rows: state
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_wrong_sums_are_caught(
    bug: str, plain: PlainSumming, monkeypatch: pytest.MonkeyPatch
) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError, match=TOKENS):
        check_slots(traced(plain)[0], plain, NEXTN)
