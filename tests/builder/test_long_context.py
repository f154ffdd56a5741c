"""The context of an engine whose user names none: the model's own, as far as memory allows."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtpbuild.builder.plan.context import choose_context
from mtpbuild.builder.plan.plan import Plan, count_state_bytes, make_state_specs
from mtpbuild.builder.plan.recipe import FoundModel, find_recipe
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.state import make_rows_spec
from mtpbuild.runtime.programs.host_slots import PackedCaches
from tests.support.engines import EngineBuilder
from tests.support.invoke import invoke
from tests.support.requests import build_request, plan_model

GIGACHAT = "gigachat3-10b-a1.8b"  # of 262,144 tokens; 27 layers of 576 values in fp32


def planned(memory: float, monkeypatch: pytest.MonkeyPatch, **flags: object) -> list[Plan]:
    """Plan GigaChat3's engines for a machine of this memory."""
    monkeypatch.setattr("mtpbuild.builder.compiler.plans.measure_memory", lambda: int(memory))
    recipe = find_recipe(GIGACHAT)
    assert recipe is not None
    found = FoundModel("giga", "giga", recipe.config_folder)
    request = build_request(GIGACHAT, (0, 1), **flags)
    return [*plan_model(request, found).values()]


@pytest.mark.parametrize(
    ("limit", "memory", "context"),
    [
        (262_144, 3_000_000, 262_144),
        (262_144, 891_000, 262_144),  # a third of what the weights leave
        (262_144, 890_000, 131_072),
        (100_000, 620_000, 100_000),  # a limit need not be a power of two
        (100_000, 400_000, 65_536),
        (262_144, 1_000, 4096),  # as much as before: caches take memory where they are used
        (2048, 1_000, 2048),
        (262_144, None, 4096),  # a system that does not say
    ],
)
def test_the_longest_that_fits(limit: int, memory: int | None, context: int) -> None:
    """A token takes a byte, and the weights 100,000."""
    assert choose_context(limit, memory, 95_000, lambda tokens: tokens) == context


def test_a_build_asks_for_the_models_context(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [plan.max_seq_len for plan in planned(128e9, monkeypatch, weights="int4")]
    assert lengths == [262_144, 262_144]
    small = planned(16e9, monkeypatch, weights="int4")
    assert [plan.max_seq_len for plan in small] == [32_768, 32_768]
    state = sum(map(count_state_bytes, make_state_specs(small[1])))
    assert 27 * 576 * 4 * 32_768 < state < (16e9 - 6.2e9) / 3
    batches = planned(16e9, monkeypatch, weights="int4", max_batch=8)
    assert batches[0].max_seq_len == 4096
    assert planned(16e9, monkeypatch, max_seq_len=99)[0].max_seq_len == 99


@pytest.mark.parametrize("flags", [{"portable": True}, {"target": "inductor"}])
def test_others_keep_theirs(flags: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their caches may take all their memory at once."""
    assert planned(128e9, monkeypatch, **flags)[0].max_seq_len == 4096


@pytest.mark.usefixtures("quick")
def test_the_build_says_it(
    smallest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A machine chooses the same each time, so that an engine is built once."""
    model, out = tmp_path / "model", tmp_path / "engine"
    shutil.copytree(smallest, model)
    config = json.loads((smallest / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    build = ("build", "--model", model, "--nextn", 1, "--out", out)
    monkeypatch.setattr("mtpbuild.builder.compiler.plans.measure_memory", lambda: 12 << 20)
    says = (
        "note: requests may have 16,384 tokens of the model's 1,048,576, which is what memory "
        "allows; --max-seq-len sets it"
    )
    assert invoke(*build)[0] == 0
    assert read_manifest(out).build.max_seq_len == 16_384
    code, printed, _ = invoke(*build)
    assert (code, "unchanged" in printed, caplog.messages) == (0, True, [says, says])
    assert invoke(*build, "--max-seq-len", 1 << 20)[0] == 0
    assert len(caplog.messages) == 2


def resident() -> int:
    """Read the bytes of memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096


def test_caches_take_memory_where_they_are_used() -> None:
    """1 GB of a long context, of which 1,000 rows are used."""
    before = resident()
    caches = PackedCaches([make_rows_spec("kv.0", "layers.0", "float32", (1, 1, 262_144, 1024))])
    caches.fit(1000)
    caches.pack(1)
    caches.views(0, 1)["kv.0"][:, :, :1000] = np.ones(1024, np.float32)
    assert 4_000_000 <= resident() - before < 40_000_000


@pytest.mark.full
def test_a_long_context_changes_no_token(smallest: Path, build_engine: EngineBuilder) -> None:
    """Nor does it, here a million tokens, take memory or time before it is used."""
    greedy = SamplingParams(max_tokens=30, ignore_eos=True)
    sampled = replace(greedy, temperature=0.8, seed=7, repetition_penalty=1.2)
    found = list[list[Sequence[int]]]()
    for length in (64, 1 << 20):
        folder = build_engine(smallest, 1, max_seq_len=length, portable=False)
        before = resident()
        with Engine.load(folder, threads=1) as engine:
            found.append([engine.generate([5, 6, 7], each).token_ids for each in (greedy, sampled)])
            assert resident() - before < 250_000_000
    assert found[0] == found[1]
