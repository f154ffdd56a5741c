"""What the benchmarks conclude from what they measured; the measuring itself is not timed here."""

import re
import sys
from itertools import chain
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from tests.support.scripts import BENCHMARKS, ROOT, benchmark

PEER = """
import sys
sys.path.insert(0, sys.argv[1])
from worker import serve
def load():
    if "unloadable" in sys.argv: raise RuntimeError("no such weights\\nand more")
    def generate(prompt, count):
        if "dies" in sys.argv: sys.exit("killed by its allocator")
        if "fails" in sys.argv: raise ValueError("too long")
        print("a library that prints")
        for i in range(0, count, 2): yield [prompt[0] + i, prompt[0] + i + 1]
    return generate
serve(load)
"""


def text(table: Table) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


@pytest.fixture
def peers() -> ModuleType:
    return benchmark("peers")


def fake(peers: ModuleType, name: str, *flags: str) -> Any:
    command = (sys.executable, "-c", PEER, str(BENCHMARKS / "peer"), *flags)
    return peers.Peer(name, "fp32", command)


def test_peers_answer_in_turn_and_failures_are_told(peers: ModuleType) -> None:
    def make() -> None:
        raise RuntimeError("no compiler\nhere")

    unmade = peers.Peer("unmade", "fp32", (sys.executable,), make)
    flags = ("unloadable", "dies", "fails")
    wanted = [fake(peers, "sound"), *(fake(peers, flag, flag) for flag in flags), unmade]
    found = peers.measure(wanted, 1, [[5, 6], [40]], 4, Console(quiet=True))
    sound, *broken = found
    assert sound.error == ""
    assert sound.tokens == {0: [5, 6, 7, 8], 1: [40, 41, 42, 43]}
    assert all(len(times) == 4 and times == sorted(times) for times in sound.times.values())
    assert {length: len(seconds) for length, seconds in sound.first.items()} == {32: 2, 1024: 2}
    assert [each.error for each in broken] == [
        "RuntimeError: no such weights", "ended with 1: killed by its allocator",
        "ValueError: too long", "no compiler",
    ]  # fmt: skip
    kinds = {"code": [0], "reasoning": [1]}
    shown = text(peers.table(found, kinds))
    assert shown.count("failed") == 2 * len(broken)
    assert "2/2" in shown


def test_rates_and_agreement(peers: ModuleType) -> None:
    """Tokens per second over all requests: of their mean time per token, not the mean of rates."""
    one, other = (peers.Measured(fake(peers, name)) for name in "ab")
    one.times = {0: [1.0, 1.5, 2.0], 1: [0.1, 0.2, 0.3]}
    assert one.per_token([0, 1]) == pytest.approx([0.5, 0.1])
    assert one.rate([0, 1]) == pytest.approx(1 / 0.3)
    assert one.rate([7]) is None
    one.tokens, other.tokens = {0: [1, 2], 1: [3]}, {0: [1, 2], 1: [4], 2: [5]}
    assert peers.agreement(one, other) == "1/2"


def test_what_got_worse() -> None:
    check = benchmark("check")
    then = {
        "reasoning": 2.0, "code": 1.5, "auto": 1.0, "v": 1.5, "d": 0.4, "host": 2.0, "load": 0.4,
        "build": 40, "step": 1.9, "memory": 1.4, "http1": 1.0, "http8": 1.0, "prompt": 15.0,
        "int8": 0.9,
    }  # fmt: skip
    recorded = {"figures": then}
    assert set(then) == set(check.FIGURES)
    _, worse = check.report(then, recorded)
    assert worse == []
    better = {
        "reasoning": 2.5, "code": 1.9, "auto": 1.1, "v": 1.1, "d": 0.2, "host": 1.0, "load": 0.2,
        "build": 9, "step": 1.6, "memory": 1.2, "http1": 1.1, "http8": 1.1, "prompt": 20.0,
        "int8": 0.8,
    }  # fmt: skip
    assert check.report(better, recorded)[1] == []
    _, worse = check.report(then | {"code": 1.2, "v": 1.8}, recorded)
    assert worse == ["nextn 3 over nextn 0, code", "v: a step of 4 tokens over one of 1"]
    grid, worse = check.report(then, {})
    assert worse == []
    assert ">= 2.2" in text(grid)


def test_the_wheel_that_is_named() -> None:
    """Wheels are for any Python 3, and have the project's version."""
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    named = [re.findall(r"mtpbuild-[\w.-]*\.whl", p.read_text()) for p in ROOT.glob("docs/*.md")]
    assert {*chain(*named)} == {f"mtpbuild-{version[1]}-py3-none-linux_x86_64.whl"}
