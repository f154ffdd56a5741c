"""Engines that were built before states had roles: their manifests are converted when read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import MANIFEST, read_manifest
from mtpbuild.runtime.controls_of import controls_of
from mtpbuild.runtime.errors import EngineFormatError, RequestError

pytestmark = pytest.mark.xdist_group("tiny")  # another worker would wait for the same engine
# That of an engine as it was built then: four slots, three drafts by MTP vanilla.
OLD = Path(__file__).parents[1] / "data" / "engine_format_2.json"


def written(folder: Path, raw: dict[str, Any]) -> Path:
    (folder / MANIFEST).write_text(json.dumps(raw), encoding="utf-8")
    return folder


def test_states_get_roles(tmp_path: Path) -> None:
    raw = json.loads(OLD.read_text(encoding="utf-8"))
    manifest = read_manifest(written(tmp_path, raw))
    assert manifest.build.capacity == 2052
    lacking = {Feature.ADAPT, Feature.OVERLAP, Feature.POOL, Feature.SCORE, Feature.SHARE}
    assert manifest.features == set(Feature) - lacking
    found = [(s.name, s.role, s.owner) for s in manifest.state]
    L, K = raw["model"]["num_hidden_layers"], raw["build"]["nextn"]
    carries = "lengths window num_drafts thinking history draft_probs past_tokens past_hidden"
    assert found == [
        *((f"kv.{i}", "rows", f"layers.{i}") for i in range(L)),
        *((f"mtp_kv.{j}", "rows", f"mtp.{j}") for j in range(K)),
        *((n, "history" if n == "history" else "carry", "step") for n in carries.split()),
    ]
    for spec, before in zip(manifest.state, raw["state"], strict=True):
        assert (spec.shape, spec.dtype) == (tuple(before["shape"]), before["dtype"])
    assert manifest.state[0].sizes == {"batch": 4, "head": 1, "rows": 2052, "width": 80}
    (tmp_path / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    assert read_manifest(tmp_path) == manifest  # in today's form


def test_they_report_fewer_alternatives(tmp_path: Path) -> None:
    manifest = read_manifest(written(tmp_path, json.loads(OLD.read_text(encoding="utf-8"))))
    controls_of([5], SamplingParams(logprobs=5), manifest)
    with pytest.raises(RequestError, match="logprobs: this engine has up to 5: build it anew"):
        controls_of([5], SamplingParams(logprobs=6), manifest)


@pytest.mark.parametrize(
    "damage",
    [
        {"state": []},
        {"state": 5},
        {"state": [{"name": "kv.0"}]},
        {"state": [{"name": "kv", "kind": "cache", "dtype": "float32", "shape": [1, 1, 9, 2]}]},
        {"state": [{"name": "odd", "kind": "carry", "dtype": "int64", "shape": [1]}]},
        {"build": 3},
    ],
)
def test_damaged_ones_are_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    raw = json.loads(OLD.read_text(encoding="utf-8")) | damage
    with pytest.raises(EngineFormatError, match="rebuild the engine") as caught:
        read_manifest(written(tmp_path, raw))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
def test_a_main_model_of_its_own_is_refused(version: int, tmp_path: Path) -> None:
    """Programs that shared one were built for a while, in both formats."""
    raw = json.loads(OLD.read_text(encoding="utf-8"))
    if version == 3:
        raw = json.loads(read_manifest(written(tmp_path, raw)).to_json())
    raw["programs"]["trunk"] = raw["programs"]["prefill"]
    with pytest.raises(EngineFormatError, match=r"programs: .*; rebuild the engine") as caught:
        Engine.load(written(tmp_path, raw))
    assert "\n" not in str(caught.value)


def test_an_old_engine_runs(tiny_engine: Callable[[int], Path], tmp_path: Path) -> None:
    engine, params = tiny_engine(3), SamplingParams(max_tokens=24)
    raw = json.loads((engine / MANIFEST).read_text(encoding="utf-8"))
    raw["format_version"] = 2
    del raw["build"]["capacity"]
    raw["state"] = [
        {
            "name": state["name"],
            "kind": "cache" if state["role"] == "rows" else "carry",
            "dtype": state["dtype"],
            "shape": list(state["sizes"].values()),
        }
        for state in raw["state"]
    ]
    old = written(Path(shutil.copytree(engine, tmp_path / "old")), raw)
    texts = []
    for folder in (engine, old):
        with Engine.load(folder) as loaded:
            texts.append(loaded.generate("def fibonacci(n):", params).token_ids)
    assert texts[0] == texts[1]
