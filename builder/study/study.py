"""Reads traces, and writes the figures of their accepted drafts."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mtpbuild.builder.show.picture import missing
from mtpbuild.builder.show.results import prepare, write_csv, write_json
from mtpbuild.builder.study.figures import Studied, studied
from mtpbuild.builder.study.report import draw
from mtpbuild.runtime.trace.lines import read_trace

JSON, CSV, PICTURE = "study.json", "study.csv", "study.png"


def study(paths: Sequence[Path], out: Path) -> list[Studied]:
    """Read traces and write study.json, study.csv and study.png; raise UsageError."""
    prepare(out)
    found = [studied(read_trace(path)) for path in paths]
    write_json(out / JSON, {"traces": [to_json(one) for one in found]})
    rows = ({"trace": str(one.trace.path), **asdict(d)} for one in found for d in one.drafts)
    write_csv(out / CSV, rows)
    if not missing():
        draw(found, out / PICTURE)
    return found


def to_json(one: Studied) -> dict[str, Any]:
    first = next(iter(one.trace.requests.values())).request
    return {
        "trace": str(one.trace.path),
        **{name: getattr(first, name) for name in ("model", "nextn", "drafter", "target")},
        "judged": len(one.drafts),
        "accepted": sum(draft.accepted for draft in one.drafts),
        "by": {
            name: [asdict(b) | {"share": b.share, "interval": b.interval} for b in bins]
            for name, bins in one.bins.items()
        },
    }
