"""Attention-DP: each rank has requests of its own, and says of each what one rank alone says.

Programs run eagerly (`tests/support/eager_ranks.py`); compiled ones are in
`test_ranks_compiled.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.recipe import FoundModel
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from tests.reference.recompute import greedy
from tests.reference.sampling import plain_text
from tests.support import collectives, eager_ranks
from tests.support.checkpoints import make_predictable, save_checkpoint
from tests.support.rank_engines import (
    GREEDY,
    HOT,
    NEXTN,
    PROMPT,
    RELAXED,
    SHAPE,
    followers,
    make,
    running,
)
from tests.support.requests import build_request, plan_model

pytestmark = [
    pytest.mark.xdist_group("inductor"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
TWO_MODULES: dict[str, Any] = SHAPE | {"num_nextn_predict_layers": 2}
OTHER, LONG = [40, 3], [11, 50, 7, 7, 31, 8, 22, 19, 4, 60, 2]  # no, one and three chunks


@pytest.fixture(scope="module")
def eagerly() -> Iterator[None]:
    with eager_ranks.in_place_of_the_compiler():
        yield


@pytest.fixture(scope="module")
def model() -> PlainDeepseek:
    return make_predictable(**TWO_MODULES)


@pytest.fixture(scope="module")
def checkpoint(model: PlainDeepseek, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("dp") / "two", model, **TWO_MODULES)


@pytest.fixture(scope="module")
def engine(eagerly: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "engine"
    return make(checkpoint, out, tp=2, attention_dp=True)


def tokens(
    loaded: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[list[int]]:
    return [result.token_ids for result in loaded.generate(prompts, params)]


def check(folder: Path, model: PlainDeepseek, comers: int = 8) -> None:
    """O2 for idle ranks, uneven numbers, and more requests than slots; twice the same.

    comers: how many of the crowd of eight come.
    """
    params = [GREEDY, HOT, RELAXED]
    crowd = [PROMPT, [5], LONG, OTHER, PROMPT, [9], LONG, OTHER]
    counts = [16, 3, 9, 5, 12, 16, 4, 8]
    crowd, counts = crowd[:comers], counts[:comers]
    many = [replace(GREEDY, max_tokens=count) for count in counts]
    with running(folder, prefix_cache=True) as loaded:
        alone = [tokens(loaded, [prompt], [GREEDY])[0] for prompt in (PROMPT, [5], LONG)]
        (relaxed,) = tokens(loaded, [PROMPT], [RELAXED])
        uneven = tokens(loaded, [LONG, PROMPT, PROMPT], params)
        turned = tokens(loaded, [PROMPT, LONG, PROMPT], [params[i] for i in (2, 0, 1)])
        crowded = tokens(loaded, crowd, many)
        again = tokens(loaded, [LONG, PROMPT, PROMPT], params)
        assert loaded.stats.prefix_queries == 0, "neither slots nor a pool keep anything"
    assert alone == [greedy(model, prompt, 16) for prompt in (PROMPT, [5], LONG)]
    assert uneven == [alone[2], plain_text(model, PROMPT, HOT), relaxed]
    assert turned == [relaxed, uneven[0], uneven[1]], "on the other rank"
    assert crowded == [greedy(model, p, n) for p, n in zip(crowd, counts, strict=True)]
    assert again == uneven
    assert not followers()


@pytest.mark.full
def test_tokens(engine: Path, model: PlainDeepseek) -> None:
    check(engine, model, comers=5)


@pytest.mark.full
def test_on_gpus(
    checkpoint: Path, model: PlainDeepseek, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake ones: a step is a captured graph, steps overlap, and ranks' collectives are the same."""
    flags: dict[str, Any] = {"tp": 2, "attention_dp": True, "device": "cuda", "max_batch": 2}
    monkeypatch.setenv(collectives.LOGS, str(tmp_path))
    with eager_ranks.on_gpus():
        check(make(checkpoint, tmp_path / "engine", **flags), model)
    lines = collectives.agreed(tmp_path)
    assert any(line.startswith("graph 3: decode_mixed of 2") for line in lines)
    assert any(line.startswith("at once: prefill") for line in lines)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        {"drafter": "mtp-vanilla", "tp": 2, "max_batch": 2},
        {"drafter": "mtp-vanilla", "tp": 4, "ep": 2, "max_batch": 1},
        {"drafter": "mtp-eagle", "tp": 2, "ep": 2, "max_batch": 3},
    ],
    ids=str,
)
@pytest.mark.usefixtures("eagerly")
def test_more_of_them(
    flags: dict[str, Any], checkpoint: Path, model: PlainDeepseek, tmp_path: Path
) -> None:
    """Ranks, slots on each, and both drafters."""
    check(make(checkpoint, tmp_path / "engine", attention_dp=True, **flags), model)


@pytest.mark.full
def test_the_folder(engine: Path, checkpoint: Path) -> None:
    """Each rank holds all but a part of the experts, and caches for its own requests."""
    manifest = read_manifest(engine)
    assert manifest.build.attention_dp
    assert (manifest.build.max_batch, manifest.build.slots) == (1, 2)
    assert all(spec.shape[0] == 1 for spec in manifest.state)
    model = make_predictable(**TWO_MODULES)
    routed = sum(p.numel() for name, p in model.named_parameters() if ".mlp.experts." in name)
    whole = sum(p.numel() for p in model.parameters())
    for rank in range(2):
        size = (engine / f"rank{rank}" / "weights.safetensors").stat().st_size
        assert size / 4 == pytest.approx(whole - routed / 2, rel=0.05)
    request = build_request(checkpoint, (NEXTN,), target="inductor", tp=2, attention_dp=True)
    (out,) = plan_model(request, FoundModel("two", "two", checkpoint))
    assert out == Path("engines/two_n2_tp2_adp")
