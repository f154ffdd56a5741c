"""Tables and a picture of four panels that show which drafts were accepted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtpbuild.builder.show.picture import colour, panels, share_legend, spans
from mtpbuild.builder.show.tables import figures_table, say
from mtpbuild.builder.study.figures import Studied

AXES = {
    "draft": "draft of a step",
    "position": "position in the context",
    "margin": "margin of the target",
    "entropy": "entropy of the target, nats",
}


def print_report(found: Sequence[Studied]) -> None:
    """Print a table for each trace and each of its axes."""
    for one in found:
        accepted = sum(draft.accepted for draft in one.drafts)
        say(f"{one.trace.path}: {accepted} of {len(one.drafts)} judged drafts", style="bold")
        for name, bins in one.bins.items():
            table = figures_table(AXES[name], ("judged", "accepted", "95 %"))
            for each in bins:
                low, high = each.interval
                ends = dict.fromkeys(f"{end:.4g}" for end in (each.low, each.high))
                share = f"{each.share:.1%}".replace("%", " %")
                table.add_row(" to ".join(ends), str(each.judged), share, f"{low:.0%}-{high:.0%}")
            say(table)
        if "entropy" not in one.bins:
            say("it has no entropies: `mtpbuild run` with --json --logprobs 1 records them")


def draw(found: Sequence[Studied], path: Path) -> None:
    """Draw the share of accepted drafts on each axis, a line per trace, with 95 % intervals."""
    note = "of the drafts that were judged; a point: drafts of like values; 95 % intervals"
    with panels(path, note, rows=2) as (figure, every):
        for axes, (name, title) in zip(every, AXES.items(), strict=True):
            for number, one in enumerate(found):
                bins = one.bins.get(name, [])
                reach = spans([(b.share, *b.interval) for b in bins])
                x, y = [b.mean for b in bins], [b.share for b in bins]
                look: dict[str, Any] = {"color": colour(number), "label": one.trace.path.name}
                axes.errorbar(x, y, reach if bins else None, fmt="o-", capsize=2, **look)
            axes.set_xlabel(title)
            axes.set_ylabel("share accepted")
            axes.set_ylim(0, 1.02)
        draft, _, _, entropy = every
        draft.set_xticks(sorted({int(b.low) for one in found for b in one.bins["draft"]}))
        if not any("entropy" in one.bins for one in found):
            entropy.set_title("not in these traces", fontsize=9)
        share_legend(figure, "accepted drafts", draft.get_legend_handles_labels()[0])
