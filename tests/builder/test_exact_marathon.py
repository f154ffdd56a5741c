"""A million tokens of deepseek-tiny: nothing that happens beside a text changes a bit of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.runtime import Engine
from tests.support.crowds import Case, check_crowd, texts
from tests.support.requests import build

TOKENS = 1_000_000  # of all formats and engines together
ENGINES, FORMATS = 3, ("float32", "int8", "int4")
TOGETHER, LONGEST = 24, 150  # requests that are queued at once, and their tokens at most
pytestmark = [pytest.mark.full]


@pytest.mark.parametrize(
    "weights", [pytest.param(f, marks=pytest.mark.xdist_group(f"marathon-{f}")) for f in FORMATS]
)
def test_a_million_tokens(weights: str, tmp_path: Path) -> None:
    """nextn, drafter, batch, chunk, threads, prefixes and cancellations; greedy and sampled."""
    scheme = None if weights == "float32" else build_scheme(weights)
    whole = BuildRequest("deepseek-tiny", max_seq_len=256, scheme=scheme)
    alone = replace(whole, nextn=(0,), out=tmp_path / "alone")
    vanilla = replace(whole, nextn=(3,), prefill_chunk=5, max_batch=4, out=tmp_path / "vanilla")
    eagle = replace(whole, nextn=(2,), prefill_chunk=33, max_batch=8, out=tmp_path / "eagle")
    folders = [build(r)[0].folder for r in (alone, vanilla, replace(eagle, drafter="mtp-eagle"))]
    quota, compared, number = TOKENS // (len(FORMATS) * ENGINES), 0, 0
    with (
        Engine.load(folders[0], threads=1, prefix_cache=False) as one,
        Engine.load(folders[1], threads=2, prefix_cache=True) as many,
        Engine.load(folders[2], threads=1, prefix_cache=False) as others,
    ):
        while compared < quota:
            requests = [Case(number + i, LONGEST) for i in range(TOGETHER)]
            number += TOGETHER
            wanted = texts(one, requests, at_once=False)
            for engine in (many, others):
                check_crowd(engine, requests, wanted)
            compared += sum(map(len, wanted))
