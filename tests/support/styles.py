"""Returns the targets' graph styles, for plans that tests make themselves."""

from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.targets import configure_target


def style_of(name: str, **flags: object) -> GraphStyle:
    """Return the style in which a target with these flags traces programs."""
    return configure_target(name, flags).style
