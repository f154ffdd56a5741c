"""The compiler's pipeline, from a request to engine directories.

recipe -> checkpoint -> weights file -> step program -> torch.export -> target -> engine directory
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.checkpoint.side_files import copy_side_files
from mtpbuild.builder.compiler.draft_vocab import write_draft_ids
from mtpbuild.builder.compiler.manifest_of import write_manifests
from mtpbuild.builder.compiler.plans import Plans, plan_engines
from mtpbuild.builder.compiler.workbench import Workbench
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


def build(
    request: BuildRequest, bench: Workbench, stages: Stages | None = None
) -> list[BuiltEngine]:
    """Build one engine directory per nextn; keep engines that were built from the same inputs.

    bench: runs the engines that a build needs. Raises UsageError, CheckpointError, DownloadError or
    BuildError. A failed build leaves no broken engine; the next build of the same inputs reuses its
    finished parts (`engine/staged.py`).
    """
    stages = stages or Stages()

    # 1. What to build: the model, the target, and for each nextn a plan and a folder; all refusals
    # that need no weights. Then the weights, if they are not here.
    plans = plan_engines(request, may_fetch=True).fetch()

    # 2. The compiler, and the checkpoint by its headers; for new engines this needs no hash.
    model = open_checkpoint(plans, stages) if any(map(plans.is_new, plans.engines)) else None

    # 3. Which engines are missing, and which of their ranks. Weights are sampled here.
    with stages("fingerprint"):
        plans = plans.take_fingerprints(stages.watch)
    missing = plans.missing()
    formats = ""
    if missing:
        from mtpbuild.builder.compiler.notes import describe_formats
        from mtpbuild.builder.program.engine_weights import EngineWeights

        model = model or open_checkpoint(plans, stages)
        formats = describe_formats(model)
        if why := plans.explain_small_disk(model):
            raise BuildError(f"{plans.source.name}: {why}")
        if request.calibration is not None:
            from mtpbuild.builder.compiler.calibrate import calibrate

            beside = plans.first
            inputs = plans.fingerprints[beside]
            view = calibrate(model.checkpoint, model.config, request, beside, inputs, bench, stages)
            model = replace(model, checkpoint=view)
        weights = EngineWeights(model, stages.watch)
        for out, ranks in missing.items():
            build_engine(plans, out, ranks, weights, bench, stages)
    if request.dump is not None and not request.dump.exists():
        logger.warning("note: --dump %s: no program had to be compiled: add --force", request.dump)
    if missing and request.calibration is not None:
        from mtpbuild.builder.compiler.calibrate import discard_calibration

        discard_calibration(plans.first)
    for out in plans.engines.keys() - missing.keys():
        discard_stale(out, plans.fingerprints[out], rank=request.rank)
    return [
        BuiltEngine(out, read_manifest(out), out not in missing, formats if out in missing else "")
        for out in plans.engines
    ]


def open_checkpoint(plans: Plans, stages: Stages) -> "OpenedModel":
    """Return the model, checked by its headers; first load the compiler."""
    with stages("load compiler"):
        plans.load_compiler()
        from mtpbuild.builder.compiler.notes import log_notes
    with stages("check checkpoint"):
        model = plans.open_model()
        log_notes(model)
        return model


def build_engine(
    plans: Plans,
    out: Path,
    ranks: Sequence[int],
    weights: "EngineWeights",
    bench: Workbench,
    stages: Stages,
) -> None:
    """Build these ranks of an engine in a folder that gets its name when it is whole."""
    plan, request, target = plans.engines[out], plans.request, plans.target
    inputs = f"{plans.fingerprints[out]} {[*ranks]}"
    with stage_folder(
        out, inputs=inputs, discard_parts=request.force, rank=request.rank, put=layout.publish
    ) as staged:
        # 4. Weights: written once, shared by every engine that has the same ones.
        folders = layout.make_rank_folders(staged.folder, plan.ranks, ranks)
        with stages("write weights"):
            # onnx refuses links, so weights that programs embed get a file of their own.
            siblings = None if plan.style.embeds_weights else out.parent
            places = write_weights(weights, staged, folders, siblings)

        # 5. One graph per program: step program -> torch.export -> target.
        programs = compile_programs(plans, out, weights.model, places, staged, folders, stages)
        files = {folder / spec.file for spec in programs.values() for folder in folders.values()}
        inexact = target.explain_inexact(files)
        if request.exact and inexact:
            raise BuildError(f"--exact: {out.name}: {inexact}")

        # 6. The directory: tokenizer, manifests with hashes. The bench completes them, so that an
        # engine which --exact refuses never gets its name.
        with stages("package"):
            for folder in folders.values():
                if not target.keeps_weights_file(folder, plan):
                    (folder / WEIGHTS).unlink()
            copy_side_files(plans.source.folder, staged.folder, plans.source.chat_template)
            write_draft_ids(plan.draft_ids, staged.folder)
            exact = None if inexact is None else False
            write_manifests(plans, out, weights.model, staged, folders, programs, exact)
        bench.finish(staged.folder, out.name, stages, exact=request.exact)


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
    plans: Plans,
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
    from mtpbuild.builder.compiler.temporary import count_temporary_bytes
    from mtpbuild.builder.program.programs import make_programs
    from mtpbuild.builder.targets.passes import dump_to

    plan, request, target = plans.engines[out], plans.request, plans.target
    shared = plan.ranks.tp == 1 or plan.style.ranks_share_programs
    if shared and not request.force:
        built = layout.find_intact_rank(out, plans.fingerprints[out])
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
    dump = None if request.dump is None else request.dump / out.name
    with dump_to(dump), pause_garbage_collection(), target.compiling():
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
