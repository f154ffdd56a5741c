"""Flags that several commands of the builder share, and those that targets bring."""

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any, get_type_hints

from typer import Option

from mtpbuild.builder.targets import all_targets
from mtpbuild.runtime.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """How many ranks share a model, and how."""

    tp: Annotated[int, Option("--tp", help="Ranks that share the model.")] = 1
    ep: Annotated[
        int, Option("--ep", help="Groups of these ranks with routed experts of their own.")
    ] = 1
    attention_dp: Annotated[
        bool,
        Option(
            "--attention-dp",
            help="Ranks share the routed experts alone; each has requests of its own.",
        ),
    ] = False

    def ranks(self) -> Ranks:
        return Ranks(self.tp, self.ep, self.attention_dp)


def make_target_flags() -> type[Any]:
    """A group of every target's options; each target has its own panel in the help."""
    found: dict[str, tuple[str, Any, Any]] = {}
    for target in all_targets():
        hints = get_type_hints(target.Options, include_extras=True)
        for option in fields(target.Options):
            hints[option.name].__metadata__[0].rich_help_panel = f"Target {target.name}"
            found[option.name] = option.name, hints[option.name], field(default=option.default)
    return make_dataclass("TargetFlags", found.values(), frozen=True, kw_only=True)


def said(flags: Any) -> dict[str, Any]:
    """Those flags of a group that differ from their defaults."""
    pairs = ((option, getattr(flags, option.name)) for option in fields(flags))
    return {option.name: value for option, value in pairs if value != option.default}
