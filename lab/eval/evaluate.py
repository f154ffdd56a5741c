"""The evaluation: load, ask under every setting, compute, write."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from mtpbuild.builder.flags import EvalFlags
from mtpbuild.builder.stages import Watch, ignore
from mtpbuild.lab.eval.problems import Settings, answer_problems, load_problems
from mtpbuild.lab.eval.report import Evaluation, make_eval_json, make_rows
from mtpbuild.lab.measure.host import describe_machine
from mtpbuild.lab.measure.runs import STRICT
from mtpbuild.lab.show.results import check_writable, write_results
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.rules import BUILT_IN
from mtpbuild.runtime.errors import UsageError

OUTPUT_TOKENS = 256  # of a problem that sets no number


@dataclass(frozen=True)
class EvalRequest(EvalFlags):
    """A request of `mtpbuild eval`."""

    engine: Path
    topk: tuple[int, ...] = (2, 5, 10)
    delta: tuple[float, ...] = (0.1, 0.3, 0.6)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(OUTPUT_TOKENS))
    options: Mapping[str, Any] = field(default_factory=dict)  # the target's options for loading


def evaluate(request: EvalRequest, watch: Watch = ignore) -> Evaluation:
    """Measure, and write the results; raise UsageError and the errors of the engine."""
    if request.params.synthetic:
        raise UsageError("synthetic acceptance gives meaningless texts: there is nothing to judge")
    check_writable(request.out)
    machine = describe_machine(request.threads)
    watch("loading the engine")
    loaded = Engine.load(
        request.engine, threads=request.threads, prefix_cache=False, **request.options
    )
    with loaded as engine:
        if engine.manifest.build.drafter in (None, "none"):
            raise UsageError(f"{request.engine} drafts nothing: there is nothing to accept")

        # 1. Load the problems.
        engine.check(request.params)
        problems = load_problems(request.task, engine, request.params, request.num_problems)

        # 2. Answer every problem under every setting in turn, strict first.
        graded = answer_problems(engine, problems, choose_settings(request), watch)

        # 3. Compute the figures.
        report = Evaluation(
            engine=str(request.engine),
            manifest=engine.manifest,
            machine=machine,
            settings={
                "task": request.task,
                "num_problems": len(problems),
                "sampling": asdict(request.params),
            },
            rows=make_rows(graded),
        )
    write_results(request.out, "eval", make_eval_json(report))
    return report


def choose_settings(request: EvalRequest) -> Settings:
    """Choose the settings: strict, and the rule asked for.

    By default that is rejection if sampled, or else every pair of relaxed values.
    """
    if (rule := request.params.acceptance) not in BUILT_IN:
        return {"strict": STRICT, rule: {}}
    if request.params.temperature > 0:
        return {"strict": STRICT, "rejection": {"acceptance": "rejection"}}
    pairs = product(request.topk, request.delta)
    relaxed = {f"{k} / {d:g}": {"relaxed_topk": k, "relaxed_delta": d} for k, d in pairs}
    return {"strict": STRICT, **relaxed}
