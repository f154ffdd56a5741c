"""`mtpbuild study`: the drafts of traces whose verdicts are known, their bins, the command."""

import csv
import json
import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from mtpbuild.lab.eval.study import AXES, BINS, list_judged_drafts, make_bins, study_trace
from mtpbuild.runtime import Engine, SamplingParams, Trace
from mtpbuild.runtime.trace.lines import read_trace
from mtpbuild.runtime.trace.recorder import compute_entropies
from tests.support.fakes import FakePrograms, fake_manifest, fake_tokenizer
from tests.support.invoke import invoke

PLAIN, WITH_LOGPROBS, SAMPLED = (None, 0), (1, 0), (0, 0.7)  # log-probabilities, temperature


def write_trace(
    path: Path,
    *,
    nextn: int = 2,
    tokens: int = 50,
    kinds: Sequence[tuple[int | None, float]] = (PLAIN, WITH_LOGPROBS, SAMPLED),
) -> Path:
    """Write requests whose drafts are wrong at every fourth position."""
    manifest = fake_manifest(nextn=nextn)
    programs = FakePrograms(manifest, draft_is_right=lambda position: position % 4 != 0)
    with Engine(programs, manifest, fake_tokenizer()) as engine, Trace(engine, path) as trace:
        for prompt, (logprobs, temperature) in zip(([5, 6, 7], [8, 9], [4]), kinds, strict=False):
            params = SamplingParams(tokens, logprobs=logprobs, temperature=temperature)
            engine.stream(prompt, params, observer=trace.request()).result()
    return path


def test_drafts_and_their_verdicts(tmp_path: Path) -> None:
    """Those of the fake are accepted by their position; after a wrong one nothing is judged."""
    trace = read_trace(write_trace(tmp_path / "a.jsonl"))
    drafts = [*list_judged_drafts(trace)]
    assert all(draft.accepted == (draft.position % 4 != 0) for draft in drafts)
    assert {draft.draft for draft in drafts} == {1, 2}
    for task_id, traced in trace.requests.items():
        assert traced.end is not None
        mine = [draft for draft in drafts if draft.task_id == task_id]
        cut = sum(step.n for step in traced.steps) - traced.end.output_tokens
        told = traced.end.speculative_decoding["num_accepted_draft_tokens"]
        assert told - cut <= sum(draft.accepted for draft in mine) <= told
        assert len({draft.position for draft in mine}) == len(mine)
        assert all((draft.entropy is None) == (task_id == 0) for draft in mine)


def test_what_a_trace_says_of_a_draft(tmp_path: Path) -> None:
    """Of the fake's drafts, and only with log-probabilities; q only of a sampled request."""
    trace = read_trace(write_trace(tmp_path / "a.jsonl"))
    for draft in list_judged_drafts(trace):
        rank = 1 if draft.accepted else 2
        measured = (math.exp(-rank), rank) if draft.task_id else (None, None)
        assert (draft.probability, draft.rank) == measured
        assert draft.q == (0.25 if draft.task_id == 2 else None)


def test_margins_of_greedy_and_sampled_steps_are_apart(tmp_path: Path) -> None:
    """One is in logits, the other a share of the CDF: no bin has both."""
    found = study_trace(read_trace(write_trace(tmp_path / "a.jsonl")))
    sampled = sum(draft.task_id == 2 for draft in found.drafts)
    judged = {name: sum(b.judged for b in bins) for name, bins in found.bins.items()}
    assert judged["sampled_margin"] == sampled == judged["q"] > 0
    assert judged["greedy_margin"] == len(found.drafts) - sampled > 0
    for draft in found.drafts:
        assert (draft.greedy_margin is None) == (draft.task_id == 2)
        assert (draft.sampled_margin is None) == (draft.task_id != 2)


def test_a_trace_from_before_it_had_drafts_figures(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    older = ({k: v for k, v in line.items() if not k.startswith("draft_")} for line in lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in older))
    assert {"entropy", "greedy_margin", "sampled_margin"} <= study_trace(
        read_trace(path)
    ).bins.keys()
    assert not {"probability", "rank", "q"} & study_trace(read_trace(path)).bins.keys()


def test_shares_by_the_place_in_a_step(tmp_path: Path) -> None:
    found = study_trace(read_trace(write_trace(tmp_path / "a.jsonl")))
    counts = Counter((draft.draft, draft.accepted) for draft in found.drafts)
    for each in found.bins["draft"]:
        assert each.low == each.high == each.mean
        assert each.accepted == counts[int(each.low), True]
        assert each.judged - each.accepted == counts[int(each.low), False]


@pytest.mark.parametrize("distinct", [1, 3, BINS, 9, 500])
def test_bins_have_every_point_once(distinct: int) -> None:
    """They are in order, equal values are in one, and their sizes are alike."""
    rng = np.random.default_rng(distinct)
    values = rng.permutation(np.arange(1000) % distinct / 7)
    points = [(float(value), bool(value * 7 % 2 > 0.5)) for value in values]
    bins = make_bins(points)
    assert sum(each.judged for each in bins) == 1000
    assert all(a.high < b.low for a, b in pairwise(bins))
    for each in bins:
        mine = [(x, y) for x, y in points if each.low <= x <= each.high]
        assert (each.judged, each.accepted) == (len(mine), sum(y for _, y in mine))
        assert each.mean == pytest.approx(sum(x for x, _ in mine) / len(mine))
        share = each.share
        assert share.low is not None
        assert share.high is not None
        assert share.low - 1e-9 <= share.value <= share.high + 1e-9
    assert len(bins) == min(distinct, BINS)
    most = 1000 / BINS + 4 if distinct == 500 else 1000
    assert max(each.judged for each in bins) <= most


def test_entropies() -> None:
    """Exact where the likeliest tokens are all there are; else the rest counts as one token."""
    even = np.full((1, 20), -math.log(20), np.float32)
    certain = np.full((1, 20), -np.inf, np.float32)
    certain[0, 0] = 0
    half = np.full((1, 20), math.log(0.5 / 20), np.float32)
    found = compute_entropies(np.concatenate([even, certain, half]))
    rest = 0.5 * math.log(2) + 0.5 * math.log(40)
    assert found == pytest.approx([math.log(20), 0, rest], abs=1e-6)


def test_the_command(tmp_path: Path) -> None:
    paths = [write_trace(tmp_path / "a.jsonl"), write_trace(tmp_path / "b.jsonl", nextn=3)]
    code, out, err = invoke("study", *paths, "--out", tmp_path / "out")
    assert (code, err) == (0, "")
    traces = [read_trace(path) for path in paths]
    every = [draft for trace in traces for draft in list_judged_drafts(trace)]
    with (tmp_path / "out" / "study.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["position"]) for line in lines] == [draft.position for draft in every]
    assert [line["accepted"] == "True" for line in lines] == [d.accepted for d in every]
    document = json.loads((tmp_path / "out" / "study.json").read_text())
    for path, one in zip(paths, document["traces"], strict=True):
        assert f"{path}: {one['accepted']} of {one['judged']} judged drafts" in out
        assert [*one["by"]] == [*AXES]
        assert sum(each["judged"] for each in one["by"]["position"]) == one["judged"]
    assert (tmp_path / "out" / "study.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = invoke("study", paths[0], "--out", tmp_path / "out", "--json")
    assert (code, len(json.loads(out)["traces"])) == (0, 1)


@pytest.mark.parametrize("kinds", [[PLAIN], [(None, 0.7)], [PLAIN, (None, 0.7)]])
def test_traces_without_logprobs(
    kinds: list[tuple[None, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels without values stay empty, and each point says how many drafts it is of."""
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "a.jsonl", kinds=kinds)
    write_trace(tmp_path / "b.jsonl", kinds=kinds, nextn=3, tokens=4)  # one draft at a position
    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))
    code, out, err = invoke("study", "a.jsonl", "b.jsonl")
    assert (code, err) == (0, "")
    assert out.endswith("wrote study_results/study.json and its pictures\n")
    traces = json.loads(Path("study_results/study.json").read_text())["traces"]
    assert traces[1]["by"]["draft"][-1]["judged"] < traces[0]["by"]["draft"][0]["judged"]
    for axes, name in zip(figures[0].axes, AXES, strict=True):
        counts = [str(one["judged"]) for trace in traces for one in trace["by"].get(name, [])]
        assert [text.get_text() for text in axes.texts] == counts
        assert (axes.get_title() == "not in these traces") == (not counts)


def test_a_picture_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one line after the tables, and no earlier picture stays beside new figures."""

    def fail(*_: object, **__: object) -> None:
        raise ValueError("no such font\nor another")

    path, out = write_trace(tmp_path / "a.jsonl"), tmp_path / "out"
    whole = invoke("study", path, "--out", out)[1]
    monkeypatch.setattr(Figure, "savefig", fail)
    code, tables, err = invoke("study", path, "--out", out)
    assert (code, tables) == (0, whole.replace(" and its pictures", ""))
    assert err == f"note: {out}/study.png: can't be drawn (ValueError: no such font)\n"
    assert sorted(each.name for each in out.iterdir()) == ["study.csv", "study.json"]


def test_a_trace_without_drafts(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "plain.jsonl", nextn=0)
    code, out, err = invoke("study", path, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err == f"error: {path} has no drafts: its engine drafts nothing\n"
