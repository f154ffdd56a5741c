"""What a check finds: passed, failed, or why it could not be made."""

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["passed", "failed", "not checked"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's outcome, in a line and in figures."""

    passed: bool
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)


class NotChecked(Exception):  # noqa: N818 - not an error: a check that has nothing to check
    """Raised by a check that can't be made, with the reason."""
