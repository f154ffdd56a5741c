"""Graph styles as the targets give them, for plans that tests make themselves."""

from typing import Any

from mtpbuild.builder.targets import load_target, make_options
from mtpbuild.builder.targets.style import GraphStyle


def style_of(name: str, **options: Any) -> GraphStyle:
    """The style in which a target traces, given its options as flags have them."""
    target = load_target(name)
    return target.style(make_options(target, options))
