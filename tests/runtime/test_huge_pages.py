"""`--huge-pages`: an engine whose weights are copied says what the mapped one says."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import WEIGHTS, read_manifest
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.programs.mapped_weights import map_tensors
from tests.support.engines import write_manifest


def test_copied_weights(tiny_engine: Callable[..., Path]) -> None:
    folder, params = tiny_engine(3), SamplingParams(max_tokens=24, logprobs=1)
    found = []
    for huge_pages in (False, True):
        with Engine.load(folder, threads=1, huge_pages=huge_pages) as engine:
            result = engine.generate("def f(n):", params)
            found.append((result.token_ids, result.logprobs))
    assert found[0] == found[1]


def test_they_are_the_file(tiny_engine: Callable[..., Path]) -> None:
    path = tiny_engine(3) / WEIGHTS
    copied, lent = map_tensors(path, huge_pages=True), map_tensors(path)
    assert copied.keys() == lent.keys()
    for name, array in copied.items():
        assert not np.shares_memory(array, lent[name])
        assert array.tobytes() == lent[name].tobytes()


def test_a_portable_engine_has_none(tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_engine(3), tmp_path / "portable")
    manifest = read_manifest(folder)
    build = manifest.build.model_copy(update={"cpu_layout": None, "block_size": None})
    write_manifest(folder, manifest.model_copy(update={"build": build}))
    with pytest.raises(UsageError, match="is for engines on our CPU kernels"):
        Engine.load(folder, huge_pages=True)
