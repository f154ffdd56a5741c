"""Oracle O1: transformers' DeepSeek-V3 on the same checkpoint, in fp32."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import SHAPES, load_reference, random_checkpoint
from tests.support.engines import EngineBuilder, greedy_ids
from tests.support.transformers_oracle import load_modules, transformers_greedy, transformers_model

ATOL = 2e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plain_model_equals_transformers(shape: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = random_checkpoint(tmp_path / shape, **SHAPES[shape])
    theirs, ours = transformers_model(folder), load_reference(folder)
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, 61, (2, 100)))
    with torch.no_grad():
        difference = (theirs(tokens).logits - ours.lm_head(ours.main(tokens))).abs().max()
    assert difference < ATOL


@pytest.mark.full  # tests/test_tiny.py compares an engine of the first shape
@pytest.mark.parametrize("shape", SHAPES)
def test_the_engine_equals_transformers(
    shape: str, tmp_path: Path, build_engine: EngineBuilder
) -> None:
    torch.set_num_threads(1)
    folder = random_checkpoint(tmp_path / shape, **SHAPES[shape])
    theirs = transformers_model(folder)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 61, (2, 100)))
    engine = build_engine(folder, 0, prefill_chunk=16)
    for length in (1, 2, 17, 40):
        prompt = tokens[0, :length].tolist()
        assert greedy_ids(engine, [prompt], 24) == [transformers_greedy(theirs, prompt, 24)]


@pytest.mark.parametrize("modules", [1, 3])
def test_mtp_modules_equal_transformers(tmp_path: Path, modules: int) -> None:
    """Hidden states of each module, against transformers' MtpModel on the same inputs."""
    from transformers.modeling_layers import MtpModel

    torch.set_num_threads(1)
    folder = random_checkpoint(tmp_path / "checkpoint", num_nextn_predict_layers=modules)
    trunk, ours = transformers_model(folder), load_reference(folder)
    theirs = MtpModel(trunk, modules).eval()
    load_modules(theirs, ours)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, 61, (1, 30)))
    with torch.no_grad():
        hidden = ours.main(tokens)
        for k in range(modules):
            hidden, following = hidden[:, :-1], tokens[:, k + 1 :]
            positions = torch.arange(following.shape[1])[None]
            got = theirs.forward_layer(k, hidden, positions, None, input_ids=following)
            hidden = ours.mtp(k + 1, following, hidden)
            assert (got - hidden).abs().max() < ATOL
