"""The figures of a benchmark, and what they say about MTP. Times are in seconds unless named ms."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from mtpbuild.builder.plan.plan import Nextn
from mtpbuild.lab.bench.measure import Contender, Measurements
from mtpbuild.lab.measure.runs import TimedAnswer
from mtpbuild.lab.measure.statistics import (
    ALL,
    Estimate,
    Groups,
    compute_speedup,
    count_decoded,
    list_kinds,
    select_kind,
    sum_drafting,
    summarise,
)
from mtpbuild.runtime.errors import UsageError

Figures = dict[str, Any]  # of one kind of prompts; keys of bench.json
PER_POSITION = "spec_decode_per_position_acceptance_rates"
AGREEMENT = 0.05  # largest relative difference of measured and predicted speedup


@dataclass(frozen=True, slots=True)
class NextnResult:
    """All figures of one nextn."""

    nextn: Nextn
    drafter: str | None
    kinds: dict[str, Figures]  # ALL first
    requests: Sequence[Figures] = ()

    @property
    def overall(self) -> Figures:
        return self.kinds[ALL]

    def speedup(self, kind: str = ALL) -> Estimate:
        return Estimate(**self.kinds[kind]["speedup"])

    @property
    def max_drafts(self) -> int:
        """The largest number of drafts in a step."""
        return len(self.overall[PER_POSITION])


def make_rows(
    contenders: Sequence[Contender], measured: dict[Nextn, Measurements]
) -> list[NextnResult]:
    """Compute a row per nextn; raise UsageError if there is nothing to time."""
    base = measured[0]
    by_kind = {kind: select_kind(base.groups, kind) for kind in list_kinds(chain(*base.groups))}
    if any(count_decoded(groups)[1] == 0 or not base.steps for groups in by_kind.values()):
        raise UsageError("no request gave two tokens: there is nothing to time; see --output-len")
    rows = []
    for contender in contenders:
        mine = measured[contender.nextn]
        cost = compute_cost(base, mine, contender.nextn)
        kinds = {
            kind: compute_figures(select_kind(mine.groups, kind), groups, cost)
            for kind, groups in by_kind.items()
        }
        requests = [describe_request(answer) for answer in chain(*mine.groups)]
        rows.append(NextnResult(contender.nextn, contender.drafter, kinds, requests))
    return rows


def compute_cost(base: Measurements, mine: Measurements, nextn: Nextn) -> Figures:
    """Compare the median step with nextn 0's, and with the verifier's.

    "auto" has no verifier; nextn 0 needs none, as it only verifies.
    """
    unit, step = statistics.median(base.steps), statistics.median(mine.steps)
    verify = None if nextn == "auto" else statistics.median(mine.verify or mine.steps)
    return {
        "step_ms": 1000 * step,
        "verify_step_ms": None if verify is None else 1000 * verify,
        "step_cost": step / unit,
        "verify_cost": None if verify is None else verify / unit,  # v
        "draft_cost": None if verify is None else (step - verify) / unit,  # d
        "draft_share": None if verify is None else 1 - verify / step,
    }


def compute_figures(groups: Groups, base: Groups, cost: Figures) -> Figures:
    answers = [answer for group in groups for answer in group]
    others = [answer for group in base for answer in group]
    tokens, seconds = count_decoded(groups)
    per_step = tokens / sum(len(a.times) - 1 for a in answers)
    duration = sum(max(a.times[-1] for a in g) - min(a.submitted for a in g) for g in groups)
    output = sum(len(a.token_ids) for a in answers)
    drafting = sum_drafting(answers)
    rate = drafting.draft_acceptance_rate
    times = {
        "ttft": [a.times[0] - a.submitted for a in answers],
        "tpot": [count_decoded([[a]])[1] / n for a in answers if (n := len(a.token_ids) - 1)],
        "itl": [interval for a in answers for interval in a.intervals],
        "e2el": [a.times[-1] - a.submitted for a in answers],
    }
    latencies = {
        f"{key}_{name}_ms": 1000 * value
        for name, seconds_of in times.items()
        for key, value in summarise(seconds_of).items()
    }
    return {
        "completed": len(answers),
        "total_input_tokens": sum(len(a.prompt.token_ids) for a in answers),
        "total_output_tokens": output,
        "duration": duration,
        "request_throughput": len(answers) / duration,
        "output_throughput": output / duration,  # of all users; the time includes the prompts
        **latencies,
        "spec_decode_acceptance_length": drafting.mean_acceptance_length,
        "spec_decode_acceptance_rate": None if rate is None else 100 * rate,
        PER_POSITION: drafting.per_position_acceptance_rates,
        "spec_decode_num_drafts": drafting.num_spec_steps,
        "spec_decode_draft_tokens": drafting.num_draft_tokens,
        "spec_decode_accepted_tokens": drafting.num_accepted_draft_tokens,
        "user_tokens_per_s": tokens / seconds,  # of one user, after the first token
        "tokens_per_step": per_step,  # tokens that were kept; no request's first step counts
        "speedup": compute_speedup(groups, base)._asdict(),  # of user_tokens_per_s over nextn 0
        "predicted_speedup": cost["verify_cost"] and per_step / cost["step_cost"],
        **cost,
        "same_output_as_nextn_0": sum(
            a.token_ids == o.token_ids for a, o in zip(answers, others, strict=True)
        ),
    }


def describe_request(answer: TimedAnswer) -> Figures:
    """Return the numbers from which the figures can be computed again."""
    return {
        "kind": answer.prompt.kind,
        "task_id": answer.prompt.task_id,
        "input_tokens": len(answer.prompt.token_ids),
        "output_tokens": len(answer.token_ids),
        "ttft_ms": 1000 * (answer.times[0] - answer.submitted),
        "e2el_ms": 1000 * (answer.times[-1] - answer.submitted),
        "steps": len(answer.times),
        "itl_ms": [round(1000 * seconds, 4) for seconds in answer.intervals],
        "acceptance_histogram": answer.drafting.acceptance_histogram,
    }


def recommend_nextn(rows: Sequence[NextnResult]) -> tuple[Nextn, str]:
    """Choose the fastest nextn, and write in one line whether MTP pays."""
    drafting = [row for row in rows if row.nextn]
    if not drafting:
        return 0, "only nextn 0 was measured: give --nextn 0,1,2,3"
    best = max(drafting, key=lambda row: row.speedup().value)
    ratio = best.speedup()
    named = f"nextn {best.nextn}, {ratio.value:.2f}x ({ratio.interval})"
    why = "{tokens_per_step:.2f} tokens per step at {step_cost:.2f} times the step's cost"
    why = why.format(**best.overall)
    if ratio.low is not None and ratio.low > 1:
        return best.nextn, f"MTP pays: {named}; {why}{name_kinds_apart(drafting, best)}"
    if ratio.value > 1:
        return best.nextn, f"MTP may pay, too few requests to be sure: {named}; {why}"
    return 0, f"MTP does not pay: nextn 0 is the fastest, then {named}; {why}"


def name_kinds_apart(drafting: Sequence[NextnResult], best: NextnResult) -> str:
    """Name the kinds of prompts for which another nextn is fastest."""
    apart = []
    for kind in best.kinds:
        fastest = max(drafting, key=lambda row: row.speedup(kind).value)
        if fastest != best and kind != ALL:
            apart.append(f"{kind}: nextn {fastest.nextn}, {fastest.speedup(kind).value:.2f}x")
    return f" ({'; '.join(apart)})" if apart else ""


def find_disagreements(rows: Sequence[NextnResult]) -> str | None:
    """Name each nextn whose measured and predicted speedups are too far apart."""
    apart = []
    for row in rows:
        measured, predicted = row.speedup().value, row.overall["predicted_speedup"]
        if predicted is not None and abs(measured / predicted - 1) > AGREEMENT:
            apart.append(f"nextn {row.nextn} {measured:.2f}x against {predicted:.2f}x")
    text = f"measured and predicted speedup are more than {100 * AGREEMENT:.0f} % apart: "
    text += f"{', '.join(apart)}. Repeat it on a quiet machine, with more requests."
    return text if apart else None
