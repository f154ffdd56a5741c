"""Requests made up from the OpenAPI schema: no 500, no hang, every error has the one shape."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from mtpbuild.runtime.server.app import make_app
from tests.support.fakes import fake_engine
from tests.support.live_server import Live, live, until

CASES = [pytest.param(40), pytest.param(2000, marks=pytest.mark.full)]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    engine, _ = fake_engine(limit=1 << 20, max_batch=2, max_seq_len=64)
    with engine, live(engine) as running:
        yield running


@pytest.mark.parametrize("count", CASES)
def test_no_request_makes_the_server_fail(server: Live, count: int) -> None:
    schema = schemathesis.openapi.from_dict(make_app(server.services).openapi())
    cases = [
        operation.as_strategy(generation_mode=mode)
        for operation in operations(schema)
        for mode in (MODES if operation.method == "post" else MODES[:1])
    ]
    assert len(cases) > 6
    posts = st.tuples(st.one_of(*cases), st.booleans(), st.integers(0, 2**30)).map(tamed)
    seen: dict[int, int] = {}

    @settings(
        max_examples=count,
        deadline=None,
        phases=[Phase.generate],
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=posts)
    def ask(case: Any) -> None:
        response = case.call(base_url=server.url, timeout=20)
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        check(response, "/messages" in case.operation.path)

    ask()
    assert seen.keys() <= {200, 400, 404, 405, 413}, seen
    assert seen[200] > count / 10 < seen[400], seen
    until(lambda: server.service.open == 0)  # an answer may be read before it is put away


def operations(schema: Any) -> Iterator[Any]:
    """Yield each route with its method."""
    for result in schema.get_all_operations():
        yield result.ok()


def tamed(drawn: tuple[Any, bool, int]) -> Any:
    """Half of the cases as they are; else a good prompt, and some three of the body's fields.

    A body in which all is made up says little: its first wrong field is all that is looked at.
    """
    case, wild, number = drawn
    if wild or not isinstance(case.body, dict):
        return case
    chosen = [name for i, name in enumerate(sorted(case.body)) if number >> (i % 30) & 7 == 0]
    good: dict[str, Any] = {"prompt": "hello"}
    if case.operation.path.endswith("responses"):
        good = {"input": "hi", "max_output_tokens": 5}
    elif "chat" in case.operation.path or "messages" in case.operation.path:
        good = {"messages": [{"role": "user", "content": "hi"}]}
    kept = {name: case.body[name] for name in chosen if name not in ("model", "prompt", "messages")}
    case.body = kept | good
    return case


def check(response: Any, anthropic: bool = False) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        if anthropic:
            error |= {"param": None, "code": response.status_code}
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] in (response.status_code, "context_length_exceeded")
        assert error["message"]


def test_the_schema_names_what_is_there(server: Live) -> None:
    paths = make_app(server.services).openapi()["paths"]
    assert sorted(paths) == [
        "/detokenize", "/health", "/load", "/markdown", "/metrics", "/reset_prefix_cache",
        "/tokenize", "/v1/chat/completions", "/v1/completions", "/v1/messages",
        "/v1/messages/count_tokens", "/v1/models", "/v1/models/{name}", "/v1/responses", "/version",
    ]  # fmt: skip
    body = paths["/v1/chat/completions"]["post"]
    assert "text/event-stream" in body["responses"]["200"]["content"]
