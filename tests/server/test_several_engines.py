"""Several engines in one server: loaded at their first request, given back when idle."""

import asyncio
import contextlib
import math
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mtpbuild.runtime import Engine, EngineError
from mtpbuild.runtime.errors import StepError
from mtpbuild.runtime.limits import Limits
from mtpbuild.runtime.server.on_demand import EngineMemory, OnDemandService
from mtpbuild.runtime.server.options import ServerOptions, parse_keep
from mtpbuild.runtime.server.service import Services
from tests.support.fakes import FakePrograms, fake_engine, fake_manifest
from tests.support.live_server import Live, live_services, until
from tests.support.served import ASK, HELLO, LONG, events, fails

FEW = settings(max_examples=4, stateful_step_count=12, deadline=None, phases=[Phase.generate])
SIZES: dict[str, Any] = {"max_batch": 2, "max_seq_len": 5000}


@dataclass
class Shelf:
    """Fake engines by name, each with its own text, and what became of them.

    events: "NAME loaded" and "NAME closed". broken: names whose loading fails. gate: what a load
    waits for. size: bytes of each engine, of `memory`.
    """

    names: Sequence[str] = ("a", "b")
    keep: float = math.inf
    size: int = 10
    memory: int | None = None
    max_queue: int = 256
    events: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    programs: dict[str, FakePrograms] = field(default_factory=dict)

    def load(self, name: str) -> Engine:
        assert self.gate.wait(10)
        if name in self.broken:
            raise EngineError(f"engines/{name}: the weights are missing")
        number = 2 + 7 * self.names.index(name)
        engine, programs = fake_engine(
            next_token=lambda _: number, limit=1 << 20, step_s=0.001, **SIZES
        )
        self.programs[name] = programs
        self.events.append(f"{name} loaded")
        close = engine.close

        def closing() -> None:
            close()
            self.events.append(f"{name} closed")

        engine.close = closing  # type: ignore[method-assign]
        return engine

    def services(self) -> Services:
        memory = EngineMemory(self.memory)
        services = []
        for name in self.names:
            own = ServerOptions(served_model_name=name, max_queue=self.max_queue)
            manifest = fake_manifest(**SIZES)
            load = partial(self.load, name)
            service = OnDemandService(own, load, manifest, memory, self.keep)
            service.size = self.size
            services.append(service)
        return Services(*services)


@contextlib.contextmanager
def served_shelf(shelf: Shelf, watching: bool = True) -> Iterator[tuple[Live, httpx2.Client]]:
    """Serve a shelf whose gate is open."""
    shelf.gate.set()
    with live_services(shelf.services()) as server, server.client() as client:

        async def watch() -> None:
            every = [service.watch(0.01) for service in server.services.all if watching]
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*every)

        async def begin() -> asyncio.Task[None]:
            return asyncio.create_task(watch())

        async def end() -> None:
            task.cancel()
            await task

        task = asyncio.run_coroutine_threadsafe(begin(), server.loop).result(5)
        yield server, client
        asyncio.run_coroutine_threadsafe(end(), server.loop).result(5)


def ask(client: httpx2.Client, model: str | None, **more: Any) -> httpx2.Response:
    return client.post("/v1/completions", json=ASK | {"model": model} | more)


def text(response: httpx2.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def statuses(client: httpx2.Client) -> dict[str, str]:
    return {c["id"]: c["status"]["value"] for c in client.get("/v1/models").json()["data"]}


def test_a_requests_model_chooses_and_loads() -> None:
    shelf = Shelf()
    with served_shelf(shelf) as (_, client):
        assert client.get("/health").status_code == 200
        assert statuses(client) == {"a": "unloaded", "b": "unloaded"}
        assert (text(ask(client, "b")), shelf.events) == (text(ask(client, "b")), ["b loaded"])
        assert statuses(client) == {"a": "unloaded", "b": "loaded"}
        assert text(ask(client, None)) == text(ask(client, "a")) != text(ask(client, "b"))
        assert ask(client, "a").json()["model"] == "a"
        assert shelf.events == ["b loaded", "a loaded"]
        card = client.get("/v1/models/b").json()
        assert (card["root"], card["max_model_len"]) == ("fake", 5000)
        fails(ask(client, "c"), 404, "The model `c` does not exist.", "model")
        fails(client.get("/v1/models/c"), 404, "`c`", "model")


@pytest.mark.parametrize("route", ["/tokenize", "/v1/messages/count_tokens"])
def test_counting_tokens_loads_the_model(route: str) -> None:
    shelf = Shelf()
    with served_shelf(shelf) as (_, client):
        answer = client.post(route, json={"messages": HELLO["messages"], "model": "b"})
        assert (answer.status_code, shelf.events) == (200, ["b loaded"])


def test_many_first_requests_load_once() -> None:
    shelf, pool = Shelf(), ThreadPoolExecutor(6)
    with served_shelf(shelf) as (server, client), pool:
        shelf.gate.clear()
        answers = [pool.submit(ask, client, "a") for _ in range(6)]
        until(lambda: server.services.open == 6)
        shelf.gate.set()
        assert {text(answer.result()) for answer in answers} == {text(ask(client, "a"))}
        assert shelf.events == ["a loaded"]


def test_an_engine_is_given_back_when_idle_and_no_request_is_cut() -> None:
    shelf = Shelf(keep=0)
    with served_shelf(shelf) as (_, client):
        body = LONG | {"model": "a", "max_tokens": 300, "stream": True}
        *chunks, done = events(client.post("/v1/completions", json=body))
        assert (done, chunks[-1]["choices"][0]["finish_reason"]) == ("[DONE]", "length")
        until(lambda: shelf.events == ["a loaded", "a closed"])
        assert statuses(client) == {"a": "unloaded", "b": "unloaded"}
        text(ask(client, "a"))
        until(lambda: shelf.events[2:] == ["a loaded", "a closed"])


def test_its_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpbuild.runtime.server.on_demand.COLLECTIONS", 1000)  # they come fast
    shelf = Shelf(keep=0)
    with served_shelf(shelf) as (_, client):
        text(ask(client, "a"))
        programs = weakref.ref(shelf.programs.pop("a"))
        until(lambda: programs() is None)


def test_it_is_kept_as_long_as_asked() -> None:
    shelf = Shelf(keep=0.5)
    with served_shelf(shelf) as (_, client):
        text(ask(client, "a"))
        assert shelf.events == ["a loaded"]
        until(lambda: shelf.events == ["a loaded", "a closed"], 5)


def test_the_longest_idle_engine_makes_room() -> None:
    shelf = Shelf(names="abc", memory=25)
    with served_shelf(shelf) as (_, client):
        for model in "abac":
            text(ask(client, model))
        assert shelf.events == ["a loaded", "b loaded", "b closed", "c loaded"]


def test_running_requests_are_waited_for_if_memory_is_short() -> None:
    shelf, pool = Shelf(memory=15), ThreadPoolExecutor(1)
    with served_shelf(shelf) as (server, client), pool:
        long = pool.submit(ask, client, "a", max_tokens=400, ignore_eos=True)
        until(lambda: shelf.events)
        text(ask(client, "b"))
        assert long.result().json()["usage"]["completion_tokens"] == 400
        assert shelf.events == ["a loaded", "a closed", "b loaded"]
        assert server.services.ready


def test_first_come_first_served_if_there_is_room_for_one() -> None:
    """Requests of `a` overlap without a gap: those that come after `b`'s are answered after it."""
    shelf, pool, more = Shelf(memory=15), ThreadPoolExecutor(4), threading.Event()
    busy = {"max_tokens": 150, "ignore_eos": True}
    answered: list[str] = []

    def ask_on(client: httpx2.Client) -> None:
        while not more.is_set() and len(answered) < 40:
            answered.append(text(ask(client, "a", **busy)))

    with served_shelf(shelf) as (server, client), pool:
        askers = [pool.submit(ask_on, client)]
        until(lambda: answered)
        askers.append(pool.submit(ask_on, client))
        until(lambda: server.services.open == 2)
        before = len(answered)
        text(ask(client, "b", timeout=10))
        assert len(answered) - before <= 2, "those that ran"
        more.set()
        for asker in askers:
            asker.result(20)
        assert len(answered) - before >= 2, "who waited is answered, too"
    assert shelf.events == ["a loaded", "a closed", "b loaded", "b closed", "a loaded"]


def test_nobody_waits_for_an_engine_that_nobody_wants() -> None:
    shelf, pool = Shelf(memory=15), ThreadPoolExecutor(2)
    with served_shelf(shelf) as (server, client), pool:
        long = pool.submit(ask, client, "a", max_tokens=1500, ignore_eos=True)
        until(lambda: shelf.events)
        with pytest.raises(httpx2.TimeoutException):
            client.post("/v1/completions", json=ASK | {"model": "b"}, timeout=0.2)
        until(lambda: server.services.open == 1)
        text(ask(client, "a"))
        assert not long.done()
        assert long.result().json()["usage"]["completion_tokens"] == 1500
    assert shelf.events == ["a loaded"]


def test_memory_that_stays_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpbuild.runtime.server.on_demand.WAIT", 0.1)
    shelf, pool = Shelf(memory=15), ThreadPoolExecutor(1)
    with served_shelf(shelf) as (_, client), pool:
        long = pool.submit(ask, client, "a", max_tokens=900, ignore_eos=True)
        until(lambda: shelf.events)
        refused = ask(client, "b")
        fails(refused, 503, "no memory for b while a is in use: 0.0 of 0.0 GB")
        assert refused.headers["retry-after"] == "1"
        assert long.result().json()["usage"]["completion_tokens"] == 900


def test_an_engine_that_can_not_be_loaded_ends_its_requests_alone() -> None:
    shelf = Shelf(broken={"a"})
    with served_shelf(shelf) as (_, client):
        for stream in (True, False):
            refused = ask(client, "a", stream=stream)
            fails(refused, 500, "a can't be loaded: engines/a: the weights are missing")
            assert refused.headers["x-should-retry"] == "false"
        text(ask(client, "b"))
        assert client.get("/health").status_code == 200
        shelf.broken.clear()
        text(ask(client, "a"))


def test_a_failed_engine_is_loaded_anew() -> None:
    shelf = Shelf()
    with served_shelf(shelf) as (_, client):
        text(ask(client, "a"))
        shelf.programs["a"].fail = StepError("out of order")
        fails(ask(client, "a"), 500, "the engine failed: out of order")
        until(lambda: shelf.events == ["a loaded", "a closed"])
        assert client.get("/health").status_code == 200
        text(ask(client, "a"))
        assert shelf.events[2:] == ["a loaded"]


def test_a_client_that_leaves_while_its_engine_is_loaded() -> None:
    shelf = Shelf(keep=0)
    with served_shelf(shelf) as (server, client):
        shelf.gate.clear()
        with pytest.raises(httpx2.TimeoutException):
            client.post("/v1/completions", json=ASK, timeout=0.2)
        until(lambda: server.services.open == 0)
        shelf.gate.set()
        until(lambda: shelf.events == ["a loaded", "a closed"])


def test_the_queue_counts_before_the_engine_is_there() -> None:
    shelf, pool = Shelf(max_queue=0), ThreadPoolExecutor(2)
    with served_shelf(shelf) as (server, client), pool:
        shelf.gate.clear()
        first = [pool.submit(ask, client, "a") for _ in range(2)]
        until(lambda: server.services.open == 2)
        fails(ask(client, "a"), 429, "wait already")
        shelf.gate.set()
        text(ask(client, "b"))
        assert [text(each.result()) for each in first]


def test_metrics_are_labelled_by_model_and_outlive_the_engine() -> None:
    shelf = Shelf(memory=15)
    with served_shelf(shelf) as (_, client):
        text(ask(client, "a"))
        text(ask(client, "b"))
        lines = client.get("/metrics").text.splitlines()
        text(ask(client, "a"))
        again = client.get("/metrics").text.splitlines()
    assert shelf.events == ["a loaded", "a closed", "b loaded", "b closed", "a loaded"]
    gauges = ["num_requests_running", "kv_cache_usage_perc", "cache_config_info"]
    gauges += ["num_requests_waiting", "prefix_pool_bytes", "prefix_pool_limit_bytes"]
    for now, loaded in ((lines, "b"), (again, "a")):
        for name in gauges:
            (line,) = (line for line in now if line.startswith(f"vllm:{name}{{"))
            assert f'model_name="{loaded}"' in line
    counts = ['prompt_tokens_total{engine="0",model_name="a"}', "generation_tokens_total{"]
    counts += ['iteration_tokens_total_count{engine="0",model_name="a"}']
    counts += ['accepted_tokens_per_pos_total{engine="0",model_name="a",position="0"}']
    for name in counts:
        before, after = (
            float(line.rpartition(" ")[2])
            for now in (lines, again)
            for line in now
            if name in line and 'model_name="a"' in line
        )
        assert after == 2 * before > 0, name
    count = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="a"} 1.0'
    assert count in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "Prometheus wants each name once"
    for model in "ab":
        assert any("e2e_request" in line and f'model_name="{model}"' in line for line in lines)


def test_it_drains_while_an_engine_is_loaded() -> None:
    shelf, pool = Shelf(), ThreadPoolExecutor(1)
    with served_shelf(shelf, watching=False) as (server, client), pool:
        shelf.gate.clear()
        waiting = pool.submit(ask, client, "a")
        until(lambda: server.services.open)
        draining = server.services.drain(0.1)
        assert asyncio.run_coroutine_threadsafe(draining, server.loop).result(5)
        fails(waiting.result(), 503, "the server is shutting down")
        fails(ask(client, "b"), 503, "the server is shutting down")
        assert client.get("/health").status_code == 503
        shelf.gate.set()


def test_the_rows_of_all_are_forgotten() -> None:
    shelf = Shelf()
    with served_shelf(shelf) as (_, client):
        text(ask(client, "a"))
        assert client.post("/reset_prefix_cache").status_code == 200
        assert shelf.events == ["a loaded"]


def test_a_line_about_memory() -> None:
    for memory, says in ((None, ""), (10**11, "; memory: 100.0 GB, all fit")):
        shelf = Shelf(memory=memory, size=2 * 10**9)
        (first, *_) = shelf.services().all
        assert isinstance(first, OnDemandService)
        assert first.memory.describe() == f"engines with prefix caches: a 2.0 GB, b 2.0 GB{says}"


@pytest.mark.parametrize(
    ("flags", "limit"), [({}, 200), ({"prefix_cache_bytes": 7}, 7), ({"no_prefix_cache": True}, 0)]
)
def test_prefix_caches_count(
    flags: dict[str, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Limits(memory=None, free=1600, processors=1)
    monkeypatch.setattr("mtpbuild.runtime.prefix_cache.cache.measure_limits", lambda: free)
    sizes = [
        OnDemandService(own, fake_engine, fake_manifest(**SIZES), EngineMemory(None), 0).size  # type: ignore[arg-type]
        for own in (ServerOptions(**flags), ServerOptions(no_prefix_cache=True))
    ]
    assert sizes[0] - sizes[1] == limit


def test_nothing_waits_for_ever_and_no_counter_falls() -> None:
    """Whatever is asked, left, broken or loaded, each request ends within 20 seconds."""
    shelf, seen, asked = Shelf(names="abc", memory=25, keep=0.05), dict[str, float](), list[Any]()
    models = st.sampled_from("abc")

    class Requests(RuleBasedStateMachine):
        @rule(model=models, tokens=st.sampled_from([1, 40, 150]))
        def ask_model(self, model: str, tokens: int) -> None:
            more = {"max_tokens": tokens, "ignore_eos": True}
            asked.append(pool.submit(ask, client, model, **more))

        @rule(model=models, seconds=st.sampled_from([0.005, 0.05]))
        def leave(self, model: str, seconds: float) -> None:
            with contextlib.suppress(httpx2.TimeoutException):
                client.post("/v1/completions", json=LONG | {"model": model}, timeout=seconds)

        @rule(model=models)
        def break_engine(self, model: str) -> None:
            if model in shelf.programs:
                shelf.programs[model].fail = StepError("out of order")

        @rule(broken=st.sets(models, max_size=1))
        def break_loading(self, broken: set[str]) -> None:
            shelf.broken = broken

        @invariant()
        def no_counter_falls(self) -> None:
            counters = r"^(vllm:\w+_(?:total|count|bucket|sum){.*) (\S+)$"
            for name, value in re.findall(counters, client.get("/metrics").text, re.M):
                assert float(value) >= seen.get(name, 0), name
                seen[name] = float(value)

        @rule()
        def wait(self) -> None:
            while asked:
                assert asked.pop().result(20).status_code in (200, 500)

        def teardown(self) -> None:
            self.wait()
            until(lambda: server.services.open == 0)

    with served_shelf(shelf) as (server, client), ThreadPoolExecutor(16) as pool:
        run_state_machine_as_test(Requests, settings=FEW)
        shelf.broken = set()
        until(lambda: ask(client, "a").status_code == 200)  # an engine that was broken fails once
        Requests().no_counter_falls()
        assert {name.partition("{")[0] for name in seen} >= {"vllm:generation_tokens_total"}


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("10m", 600), ("90s", 90), ("1.5h", 5400), ("7", 7), ("0", 0), ("-1", math.inf)],
)
def test_how_long_an_engine_is_kept(given: str, seconds: float) -> None:
    assert parse_keep(given) == seconds
