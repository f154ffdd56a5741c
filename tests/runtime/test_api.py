"""The Python API beyond `generate`: chats, deadlines, swaps, metrics, traces; its reference."""

import ast
import asyncio
import contextlib
import inspect
import json
import os
import re
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from prometheus_client.parser import text_string_to_metric_families

import mtpbuild.runtime
from mtpbuild.runtime import (
    ChatResult,
    DeadlineError,
    Engine,
    EngineError,
    RequestError,
    SamplingParams,
    Trace,
)
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.server import make_app
from mtpbuild.runtime.threads import start_daemon
from tests.support.fakes import continuation, fake_engine
from tests.support.live_server import live, until
from tests.support.scripts import load_script
from tests.support.served import SAID, TOOL_TEMPLATE, TOOLS, saying

MESSAGES = [{"role": "user", "content": "hi"}]
STOP = SamplingParams(max_tokens=100, stop=["｜end｜"])
CALL = {"name": "weather", "arguments": '{"city": "Ulm"}'}
RUNTIME = Path(mtpbuild.runtime.__file__).parent
EXPORTS = mtpbuild.runtime.__all__
# Files that declare flags, or whose messages commands print.
OF_COMMANDS = {
    "command.py", "diff.py", "drafters.py", "flag_groups.py", "options.py", "params.py", "ranks.py",
    "start.py",
}  # fmt: skip

reference = load_script(RUNTIME.parent / "tools" / "api_reference.py")


@pytest.fixture
def talker() -> Engine:
    """Make an engine that thinks, speaks and calls a tool."""
    return fake_engine(max_batch=2, max_seq_len=500, **saying(SAID, TOOL_TEMPLATE))[0]


def long_engine(**sizes: Any) -> Engine:
    return fake_engine(max_seq_len=5000, step_s=0.001, **sizes)[0]


def check_parts(answer: ChatResult) -> None:
    assert (answer.reasoning_content, answer.content) == ("so", "I look.")
    (call,) = answer.tool_calls
    assert (call["type"], call["function"]) == ("function", CALL)
    assert answer.finish_reason == "tool_calls"
    assert answer.message == {
        "role": "assistant", "content": "I look.", "reasoning_content": "so", "tool_calls": [call],
    }  # fmt: skip


def test_a_chat_has_thought_text_and_calls_apart(talker: Engine) -> None:
    check_parts(talker.chat(MESSAGES, STOP, tools=TOOLS))
    plain = talker.chat(MESSAGES, STOP)
    assert plain.content.startswith("I look.<tool_call>")
    assert (plain.tool_calls, plain.finish_reason) == ([], "stop")


def test_a_streamed_chat_joins_to_the_whole_one(talker: Engine) -> None:
    with talker.chat(MESSAGES, STOP, stream=True, tools=TOOLS) as stream:
        chunks = [*stream]
        check_parts(stream.result())
    assert "".join(chunk.content for chunk in chunks) == "I look."
    assert "".join(chunk.reasoning_content for chunk in chunks) == "so"
    first, *rest = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert (first["index"], first["function"]["name"]) == (0, "weather")
    parts = [first["function"]["arguments"], *(d["function"]["arguments"] for d in rest)]
    assert "".join(parts) == CALL["arguments"]
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["tool_calls"]


def test_chats_in_asyncio(talker: Engine) -> None:
    async def ask() -> None:
        whole, stream = await asyncio.gather(
            talker.achat(MESSAGES, STOP, tools=TOOLS),
            talker.achat(MESSAGES, STOP, stream=True, tools=TOOLS),
        )
        check_parts(whole)
        text = "".join([chunk.content async for chunk in stream])
        assert text == "I look."
        check_parts(await stream.result())

    asyncio.run(ask())


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}])
def test_texts_equal_those_over_http(talker: Engine, more: dict[str, Any]) -> None:
    parts = [{"type": "text", "text": text} for text in ("What", "now?")]
    earlier = [{"role": "user", "content": parts}]
    with live(talker) as server, server.client() as client:
        for messages in (MESSAGES, earlier):
            mine = talker.chat(messages, STOP, **more)
            body = {"messages": messages, "max_tokens": 100, "stop": "｜end｜", "temperature": 0}
            told = client.post("/v1/chat/completions", json=body | more).json()["choices"][0]
            theirs = told["message"]
            assert (theirs["content"] or "") == mine.content
            assert theirs.get("reasoning_content", "") == mine.reasoning_content
            calls = [call["function"] for call in theirs.get("tool_calls", [])]
            assert calls == [call["function"] for call in mine.tool_calls]
            assert told["finish_reason"] == mine.finish_reason


def test_a_cancelled_task_ends_its_chat() -> None:
    engine = long_engine()

    async def ask() -> None:
        task = asyncio.create_task(engine.achat(MESSAGES, SamplingParams(max_tokens=4000)))
        while not engine.stats.output_tokens:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(ask())
    until(lambda: engine.stats.requests_running == 0)
    assert engine.stats.output_tokens < 3000


def test_wrong_options_of_tools_are_named(talker: Engine) -> None:
    for wrong, says in (
        ({"tools": [{"name": "f"}]}, r"tools\.0 is not"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice must be"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_call_parser": "x"}, "no tool_call_parser 'x'; tool_call_"),
        ({"tools": TOOLS, "tool_call_parser": ["hermes"]}, "no tool_call_parser"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls must be true or f"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt must be true or false, not 'no'"),
        ({"continue_final_message": 5}, "continue_final_message must be true or false, not 5"),
        ({"tolls": []}, "unknown option tolls"),
    ):
        with pytest.raises(RequestError, match=says):
            talker.chat(MESSAGES, **wrong)


@pytest.mark.parametrize("wrong", [MESSAGES[0], 5, 5.0, {1}, iter(MESSAGES), b"hi", None, [5.0]])
def test_what_is_no_conversation_is_named(talker: Engine, wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"messages|a prompt is a text or a list of token ids"):
        talker.chat(wrong)


@pytest.mark.parametrize(
    "message",
    [{"role": "user"}, {"role": "user", "content": None}, {"role": "system"}, {"role": "tool"},
     {"role": "assistant"}, {"role": "assistant", "tool_calls": []}],
)  # fmt: skip
def test_a_message_has_content(talker: Engine, message: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\.1\.content is missing"):
        talker.chat([*MESSAGES, message])


@pytest.mark.parametrize("name", ["", "a\nb", "a b", "<tool>", "a.b", "é", "a" * 65])
def test_function_names_are_openais(talker: Engine, name: str) -> None:
    function = {"name": "a" * 64}
    tools = [{"type": "function", "function": function}]
    assert talker.chat(MESSAGES, STOP, tools=tools).finish_reason
    function["name"] = name
    with pytest.raises(RequestError, match=r"tools\.0\.function\.name has up to 64 letters"):
        talker.chat(MESSAGES, tools=tools)


def test_results_have_their_stop_reason(talker: Engine) -> None:
    assert talker.generate("hi", STOP).stop_reason == "｜end｜"
    first = talker.generate("hi", SamplingParams(max_tokens=1)).token_ids[0]
    token = SamplingParams(stop_token_ids=[first])
    assert talker.generate("hi", token).stop_reason == first
    assert talker.chat(MESSAGES, STOP).stop_reason == "｜end｜"
    assert talker.chat(MESSAGES, SamplingParams(max_tokens=1)).stop_reason is None


@pytest.mark.parametrize("waits", [False, True])
def test_a_request_ends_at_its_deadline(waits: bool) -> None:
    """With an error that is a TimeoutError, while it runs or waits; others go on."""
    engine = long_engine()
    ahead = engine.stream([9], SamplingParams(max_tokens=200 if waits else 1))
    until(lambda: next(ahead).token_ids)
    began = time.monotonic()
    late = SamplingParams(max_tokens=4900, timeout=0.05)
    with pytest.raises(DeadlineError, match=r"longer than its timeout of 0\.05 s"):
        engine.generate([5], late)
    assert time.monotonic() - began >= 0.05
    assert engine.stats.output_tokens < 4900, "it did not end by itself"
    assert issubclass(DeadlineError, TimeoutError)
    assert ahead.result().finish_reason == "length"
    assert engine.stats.requests_running == engine.stats.requests_waiting == 0
    assert engine.generate([5], SamplingParams(max_tokens=4, timeout=60)).finish_reason == "length"


def test_clients_may_give_a_timeout() -> None:
    with live(long_engine()) as server, server.client() as client:
        body = {"prompt": [5], "max_tokens": 4000, "timeout": 0.05}
        late = client.post("/v1/completions", json=body)
    assert (late.status_code, late.headers["x-should-retry"]) == (408, "false")
    assert "longer than its timeout" in late.json()["error"]["message"]


def swapped(engine: Engine, other: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    """Swap to another engine in a thread of its own."""
    monkeypatch.setattr(Engine, "load", lambda path, **_: other)
    thread = threading.Thread(target=engine.swap, args=("engines/other",))
    thread.start()
    return thread


def count_tokens(engine: Engine) -> float:
    (line,) = re.findall(r"^vllm:generation_tokens_total\{.*", engine.metrics(), re.M)
    return float(line.rpartition(" ")[2])


def test_a_swap_ends_old_requests_on_the_old_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = long_engine(), fake_engine(next_token=lambda history: 7, nextn=1)[0]
    wanted = old.generate([5], SamplingParams(max_tokens=300)).token_ids
    driver, running = old._loaded.driver, old.stream([5], SamplingParams(max_tokens=300))
    next(running)
    before = count_tokens(old)
    assert before > 300
    thread = swapped(old, new, monkeypatch)
    until(lambda: old.manifest.build.nextn == 1)
    assert count_tokens(old) >= before, "the requests that end on the old one count"
    assert old.generate([5], SamplingParams(max_tokens=3)).token_ids == [7, 7, 7]
    assert running.result().token_ids == wanted
    thread.join(10)
    assert driver.closed
    assert (count_tokens(old), old.stats.output_tokens) == (603, 3)
    positions = [line for line in old.metrics().splitlines() if 'position="2"' in line]
    assert len(positions) == 1, "the old engine's third draft"
    assert "vllm:request_success_total" in old.metrics()
    old.close()
    with pytest.raises(EngineError, match="closed"):
        new.generate([5])


def test_a_swap_beside_asyncio_and_prepared_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was prepared in a pinned engine ends there, however late it begins."""
    engine, new = long_engine(), fake_engine(next_token=lambda history: 7)[0]
    params = SamplingParams(max_tokens=100)
    wanted = engine.generate([5], params).token_ids

    async def ask() -> None:
        with engine.pinned() as pinned:
            request = pinned.prepare([5], params)
            thread = swapped(engine, new, monkeypatch)
            while engine._loaded is pinned._loaded:
                await asyncio.sleep(0.005)
            found = [id async for chunk in engine.astream(request) for id in chunk.token_ids]
            assert found == wanted
            assert thread.is_alive(), "it waits for the block"
        await asyncio.to_thread(thread.join, 10)
        assert not thread.is_alive()

    asyncio.run(ask())
    engine.close()


def test_a_swap_on_a_loop_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat that is being prepared holds the old engine, which only the loop can let go."""
    engine, new = long_engine(), fake_engine(next_token=lambda history: 7)[0]
    monkeypatch.setattr(Engine, "load", lambda path, **_: new)
    params, ended = SamplingParams(max_tokens=3), list[int]()

    async def ask() -> None:
        with engine.pinned() as pinned:
            request = pinned.prepare([5], params)
            with pytest.raises(UsageError, match=r"await engine\.aswap"):
                engine.swap("engines/other")
            assert engine._loaded is pinned._loaded
            swap = asyncio.create_task(engine.aswap("engines/other"))
            while engine._loaded is pinned._loaded:
                await asyncio.sleep(0.005)
            assert not swap.done(), "it waits for the block"
            assert [chunk async for chunk in engine.astream(request)]
        await swap
        ended.append(1)

    loop = threading.Thread(target=asyncio.run, args=(ask(),), daemon=True)
    loop.start()
    loop.join(10)  # a swap that stops the loop would stop its timeouts, too
    assert ended
    assert engine.generate([5], params).token_ids == [7, 7, 7]
    engine.close()


def test_swaps_wait_for_nothing_and_no_counter_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """In threads and on a loop, beside requests of both that run, wait or are cancelled."""
    engine, loop, counted = long_engine(max_batch=2), asyncio.new_event_loop(), [0.0]
    monkeypatch.setattr(Engine, "load", lambda path, **_: long_engine(nextn=int(path), max_batch=2))
    asked = list[tuple[Any, list[int] | None]]()
    counts, nextns = st.sampled_from([1, 30, 300]), st.sampled_from([1, 2, 3])

    async def ask_on_loop(count: int) -> list[int]:
        chunks = engine.astream([5], SamplingParams(max_tokens=count, ignore_eos=True))
        return [id async for chunk in chunks for id in chunk.token_ids]

    def ask_in_thread(count: int) -> list[int]:
        return engine.generate([5], SamplingParams(max_tokens=count, ignore_eos=True)).token_ids

    class Swaps(RuleBasedStateMachine):
        @rule(count=counts, on_loop=st.booleans(), cancelled=st.booleans())
        def ask(self, count: int, on_loop: bool, cancelled: bool) -> None:
            if on_loop:
                task = asyncio.run_coroutine_threadsafe(ask_on_loop(count), loop)
                if cancelled and task.cancel():
                    return
                asked.append((task, continuation([5], count)))
            else:
                asked.append(
                    (start_daemon(partial(ask_in_thread, count)), continuation([5], count))
                )

        @rule(nextn=nextns, on_loop=st.booleans())
        def swap(self, nextn: int, on_loop: bool) -> None:
            if on_loop:
                swapping = engine.aswap(str(nextn))
                asked.append((asyncio.run_coroutine_threadsafe(swapping, loop), None))
            else:
                asked.append((start_daemon(partial(engine.swap, str(nextn))), None))

        @invariant()
        def no_counter_falls(self) -> None:
            counted.append(count_tokens(engine))
            assert counted[-1] >= counted[-2]

        @rule()
        def wait(self) -> None:
            while asked:
                future, expected = asked.pop()
                assert future.result(20) == expected

        teardown = wait

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    few = settings(max_examples=6, stateful_step_count=15, deadline=None, phases=[Phase.generate])
    run_state_machine_as_test(Swaps, settings=few)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    assert counted[-1] > 0
    engine.close()
    loop.close()


def test_a_swap_that_fails_changes_nothing(tmp_path: Path) -> None:
    engine, _ = fake_engine()
    with engine:
        with pytest.raises(EngineError):
            engine.swap(tmp_path)
        assert engine.generate([5], SamplingParams(max_tokens=3)).token_ids


def test_a_swap_under_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, new = long_engine(max_batch=2), fake_engine(next_token=lambda history: 7)[0]
    body = {"prompt": [5], "max_tokens": 400, "temperature": 0, "return_token_ids": True}
    with live(engine) as server, server.client() as client:
        wanted = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
        told: list[Any] = []
        asking = threading.Thread(
            target=lambda: told.append(client.post("/v1/completions", json=body).json())
        )
        asking.start()
        until(lambda: engine.stats.requests_running)
        thread = swapped(engine, new, monkeypatch)
        until(lambda: engine.manifest is new.manifest)
        short = body | {"max_tokens": 3}
        now = client.post("/v1/completions", json=short).json()["choices"][0]["token_ids"]
        assert now == [7, 7, 7]
        asking.join(10)
        thread.join(10)
        assert not thread.is_alive()
        assert told[0]["choices"][0]["token_ids"] == wanted
    engine.close()


def test_metrics_of_python_requests() -> None:
    engine, _ = fake_engine(nextn=2)
    engine.generate([5, 6], SamplingParams(max_tokens=7))
    with pytest.raises(DeadlineError):
        engine.generate([5, 6], SamplingParams(max_tokens=7, timeout=0))
    text = engine.metrics("mine")
    assert text == engine.metrics("mine") or "process_" in text
    families = text_string_to_metric_families(text)
    found = {(s.name, s.labels.get("finished_reason")): s for f in families for s in f.samples}
    assert found["vllm:generation_tokens_total", None].value == 7
    assert found["vllm:request_generation_tokens_sum", None].value == 7
    assert found["vllm:time_to_first_token_seconds_count", None].value == 1
    assert found["vllm:request_success_total", "length"].value == 1
    assert found["vllm:request_success_total", "abort"].value == 1
    assert found["vllm:prompt_tokens_total", None].labels == {"model_name": "mine", "engine": "0"}


def test_a_trace_records_all_ways_to_ask(tmp_path: Path) -> None:
    engine, path = fake_engine(max_batch=2)[0], tmp_path / "out.jsonl"
    params = SamplingParams(max_tokens=5)

    async def ask(trace: Trace) -> None:
        async for _ in engine.astream([7], params, observer=trace):
            pass
        await engine.achat(MESSAGES, params, observer=trace)

    with Trace(engine, path) as trace:
        engine.generate([[5], [6]], params, observer=trace)
        asyncio.run(ask(trace))
        engine.chat(MESSAGES, params, observer=trace)
        engine.stream([8], params, observer=trace.request("mine")).result()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    begun = [line for line in lines if line["kind"] == "request"]
    assert [line["task_id"] for line in begun] == [0, 1, 2, 3, 4, "mine"]
    assert [line["prompt"] for line in begun][:3] == [[5], [6], [7]]
    assert begun[3]["prompt"] == begun[4]["prompt"] == engine.chat_ids(MESSAGES)
    assert (lines[-1]["kind"], lines[-1]["requests"]) == ("summary", 6)


def test_earlier_prompts_are_reused(tiny_engine: Callable[..., Path]) -> None:
    """As in `serve`, and `prefix_cache=False` fills in each prompt from its beginning."""
    prompt, params = [*range(5, 105)], SamplingParams(max_tokens=4)
    for options, reused in ((dict[str, Any](), True), ({"prefix_cache": False}, False)):
        with Engine.load(tiny_engine(3), threads=1, **options) as engine:
            engine.generate(prompt, params)
            assert (engine.generate(prompt, params).metrics.cached_tokens > 0) is reused


def test_an_application_to_mount(talker: Engine) -> None:
    """Its routes, its errors and what needs no key, below any path."""
    app = FastAPI()
    app.mount("/llm", make_app(talker, served_model_name="mine", api_key="k"))

    @app.get("/own")
    async def own() -> str:
        return "mine"

    async def ask() -> None:
        transport, key = httpx2.ASGITransport(app), {"Authorization": "Bearer k"}
        async with httpx2.AsyncClient(transport=transport, base_url="http://a.example") as client:
            assert (await client.get("/own")).json() == "mine"
            assert (await client.get("/llm/health")).status_code == 200
            assert (await client.get("/llm/v1/models")).status_code == 401
            models = (await client.get("/llm/v1/models", headers=key)).json()
            assert models["data"][0]["id"] == "mine"
            body = {"messages": MESSAGES, "stop": "｜end｜", "temperature": 0, "tools": TOOLS}
            told = await client.post("/llm/v1/chat/completions", json=body, headers=key)
            message = told.json()["choices"][0]["message"]
            assert (message["content"], message["reasoning_content"]) == ("I look.", "so")
            wrong = await client.post("/llm/v1/messages", json={}, headers=key)
            assert wrong.json()["type"] == "error", "Anthropic's form of an error"

    asyncio.run(ask())
    with pytest.raises(TypeError, match="max_que"):
        make_app(talker, max_que=3)  # type: ignore[call-arg]


def test_an_engine_says_what_it_is() -> None:
    engine, _ = fake_engine(nextn=2)
    assert repr(engine) == "<Engine of fake: nextn 2, onnxruntime>"
    engine._loaded.folder = Path("engines/a b")
    engine.close()
    assert str(engine) == "<Engine of fake from 'engines/a b': nextn 2, onnxruntime, closed>"


def test_an_application_is_unhealthy_without_its_engine() -> None:
    """After a fork, as by `gunicorn --preload`, and once the engine is closed."""
    engine, _ = fake_engine()
    app = make_app(engine)

    async def ask() -> list[int]:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://a.example") as client:
            return [(await client.get(path)).status_code for path in ("/health", "/ping")]

    assert asyncio.run(ask()) == [200, 200]
    here, there = os.pipe()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads
        child = os.fork()
    if not child:
        try:
            os.write(there, json.dumps(asyncio.run(ask())).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(os.read(here, 99)) == [503, 503]
    os.close(here)
    os.close(there)
    assert asyncio.run(ask()) == [200, 200], "the parent goes on"
    engine.close()
    assert asyncio.run(ask()) == [503, 503]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tool_call_parser": "herms"}, "tool_call_parser must be one of .*, not 'herms'"),
        ({"defaults": {"temprature": 0}}, "defaults: temprature is .*; did you mean temperature?"),
        ({"defaults": {"temperature": -5}}, "defaults: temperature must be a number in 0..100"),
        ({"defaults": {"max_tokens": 5}}, "defaults: max_tokens is no setting of requests"),
        ({"defaults": [("top_p", 1)]}, "defaults: must map names to values"),
        ({"request_timeout": -1}, "request_timeout must be a number in 0"),
        ({"request_timeout": float("nan")}, "request_timeout must be a number in 0"),
        ({"max_queue": -1}, "max_queue must be a whole number"),
        ({"max_queue": None}, "max_queue must be a whole number"),
        ({"max_body": "8 MB"}, "max_body must be a whole number"),
        ({"allow_origin": "https://a.example"}, r'allow_origin must be a list such as \["https:'),
        ({"allow_origin": ["https://a.example/"]}, "allow_origin must be a list such as"),
        ({"allowed_hosts": "localhost"}, "allowed_hosts must be a list such as"),
        ({"allowed_hosts": [5]}, "allowed_hosts must be a list such as"),
        ({"served_model_name": ""}, "served_model_name must be a text of 1"),
        ({"api_key": ""}, "api_key must be a text in ASCII that is not empty"),
        ({"api_key": "schlüssel"}, "api_key must be a text in ASCII"),
        ({"api_key": b"secret"}, "api_key must be a text in ASCII"),
        ({"split_thought": "no"}, "split_thought must be true or false"),
    ],
)
def test_an_application_checks_its_arguments(arguments: dict[str, Any], says: str) -> None:
    engine, _ = fake_engine()
    with pytest.raises(UsageError, match=f"^{says}") as told:
        make_app(engine, **arguments)
    assert "\n" not in str(told.value)
    assert "schl" not in str(told.value)


def test_an_application_takes_what_can_be() -> None:
    engine, _ = fake_engine()
    make_app(
        engine,
        allow_origin=["*", "https://a.example:8000", "chrome-extension://abc", "null"],
        allowed_hosts=(),
        api_key="a b",
        request_timeout=0,
        tool_call_parser="none",
        defaults={"temperature": 0, "top_k": 5},
    )
    with pytest.raises(UsageError, match="make_app needs an Engine, not 'engines/tiny'"):
        make_app("engines/tiny")  # type: ignore[arg-type]


def test_messages_have_no_flags() -> None:
    """What a caller of Python reads names arguments; flags are the command line's."""
    seen = 0
    for path in RUNTIME.rglob("*.py"):
        if path.parent.name in ("cli", "configuration") or path.name in OF_COMMANDS:
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        values = (node.value for node in nodes if isinstance(node, ast.Constant))
        for text in (value for value in values if isinstance(value, str)):
            output = re.sub("`[^`]*`", "", text)  # without whole commands
            assert not re.search(r"--[a-z]", output), f"{path}: {output}"
            seen += 1
    assert seen > 2000


def members_of(module: str) -> Iterator[tuple[str, str, str]]:
    """Yield the public names on a module's page, with their docstring and that of their class."""
    page = reference.document(module)
    for function in page.functions:
        yield function.name, function.docstring, ""
    for kind in page.classes:
        yield kind.name, kind.docstring, ""
        for member in kind.own_members:
            if not member.name.startswith("_"):
                yield f"{kind.name}.{member.name}", member.docstring, kind.docstring


def test_every_public_name_is_documented(tmp_path: Path) -> None:
    """By a docstring, a setting's help, a field's comment, or by its name in its class's one."""
    pages = [page.read_text(encoding="utf-8") for page in reference.write(tmp_path)]
    seen = 0
    for module, page in zip(reference.MODULES, pages, strict=True):
        for name, docstring, about in members_of(module):
            own = name.rpartition(".")[2]
            assert docstring or re.search(rf"\b{own}\b", about), f"{name} has no docstring"
            assert f'id="{name}"' in page
            seen += 1
    assert seen > 150
    assert all(f'id="{name}"' in pages[0] for name in mtpbuild.runtime.__all__)


@pytest.fixture
def folder(tiny_engine: Callable[..., Path], tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with the engines that docstrings name; one engine serves under all names."""
    (tmp_path / "engines").mkdir()
    for name in ("tiny_n2", "tiny_n3"):
        (tmp_path / "engines" / name).symlink_to(tiny_engine(3))
    with contextlib.chdir(tmp_path):
        yield tmp_path


def test_examples_of_docstrings_run(folder: Path) -> None:
    code = re.compile(r"(?:^ {4}.*\n?|^\n(?= {4}))+", re.MULTILINE)
    seen = 0
    with Engine.load("engines/tiny_n3", threads=1) as engine:
        for module in reference.MODULES:
            page = reference.document(module)
            for text in [page.docstring, *(docstring for _, docstring, _ in members_of(module))]:
                text = text.partition("Args:")[0]
                for example in map(textwrap.dedent, code.findall(text)):
                    given = {name: getattr(mtpbuild.runtime, name) for name in EXPORTS}
                    given |= {"engine": engine, "messages": MESSAGES, "FastAPI": FastAPI}
                    given |= {"make_app": make_app, "__name__": "example"}
                    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                    result = eval(compile(example, module, "exec", flags), given)
                    if inspect.iscoroutine(result):
                        asyncio.run(result)
                    seen += 1
    assert seen >= 9
