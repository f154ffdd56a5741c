"""What `build --weights` and `--head-weights` ask for, and which targets take it. No torch here."""

from typing import TYPE_CHECKING, cast, get_args

from mtpbuild.builder.targets import targets_that
from mtpbuild.builder.targets.target import Target
from mtpbuild.runtime.contract.manifest import HeadType, QuantisedType
from mtpbuild.runtime.errors import UsageError

if TYPE_CHECKING:
    from mtpbuild.builder.request import BuildRequest

NONE = "none"
WEIGHTS: tuple[str, ...] = get_args(QuantisedType)
HEADS: tuple[str, ...] = (*get_args(HeadType), NONE)
# Of embedding and head, where nothing else is asked for; the others keep the engine's float type.
USUAL_HEADS = {"int8": "int8", "int4": "int8"}


def asked_formats(
    target: Target, request: "BuildRequest"
) -> tuple[QuantisedType | None, HeadType | None]:
    """The formats of products, and of embedding and head; None: as they are.

    Raises UsageError for what the target can't keep, with the targets that can.
    """
    weights, head = request.weights, request.head_weights
    if weights is None:
        if head is not None:
            raise UsageError(f"--head-weights {head} goes with --weights: say {_list(WEIGHTS)}")
        return None, None
    check_choice("--weights", weights, WEIGHTS)
    head = USUAL_HEADS.get(weights, NONE) if head is None else head
    check_choice("--head-weights", head, HEADS)
    _check_target("--weights", weights, target)
    if head == NONE:
        return cast(QuantisedType, weights), None
    _check_target("--head-weights", head, target)
    return cast(QuantisedType, weights), cast(HeadType, head)


def check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{flag} {value} is unknown; supported: {', '.join(choices)}")


def _check_target(flag: str, format: str, target: Target) -> None:
    if format not in target.formats:
        keeps = ", ".join(target.formats) or "no quantised weights"
        can = targets_that(lambda other: format in other.formats)
        raise UsageError(
            f"{flag} {format}: target {target.name} keeps {keeps}; {format} is for target {can}"
        )


def _list(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
