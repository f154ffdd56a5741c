"""Recipes: which there are, where their weights are looked for, what is said without them."""

from pathlib import Path

import pytest

from mtpbuild.builder.quantize.scheme import SCHEMES
from mtpbuild.builder.recipe import default_target, find_model, find_recipe, load_recipes
from mtpbuild.runtime.errors import MissingWeightsError, UsageError
from mtpbuild.runtime.targets import names
from tests.support.checkpoints import load_config
from tests.support.invoke import invoke

R1 = "models--deepseek-ai--DeepSeek-R1"


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoints in the current folder, none in the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def test_names() -> None:
    assert {recipe.name for recipe in load_recipes()} == {
        "deepseek-v3",
        "deepseek-r1",
        "deepseek-r1-0528",
        "deepseek-r1-fp4",
        "deepseek-r1-0528-fp4-v2",
        "deepseek-tiny",
        "deepseek-tiny-fp8",
        "deepseek-tiny-nvfp4",
        "deepseek-tiny-int8",
        "deepseek-tiny-int4",
    }


def test_each_has_a_configuration_a_layout_and_a_source() -> None:
    engines = {recipe.engine for recipe in load_recipes()}
    assert len(engines) == len(load_recipes())
    for recipe in load_recipes():
        load_config(recipe.config_folder)
        assert recipe.layout in SCHEMES
        assert recipe.target in names()
        assert [recipe.shipped, bool(recipe.repository), bool(recipe.made_from)].count(True) == 1
        assert recipe.made_from is None or find_recipe(recipe.made_from) is not None


def test_what_they_are_built_for(tmp_path: Path) -> None:
    built = find_recipe("deepseek-r1-fp4")
    assert built is not None
    assert (built.engine, default_target(built.name)) == ("r1", "tensorrt")
    for other in ("deepseek-tiny", "deepseek-r1", str(tmp_path)):
        assert default_target(other) == "onnxruntime"


def test_without_weights() -> None:
    code, out, err = invoke("build", "--model", "deepseek-r1-fp4")
    assert (code, out) == (1, "")
    assert err == (
        "error: deepseek-r1-fp4 has no weights here: `hf download nvidia/DeepSeek-R1-FP4 "
        "--local-dir checkpoints/deepseek-r1-fp4`, or name their folder with --checkpoint\n"
    )
    _, _, err = invoke("build", "--model", "deepseek-tiny-int4")
    assert "`mtpbuild quantize --model deepseek-tiny --to int4 --out checkpoints/deepseek" in err


def test_where_weights_are_found(tmp_path: Path) -> None:
    given = find_model("deepseek-r1", tmp_path / "anywhere")
    assert (given.name, given.engine) == ("deepseek-r1", "r1_fp8")
    assert given.folder == tmp_path / "anywhere"
    snapshot = tmp_path / "hf" / "hub" / R1 / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    with pytest.raises(MissingWeightsError):  # nothing says which snapshot
        find_model("deepseek-r1")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc\n")
    assert find_model("deepseek-r1").folder == snapshot
    local = tmp_path / "checkpoints" / "deepseek-r1"
    local.mkdir(parents=True)
    (local / "config.json").touch()
    assert find_model("deepseek-r1").folder.resolve() == local


def test_checkpoint_goes_with_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--checkpoint holds a recipe's weights; --model "):
        find_model(str(tmp_path), tmp_path)
