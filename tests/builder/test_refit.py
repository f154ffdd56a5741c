"""New weights in an old engine are the engine that a build would have made."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild.builder.checkpoint import side_files
from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.compiler import refit as refit_module
from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.engine import layout
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.scheme import make_scheme
from mtpbuild.runtime.contract.manifest import MANIFEST, check_files, read_manifest
from mtpbuild.runtime.errors import MtpbuildError
from tests.reference.recompute import greedy
from tests.support.checkpoints import make_predictable, save_checkpoint, write_tokenizer
from tests.support.engines import EngineBuilder, greedy_ids
from tests.support.fake_target import greedy_only
from tests.support.requests import build, quantize
from tests.support.stand_ins import failing

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}


def checkpoint(folder: Path, seed: int, **overrides: Any) -> Path:
    torch.set_num_threads(1)
    return save_checkpoint(folder, make_predictable(seed, **SHAPE | overrides), **SHAPE | overrides)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_engine_runs_the_new_weights(build_engine: EngineBuilder, tmp_path: Path) -> None:
    first, second = (checkpoint(tmp_path / f"refit{seed}", seed) for seed in (0, 1))
    write_tokenizer(second / "tokenizer.json")
    with greedy_only():
        built = build_engine(first, 1, prefill_chunk=8)
    engine = shutil.copytree(built, tmp_path / "engine")
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8]]
    for model, seed in ((first, 0), (second, 1)):
        wanted = [greedy(make_predictable(seed, **SHAPE), prompt, 20) for prompt in prompts]
        assert greedy_ids(engine, prompts, 20) == wanted, model
        old, new = refit(engine, str(second))
        assert read_manifest(engine) == new
        check_files(engine, new, verify_hashes=True)
    assert (old.model.name, new.model.name) == ("refit1", "refit1")  # the second time around
    assert (engine / "tokenizer.json").is_file()
    before, after = contents(built), contents(engine)
    kept = {file.file for file in new.programs.values()}
    assert all(before[name] == after[name] for name in kept)
    assert {p.name for p in tmp_path.iterdir()} == {"refit0", "refit1", "engine"}


@pytest.mark.usefixtures("quick")
class TestQuick:
    @pytest.fixture
    def engine(self, tmp_path: Path) -> Path:
        model = checkpoint(tmp_path / "model", 0)
        return build(BuildRequest(str(model), (1,), out=tmp_path / "engine"))[0].folder

    def test_the_weights_are_those_of_a_build(self, engine: Path, tmp_path: Path) -> None:
        other = checkpoint(tmp_path / "other", 1)
        refit(engine, str(other))
        anew = build(BuildRequest(str(other), (1,), out=tmp_path / "anew"))[0]
        got, wanted = contents(engine), contents(anew.folder)
        assert got.pop(MANIFEST) != wanted.pop(MANIFEST)  # it does not pass for that build
        assert got == wanted
        assert (engine / "weights.safetensors").samefile(anew.folder / "weights.safetensors")
        assert layout.find_missing_ranks(engine, anew.manifest.build.fingerprint, [0])

    def refused(self, engine: Path, model: Path, *said: str) -> None:
        before, beside = contents(engine), sorted(engine.parent.iterdir())
        with pytest.raises(MtpbuildError) as caught:
            refit(engine, str(model))
        assert "\n" not in str(caught.value)
        for part in said:
            assert part in str(caught.value)
        assert contents(engine) == before
        assert sorted(engine.parent.iterdir()) == beside

    def test_chat_templates_are_the_new_models(self, engine: Path, tmp_path: Path) -> None:
        other, name = checkpoint(tmp_path / "other", 1), "additional_chat_templates/rag.jinja"
        (other / name).parent.mkdir()
        (other / name).write_text("hi")
        for model, there in ((other, True), (tmp_path / "model", False)):
            _, new = refit(engine, str(model))
            assert (name in new.files) == there
            check_files(engine, new, verify_hashes=True)

    def test_another_architecture(self, engine: Path, tmp_path: Path) -> None:
        other = {"num_hidden_layers": 2, "rope_theta": 50000, "kv_lora_rank": 12}
        differences = (
            "kv_lora_rank 16 -> 12",
            "num_hidden_layers 1 -> 2",
            "rope.theta 10000.0 -> 50000.0",
            "build it anew",
        )
        self.refused(engine, checkpoint(tmp_path / "other", 1, **other), *differences)

    def test_a_long_list_is_cut(self, engine: Path, tmp_path: Path) -> None:
        other = checkpoint(tmp_path / "other", 1)
        config = json.loads((other / "config.json").read_text())
        names = ("rms_norm_eps", "routed_scaling_factor", "max_position_embeddings")
        config |= {name: config[name] * 2 for name in names}
        config["rope_scaling"] |= {"factor": 5, "beta_fast": 9, "beta_slow": 2, "mscale": 2.0}
        (other / "config.json").write_text(json.dumps(config))
        self.refused(engine, other, "rms_norm_eps 1e-06 -> 2e-06", " and 1 more; build it anew")

    def test_other_number_formats(self, engine: Path, tmp_path: Path) -> None:
        """`refused` checks the line, and that the engine and its folder stay as they were."""
        scheme = make_scheme("int8", None, None)
        folder = tmp_path / "int8"
        quantize(QuantizeRequest(str(tmp_path / "model"), scheme, folder), lambda text: None)
        self.refused(engine, folder, "weights float32 -> int8")

    def test_what_can_not_be_refitted(self, engine: Path, tmp_path: Path) -> None:
        model = tmp_path / "model"
        self.refused(engine, tmp_path / "nothing", "neither a recipe nor a checkpoint")
        manifest = json.loads((engine / MANIFEST).read_text())
        older = json.loads(json.dumps(manifest))
        (engine / side_files.CONFIG).unlink()
        self.refused(engine, model, "config.json is missing; copy it again or rebuild the engine")
        del older["files"][side_files.CONFIG]
        (engine / MANIFEST).write_text(json.dumps(older))
        self.refused(engine, model, "has no config.json to compare with: rebuild it")
        older["target"]["name"] = "tensorrt-rtx"
        (engine / MANIFEST).write_text(json.dumps(older))
        self.refused(engine, model, "programs of target tensorrt-rtx hold their weights")

    def test_a_slice_of_a_model(self, tmp_path: Path) -> None:
        """Takes the same layers of the new one, of which there must be as many."""
        shape = {"num_hidden_layers": 3}
        first, other = (checkpoint(tmp_path / f"three{seed}", seed, **shape) for seed in (0, 1))
        request = BuildRequest(str(first), (1,), layers=LayersSlice(1, 2), out=tmp_path / "engine")
        engine = build(request)[0].folder
        self.refused(engine, checkpoint(tmp_path / "one", 1), "num_hidden_layers 3 -> 1")
        _, new = refit(engine, str(other))
        (anew,) = build(replace(request, model=str(other), out=tmp_path / "anew"))
        got, wanted = contents(engine), contents(anew.folder)
        del got[MANIFEST], wanted[MANIFEST]
        assert got == wanted
        assert new.model == anew.manifest.model
        assert (new.build.layers, new.whole_model) == ("1-2", "three1")

    def test_a_full_disk(self, engine: Path, tmp_path: Path) -> None:
        full = OSError(28, "No space left on device")
        with failing(refit_module, "copy_side_files", full):
            self.refused(engine, checkpoint(tmp_path / "other", 1), "No space left on device")

    def test_without_hard_links(self, engine: Path, tmp_path: Path) -> None:
        with failing(os, "link", OSError(95, "Operation not supported")):
            old, new = refit(engine, str(checkpoint(tmp_path / "other", 1)))
        check_files(engine, new, verify_hashes=True)
        assert new.files["weights.safetensors"] != old.files["weights.safetensors"]
