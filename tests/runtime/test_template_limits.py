"""A chat template gets 2 s and 256 MB; one that takes more ends its own process alone."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mtpbuild.runtime.errors import RequestError, TemplateLimitError
from mtpbuild.runtime.text.chat_template import ChatTemplates, TemplateText
from mtpbuild.runtime.text.template_pool import MAX_PROCESSES
from mtpbuild.runtime.text.template_process import MEMORY, SECONDS

MESSAGES = [{"role": "user", "content": "hi"}]
SLACK = 4.0  # seconds that a busy machine may take beyond the limit
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TOO_LONG = {
    "loops": LOOPS,
    "filters": "{% set r = range(99999) | list %}{% for a in r if r | sum < 0 %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(70) }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "words": "{{ lipsum(n=10 ** 7) }}",
}
TOO_LARGE = {
    "a text": "{{ 'x' * 10 ** 9 }}", "a list": "{{ [0] * 10 ** 9 }}",
    "a text that is doubled": "{% set n = namespace(x='ab') %}"
    "{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a list that is doubled": "{% set n = namespace(x=[1]) %}"
    "{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "percent": "{{ '%0999999999d' % 1 }}", "format": "{{ '{:>999999999}'.format(1) }}",
    "center": "{{ 'x' | center(10 ** 9) }}", "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "tojson": "{{ [[1]] | tojson(indent=10 ** 9) }}",
    "join": "{% set n = messages | length * 10 ** 6 %}{{ (['x' * n] * 1000) | join }}",
    "output": "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
}  # fmt: skip
TOO_MUCH = {"output": "{{ 'x' * 20000000 }}"}


def one(text: str) -> ChatTemplates:
    return ChatTemplates({"default": TemplateText("chat_template.jinja", text)})


def refused(text: str, says: str) -> None:
    began = time.monotonic()
    with pytest.raises(TemplateLimitError, match=says) as caught:
        one(text).render(MESSAGES)
    assert time.monotonic() - began < SECONDS + SLACK
    assert "\n" not in str(caught.value)
    assert one("{{ messages[0].content }}").render(MESSAGES) == "hi"


def some(names: Iterable[str], chosen: tuple[str, ...]) -> list[Any]:
    """Leave the others to the larger matrix: one of each way to loop or to grow is enough."""
    return [pytest.param(n, marks=[] if n in chosen else pytest.mark.full) for n in names]


@pytest.mark.parametrize("name", some(TOO_LONG, ("loops", "a power")))
def test_time(name: str) -> None:
    refused(TOO_LONG[name], "takes more than 2 seconds")


@pytest.mark.parametrize("name", some(TOO_LARGE, ("a list", "output")))
def test_memory(name: str) -> None:
    refused(TOO_LARGE[name], "takes more than 256 MB of memory")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts memory so")
def test_memory_of_all_processes() -> None:
    """Counted in a small process: what a child begins with is its parent's memory."""
    script = (
        "import re, resource; from tests.runtime.test_template_limits import *\n"
        "for text in TOO_LARGE.values(): refused(text, 'MB of memory')\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    own, children = (int(kib) << 10 for kib in done.stdout.split())
    assert own < 128 << 20
    assert children < MEMORY + (128 << 20)


@pytest.mark.parametrize("name", TOO_MUCH)
def test_output(name: str) -> None:
    refused(TOO_MUCH[name], "writes more than 16 MB")


def test_a_large_message_is_rendered_and_what_is_said_of_it_is_short() -> None:
    messages = [{"role": "user", "content": "é" * (4 << 20)}]
    assert one("{{ messages[0].content }}").render(messages) == messages[0]["content"]
    with pytest.raises(RequestError) as caught:
        one("{{ raise_exception(messages[0].content) }}").render(messages)
    assert len(str(caught.value)) < 2000


def test_values_arrive_as_they_are() -> None:
    """Texts that are no Unicode, large numbers, tuples: nothing is written as JSON between."""
    kwargs = {"a": "\ud800\r\n", "b": 10**5000, "c": (1, [2.5, None, True]), "d": float("inf")}
    shown = one("{{ a }}{{ b % 7 }}{{ c }}{{ d }}").render(MESSAGES, chat_template_kwargs=kwargs)
    assert shown == f"\ud800\r\n{10**5000 % 7}(1, [2.5, None, True])inf"


def test_one_that_takes_its_time_delays_no_other() -> None:
    with ThreadPoolExecutor(MAX_PROCESSES) as threads:
        slow = [threads.submit(refused, LOOPS, "2 seconds") for _ in range(MAX_PROCESSES - 1)]
        answers = [one("{{ messages[0].content }}").render(MESSAGES) for _ in range(20)]
        assert not any(each.done() for each in slow)
        assert answers == ["hi"] * 20
        for each in slow:
            each.result()


def test_threads_get_their_own_texts() -> None:
    def text(number: int) -> str:
        return one("{{ messages[0].content }}").render([{"role": "user", "content": str(number)}])

    with ThreadPoolExecutor(12) as threads:
        assert [*threads.map(text, range(300))] == [*map(str, range(300))]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a process of several threads forks
def test_a_forked_child_has_processes_of_its_own() -> None:
    ours = one("{{ messages[0].content }}")
    ours.render(MESSAGES)
    if (child := os.fork()) == 0:
        found = b""
        try:
            found = ours.render([{"role": "user", "content": "child"}]).encode()
        finally:
            os._exit(0 if found == b"child" else 1)
    assert [ours.render(MESSAGES) for _ in range(20)] == ["hi"] * 20
    assert os.waitpid(child, 0)[1] == 0
