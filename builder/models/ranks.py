"""Checks of whether ranks can share a model, for builds and forecasts."""

from collections.abc import Mapping

from mtpbuild.builder.formats import FORMATS
from mtpbuild.builder.models import ModelConfig, find_family_of
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import MAX_RANKS, Ranks, join_numbers


def check_ranks(
    config: ModelConfig,
    ranks: Ranks,
    formats: Mapping[str, str] | None = None,
    max_ranks: int = MAX_RANKS,
) -> None:
    """Raise UsageError, which lists the possible numbers of ranks, if these can't share the model.

    formats: the format of each kind of weights, whose blocks must stay whole. max_ranks: the
    largest number to list.
    """
    ranks.check(config.n_routed_experts)
    if config.head and ranks.tp > 1:
        raise UsageError(f"--tp {ranks.tp}: an engine with {config.head.title} has one rank")
    if why := _find_obstacle(config, ranks, formats or {}):
        others = ranks.others(max_ranks)
        good = [other.tp for other in others if not _find_obstacle(config, other, formats or {})]
        raise UsageError(f"--tp {ranks.tp} does not divide {why}; possible: {join_numbers(good)}")


def _find_obstacle(config: ModelConfig, ranks: Ranks, formats: Mapping[str, str]) -> str:
    """Describe the first size that does not split into its parts; "" if all do."""
    for split in find_family_of(config).split_sizes(config, ranks):
        format = FORMATS.get(formats.get(split.weights, "")) if split.parts > 1 else None
        block = 1 if format is None else format.block  # a split must not cut blocks
        if split.size % (block * split.parts):
            into = f" (into tp / ep = {split.parts})" if split.parts not in (1, ranks.tp) else ""
            blocks = f" into blocks of {block}" if block > 1 else ""
            return f"{split.name} {split.size}{blocks or into}"
    return ""
