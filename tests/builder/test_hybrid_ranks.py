"""Engines of a hybrid model that two ranks share, as processes."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mtpbuild.runtime.contract.controls import StepControls
from tests.reference.recompute import greedy
from tests.reference.sampling import sample
from tests.support.eager_ranks import in_place_of_the_compiler
from tests.support.families import make_family, save_family
from tests.support.inductor_engines import compiled_soon
from tests.support.rank_engines import GREEDY, HOT, make, running

NAME = "qwen3.5"
EVEN = {"vocab_size": 62}  # it splits


@pytest.mark.full
@pytest.mark.xdist_group("inductor")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, in export and gloo
@pytest.mark.parametrize(
    ("nextn", "compiler"),
    [
        (3, in_place_of_the_compiler),
        pytest.param(0, in_place_of_the_compiler, marks=pytest.mark.full),
        pytest.param(3, compiled_soon, marks=pytest.mark.full),
    ],
)
def test_two_ranks(
    nextn: int, compiler: Callable[[], contextlib.AbstractContextManager[object]], tmp_path: Path
) -> None:
    """Each has half of the heads of both kinds of layers; text is the plain model's."""
    torch.set_num_threads(1)
    model = make_family(NAME, **EVEN)
    folder = save_family(tmp_path / NAME, NAME, model, **EVEN)
    prompts = [np.random.default_rng(n).integers(0, 62, n).tolist() for n in (11, 1, 6)]
    with compiler():
        drafter = "mtp-eagle" if nextn else None
        engine = make(folder, tmp_path / "engine", nextn, drafter=drafter, tp=2, max_batch=2)
        with running(engine) as loaded:
            results = loaded.generate(prompts, [GREEDY, HOT, GREEDY])
    drawn = StepControls(temperature=0.8, top_p=0.95, seed=5)
    wanted = [greedy(model, prompt, 16) for prompt in prompts]
    wanted[1] = sample(model, prompts[1], 16, drawn)
    assert [list(result.token_ids) for result in results] == wanted
    drafting = loaded.stats.speculative_decoding
    some = 0 < drafting.num_accepted_draft_tokens < drafting.num_draft_tokens
    assert some == bool(nextn)
