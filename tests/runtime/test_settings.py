"""Every setting at its bounds and beyond: an error that names it, or a request that runs."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtpbuild.runtime import DeadlineError, Engine, RequestError, SamplingParams
from mtpbuild.runtime.configuration.input_file import read_requests
from mtpbuild.runtime.contract import rules
from mtpbuild.runtime.contract.controls import (
    CONSTRAINTS,
    CONTROLS,
    FIELDS,
    GREEDY,
    HISTORY,
    Control,
    StepControls,
    list_control_shapes,
)
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest, ProgramSpec, TensorSpec
from mtpbuild.runtime.contract.programs import MIXED, Constraint
from mtpbuild.runtime.contract.rules import Rule
from mtpbuild.runtime.contract.settings import Setting, declarations, setting
from mtpbuild.runtime.contract.state import step_spec
from mtpbuild.runtime.prefix_cache.cache import PrefixCache
from mtpbuild.runtime.requests.step_controls import fits, make_step_controls
from mtpbuild.runtime.sampling.params import DEFAULTS, SETTINGS, list_http_settings
from mtpbuild.runtime.server.answers import seed_choices
from tests.support.fakes import FakePrograms, backend_tokenizer, fake_manifest, fake_tokenizer
from tests.support.live_server import live

V, LARGEST = 300, 2**31 - 1
NAN, INF = math.nan, math.inf
# Of each setting: values at its bounds, and values that are just beyond.
BOUNDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "temperature": ((0, 5e-324, 1e-46, 100), (-1e-9, 100.1)),
    "top_k": ((-1, LARGEST), (-2, LARGEST + 1)),
    "top_p": ((5e-324, 1), (0, 1.01)),
    "min_p": ((0, 5e-324, 1), (-5e-324, 1.01)),
    "relaxed_topk": ((1, LARGEST), (0, LARGEST + 1)),
    "relaxed_delta": ((0, 1), (-0.1, 1.1)),
    "presence_penalty": ((-2, 2), (-2.1, 2.1)),
    "frequency_penalty": ((-2, 2), (-2.1, 2.1)),
    "repetition_penalty": ((0.01, 100), (0, 1e-300, 0.0099, 100.1)),
    "max_tokens": ((1, LARGEST), (0, LARGEST + 1)),
    "min_tokens": ((0, 4), (-1, 5)),
    "timeout": ((60, 10**9), (-1e-9, 10**9 + 1)),
    "stop": (("x" * 1024, ["x"] * 64, []), ("x" * 1025, ["x"] * 65, [""])),
    "include_stop_str_in_output": ((False, True), (0, 1)),
    "stop_in_thought": ((False, True), (0, 1)),
    "split_thought": ((False, True), (0, 1)),
    "stop_token_ids": (([0, V - 1], [0] * 1024), ([-1], [V], [0] * 1025)),
    "ignore_eos": ((False, True), (0, 1)),
    "logit_bias": (({0: -100, V - 1: 100}, {}), ({V: 1}, {-1: 1}, {0: 100.1}, {0: -100.1})),
    "allowed_token_ids": (([0, V - 1], [0] * 2**18), ([], [-1], [V], [0] * (2**18 + 1))),
    "bad_words": ((["x" * 256], ["x"] * 300), (["x" * 257], ["x"] * 301, [""], ["<beyond>"])),
    "seed": ((-(2**63), -1, 2**63, 2**64 - 1), (-(2**63) - 1, 2**64)),
    "acceptance": (("strict", "rejection"), ("", "x")),
    "acceptance_settings": (({},), ({"acceptance_settings": 1},)),
    "rejection_sample_method": (("standard", "block"), ("", "x")),
    "draft_sample_method": (("probabilistic", "greedy"), ("", "x")),
    "synthetic_acceptance_rates": (
        ([0, 0, 0], [1, 1, 5e-324]),
        ([1, 1], [1] * 16, [0, 0, 1], [1, 1, -0.1], [1.1, 1, 1]),
    ),
    "synthetic_acceptance_length": ((1, 4), (0.99, 4.01, 16.1)),
    "begin_thinking_phase_token": ((0, V - 1), (-1, V)),
    "end_thinking_phase_token": ((0, V - 1), (-1, V)),
    "logprobs": ((0, 20), (-1, 21)),
    "prompt_logprobs": ((), (-1, 0, 20, 21)),  # the engine has none
    "structured_outputs": ((), ({}, "x")),
    "cache_salt": (("x", "é" * 256), ("", "x" * 257)),
    "shown_tokens": (([0, V - 1],), ([-1], [V])),
}
# What may be said of any setting: most of it is wrong for each.
NUMBERS: tuple[Any, ...] = (0, 1, 1.5, 2**31, 2**63, 2**64, -(2**64), 10**400, -(10**400), 1e308)
ANYTHING: tuple[Any, ...] = (
    *(*NUMBERS, 10**5000, NAN, INF, -INF, 1e-46, True, "\ud800", "5", b"x", object()),
    *(np.int64(3), np.float32(0.5), np.bool_(True), np.array([1, 2]), np.array([2**63])),
    *([each] for each in (*NUMBERS, NAN, True, None, "\ud800", [[]], b"x")),
    *({0: each} for each in (2**64, 10**400, NAN, INF, None, "\ud800")),
    *({each: 0} for each in (2**31, 2**64, 10**5000, 1.5, True, None, "\ud800", "x")),
)
# What a setting needs to count.
WITH: dict[str, dict[str, Any]] = {
    "relaxed_delta": {"relaxed_topk": 2},
    "begin_thinking_phase_token": {"relaxed_topk": 2},
    "end_thinking_phase_token": {"relaxed_topk": 2},
    "stop_token_ids": {"min_tokens": 1},
    "seed": {"temperature": 1},
    "rejection_sample_method": {"acceptance": "rejection", "temperature": 1},
    "synthetic_acceptance_rates": {
        "acceptance": "rejection",
        "rejection_sample_method": "synthetic",
    },
    **{name: {"temperature": 1} for name in ("top_k", "top_p", "min_p")},
}
WITH["synthetic_acceptance_length"] = WITH["synthetic_acceptance_rates"]
EVERY = (*CONTROLS, *CONSTRAINTS)
ASK = {"prompt": "hello", "max_tokens": 4, "temperature": 0}


class Filled(FakePrograms):
    """Slots that write controls as a target's do, and take no notice of constraints."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self.features |= {Feature.CONSTRAIN}
        shapes = list_control_shapes(manifest.build.nextn, 64, V)
        self.places = {control.name: (shapes[control.name], control.dtype) for control in CONTROLS}

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
        super().begin(slot, length, newest, controls)
        for name, row in controls.rows(self.places):
            assert np.isfinite(row).all(), name

    def constrain(self, slot: int, constraint: Constraint) -> None: ...


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Yield an engine with all settings but `prompt_logprobs`, and a token too many."""
    tensors = (TensorSpec(name=c.name, dtype=c.dtype, shape=(1,)) for c in EVERY)
    mixed = ProgramSpec(file="x", inputs=tuple(tensors), outputs=())
    manifest = fake_manifest(vocab_size=V).model_copy(
        update={
            "programs": {MIXED: mixed},
            "state": (step_spec(HISTORY, "int64", (1, 68)),),
            "capabilities": {"acceptance": ["loose"]},
        }
    )
    backend = backend_tokenizer()
    backend.add_special_tokens(["<beyond>"])
    assert (backend.token_to_id("<beyond>") or 0) >= V
    programs = Filled(manifest)
    pool = PrefixCache(programs, manifest, 1 << 20)
    with Engine(programs, manifest, fake_tokenizer(backend), prefix_cache=pool) as loaded:
        yield loaded


def answer(engine: Engine, name: str, value: Any) -> str:
    """Run a request with this setting; returns its error, or nothing if it ran."""
    asked: dict[str, Any] = {"max_tokens": 4} | WITH.get(name, {}) | {name: value}
    try:
        result = engine.generate("hello", SamplingParams(**asked))
    except (RequestError, DeadlineError) as error:
        return str(error)
    assert result.finish_reason in ("stop", "length")
    return ""


def test_every_setting_has_bounds() -> None:
    assert BOUNDS.keys() == SETTINGS.keys()


@pytest.mark.parametrize("name", BOUNDS)
def test_a_setting_at_its_bounds_and_beyond(engine: Engine, name: str) -> None:
    inside, beyond = BOUNDS[name]
    for value in inside:
        assert not answer(engine, name, value)
    for value in beyond:
        assert name in answer(engine, name, value), value


@pytest.mark.parametrize("name", BOUNDS)
def test_what_may_be_said_of_a_setting(engine: Engine, name: str) -> None:
    for value in ANYTHING:
        error = answer(engine, name, value)
        assert not error or name.removesuffix("_settings") in error, (value, error)
        assert "\n" not in error
        error.encode()
    assert not answer(engine, "max_tokens", 2)  # the next request is right


def test_settings_that_steps_are_given_have_the_same_defaults() -> None:
    shared = SETTINGS.keys() & FIELDS.keys()
    assert {"temperature", "top_k", "relaxed_delta", "repetition_penalty"} <= shared
    assert {name: getattr(GREEDY, name) for name in shared} == {n: DEFAULTS[n] for n in shared}


def test_settings_become_controls() -> None:
    """Stop tokens are banned up to a position; the least temperature is one that divides."""
    params = SamplingParams(9, min_tokens=3, temperature=5e-324, stop_token_ids=[7])
    controls = make_step_controls([5, 6], params, fake_manifest(eos=(1,)))
    assert (controls.banned_ids, controls.banned_until) == ((1, 7), 5)
    assert controls.temperature == 1e-20


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        np.int64(4),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=[np.int32(3)],  # type: ignore[list-item]
    )
    assert params == SamplingParams(4, temperature=0.5, stop_token_ids=[3])
    kept = (params.max_tokens, params.temperature, params.stop_token_ids[0])
    assert [*map(type, kept)] == [int, float, int]


def test_bodies_have_the_same_bounds(engine: Engine) -> None:
    """The status is 400, with the field's name, or 200."""
    names, seen = [name for name in list_http_settings() if name in SETTINGS], set()
    with live(engine) as server, server.client() as client:
        for name in names:
            for value in (*BOUNDS[name][0], *BOUNDS[name][1], *NUMBERS, INF, "\ud800", ["\ud800"]):
                text = json.dumps(ASK | WITH.get(name, {}) | {name: value})
                got = client.post("/v1/completions", content=text.replace("Infinity", "1e999"))
                seen.add(got.status_code)
                assert got.status_code in (200, 400, 408), (name, value, got.text)
                named = name in got.text or "the body is not JSON: " in got.text
                assert got.status_code == 200 or named, (name, value, got.text)
    assert seen - {408} == {200, 400}  # 408: a short timeout is over


def test_lines_have_the_same_bounds(engine: Engine, tmp_path: Path) -> None:
    path, names = tmp_path / "in.jsonl", [name for name in list_http_settings() if name in SETTINGS]
    for name in names:
        for value in (*BOUNDS[name][1], 2**64, 10**400, "\ud800", ["\ud800"], [2**64]):
            path.write_text(json.dumps(ASK | WITH.get(name, {}) | {name: value}), "utf-8")
            with pytest.raises(RequestError, match=name):
                read_requests(path, engine, SamplingParams(), check=True)


def inverse(value: Any) -> Any:
    return 1 / value


@dataclass(frozen=True)
class Loose:
    """Settings whose checks let everything through."""

    loose_number: float = setting(0.5, lambda value: value, control=Control("float32"))
    loose_count: int = setting(1, lambda value: value, control=Control("int32"))
    loose_switch: bool = setting(False, lambda value: value, control=Control("bool"))
    loose_pair: Any = setting((0, 0), lambda value: value, control=Control("float32", (2,)))
    loose_inverse: float = setting(1.0, inverse, control=Control("float32"))


FITTING: tuple[tuple[str, Any], ...] = (
    *(("loose_number", 3e38), ("loose_number", 7), ("loose_count", LARGEST)),
    *(("loose_switch", True), ("loose_pair", [1, 2.5]), ("loose_inverse", 4)),
)
UNFITTING: tuple[tuple[str, Any], ...] = (
    *(("loose_number", 10**400), ("loose_number", 1e300), ("loose_number", -(2**128))),
    *(("loose_count", 2**31), ("loose_count", 2**64), ("loose_count", 1.5)),
    *(("loose_switch", 2), ("loose_pair", [1, 2, 3]), ("loose_pair", [1, 1e300])),
    *(("loose_inverse", 0), ("loose_inverse", 5e-324)),
)


@pytest.fixture
def loose() -> Iterator[None]:
    rules.register(Rule("loose", lambda judged: None, Loose))
    try:
        yield
    finally:
        del rules._rules._registered["loose"]


@pytest.mark.parametrize("name", rules.BUILT_IN)
def test_a_rule_of_another_package_has_a_name_of_its_own(name: str) -> None:
    with pytest.raises(ValueError, match=f"called '{name}' is built in"):
        Rule(name, lambda judged: None)


@pytest.mark.usefixtures("loose")
def test_settings_of_other_packages_fit_their_controls(engine: Engine) -> None:
    """Whatever their own checks let through, or raise."""

    def error(name: str, value: Any) -> str:
        try:
            engine.check(SamplingParams(acceptance="loose", acceptance_settings={name: value}))
        except RequestError as error:
            return str(error)
        return ""

    for name, value in FITTING:
        assert not error(name, value)
    for name in declarations(Loose, Setting):
        for value in ("x", "\ud800", NAN, object(), [[1]], [1, [2]], None):
            assert name in error(name, value), value
    for name, value in UNFITTING:
        assert name in error(name, value)


SEEDS = (0, 5, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1)


def numbers(seed: int) -> bytes:
    return StepControls(seed=seed).uniforms(8).tobytes()


def test_every_seed_has_numbers_of_its_own() -> None:
    assert len({numbers(seed) for seed in SEEDS}) == len(SEEDS)
    for seed in (-1, -5, -(2**63)):
        assert numbers(seed) == numbers(seed + 2**64)
    for seed in SEEDS[:4]:  # as they have always been
        keys = [np.random.Philox(key=[seed, stream]) for stream in range(4)]
        wanted = [np.random.Generator(key).random(8, np.float32) for key in keys]
        assert np.array_equal(StepControls(seed=seed).uniforms(8, 4), wanted)


@pytest.mark.parametrize("seed", [*SEEDS, -1, -2, -(2**63)])
def test_choices_have_seeds_that_differ(seed: int) -> None:
    each = [params.seed for params in seed_choices(SamplingParams(seed=seed), 5)]
    assert each == [(seed + i) % 2**64 for i in range(5)]
    assert len({numbers(own or 0) for own in each}) == 5


@pytest.mark.parametrize(
    ("value", "does"),
    [([[1, 2]], True), ([[1] * 3] * 2, True), ([[1] * 4], False), ([[1]] * 3, False), ([1], False)],
)
def test_a_rules_value_fits_its_place(value: list[Any], does: bool) -> None:
    """Each size is compared: a row that is too long does not fit because there are fewer rows."""
    assert fits(value, (2, 3), "int64") == does
