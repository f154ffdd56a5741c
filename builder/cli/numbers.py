"""Numbers of drafts as flags have them."""

from typing import TYPE_CHECKING

from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import parse_list

if TYPE_CHECKING:
    from mtpbuild.builder.plan import Nextn


def parse_nextn(text: str) -> tuple["Nextn", ...]:
    """Read what `build` and `bench` take: `0,1,auto` -> (0, 1, "auto")."""

    def read(part: str) -> "Nextn":
        return "auto" if part.strip() == "auto" else int(part)

    return parse_list("--nextn", text, read, "0,1,2,3, or auto")


def parse_range(text: str) -> tuple[int, ...]:
    """Read what `plan` takes: `3`, `0,1,3` or `0..5`, in rising order."""
    first, dots, last = text.partition("..")
    numbers = parse_list("--nextn", f"{first},{last}" if dots else text, int, "0,1,2,3")
    if not dots:
        return tuple(sorted(set(numbers)))
    low, high = numbers
    if not 0 <= low <= high <= 99:
        raise UsageError(f"--nextn {text}: the range must rise from 0 or more")
    return tuple(range(low, high + 1))
