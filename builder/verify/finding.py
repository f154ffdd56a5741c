"""A check finds something out: it passed, it failed, or it could not be made."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """A check's outcome, in a line and in figures."""

    passed: bool | None  # None: the check could not be made
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return {True: "passed", False: "failed", None: "not checked"}[self.passed]


class NotChecked(Exception):  # noqa: N818 - not an error: a check that has nothing to check
    """Raised by a check that can't be made, with the reason."""
