"""A verification as a table for people and as one JSON object for programs."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from mtpbuild.builder.show.tables import say
from mtpbuild.builder.verify.verify import Verification

STYLES = {"passed": "green", "failed": "bold red", "not checked": "yellow"}


def to_json(verification: Verification) -> dict[str, Any]:
    """Make the JSON that docs/verify.md describes."""
    v = verification
    return {
        "engine": str(v.folder),
        "model": v.manifest.model.name,
        "nextn": v.manifest.build.nextn,
        "drafter": v.manifest.build.drafter,
        "against": None if v.against is None else str(v.against),
        "passed": not v.failed,
        "checks": [
            {"check": name, "verdict": c.verdict, "detail": c.detail, **c.figures}
            for name, c in v.checks.items()
        ],
    }


def last_line(verification: Verification) -> str:
    """Name the checks that failed, or count those that passed."""
    failed = verification.failed
    if failed:
        return f"FAILED: {'; '.join(failed)}"
    counts = [found.verdict for found in verification.checks.values()]
    skipped = counts.count("not checked")
    more = f", {skipped} not checked" if skipped else ""
    return f"passed: {counts.count('passed')} checks{more}"


def print_report(verification: Verification) -> None:
    build = verification.manifest.build
    against = f", against {verification.against}" if verification.against else ""
    drafter = f", {build.drafter}" if build.drafter else ""
    model = f"{verification.manifest.model.name}, nextn {build.nextn}"
    say(f"{verification.folder}: {model}{drafter}{against}", style="bold")
    table = Table("check", "verdict", "found", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name, check in verification.checks.items():
        verdict = f"[{STYLES[check.verdict]}]{check.verdict}[/]"
        table.add_row(name, verdict, escape(check.detail))
    say(table)
    say(last_line(verification), style="bold")
