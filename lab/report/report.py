"""The report: build, load, answer, verify, time, compare, write."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.compiler.source import ModelSource, find_source
from mtpbuild.builder.models import ModelConfig
from mtpbuild.builder.plan.plan import Nextn, choose_drafter
from mtpbuild.builder.plan.recipe import find_recipe
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.plan.weight_classes import count_classes, find_layout
from mtpbuild.builder.stages import Stages, Watch, ignore
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.lab.bench.engines import choose_folder
from mtpbuild.lab.forecast.cpu import CpuForecast, forecast_cpu
from mtpbuild.lab.forecast.fitting import choose_weights
from mtpbuild.lab.forecast.forecast import ForecastRequest
from mtpbuild.lab.measure.host import describe_machine
from mtpbuild.lab.measure.runs import TimedAnswer
from mtpbuild.lab.measure.workbench import WORKBENCH
from mtpbuild.lab.report import sections
from mtpbuild.lab.report.published import find_published
from mtpbuild.lab.report.redaction import redact
from mtpbuild.lab.report.sections import QUICK, WHOLE, Engines, Json, ReportSize
from mtpbuild.lab.show.results import check_writable
from mtpbuild.lab.verify.checks import read_layers
from mtpbuild.lab.verify.plain import compare_with_checkpoint
from mtpbuild.runtime import Engine, Manifest
from mtpbuild.runtime.contract.manifest import MANIFEST, read_manifest
from mtpbuild.runtime.errors import MtpbuildError, UsageError, take_first_line
from mtpbuild.runtime.files import format_size
from mtpbuild.runtime.limits import measure_limits
from mtpbuild.runtime.ranks import ALONE
from mtpbuild.runtime.text.tokenizer import TOKENIZER

Texts = tuple[list[list[int]], list[TimedAnswer]]  # prompts and answers
ENGINES = Path("engines")
ENGINE_FIELDS = (  # of a build
    *("nextn", "adaptive", "drafter", "draft_vocab", "weights", "quantised_to", "head_weights"),
    *("weight_bits", "dtype", "max_seq_len", "prefill_chunk", "cpu_layout", "exact"),
)
# For the estimate of a report's time: kinds of prompts, and numbers of drafts that are timed.
KINDS, TIMED, PROMPT_TOKENS = 5, 7, 100
STEP_FACTOR = 2.0  # a step's time over the one in which its bytes are read, drafts included
PLAIN_RATE = 2e10  # operations a second of a core, in the plain model
READ_RATE = 5e8  # bytes of a checkpoint that are read and dequantised in a second
BUILD_SECONDS, BUILD_RATE = 40, 2e7  # of any build; parameters a second of a core


@dataclass(frozen=True)
class ReportRequest:
    """A request of `mtpbuild report`: a model, or an engine of one."""

    model: str
    checkpoint: Path | None = None  # the recipe's weights, or those that an engine was built of
    mtp: Path | None = None
    weights: str | None = None
    threads: int | None = None
    quick: bool = False
    hashes: bool = True
    out: Path = Path("report_results")


@dataclass
class ModelReport:
    """What has been measured; `parts` is the JSON, `problems` says what is missing or wrong."""

    parts: Json = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def measure(self, name: str, section: Callable[[], Any]) -> None:
        """Add a part; a failure is a part, too, as whoever reads the report wants to know it."""
        try:
            self.parts[name] = section()
        except Exception as error:
            known = "" if isinstance(error, MtpbuildError) else f"{type(error).__name__}: "
            self.parts[name] = {"not_measured": f"{known}{take_first_line(error)}"}
            self.problems.append(f"{name}: {self.parts[name]['not_measured']}")


class WarningList(logging.Handler):
    """A handler that collects warnings, and shows each one."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.lines, self._show = list[str](), show

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._show(self.lines[-1])


@contextmanager
def collect_warnings(show: Callable[[str], None]) -> Iterator[list[str]]:
    """Collect the warnings of a block, each once."""
    handler, log = WarningList(show), logging.getLogger("mtpbuild")
    log.addHandler(handler)
    try:
        yield handler.lines
    finally:
        log.removeHandler(handler)


@dataclass(frozen=True)
class Subject:
    """What is reported: an engine, and the model that it was built of.

    model, checkpoint: names of it, as `plan` takes them. source: None if it is not here.
    """

    folder: Path
    model: str
    checkpoint: Path | None
    source: ModelSource | None

    def list_names(self, request: ReportRequest) -> list[str]:
        """List names and paths that are the user's own, unless they are a recipe's."""
        source, recipe = self.source, find_recipe(self.model)
        model = read_manifest(self.folder).model
        places = [self.folder, request.out, request.checkpoint, request.mtp, Path(request.model)]
        places += [] if source is None else [source.folder, source.mtp]
        paths = [path for place in places if place for path in (place, place.absolute())]
        head = (model.head or "").partition(" from ")[2]  # the name of a joined one's place
        names = {self.model, request.model, model.name, head}
        names |= {str(path) for path in paths} | {path.name for path in paths}
        names |= set() if source is None else {source.name, source.engine}
        public = set() if recipe is None else {recipe.name, recipe.engine, recipe.repository}
        return [name for name in names - public if name]


def make_report(
    request: ReportRequest, watch: Watch = ignore, say: Callable[[str], None] = print
) -> Json:
    """Measure, and return the report; raise the errors of builds and engines.

    say: is called with lines for the user.
    """
    check_writable(request.out)
    report, size = ModelReport(), QUICK if request.quick else WHOLE
    machine = describe_machine(request.threads)
    del machine["command"]  # it has names and paths
    report.parts |= {"machine": machine, "quick": request.quick, "problems": report.problems}
    with collect_warnings(say) as warnings:
        subject = find_or_build(request, report, watch, say)
        manifest = read_manifest(subject.folder)
        if manifest.build.tp > 1:
            raise UsageError(f"{subject.folder}: report takes engines of one rank")
        say(manifest.drafting)
        describe_model(request, report, manifest, subject)
        texts = measure_engine(subject.folder, manifest, size, request.threads, report, watch)
        if subject.source is not None:  # the engine is closed: each takes the memory it needs
            verify_texts(subject.source, manifest, texts, report, watch)
        foresee_speed(subject, report, manifest)
    report.parts["warnings"] = [*dict.fromkeys(warnings)]
    redacted: Json = redact(report.parts, subject.list_names(request))
    return redacted


def find_or_build(
    request: ReportRequest, report: ModelReport, watch: Watch, say: Callable[[str], None]
) -> Subject:
    """Find the engine that is named, or build one of the model that is named."""
    for folder in (Path(request.model), ENGINES / request.model):
        if (folder / MANIFEST).is_file():
            manifest = read_manifest(folder)
            named = str(request.checkpoint or manifest.whole_model)
            try:
                source = find_source(BuildRequest(named, mtp=request.mtp))
            except MtpbuildError as error:
                why = f"{take_first_line(error)}; --checkpoint names its folder"
                report.problems.append(f"the engine's checkpoint is not here: {why}")
                source = None
            with suppress(MtpbuildError):
                forecast = forecast_model(named, None, (0,))
                say(describe_work(request, forecast, manifest.build.quantised_to, "uses"))
            return Subject(folder, named, None, source)
    wanted = BuildRequest(request.model, checkpoint=request.checkpoint, mtp=request.mtp)
    watch("reading the checkpoint")
    source = find_source(wanted, may_fetch=True)
    forecast = forecast_model(request.model, request.checkpoint, (0,))
    weights = request.weights or choose_weights(forecast).weights
    nextn = choose_nextn(source, forecast.model.config, report)
    wanted = replace(wanted, nextn=(nextn,), scheme=build_scheme(weights))
    say(describe_work(request, forecast, weights, "builds"))
    folder = choose_folder(f"{source.engine}_n{nextn}", wanted)
    stages = Stages(watch)
    build(replace(wanted, out=folder), WORKBENCH, stages)
    report.parts["build_seconds"] = sum(stages.seconds.values())
    source = find_source(replace(wanted, nextn=None))
    return Subject(folder, request.model, request.checkpoint, source)


def choose_nextn(source: ModelSource, settled: ModelConfig, report: ModelReport) -> Nextn:
    """Return "auto", or as many drafts as the model allows.

    settled: the configuration with the modules that the checkpoint's files really have.
    """
    config = settled if source.mtp is None else source.config
    if not config.num_nextn_predict_layers:
        report.problems.append("the checkpoint has no MTP head: nothing is drafted")
        return 0
    try:
        choose_drafter(config, "auto", None)
    except MtpbuildError as error:
        report.problems.append(f"--nextn auto: {take_first_line(error)}")
        return config.num_nextn_predict_layers
    return "auto"


def forecast_model(
    model: str,
    checkpoint: Path | None,
    nextn: tuple[int, ...],
    acceptance: tuple[float, ...] | None = None,
) -> CpuForecast:
    return forecast_cpu(ForecastRequest(model, nextn, acceptance=acceptance, checkpoint=checkpoint))


def describe_work(
    request: ReportRequest, forecast: CpuForecast, weights: str | None, takes: str
) -> str:
    """Say what will be done, and about how long it takes."""
    minutes = estimate_seconds(forecast, weights, QUICK if request.quick else WHOLE) / 60
    parameters = sum(part.parameters for part in forecast.portions.values())
    download = f"fetches {format_size(forecast.download)}, " if forecast.download else ""
    shorter = "" if request.quick else "; --quick takes less"
    return (
        f"{parameters / 1e9:.2g} B parameters: {download}{takes} an engine (weights "
        f"{weights or 'as stored'}), compares it with the checkpoint and times it, in about "
        f"{max(minutes, 1):.0f} min{shorter}. {request.out}/report.json and report.html have "
        "no prompts, names or paths; nothing is sent"
    )


def estimate_seconds(forecast: CpuForecast, weights: str | None, size: ReportSize) -> float:
    """Estimate the seconds of a report, as measured on small models, from bytes and parameters."""
    engine = {e.weights: e for e in forecast.engines}.get(weights) or forecast.engines[0]
    parameters = sum(part.parameters for part in forecast.portions.values())
    cores = measure_limits().processors
    answers = KINDS * size.prompts * size.tokens + TIMED * size.timed * size.tokens
    decode = answers * STEP_FACTOR * engine.reads[0] / forecast.bandwidth
    texts = KINDS * size.prompts * (size.tokens + PROMPT_TOKENS)
    plain = 2 * parameters * texts / (cores * PLAIN_RATE) + forecast.checkpoint_bytes / READ_RATE
    return BUILD_SECONDS + parameters / (cores * BUILD_RATE) + decode + plain


def describe_model(
    request: ReportRequest, report: ModelReport, manifest: Manifest, subject: Subject
) -> None:
    """Add the model, its files' hashes and formats, and the engine."""
    model, build, source = manifest.model, manifest.build, subject.source
    recipe = find_recipe(subject.model)
    report.parts["model"] = {
        "recipe": None if recipe is None else recipe.name,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "layers": model.num_hidden_layers,
        "mtp_modules": model.num_nextn_predict_layers,
        "vocabulary": model.vocab_size,
        "context": model.max_position_embeddings,
        "has_tokenizer": TOKENIZER in manifest.files,
    }
    report.parts["published"] = [] if source is None else find_published(source.config)
    report.parts["engine"] = {
        "drafting": manifest.drafting,
        **{name: getattr(build, name) for name in ENGINE_FIELDS},
        "target": manifest.target.name,
        "bytes": sum(file.size for file in manifest.files.values()),
    }
    if source is None:
        return
    if request.hashes:
        report.measure("hashes", lambda: sections.hash_files(source.folder))
    report.measure("weights_read", lambda: list_formats(source))


def list_formats(source: ModelSource) -> list[Json]:
    """List what the checkpoint stores, by class of weights."""
    layout = find_layout(str(source.folder), None)
    return [
        {
            "weights": weights.name,
            "of": "MTP module" if weights.module else "trunk",
            "formats": ", ".join(sorted(weights.formats)),
            "parameters": weights.parameters,
            "bytes": weights.bytes,
        }
        for weights in count_classes(layout, ALONE)
    ]


def measure_engine(
    folder: Path,
    manifest: Manifest,
    size: ReportSize,
    threads: int | None,
    report: ModelReport,
    watch: Watch,
) -> Texts:
    """Add acceptance, tokens/s and memory; return the prompts and their answers."""
    before = sections.measure_resident_bytes()
    fixed = sections.load_fixed_engine(folder, manifest, threads)
    with fixed.engine as engine:
        kinds = sections.collect_prompts(engine, size.prompts, size.tokens)
        if sections.ARBITRARY in kinds:
            report.problems.append("there is no tokenizer: the prompts are arbitrary tokens")
        by_kind = sections.answer_all(fixed, kinds, size.tokens, watch)
        prompts = [ids for group in kinds.values() for ids in group]
        answers = [answer for group in by_kind.values() for answer in group]
        groups = {"all": answers, **by_kind}
        accepted = {kind: sections.measure_acceptance(group) for kind, group in groups.items()}
        report.parts["acceptance"] = accepted
        turns = zip_longest(*kinds.values())
        timed = [ids for turn in turns for ids in turn if ids][: size.timed]
        drafts: Engines = {nextn: partial(fixed.draft, nextn) for nextn in fixed.nextns}
        speeds = sections.time_drafts(drafts, timed, size.tokens, watch)
        report.measure("prompt", lambda: sections.time_prompt(engine, prompts))
        after = sections.measure_resident_bytes()
    if manifest.build.adaptive:
        with Engine.load(folder, threads=threads, prefix_cache=False) as engine:
            drafts = {"auto": lambda: engine}
            speeds |= sections.time_drafts(drafts, timed, size.tokens, watch)
    report.parts["speed"] = sections.describe_speeds(speeds)
    report.parts["memory"] = {"resident_bytes": None if before is None else (after or 0) - before}
    return prompts, answers


def verify_texts(
    source: ModelSource, manifest: Manifest, texts: Texts, report: ModelReport, watch: Watch
) -> None:
    """Add the comparison with the checkpoint's plain model, and what it says of the head."""
    layers = read_layers(manifest)

    def verify() -> Json:
        finding = compare_with_checkpoint(
            manifest, source.folder, *texts, layers=layers, mtp=source.mtp, watch=watch
        )
        return {"verdict": finding.verdict, "detail": finding.detail, **finding.figures}

    report.measure("verify", verify)
    report.problems += sections.judge(report.parts["acceptance"]["all"], report.parts["verify"])


def foresee_speed(subject: Subject, report: ModelReport, manifest: Manifest) -> None:
    """Add the forecast of `mtpbuild plan --cpu`, with the acceptance lengths that were measured."""
    lengths = report.parts["acceptance"]["all"]["acceptance_lengths"]
    if subject.source is not None and subject.source.mtp is not None:
        lengths = []  # `plan` knows the heads of checkpoints alone
    nextns = tuple(range(len(lengths) + 1))

    def foresee_engine() -> Json:
        forecast = forecast_model(subject.model, subject.checkpoint, nextns, (1.0, *lengths))
        return sections.foresee(forecast, manifest.build.quantised_to)

    report.measure("forecast", foresee_engine)
