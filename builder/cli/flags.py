"""Flags that several commands of the builder share, and those that targets bring."""

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

from mtpbuild.builder.targets import all_targets
from mtpbuild.runtime.flag_groups import flag
from mtpbuild.runtime.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """How many ranks share a model, and how."""

    tp: int = flag(1, "Ranks that share the model.")
    ep: int = flag(1, "Groups of these ranks with routed experts of their own.")
    attention_dp: bool = flag(
        False, "Ranks share the routed experts alone; each has requests of its own."
    )

    def ranks(self) -> Ranks:
        return Ranks(self.tp, self.ep, self.attention_dp)


def make_target_flags() -> type[Any]:
    """A group of every target's options; each target has its own panel in the help."""
    found: dict[str, tuple[str, Any, Any]] = {}
    for target in all_targets():
        hints, panel = get_type_hints(target.Options), {"panel": f"Target {target.name}"}
        for option in fields(target.Options):
            shown = field(default=option.default, metadata=option.metadata | panel)
            found[option.name] = option.name, hints[option.name], shown
    return make_dataclass("TargetFlags", found.values(), frozen=True, kw_only=True)


def said(flags: Any) -> dict[str, Any]:
    """Those flags of a group that differ from their defaults."""
    pairs = ((option, getattr(flags, option.name)) for option in fields(flags))
    return {option.name: value for option, value in pairs if value != option.default}
