"""Recipes: which there are, where their weights are looked for, what is said without them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mtpbuild.builder.checkpoint.shards import INDEX
from mtpbuild.builder.compiler.source import find_head_place
from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.recipe import (
    choose_default_target,
    find_model,
    find_recipe,
    find_recipe_folder,
    load_recipes,
    name_model,
    suggest_instead_of,
)
from mtpbuild.builder.plan.weight_classes import load_recipe_config
from mtpbuild.builder.weights.scheme import SCHEMES
from mtpbuild.runtime.contract.targets import target_names
from mtpbuild.runtime.errors import MissingWeightsError, UnknownRecipeError, UsageError
from tests.support.fake_target import quick_target
from tests.support.invoke import invoke
from tests.support.requests import build_request
from tests.support.stand_ins import importing

R1 = "models--deepseek-ai--DeepSeek-R1"


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoints in the current folder, none in the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_names() -> None:
    assert " ".join(sorted(recipe.name for recipe in load_recipes())) == (
        "deepseek-r1 deepseek-r1-0528 deepseek-r1-0528-fp4-v2 deepseek-r1-fp4 deepseek-tiny "
        "deepseek-tiny-fp8 deepseek-tiny-int4 deepseek-tiny-int8 deepseek-tiny-nvfp4 deepseek-v3 "
        "deepseek-v3.1 deepseek-v3.2 deepseek-v4-flash deepseek-v4-flash-preview deepseek-v4-pro "
        "gemma-4-12b gemma-4-26b-a4b gemma-4-31b gemma-4-e2b "
        "gemma-4-e4b gigachat3-10b-a1.8b gigachat3-10b-a1.8b-bf16 glm-4.5 glm-4.5-air glm-4.6 "
        "glm-4.7 glm-4.7-flash glm-5 glm-5.1 glm-5.2 kimi-k2-instruct mimo-7b-rl "
        "moonlight-16b-a3b-instruct qwen-tiny qwen3-next-80b-a3b qwen3.5-0.8b "
        "qwen3.5-122b-a10b qwen3.5-27b qwen3.5-2b qwen3.5-35b-a3b qwen3.5-397b-a17b qwen3.5-4b "
        "qwen3.5-9b qwen3.6-27b qwen3.6-35b-a3b qwen3.8-27b smollm2-135m"
    )


def test_a_head_that_is_shipped() -> None:
    """Drafts take it unless --mtp names another; its configuration has the drafted tokens."""
    request = build_request("smollm2-135m", (3,))
    place = find_head_place(request, may_fetch=False)
    assert place == find_recipe_folder() / "smollm2_135m_mtp"
    assert find_head_place(replace(request, nextn=(0,)), may_fetch=False) is None
    assert find_head_place(replace(request, mtp=Path()), may_fetch=False) == Path()
    recipe = find_recipe("smollm2-135m")
    assert recipe is not None
    assert load_recipe_config(recipe).num_nextn_predict_layers == 1
    assert len(json.loads((place / "draft_vocab.json").read_text())) == 8192


def test_each_has_a_configuration_a_layout_and_a_source() -> None:
    engines = {recipe.engine for recipe in load_recipes()}
    assert len(engines) == len(load_recipes())
    for recipe in load_recipes():
        load_config(recipe.config_folder)
        assert recipe.layout in SCHEMES
        assert recipe.target in target_names()
        assert [recipe.shipped, bool(recipe.repository), bool(recipe.made_from)].count(True) == 1
        assert (recipe.download is None) == (recipe.repository is None)
        assert recipe.made_from is None or find_recipe(recipe.made_from) is not None


@pytest.mark.parametrize(
    "typed", ["Qwen3.5-4B", "qwen3.5:4b", "Qwen/Qwen3.5-4B", "qwen/qwen3.5-4b", "QWEN3.5-4b"]
)
def test_names_as_people_type_them(typed: str) -> None:
    assert name_model(typed).name == "qwen3.5-4b"
    assert choose_default_target(typed) == "onnxruntime"


def test_a_folder_of_a_models_name(tmp_path: Path) -> None:
    (folder := tmp_path / "Qwen3.5-4B").mkdir()
    assert name_model("Qwen3.5-4B").folder == Path(folder.name)


def test_what_they_are_built_for(tmp_path: Path) -> None:
    built = find_recipe("deepseek-r1-fp4")
    assert built is not None
    assert (built.engine, choose_default_target(built.name)) == ("r1", "tensorrt")
    for other in ("deepseek-tiny", "deepseek-r1", str(tmp_path)):
        assert choose_default_target(other) == "onnxruntime"


def test_without_weights() -> None:
    with quick_target("tensorrt", check_machine=lambda plan: None):
        code, out, err = invoke("build", "--model", "deepseek-r1-fp4")
    assert (code, out) == (1, "")
    assert err == (
        "error: HF_HUB_OFFLINE is set, and deepseek-r1-fp4 is not downloaded here (424 GB): unset "
        "it, or name a folder that has it with --checkpoint\n"
    )
    _, _, dry = invoke("build", "--model", "nvidia/DeepSeek-R1-FP4", "--dry-run")
    assert dry == (
        "error: deepseek-r1-fp4 is not downloaded here: `mtpbuild build --model deepseek-r1-fp4` "
        "or `hf download nvidia/DeepSeek-R1-FP4` fetches it (424 GB), or name a folder that has it "
        "with --checkpoint\n"
    )
    recipe = find_recipe("deepseek-r1-fp4")
    assert recipe is not None
    flags = ("--checkpoint", recipe.config_folder, "--nextn", "3", "--tp", "8")
    with importing({"tensorrt": None}):
        code, _, err = invoke("build", "--model", "deepseek-r1-fp4", *flags)
    assert code == 1
    assert err.startswith("error: target tensorrt can't compile here: "), "before weights are read"
    assert "(checked: flags and config.json: nextn 3, bfloat16, 8 ranks; --dry-run" in err
    _, _, err = invoke("build", "--model", "deepseek-tiny-int4")
    assert "`mtpbuild quantize --model deepseek-tiny --to int4 --out checkpoints/deepseek" in err


def test_where_weights_are_found(tmp_path: Path) -> None:
    given = find_model("deepseek-r1", tmp_path / "anywhere")
    assert (given.name, given.engine) == ("deepseek-r1", "r1_fp8")
    assert given.folder == tmp_path / "anywhere"
    snapshot = tmp_path / "hf" / "hub" / R1 / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    (snapshot / INDEX).write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    (snapshot / "1.safetensors").touch()
    (snapshot / "2.safetensors").touch()
    with pytest.raises(MissingWeightsError):  # nothing says which snapshot
        find_model("deepseek-r1")
    assert find_model("deepseek-r1", revision="abc").folder == snapshot
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc\n")
    assert find_model("deepseek-r1").folder == snapshot
    (snapshot / "2.safetensors").unlink()
    with pytest.raises(MissingWeightsError):  # a download that was not finished
        find_model("deepseek-r1")
    (snapshot / "2.safetensors").touch()
    local = tmp_path / "checkpoints" / "deepseek-r1"
    local.mkdir(parents=True)
    (local / "config.json").touch()
    assert find_model("deepseek-r1").folder.resolve() == local
    assert find_model("deepseek-r1", revision="main").folder == snapshot


def test_what_checkpoint_and_revision_go_with(tmp_path: Path) -> None:
    given = find_model("some/model", tmp_path)
    assert (given.name, given.engine, given.folder) == ("some/model", "model", tmp_path)
    with pytest.raises(UsageError, match="is a folder or file already: leave --checkpoint out"):
        find_model(str(tmp_path), tmp_path)
    for model, checkpoint in ((str(tmp_path), None), ("deepseek-tiny", None), ("a/b", tmp_path)):
        with pytest.raises(UsageError, match="--revision needs a Hugging Face repository"):
            find_model(model, checkpoint, "main")


def test_a_name_is_a_recipe_a_folder_or_a_repository(tmp_path: Path) -> None:
    """A folder wins over a repository, and a recipe names its repository."""
    named = name_model("deepseek-ai/DeepSeek-R1")
    assert (named.name, named.engine) == ("deepseek-r1", "r1_fp8")
    assert choose_default_target("nvidia/DeepSeek-R1-FP4") == "tensorrt"
    named = name_model("some/Model-1.5")
    assert (named.name, named.engine, named.repository) == (
        "some/Model-1.5",
        "Model-1.5",
        "some/Model-1.5",
    )
    for name in ("some/Model-1.5", "deepseek-ai/DeepSeek-R1", "deepseek-tiny"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("some/Model-1.5", "deepseek-ai/DeepSeek-R1"):
        named = name_model(name)
        assert (named.folder, named.repository) == (Path(name), None)
        assert (named.name, named.engine) == (Path(name).name, Path(name).name)
    assert name_model("deepseek-tiny").recipe is not None
    for name in ("a/b/c", "/a", "a/", "../a", "~/a", "a b/c", "ä/b"):
        with pytest.raises(UnknownRecipeError, match="nor OWNER/NAME of a Hugging Face repository"):
            name_model(name)


def test_a_repository_that_is_not_here() -> None:
    with pytest.raises(MissingWeightsError) as caught:
        find_model("some/model", revision="v1")
    assert str(caught.value) == (
        "some/model: no such folder, and the repository is not downloaded here: `mtpbuild build "
        "--model some/model --revision v1` or `hf download some/model --revision v1` fetches it, "
        "or name a folder that has it with --checkpoint"
    )


@pytest.mark.parametrize(
    ("name", "made_from", "says"),
    [
        ("unsloth/DeepSeek-R1-GGUF", (), "; --model deepseek-r1 (deepseek-ai/DeepSeek-R1) is the"),
        ("DeepSeek-R1-0528-AWQ", (), "; --model deepseek-r1-0528 ("),
        ("some/other", ("deepseek-ai/DeepSeek-V3",), "; --model deepseek-v3 ("),
        ("some/other-4bit", ("some/other",), "; it was made from --model some/other"),
        ("some/other-GGUF", (), ""),
    ],
)
def test_what_may_be_built_instead(name: str, made_from: tuple[str, ...], says: str) -> None:
    found = suggest_instead_of(name, made_from)
    assert found.startswith(says)
    assert bool(found) == bool(says)
