"""The verification: load, find an engine to compare with, check, print."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text

from mtpbuild.builder.flags import VerifyFlags
from mtpbuild.builder.plan.recipe import PROMPT_SETS, find_built_in, find_model
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages, Watch, ignore
from mtpbuild.builder.weights.scheme import read_scheme
from mtpbuild.lab.bench.engines import build_engines
from mtpbuild.lab.measure.compare import Finding, NotChecked
from mtpbuild.lab.measure.prompts import check_room
from mtpbuild.lab.measure.runs import reload_engine
from mtpbuild.lab.verify.checks import (
    CHECKS,
    VerifyCase,
    explain_missing,
    make_rule_checks,
    read_layers,
)
from mtpbuild.runtime import Engine, Manifest, SamplingParams
from mtpbuild.runtime.checks import in_range
from mtpbuild.runtime.configuration.input_file import read_requests
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.targets import find_target
from mtpbuild.runtime.errors import BuildError, UsageError
from mtpbuild.runtime.prefix_cache.files import check_prefixes
from mtpbuild.runtime.tables import print_lines, print_table

PROMPTS = 4  # of each built-in kind
LEAST_SEEDS = 20
STYLES = {"passed": "green", "failed": "bold red", "not checked": "yellow"}


@dataclass(frozen=True)
class VerifyRequest(VerifyFlags):
    """A request of `mtpbuild verify`."""

    engine: Path
    options: Mapping[str, Any] = field(default_factory=dict)  # the target's options for loading


@dataclass(frozen=True, slots=True)
class Verification:
    """The results of one run of `mtpbuild verify`."""

    folder: Path
    manifest: Manifest
    against: Path | None
    checks: dict[str, Finding]

    @property
    def failed(self) -> list[str]:
        return [name for name, finding in self.checks.items() if finding.passed is False]


def verify(request: VerifyRequest, watch: Watch = ignore) -> Verification:
    """Run every check that can be made; raise EngineError, UsageError and errors of builds."""
    in_range(request.output_len, 2, 1 << 20, "--output-len")
    in_range(request.seeds, LEAST_SEEDS, 1 << 20, "--seeds")
    with ExitStack() as stack:
        # 1. Load the engine and the prompts.
        watch("loading the engine")
        options: dict[str, Any] = {"threads": request.threads, **request.options}
        engine = stack.enter_context(Engine.load(request.engine, prefix_cache=False, **options))
        check_prefixes(request.engine, engine.manifest)
        if request.exact and not engine.manifest.build.counts_as_exact:
            raise UsageError(
                f"--exact: {request.engine} is not exact by its engine.json; "
                "`mtpbuild build --exact` says why"
            )
        if request.model is not None:
            find_model(request.model)
        prompts = read_prompts(request, engine)

        # 2. Load the engine to compare with.
        against: Path | None = None
        base: Engine | str
        try:
            against = find_baseline(request, engine.manifest, watch)
            base = stack.enter_context(load_baseline(against, request, engine.manifest))
        except NotChecked as reason:
            base = str(reason)

        # 3. Run the checks in turn.
        reload = partial(reload_engine, request.engine, engine, **options)
        case = VerifyCase(
            engine, reload, prompts, request.output_len, base, request.seeds, request.model
        )
        checks = {}
        for name in (*CHECKS, *make_rule_checks(engine.manifest)):
            watch(f"checking {name}")
            checks[name] = run_check(name, case)
    return Verification(request.engine, engine.manifest, against, checks)


def run_check(name: str, case: VerifyCase) -> Finding:
    """Run one check, or return why it can't be made."""
    try:
        return (CHECKS | make_rule_checks(case.engine.manifest))[name](case)
    except NotChecked as reason:
        return Finding(None, str(reason))


def read_prompts(request: VerifyRequest, engine: Engine) -> list[list[int]]:
    """Read the file of --prompts, or some of each built-in kind; raise UsageError."""
    params = SamplingParams(max_tokens=request.output_len)
    flag = "--prompts"
    if request.prompts is not None:
        requests = read_requests(request.prompts, engine, params, flag=flag)
    elif engine.tokenizer is None or engine.tokenizer.chat_template is None:
        raise UsageError(
            "the built-in prompts need a tokenizer and a chat template: give --prompts"
        )
    else:
        files = map(find_built_in, PROMPT_SETS)
        requests = [r for file in files for r in read_requests(file, engine, params)[:PROMPTS]]
    longest = max(len(request.token_ids) for request in requests)
    check_room(engine, longest, request.output_len, hint=": see --output-len")
    return [request.token_ids for request in requests]


def find_baseline(request: VerifyRequest, manifest: Manifest, watch: Watch) -> Path:
    """Find a nextn 0 engine's folder, building the engine if needed; raise NotChecked."""
    if request.against is not None:
        return request.against
    if manifest.build.calibrated is not None:
        raise NotChecked(
            "its weights were calibrated: build it with --nextn 0 too, and give --against"
        )
    if manifest.build.nextn == 0:
        raise NotChecked("this is a nextn 0 engine: give --against to compare it with another")
    missing = "there is no nextn 0 engine, and {}: give --against"
    with explain_missing(manifest, "--against or --model", missing):
        target = manifest.target.name
        wanted = BuildRequest(
            request.model or manifest.whole_model,
            target=target,
            layers=read_layers(manifest),
            scheme=read_scheme(manifest.build),
            revision=None if request.model else manifest.build.revision,
            options=find_target(target).build_flags(manifest),
        )
        try:
            (built,) = build_engines(wanted, Stages(watch))
        except BuildError as error:
            raise NotChecked(missing.format(error)) from None
    return built.folder


def load_baseline(folder: Path, request: VerifyRequest, verified: Manifest) -> Engine:
    """Load the engine to compare with; raise UsageError if it can't be of the same model.

    The load options are used only if both engines have the same target.
    """
    base = read_manifest(folder)
    if base.model.vocab_size != verified.model.vocab_size:
        raise UsageError(
            f"{folder} has a vocabulary of {base.model.vocab_size} tokens, {request.engine} of "
            f"{verified.model.vocab_size}: they are not of one model"
        )
    same = find_target(base.target.name) is find_target(verified.target.name)
    options = request.options if same else {}
    return Engine.load(folder, threads=request.threads, prefix_cache=False, **options)


def make_verify_json(verification: Verification) -> dict[str, Any]:
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


def summarise_checks(verification: Verification) -> str:
    """Name the checks that failed, or count those that passed."""
    failed = verification.failed
    if failed:
        return f"FAILED: {'; '.join(failed)}"
    counts = [finding.verdict for finding in verification.checks.values()]
    skipped = counts.count("not checked")
    more = f", {skipped} not checked" if skipped else ""
    return f"passed: {counts.count('passed')} checks{more}"


def print_verification(verification: Verification) -> None:
    """Print a line per check, and the summary."""
    build = verification.manifest.build
    against = f", against {verification.against}" if verification.against else ""
    drafter = f", {build.drafter}" if build.drafter else ""
    model = f"{verification.manifest.model.name}, nextn {build.nextn}"
    print_lines(f"{verification.folder}: {model}{drafter}{against}", style="bold")
    rows = [
        (name, Text(finding.verdict, STYLES[finding.verdict]), finding.detail)
        for name, finding in verification.checks.items()
    ]
    print_table([("check", "verdict", "found"), *rows], texts=("verdict", "found"))
    print_lines(summarise_checks(verification), style="bold")
