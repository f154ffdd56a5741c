"""A drafter of another package with trained weights, which enter engine and fingerprint.

The oracle is its table in NumPy: every draft, and the probability with which it was drawn.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mtpbuild.builder.compiler.build import BuiltEngine
from mtpbuild.builder.compiler.refit import refit
from mtpbuild.runtime import Engine, SamplingParams, Trace
from mtpbuild.runtime.contract.controls import StepControls
from mtpbuild.runtime.errors import CheckpointError
from mtpbuild.runtime.trace.lines import StepLine, read_trace
from tests.reference.sampling import distribution
from tests.support import bigrams, installed
from tests.support.checkpoints import SMALLEST, random_checkpoint
from tests.support.engines import greedy_ids
from tests.support.fake_target import greedy_only
from tests.support.requests import build, build_request

V, NEXTN, PROMPT = 61, 2, [3, 1, 4]


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NDArray[np.float32]]:
    """Install the drafter, and train it: half of the tokens are followed by the one after them."""
    logits = np.random.default_rng(2).normal(size=(V, V)).astype(np.float32)
    logits[np.arange(0, V, 2), (np.arange(0, V, 2) + 1) % V] += 9
    save_file({"counts.logits": logits}, tmp_path / "bigrams.safetensors")
    monkeypatch.setattr(bigrams, "FILES", [tmp_path / "bigrams.safetensors"])
    at, folder = "tests.support.bigrams:BIGRAMS", tmp_path / "site-packages"
    folder.mkdir()
    with installed.installed(folder, "mtpbuild.drafters", "bigrams", at):
        yield logits


def built(model: Path, tmp_path: Path, **own: Any) -> BuiltEngine:
    flags = {"drafter": "bigrams", "out": tmp_path / "engine"} | own
    (engine,) = build(build_request(model, (NEXTN,), **flags))
    return engine


def steps_of(engine: Path, trace: Path, params: SamplingParams) -> list[StepLine]:
    with Engine.load(engine, threads=1) as loaded, Trace(loaded, trace) as recorder:
        loaded.stream(PROMPT, params, observer=recorder.request()).result()
    (traced,) = read_trace(trace).requests.values()
    return traced.steps


def test_drafts_are_what_its_table_says(
    smallest: Path, tmp_path: Path, table: NDArray[np.float32]
) -> None:
    """Greedily the argmax, and sampled drawn with its probability; the text is that without it."""
    engine = built(smallest, tmp_path)
    assert engine.manifest.build.packages == {"bigrams": "bigrams 1.0"}
    stored = load_file(engine.folder / "weights.safetensors")["drafter.counts.logits"]
    assert np.array_equal(stored, table)
    greedy = SamplingParams(24, ignore_eos=True)
    steps = steps_of(engine.folder, tmp_path / "greedy.jsonl", greedy)
    for step in steps[1:]:
        assert step.window[1:] == [int(table[t].argmax()) for t in step.window[:-1]]
    with greedy_only():
        (without,) = build(build_request(smallest, (0,), out=tmp_path / "n0"))
    texts = [greedy_ids(folder, [PROMPT], 24)[0] for folder in (engine.folder, without.folder)]
    assert texts[0] == texts[1] == [t for step in steps for t in step.tokens][:24]
    hot = SamplingParams(24, ignore_eos=True, temperature=0.8, seed=1, logprobs=0)
    for step in steps_of(engine.folder, tmp_path / "hot.jsonl", hot)[1:]:
        pairs = zip(step.window[:-1], step.window[1:], strict=True)
        shape = StepControls(temperature=0.8)
        q = [float(distribution(table[a].astype(np.float64), shape)[b]) for a, b in pairs]
        assert step.draft_q == pytest.approx(q, abs=1e-5)


@pytest.mark.usefixtures("quick")
def test_its_files_are_in_the_fingerprint(
    smallest: Path, tmp_path: Path, table: NDArray[np.float32]
) -> None:
    """Other values are another engine; the drafter of an engine without them does not matter."""
    first = built(smallest, tmp_path)
    assert built(smallest, tmp_path).unchanged
    save_file({"counts.logits": table + 1}, bigrams.FILES[0])
    second = built(smallest, tmp_path)
    assert not second.unchanged
    assert first.manifest.build.fingerprint != second.manifest.build.fingerprint
    eagle = built(smallest, tmp_path, drafter="mtp-eagle", out=tmp_path / "eagle")
    save_file({"counts.logits": table}, bigrams.FILES[0])
    assert built(smallest, tmp_path, drafter="mtp-eagle", out=tmp_path / "eagle").unchanged
    names = load_file(eagle.folder / "weights.safetensors").keys()
    assert not [name for name in names if name.startswith("drafter.")]


@pytest.mark.usefixtures("quick")
def test_refit_keeps_its_weights(
    smallest: Path, tmp_path: Path, table: NDArray[np.float32]
) -> None:
    engine = built(smallest, tmp_path).folder
    before = load_file(engine / "weights.safetensors")
    refit(engine, str(random_checkpoint(tmp_path / "new", seed=7, **SMALLEST)))
    now = load_file(engine / "weights.safetensors")
    changed = {name for name in now if not np.array_equal(now[name], before[name])}
    assert np.array_equal(now["drafter.counts.logits"], table)
    assert len(changed) > 5


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (None, "drafter bigrams: {}: no such file"),
        (b"no header", "{}: not a readable safetensors file"),
        ({"counts.logits": np.zeros((V, V), np.int32)}, "{}: tensor drafter.counts.logits is I32"),
    ],
)
def test_files_that_can_not_be(tensors: Any, says: str, smallest: Path, tmp_path: Path) -> None:
    path = bigrams.FILES[0]
    path.unlink()
    if isinstance(tensors, bytes):
        path.write_bytes(tensors)
    elif tensors is not None:
        save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        built(smallest, tmp_path)
    assert str(caught.value).startswith(says.format(path))
    assert not (tmp_path / "engine").exists()
