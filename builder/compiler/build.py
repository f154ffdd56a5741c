"""The compiler's pipeline, from a request to engine directories.

recipe -> checkpoint -> weights file -> step program -> torch.export -> target -> engine directory
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.checkpoint.side_files import copy_side_files
from mtpbuild.builder.compiler.draft_vocab import write_draft_ids
from mtpbuild.builder.compiler.job import Job, load_compiler, prepare, take_fingerprints
from mtpbuild.builder.compiler.manifest_of import write_manifests
from mtpbuild.builder.engine import layout
from mtpbuild.builder.engine.staged import StagedFolder, discard_stale, stage_folder
from mtpbuild.builder.garbage import pause_garbage_collection
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.runtime.contract.manifest import (
    WEIGHTS,
    Manifest,
    ProgramSpec,
    hash_file,
    list_engine_folders,
    read_manifest,
)
from mtpbuild.runtime.errors import BuildError

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from mtpbuild.builder.program.engine_weights import EngineWeights
    from mtpbuild.builder.program.opened_model import OpenedModel
    from mtpbuild.builder.program.programs import Program
    from mtpbuild.builder.program.trace import TracedProgram
    from mtpbuild.builder.weights.placed import ByteRange


@dataclass(frozen=True)
class BuiltEngine:
    """An engine directory and its manifest. `unchanged` is true if an earlier build made it."""

    folder: Path
    manifest: Manifest
    unchanged: bool
    formats: str = ""  # of trunk, head and MTP module (`describe_formats`), if it was built now

    def list_file_sizes(self) -> list[int]:
        """Return the size of every file in bytes; manifests count as 0.

        A program that ranks share on disk counts once for each rank.
        """
        listed = [part.files for _, part in list_engine_folders(self.folder, self.manifest)]
        return [0] * len(listed) + [file.size for files in listed for file in files.values()]


def build(request: BuildRequest, stages: Stages | None = None) -> list[BuiltEngine]:
    """Build one engine directory per nextn; keep engines that were built from the same inputs.

    Raises UsageError, CheckpointError or BuildError. A failed build leaves no broken engine; the
    next build of the same inputs reuses its finished parts (`engine/staged.py`).
    """
    stages = stages or Stages()

    # 1. What to build: the model, the target, and for each nextn a plan and a folder.
    job = prepare(request)

    # 2. The compiler, and the checkpoint by its headers; for new engines this needs no hash.
    new = any(map(job.is_new, job.plans))
    model, formats = open_checkpoint(job, stages) if new else (None, "")

    # 3. Which engines are missing, and which of their ranks. Weights are sampled here.
    with stages("fingerprint"):
        job = take_fingerprints(job, stages.watch)
    todo = {out: ranks for out in job.plans if (ranks := job.lacking(out))}
    if todo:
        from mtpbuild.builder.program.engine_weights import EngineWeights

        model, formats = open_checkpoint(job, stages) if model is None else (model, formats)
        if why := job.explain_small_disk(model):
            raise BuildError(f"{job.source.name}: {why}")
        weights = EngineWeights(model, stages.watch)
    for out, ranks in todo.items():
        build_engine(job, out, ranks, weights, stages)
    if request.dump is not None and not request.dump.exists():
        logger.warning("note: --dump %s: no program had to be compiled: add --force", request.dump)
    if todo and job.calibrates:
        from mtpbuild.builder.compiler.own_text import discard_calibration

        discard_calibration(next(iter(job.plans)))
    for out in job.plans.keys() - todo.keys():
        discard_stale(out, job.fingerprints[out], rank=request.rank)
    return [
        BuiltEngine(out, read_manifest(out), out not in todo, formats if out in todo else "")
        for out in job.plans
    ]


def open_checkpoint(job: Job, stages: Stages) -> "tuple[OpenedModel, str]":
    """Return the model, checked by its headers, and its formats; first load the compiler."""
    with stages("load compiler"):
        load_compiler(job.target, [*job.plans.values()])
        from mtpbuild.builder.compiler.notes import describe_formats, log_notes
    with stages("check checkpoint"):
        model = job.open_model()
        log_notes(model)
        return model, describe_formats(model)


def build_engine(
    job: Job, out: Path, ranks: Iterable[int], weights: "EngineWeights", stages: Stages
) -> None:
    """Build these ranks of an engine in a folder that gets its name when it is whole."""
    plan, request, target = job.plans[out], job.request, job.target
    inputs = f"{job.fingerprints[out]} {[*ranks]}"
    with stage_folder(
        out, inputs=inputs, discard_parts=request.force, rank=request.rank, put=layout.publish
    ) as staged:
        # 4. Weights: written once, shared by every engine that has the same ones.
        folders = layout.make_rank_folders(staged.folder, plan.ranks, ranks)
        if job.calibrates and WEIGHTS not in staged.hashes(staged.folder):
            calibrate_weights(job, weights, stages)
        with stages("write weights"):
            # onnx refuses links, so weights that programs embed get a file of their own.
            siblings = None if plan.style.embeds_weights else out.parent
            places = write_weights(weights, staged, folders, siblings)

        # 5. One graph per program: step program -> torch.export -> target.
        with open_dump(request, out):
            programs = compile_programs(job, out, weights.model, places, staged, folders, stages)
        inexact = explain_inexact(job, out, programs, folders)

        # 6. The directory: tokenizer, manifests with hashes, one rename.
        with stages("package"):
            for folder in folders.values():
                if not target.keeps_weights_file(folder, plan):
                    (folder / WEIGHTS).unlink()
            copy_side_files(job.source.folder, staged.folder, request.chat_template)
            write_draft_ids(plan.draft_ids, staged.folder)
            write = partial(write_manifests, job, out, weights.model, staged, folders, programs)
            write(exact=inexact is None)
        if inexact is None and plan.ranks.tp == 1:
            with stages("probe"):
                record_probe(staged.folder, out.name, write, refuse=request.exact)
            if plan.adaptive:
                with stages("time steps"):
                    time_steps(staged.folder)


def calibrate_weights(job: Job, weights: "EngineWeights", stages: Stages) -> None:
    """Calibrate the model's weights; what is not finished lies beside the first engine."""
    from mtpbuild.builder.compiler.own_text import calibrate_model

    first = next(iter(job.plans))
    how = job.request, first, job.fingerprints[first], stages, build
    weights.model = calibrate_model(weights.model, *how)


def open_dump(request: BuildRequest, out: Path) -> AbstractContextManager[None]:
    """Return the context in which graphs are dumped, if the request asks for it."""
    from mtpbuild.builder.targets.passes import dump_to

    return dump_to(None if request.dump is None else request.dump / out.name)


def explain_inexact(
    job: Job, out: Path, programs: dict[str, ProgramSpec], folders: dict[int, Path]
) -> str | None:
    """Return why these programs are not exact, None if they are; with --exact, raise BuildError."""
    files = {folder / spec.file for spec in programs.values() for folder in folders.values()}
    inexact = job.target.explain_inexact(files)
    if job.request.exact and inexact:
        raise BuildError(f"--exact: {out.name}: {inexact}")
    return inexact


def record_probe(folder: Path, name: str, write: Callable[..., None], refuse: bool) -> None:
    """Probe whether an engine is exact; `write` the result, or raise BuildError (`refuse`)."""
    from mtpbuild.lab.measure.checks import probe

    found = probe(folder)
    if found.wrong is not None and refuse:
        raise BuildError(f"--exact: {name}: {found.wrong}")
    if found.wrong is not None:
        logger.warning("note: %s is not exact: %s", name, found.wrong)
    write(exact=found.wrong is None, probed=found.checked)


def time_steps(folder: Path) -> None:
    """Measure an adaptive engine's steps, so that its first load on this machine need not."""
    from mtpbuild.runtime.engine.step_times import BUILD_SECONDS, open_step_times
    from mtpbuild.runtime.programs import load_programs

    manifest = read_manifest(folder)
    programs = load_programs(folder, manifest)
    open_step_times(programs, manifest, None, BUILD_SECONDS)


def write_weights(
    weights: "EngineWeights",
    staged: StagedFolder,
    folders: Mapping[int, Path],
    siblings: Path | None,
) -> "dict[str, ByteRange]":
    """Write each rank's file, or link one in `siblings`; return each weight's place in any file."""
    for rank, folder in folders.items():
        written = weights.write(folder, siblings, rank, staged.hashes(folder).get(WEIGHTS))
        name = " ".join(("weights", *folder.relative_to(staged.folder).parts))
        staged.add(name, {folder / WEIGHTS: written.sha256})
    return written.places


def compile_programs(
    job: Job,
    out: Path,
    model: "OpenedModel",
    places: "dict[str, ByteRange]",
    staged: StagedFolder,
    folders: Mapping[int, Path],
    stages: Stages,
) -> dict[str, ProgramSpec]:
    """Compile every program of an engine into the folders of all its ranks.

    Programs that ranks share are compiled once, or taken from a rank that was built before.
    Otherwise each program is lowered for each rank in turn, with that rank's weights.
    """
    from mtpbuild.builder.compiler.step_counts import count_temporary_bytes
    from mtpbuild.builder.program.programs import make_programs

    plan, target = job.plans[out], job.target
    shared = plan.ranks.tp == 1 or plan.style.ranks_share_programs
    if shared and not job.request.force:
        built = layout.find_intact_rank(out, job.fingerprints[out])
        if built is not None:
            layout.share_programs(built, folders.values())
            return read_manifest(built).programs
    first, *others = folders.items()

    def trace_one(program: "Program") -> "TracedProgram":
        with stages(f"trace {program.name}"):
            return target.trace(program, plan)

    def lower_one(
        name: str, rank: int, folder: Path, trace: "Callable[[], TracedProgram]"
    ) -> ProgramSpec:
        traced = trace()
        temporary = count_temporary_bytes(traced) if plan.style.for_gpu else 0
        with stages(f"lower {name}"):
            return traced.spec(target.lower(replace(traced, rank=rank), places, folder), temporary)

    programs = dict[str, ProgramSpec]()
    # Graphs are full of live cycles: the garbage collector would take a tenth of the time.
    with pause_garbage_collection(), target.compiling():
        for program in make_programs(plan, model.model):
            trace = cache(partial(trace_one, program))  # at most once, for all ranks
            for rank, folder in [first] if shared else [first, *others]:
                name = program.name if shared else f"{program.name} {folder.name}"
                lower = partial(lower_one, name, rank, folder, trace)
                programs[program.name] = compile_unless_built(name, staged, lower)
    if shared:
        layout.share_programs(first[1], folders.values())
    return programs


def compile_unless_built(
    name: str, staged: StagedFolder, compile_one: Callable[[], ProgramSpec]
) -> ProgramSpec:
    """Return the program if an interrupted build finished it; otherwise compile it now."""
    done = staged.finished.get(name)
    if done is not None and done.program is not None:
        return done.program
    before = set(staged.folder.rglob("*"))
    spec = compile_one()
    files = set(staged.folder.rglob("*")) - before
    staged.add(name, {path: hash_file(path) for path in files}, spec)
    return spec
