"""Returns the targets' graph styles, for plans that tests make themselves."""

from typing import Any

from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.recipe import find_recipe
from mtpbuild.builder.targets import load_target


def style_of(name: str, **options: Any) -> GraphStyle:
    """Return the style in which a target traces a small model, given its options as flags."""
    target, recipe = load_target(name), find_recipe("deepseek-tiny")
    assert recipe is not None
    return target.style(target.Options(**options), load_config(recipe.config_folder))
