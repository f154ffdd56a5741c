"""The build as a user sees it: what lands where, what is shared, left alone, and refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.checkpoint.side_files import SIDE_FILES
from mtpbuild.builder.compiler.build import BuiltEngine
from mtpbuild.builder.compiler.manifest_of import FROM_CONFIG, FROM_PLAN
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.recipe import load_recipes
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.runtime.contract.manifest import (
    MANIFEST,
    BuildInfo,
    ModelInfo,
    check_files,
    read_manifest,
)
from mtpbuild.runtime.errors import (
    BuildError,
    CheckpointError,
    MissingDependencyError,
    MtpbuildError,
    UnknownRecipeError,
    UsageError,
    advise_install,
    explain_missing_package,
)
from tests.support.checkpoints import random_checkpoint, write_tokenizer
from tests.support.fake_target import quick_target
from tests.support.requests import build, build_request
from tests.support.stand_ins import failing


def request(checkpoint: Path, *nextn: int, **flags: Any) -> BuildRequest:
    return build_request(checkpoint, nextn or None, **flags)


def build_one(checkpoint: Path, nextn: int, out: Path, **flags: Any) -> BuiltEngine:
    (engine,) = build(request(checkpoint, nextn, out=out, **flags))
    return engine


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def engine_files(engine: Path) -> set[str]:
    """Name the files that every engine has; its tokenizer and the like come on top."""
    programs = {program.file for program in read_manifest(engine).programs.values()}
    assert {"prefill.onnx", "decode.onnx"} <= programs
    return {MANIFEST, "config.json", "weights.safetensors"} | programs


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what changes when a file is written or replaced."""
    stats = {p.relative_to(folder).as_posix(): p.stat() for p in [folder, *folder.rglob("*")]}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}


def build_two(smallest: Path, parent: Path) -> Path:
    """Build the engines small_n0 and small_n1 at once."""
    stages = Stages()
    built = build(request(smallest, 1, 0, out=parent), stages)
    assert [engine.folder for engine in built] == [parent / "small_n0", parent / "small_n1"]
    assert not any(engine.unchanged for engine in built)
    assert {"check checkpoint", "write weights", "trace decode", "package"} <= set(stages.seconds)
    return parent


@pytest.fixture(scope="module")
def engines(smallest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a parent with two real engines."""
    return build_two(smallest, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def quick_engines(smallest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same, but for their graphs."""
    with quick_target("onnxruntime"):
        return build_two(smallest, tmp_path_factory.mktemp("quick"))


@pytest.mark.xdist_group("pipeline")
@pytest.mark.parametrize("kind", ["quick_engines", pytest.param("engines", marks=pytest.mark.full)])
def test_several_nextn_share_one_copy_of_the_weights(
    kind: str, request: pytest.FixtureRequest
) -> None:
    engines: Path = request.getfixturevalue(kind)
    folders = [engines / "small_n0", engines / "small_n1"]
    assert sorted(engines.iterdir()) == folders
    for nextn, folder in enumerate(folders):
        manifest = read_manifest(folder)
        check_files(folder, manifest, verify_hashes=True)
        assert manifest.build.nextn == nextn
        assert set(contents(folder)) == engine_files(folder)
    assert (folders[0] / "weights.safetensors").samefile(folders[1] / "weights.safetensors")


@pytest.mark.full
@pytest.mark.xdist_group("pipeline")
@pytest.mark.parametrize("nextn", ["0", pytest.param("1", marks=pytest.mark.full)])
def test_builds_are_reproducible(nextn: str, engines: Path, smallest: Path, tmp_path: Path) -> None:
    """Another folder, another parent, another process and order: the same bytes."""
    copy = shutil.copytree(smallest, tmp_path / "elsewhere" / "small")
    code = "import sys; from mtpbuild.builder.cli import app; app(sys.argv[1:])"
    flags = ["--model", str(copy), "--nextn", nextn, "--out", str(tmp_path / "again")]
    run = [sys.executable, "-c", code, "build", *flags]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "again") == contents(engines / f"small_n{nextn}")


@pytest.mark.xdist_group("pipeline")
@pytest.mark.full
def test_a_build_that_goes_on_ends_the_same(engines: Path, smallest: Path, tmp_path: Path) -> None:
    """A graph does not depend on whether those before it were traced by the same process."""

    def watch(stage: str) -> None:
        if stage == "lower decode":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(request(smallest, 1, out=tmp_path / "again"), Stages(watch))
    stages = Stages()
    build(request(smallest, 1, out=tmp_path / "again"), stages)
    assert "trace prefill" not in stages.seconds
    assert contents(tmp_path / "again") == contents(engines / "small_n1")


@pytest.mark.parametrize(
    ("taken", "record", "source"),
    [(FROM_CONFIG, ModelInfo, ModelConfig), (FROM_PLAN, BuildInfo, Plan)],
)
def test_the_manifest_has_all_that_plan_and_configuration_say(
    taken: tuple[str, ...], record: Any, source: Any
) -> None:
    known = {*dir(source), *source.__dataclass_fields__}
    named = {"head"}  # the manifest has its name, not its configuration
    assert {*taken} == known & record.model_fields.keys() - named


@pytest.mark.xdist_group("pipeline")
def test_unchanged_is_left_alone_without_torch(quick_engines: Path, smallest: Path) -> None:
    engines, before = quick_engines, stamps(quick_engines)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mtpbuild.builder.compiler.build import build\n"
        "from mtpbuild.builder.plan.request import BuildRequest\n"
        "from mtpbuild.lab.measure.workbench import WORKBENCH\n"
        "built = build(BuildRequest(sys.argv[1], (0, 1), out=Path(sys.argv[2])), WORKBENCH)\n"
        "assert [engine.unchanged for engine in built] == [True, True]\n"
        "assert not {'torch', 'onnx', 'onnxruntime'} & set(sys.modules)\n"
    )
    run = [sys.executable, "-c", code, str(smallest), str(engines)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert stamps(engines) == before


@pytest.mark.usefixtures("quick")
class TestQuick:
    def test_separate_builds_share_weights(self, smallest: Path, tmp_path: Path) -> None:
        weights = [
            build_one(smallest, 0, tmp_path / "a").folder / "weights.safetensors",
            build_one(smallest, 1, tmp_path / "b", max_batch=3).folder / "weights.safetensors",
        ]
        assert weights[0].samefile(weights[1])

    def test_damaged_or_other_weights_are_not_shared(self, smallest: Path, tmp_path: Path) -> None:
        first = build_one(smallest, 0, tmp_path / "a").folder / "weights.safetensors"
        raw = bytearray(first.read_bytes())
        raw[-1] ^= 1
        first.write_bytes(raw)
        second = build_one(smallest, 1, tmp_path / "b")
        assert not first.samefile(second.folder / "weights.safetensors")
        check_files(second.folder, second.manifest, verify_hashes=True)
        other = random_checkpoint(tmp_path / "checkpoint", seed=1, num_hidden_layers=1)
        third = build_one(other, 0, tmp_path / "c").folder / "weights.safetensors"
        assert third.stat().st_nlink == 1

    def test_weights_that_programs_take_in_are_not_shared(
        self, smallest: Path, tmp_path: Path
    ) -> None:
        links = []

        def lower(traced: Any, weights: Any, folder: Path) -> str:
            links.append((folder / "weights.safetensors").stat().st_nlink)
            (folder / "program").write_bytes(b"")
            return "program"

        build_one(smallest, 0, tmp_path / "a")
        with quick_target("onnxruntime", lower=lower, style=GraphStyle(embeds_weights=True)):
            build_one(smallest, 1, tmp_path / "b")
        assert set(links) == {1}

    def test_without_hard_links_weights_are_copied(self, smallest: Path, tmp_path: Path) -> None:
        with failing(os, "link", OSError(95, "Operation not supported")):
            engines = build(request(smallest, 0, 1, out=tmp_path))
        for engine in engines:
            check_files(engine.folder, engine.manifest, verify_hashes=True)
            assert (engine.folder / "weights.safetensors").stat().st_nlink == 1

    def test_default_place_and_nextn(
        self, smallest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (engine,) = build(request(smallest))
        assert engine.folder == Path("engines/small_n1")  # the checkpoint has one module
        assert engine.manifest.build.drafter == "mtp-vanilla"
        assert engine.manifest.build.max_seq_len == 256  # its max_position_embeddings

    def test_drafters(self, smallest: Path, tmp_path: Path) -> None:
        assert build_one(smallest, 0, tmp_path / "0").manifest.build.drafter is None
        assert build_one(smallest, 2, tmp_path / "2").manifest.build.drafter == "mtp-eagle"
        eagle = build_one(smallest, 1, tmp_path / "e", drafter="mtp-eagle")
        assert eagle.manifest.build.drafter == "mtp-eagle"
        assert eagle.manifest.capabilities["drafter"] == ["mtp-eagle"]

    def test_side_files(self, smallest: Path, tmp_path: Path) -> None:
        """Tokenizer and generation defaults come along; nothing else does."""
        model = shutil.copytree(smallest, tmp_path / "model")
        (model / "additional_chat_templates").mkdir()
        side = {*SIDE_FILES, "additional_chat_templates/tool_use.jinja"}
        for name in (*side, "README.md", "modeling.py"):
            (model / name).write_text("{}")
        write_tokenizer(model / "tokenizer.json")
        (model / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
        built = build_one(model, 0, tmp_path / "engine")
        assert {MANIFEST, *built.manifest.files} == engine_files(built.folder) | side
        check_files(built.folder, built.manifest, verify_hashes=True)
        assert built.manifest.model.eos_token_ids == (7, 5)
        assert built.manifest.model.bos_token_id == 0

    def test_tokenizers_that_can_not_be(self, smallest: Path, tmp_path: Path) -> None:
        """Found when building, not when the engine is run."""
        model = shutil.copytree(smallest, tmp_path / "model")
        (model / "tokenizer.json").write_text("{}")
        with pytest.raises(CheckpointError, match="not a tokenizer"):
            build_one(model, 0, tmp_path / "engine")
        write_tokenizer(model / "tokenizer.json", size=62)
        with pytest.raises(CheckpointError, match="62 tokens"):
            build_one(model, 0, tmp_path / "engine")
        assert not (tmp_path / "engine").exists()

    def test_what_makes_a_build_new(self, smallest: Path, tmp_path: Path) -> None:
        model = shutil.copytree(smallest, tmp_path / "model")
        out = tmp_path / "engine"

        def again(**flags: Any) -> bool:
            return not build_one(model, 0, out, **flags).unchanged

        assert again()
        assert not again()
        assert again(force=True)
        assert again(max_batch=2)
        assert again(max_batch=2, prefill_chunk=7)
        assert again()
        (model / "generation_config.json").write_text('{"eos_token_id": 3}')
        assert again()
        tensors = load_file(model / "model.safetensors")
        save_file(tensors | {"lm_head.weight": torch.ones(61, 32)}, model / "model.safetensors")
        assert again()
        assert not again()

    def test_a_damaged_engine_is_rebuilt(self, smallest: Path, tmp_path: Path) -> None:
        """The run time says to build it again: doing so must help."""
        out = build_one(smallest, 0, tmp_path / "engine").folder
        sound = contents(out)
        for damage in (
            lambda: (out / "decode.onnx").write_bytes(b"\x08\x0b"),
            lambda: (out / "prefill.onnx").unlink(),
            lambda: (out / MANIFEST).write_text(
                (out / MANIFEST).read_text().replace('"format_version": 4', '"format_version": 3')
            ),
        ):
            damage()
            assert not build_one(smallest, 0, out).unchanged
            assert contents(out) == sound

    def test_force_writes_the_same_again(self, smallest: Path, tmp_path: Path) -> None:
        out = build_one(smallest, 0, tmp_path / "engine").folder
        bytes_before, before = contents(out), stamps(out)
        build_one(smallest, 0, out, force=True)
        assert contents(out) == bytes_before
        assert before[MANIFEST] != stamps(out)[MANIFEST]

    def test_another_models_engine_needs_force(self, smallest: Path, tmp_path: Path) -> None:
        out = build_one(smallest, 0, tmp_path / "engine").folder
        before = contents(out)
        other = random_checkpoint(tmp_path / "other", seed=1, num_hidden_layers=1)
        with pytest.raises(BuildError, match="holds an engine of small; use --force"):
            build_one(other, 0, out)
        assert contents(out) == before
        assert build_one(other, 0, out, force=True).manifest.model.name == "other"

    def test_an_unreadable_manifest_needs_force(self, smallest: Path, tmp_path: Path) -> None:
        """Somebody's folder may have an engine.json of its own."""
        out = tmp_path / "game"
        out.mkdir()
        (out / MANIFEST).write_text('{"engine": "v8"}')
        with pytest.raises(BuildError, match=r"holds an engine\.json that can't be read"):
            build_one(smallest, 0, out)
        assert contents(out) == {MANIFEST: b'{"engine": "v8"}'}
        assert not build_one(smallest, 0, out, force=True).unchanged

    @pytest.mark.parametrize("force", [False, True])
    def test_what_is_no_engine_is_never_replaced(
        self, force: bool, smallest: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "chapter1.md").write_text("It was a dark night.")
        for out in (tmp_path / "thesis", tmp_path / "thesis" / "chapter1.md", smallest):
            with pytest.raises(BuildError, match="exists and is not an engine"):
                build_one(smallest, 0, out, force=force)
        assert contents(tmp_path / "thesis") == {"chapter1.md": b"It was a dark night."}

    def test_an_empty_folder_is_taken(self, smallest: Path, tmp_path: Path) -> None:
        (tmp_path / "engine").mkdir()
        assert not build_one(smallest, 0, tmp_path / "engine").unchanged

    def test_a_link_stays_a_link(self, smallest: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "deep" / "engine")
        for force in (False, True):
            build_one(smallest, 0, tmp_path / "link", force=force)
            assert (tmp_path / "link").is_symlink()
            engine = tmp_path / "deep" / "engine"
            assert set(contents(engine)) == engine_files(engine)
            assert sorted(tmp_path.iterdir()) == [tmp_path / "deep", tmp_path / "link"]


@pytest.mark.full
@pytest.mark.parametrize("nextn", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (0, 2))])
def test_the_shortest_engine_can_be_traced(nextn: int, smallest: Path, tmp_path: Path) -> None:
    built = build_one(smallest, nextn, tmp_path / "engine", max_seq_len=nextn + 4, prefill_chunk=1)
    assert built.manifest.build.max_seq_len == nextn + 4


def test_without_modules(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
    model = random_checkpoint(tmp_path / "model", **shape)
    with pytest.raises(UsageError, match="no MTP modules: say --nextn 0"):
        build(request(model, out=tmp_path / "engine"))
    with pytest.raises(BuildError, match="--nextn 1 needs an MTP module; this checkpoint has none"):
        build(request(model, 1, out=tmp_path / "engine"))
    assert not (tmp_path / "engine").exists()


def test_unknown_models(tmp_path: Path) -> None:
    known = {recipe.name for recipe in load_recipes()}
    names = {
        "deepseek-tinny": "deepseek-tiny",
        "GLM-4.7flash": "glm-4.7-flash",
        "r1": "deepseek-r1",
    }
    for name in (str(tmp_path / "nowhere"), "x" * 300, "a\0b", *names):
        with pytest.raises(UnknownRecipeError) as caught:
            build(BuildRequest(name))
        said, _, nearest = str(caught.value).partition(": ")
        assert said.endswith("nor a checkpoint folder, nor OWNER/NAME of a Hugging Face repository")
        assert nearest.startswith("`mtpbuild recipes` lists all recipes, the nearest are ")
        listed = nearest.partition(" are ")[2].split(", ")
        assert len({*listed} & known) == len(listed) == 5
        assert names.get(name, listed[0]) == listed[0]
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file; give its folder: --model "):
        build(BuildRequest(str(tmp_path / "model.safetensors")))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        build(BuildRequest(str(tmp_path)))


def test_a_place_that_cannot_be(smallest: Path, tmp_path: Path) -> None:
    for out in (tmp_path / ("x" * 300), smallest / "config.json" / "engine", Path("/proc/engine")):
        with pytest.raises(BuildError):
            build_one(smallest, 0, out)


@pytest.mark.parametrize("ids", [[61], "1", [True], [[1]], -1])
def test_end_tokens_are_in_the_vocabulary(ids: Any, smallest: Path, tmp_path: Path) -> None:
    model = shutil.copytree(smallest, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(CheckpointError, match=r"eos_token_id .* is not a token id below 61"):
        build_one(model, 0, tmp_path / "engine")


def test_a_missing_package_is_named() -> None:
    with (
        pytest.raises(MissingDependencyError, match=re.escape(advise_install("build"))),
        explain_missing_package("this", "build", "torch"),
    ):
        raise ModuleNotFoundError(name="torch._C")
    with pytest.raises(ModuleNotFoundError), explain_missing_package("this", "build", "torch"):
        raise ModuleNotFoundError(name="ours")
    assert issubclass(MissingDependencyError, MtpbuildError)
