"""A verification as a table for people and as one JSON object for machines."""

from typing import Any

from mtpbuild.builder.verify.verify import Verification

STYLES = {"passed": "green", "failed": "bold red", "not checked": "yellow"}


def to_json(verification: Verification) -> dict[str, Any]:
    """docs/verify.md describes it."""
    v = verification
    return {
        "engine": str(v.folder),
        "model": v.manifest.model.name,
        "nextn": v.manifest.build.nextn,
        "drafter": v.manifest.build.drafter,
        "against": None if v.against is None else str(v.against),
        "passed": not v.failed,
        "checks": [
            {"check": c.name, "verdict": c.verdict, "detail": c.detail, **c.figures}
            for c in v.checks
        ],
    }


def last_line(verification: Verification) -> str:
    """What failed, or how much was checked."""
    failed = verification.failed
    if failed:
        return f"FAILED: {'; '.join(failed)}"
    counts = [c.verdict for c in verification.checks]
    skipped = counts.count("not checked")
    more = f", {skipped} not checked" if skipped else ""
    return f"passed: {counts.count('passed')} checks{more}"


def print_report(verification: Verification) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    build, console = verification.manifest.build, Console(highlight=False)
    against = f", against {verification.against}" if verification.against else ""
    drafter = f", {build.drafter}" if build.drafter else ""
    console.print(
        f"{verification.folder}: {verification.manifest.model.name}, nextn {build.nextn}{drafter}"
        f"{against}",
        style="bold",
        soft_wrap=True,
    )
    table = Table("check", "verdict", "found", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for check in verification.checks:
        style = STYLES[check.verdict]
        table.add_row(check.name, f"[{style}]{check.verdict}[/]", escape(check.detail))
    console.print(table)
    console.print(last_line(verification), style="bold", soft_wrap=True)


def escape(text: str) -> str:
    """Brackets of token lists are no markup."""
    from rich.markup import escape

    return escape(text)
