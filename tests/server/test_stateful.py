"""Requests with fields at their bounds and beyond, next to canaries whose texts never change."""

import contextlib
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mtpbuild.runtime import Engine, RequestError, SamplingParams, Stream
from mtpbuild.runtime.errors import DeadlineError
from mtpbuild.runtime.sampling.params import DEFAULTS, list_http_settings
from mtpbuild.runtime.server.options import ServerOptions
from tests.support.live_server import Live, live, post, until

PROMPT = "What is 47 + 85?"
MESSAGES = [{"role": "user", "content": PROMPT}]
# Each route with a body that is answered, and the fields of its own that are not settings.
ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/completions": (
        {"prompt": PROMPT, "max_tokens": 3},
        "prompt max_tokens n best_of logprobs echo suffix stream stream_options user model "
        "response_format structured_outputs",
    ),
    "/v1/chat/completions": (
        {"messages": MESSAGES, "max_tokens": 3},
        "messages max_tokens max_completion_tokens n logprobs top_logprobs tools tool_choice "
        "stream chat_template_kwargs response_format",
    ),
    "/v1/responses": (
        {"input": PROMPT, "max_output_tokens": 3},
        "input instructions max_output_tokens tools tool_choice text stream reasoning metadata "
        "top_logprobs include",
    ),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 3},
        "messages system max_tokens stop_sequences tools tool_choice stream thinking metadata",
    ),
    "/tokenize": ({"prompt": PROMPT}, "prompt messages add_special_tokens"),
    "/detokenize": ({"tokens": [5, 6]}, "tokens"),
}
WHOLE = [0, 1, 2, -1, 20, 21, 300, 2**15, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63]
BEYOND = [2**64 - 1, 2**64, 10**400, -(2**31), -(2**63), -(2**63) - 1]
REAL = [0.0, 0.5, 1.0, -0.0, 1e-46, 1e-40, 1e-38, 1e-7, 2.0, 100.0, 3e38, 1e39, 1e308, -1e-9]
ODD = [math.nan, math.inf, -math.inf, True, False, None]
TEXTS = ["", "a", "\ud800", "\x00", "<think>", "</think>", "x" * 300, "strict", "rejection"]
SCALARS = st.sampled_from([*WHOLE, *BEYOND, *REAL, *ODD, *TEXTS])
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.lists(st.sampled_from([0, 1, 5, 3071, 3072, 2**31, 2**64, -1]), max_size=3),
    st.dictionaries(st.sampled_from(["5", "-1", "x", str(2**64), "type"]), SCALARS, max_size=2),
    st.sampled_from(
        [{"type": "function"}, [{"type": "function", "function": {"name": "f"}}], [[]]]
    ),
)
CANARIES = (
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=7, logprobs=2),
)


@dataclass
class Canaries:
    """Requests that run next to all others, one after the other; each must say what it said."""

    engine: Engine
    expected: list[Any] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    answered: int = 0
    stop: bool = False

    def ask(self, params: SamplingParams) -> Any:
        result = self.engine.generate(PROMPT, params)
        return result.token_ids, [token.logprob for token in result.logprobs or ()]

    def run(self) -> None:
        while not self.stop and not self.wrong:
            for params, expected in zip(CANARIES, self.expected, strict=True):
                try:
                    if (output := self.ask(params)) != expected:
                        self.wrong.append(f"{output} in place of {expected}")
                except Exception as error:
                    self.wrong.append(f"{type(error).__name__}: {error}")
                self.answered += 1

    @contextlib.contextmanager
    def flying(self) -> Iterator["Canaries"]:
        self.expected = [self.ask(params) for params in CANARIES]
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield self
        finally:
            self.stop = True
            thread.join(60)


def machine(server: Live, engine: Engine, canaries: Canaries, seen: Counter[str]) -> Any:
    """Return the class of a state machine that asks this server and this engine."""
    names = sorted(list_http_settings())
    own = sorted(DEFAULTS)

    class Requests(RuleBasedStateMachine):
        """Requests by HTTP and in Python, streams that are dropped, and an empty prefix cache."""

        def __init__(self) -> None:
            super().__init__()
            self.streams: list[Stream] = []

        @rule(data=st.data(), route=st.sampled_from(sorted(ROUTES)))
        def ask_by_http(self, data: st.DataObject, route: str) -> None:
            good, fields = ROUTES[route]
            chosen = data.draw(st.lists(st.sampled_from([*names, *fields.split()]), max_size=3))
            body = good | {name: data.draw(VALUES, name) for name in chosen}
            status, raw = post(urlsplit(server.url).netloc, route, json.dumps(body).encode())
            text = raw.decode()
            assert not text.startswith("event") or "the server failed" not in text
            seen[f"HTTP {status}"] += 1
            late = (408,) if "timeout" in body else ()
            assert status in (200, 400, 404, 413, 429, *late), (status, text[:500], body)

        @rule(data=st.data(), drop=st.booleans())
        def ask_in_python(self, data: st.DataObject, drop: bool) -> None:
            chosen = data.draw(st.lists(st.sampled_from(own), max_size=3))
            given: dict[str, Any] = {"max_tokens": 3}
            given |= {name: data.draw(VALUES, name) for name in chosen}
            prompt: Any = data.draw(st.one_of(st.just(PROMPT), st.just([5, 6]), VALUES))
            try:
                stream = engine.stream(prompt, SamplingParams(**given))
            except RequestError:
                seen["refused in Python"] += 1
                return
            late = (DeadlineError,) if "timeout" in given else ()
            with contextlib.suppress(*late):
                next(stream, None)
                if drop:
                    self.streams.append(stream)
                else:
                    stream.result()
            seen["answered in Python"] += 1

        @rule()
        def drop_streams(self) -> None:
            self.streams.clear()

        @rule()
        def forget_prefixes(self) -> None:
            engine.reset_prefix_cache()

        @invariant()
        def all_is_well(self) -> None:
            assert not canaries.wrong
            assert engine.failure is None
            assert server.service.ready

    return Requests


@pytest.mark.xdist_group("tiny")
@pytest.mark.parametrize("requests", [600, pytest.param(20_000, marks=pytest.mark.full)])
def test_canaries_live(tiny_engine: Callable[..., Path], requests: int) -> None:
    """No request changes another's text, ends the engine or gets a 500."""
    seen, steps = Counter[str](), 50
    with (
        Engine.load(
            tiny_engine(3), threads=1, prefix_cache=True, prefix_cache_bytes=1 << 24
        ) as engine,
        live(engine, ServerOptions(max_queue=64)) as server,
        Canaries(engine).flying() as canaries,
    ):
        run_state_machine_as_test(
            machine(server, engine, canaries, seen),
            settings=settings(
                max_examples=requests // steps,
                stateful_step_count=steps,
                deadline=None,
                phases=[Phase.generate],
                derandomize=requests < 1000,
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )
        until(lambda: server.service.open == 0)
        assert not canaries.wrong
        assert canaries.answered > 2
    assert seen["HTTP 200"] > seen.total() / 20 < seen["HTTP 400"], seen
    assert seen["answered in Python"] > seen.total() / 50 < seen["refused in Python"], seen
