"""An engine of a hybrid model takes another checkpoint's weights."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.models.common.plain import PlainCausalLM
from tests.reference.recompute import greedy
from tests.support.engines import EngineBuilder, greedy_ids
from tests.support.families import make_family, save_family

NAME, CHUNK = "qwen3-next", 16  # the engine that `test_families.py` builds


@pytest.mark.full
def test_new_weights(build_engine: EngineBuilder, tmp_path: Path) -> None:
    models: list[PlainCausalLM] = [make_family(NAME, seed) for seed in range(2)]
    folders = [save_family(tmp_path / str(i) / NAME, NAME, m) for i, m in enumerate(models)]
    built = build_engine(folders[0], 3, "mtp-eagle", prefill_chunk=CHUNK)
    engine = shutil.copytree(built, tmp_path / "engine")
    prompts = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in (20, 1)]
    refit(engine, str(folders[1]))
    assert greedy_ids(engine, prompts, 20) == [greedy(models[1], p, 20) for p in prompts]
