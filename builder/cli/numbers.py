"""Lists of numbers as flags have them."""

from typing import TYPE_CHECKING

from mtpbuild.runtime.errors import UsageError

if TYPE_CHECKING:
    from mtpbuild.builder.plan import Nextn


def parse_numbers(flag: str, text: str) -> tuple[int, ...]:
    """`0,1,2,3` -> (0, 1, 2, 3)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{flag} {text!r} is not a list of numbers such as 0,1,2,3") from None


def parse_nextn(text: str) -> tuple["Nextn", ...]:
    """`0,1,auto` -> (0, 1, "auto")."""
    try:
        return tuple("auto" if part.strip() == "auto" else int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--nextn {text!r} is not a list of numbers such as 0,1,2,3, or auto"
        ) from None
