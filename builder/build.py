"""The compiler on one screen: from a request to engine directories.

recipe -> checkpoint -> weights file -> step program -> torch.export -> target -> engine directory
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from mtpbuild.builder import layout
from mtpbuild.builder.checkpoint.generation import generation_ids
from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.compute_capability import compiling_gpu, compute_capabilities
from mtpbuild.builder.fingerprint import fingerprint
from mtpbuild.builder.garbage import no_garbage_collection
from mtpbuild.builder.models.common.share import Share, check_share
from mtpbuild.builder.models.deepseek_v3.config import ModelConfig, load_config
from mtpbuild.builder.plan import (
    ADAPTIVE_NEXTN,
    DrafterName,
    Nextn,
    Plan,
    choose_drafter,
    in_order,
    state_specs,
)
from mtpbuild.builder.recipe import Source, find_model
from mtpbuild.builder.staging import Staging, staging
from mtpbuild.runtime.errors import MissingDependencyError, UsageError
from mtpbuild.runtime.manifest import (
    MAX_BATCH,
    MAX_CHUNK,
    MAX_SEQ_LEN,
    FloatType,
    Manifest,
    ProgramSpec,
    engine_folders,
    hash_file,
    rank_name,
    read_manifest,
)

if TYPE_CHECKING:
    from mtpbuild.builder.program.programs import Program
    from mtpbuild.builder.program.trace import Traced

DEFAULT_MAX_SEQ_LEN = 4096  # or the checkpoint's limit, if that is lower


@dataclass(frozen=True)
class BuildRequest:
    """The flags of `mtpbuild build`. nextn None: the checkpoint's number of MTP modules."""

    model: str
    nextn: tuple[Nextn, ...] | None = None
    drafter: DrafterName | None = None
    max_batch: int = 1
    max_seq_len: int | None = None
    prefill_chunk: int = 256
    target: str = "onnxruntime"
    out: Path | None = None
    force: bool = False
    checkpoint: Path | None = None  # of a recipe's weights; else where the recipe finds them
    compute_capability: tuple[str, ...] = ()  # as said on the command line: sm120
    fast_build: bool = False
    strip_weights: bool = False
    device: str = "cpu"
    tp: int = 1
    ep: int = 1
    attention_dp: bool = False
    rank: int | None = None  # to build alone; None: all of them
    layers: LayersSlice | None = None
    dtype: FloatType = "float32"
    dry_run: bool = False  # nothing is compiled

    @property
    def share(self) -> Share:
        """Of rank 0; the graph is the same for all."""
        return Share(self.tp, self.ep, attention_dp=self.attention_dp)


@dataclass(frozen=True)
class BuiltEngine:
    folder: Path
    manifest: Manifest
    unchanged: bool

    def file_sizes(self) -> list[int]:
        """Bytes of every file but the manifests, which count as 0; ranks share programs on disk."""
        found = [part.files for _, part in engine_folders(self.folder, self.manifest)]
        return [0] * len(found) + [file.size for files in found for file in files.values()]


@dataclass
class Stages:
    """Names and times of the stages; `watch` is told of each one as it begins."""

    watch: Callable[[str], None] = lambda stage: None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.watch(stage)
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


def build(request: BuildRequest, stages: Stages | None = None) -> list[BuiltEngine]:
    """Build one engine directory per nextn; those that would come out the same are left alone.

    Raises UsageError, CheckpointError or BuildError; nothing half-written stays on disk, and what
    was finished the next build of the same takes up (staging.py).
    """
    stages = stages or Stages()

    # 1. What to build: the model's configuration, and a plan and a place for each nextn.
    source, config = find_source(request)
    ids = generation_ids(source.folder, config)
    plans = dict(make_plans(config, request, source.engine))
    prints = make_prints(source, plans, request)
    for out in plans:
        layout.check_place(out, source.name, force=request.force)
        if request.rank is not None:
            layout.check_ranks(out, prints[out], force=request.force)

    # 2. What is there already; an engine of one rank is its rank 0.
    ranks = range(request.tp) if request.rank is None else [request.rank]
    lacks = {o: ranks if request.force else layout.lacking(o, prints[o], ranks) for o in plans}
    todo = {out: lacking for out, lacking in lacks.items() if lacking}
    if todo:
        with stages("load compiler"), needs("build", "torch", "onnx", "onnxscript"):
            from mtpbuild.builder import model_source
            from mtpbuild.builder.targets import load_target

            target = load_target(request.target)
            for out in todo:
                target.check(plans[out])

        # 3. The checkpoint, checked by name, shape and dtype before anything is written.
        with stages("check checkpoint"):
            model = model_source.ModelSource(
                source.name,
                source.folder,
                config,
                ids,
                formats=target.formats,
                layers=request.layers,
                share=request.share,
                dtype=request.dtype,
            )
            model.tell_formats()

        for out, lacking in todo.items():
            with staging(
                out,
                inputs=f"{prints[out]} {[*lacking]}",
                anew=request.force,
                part="" if request.rank is None else rank_name(request.rank),
                put=layout.publish,
            ) as stage:
                # 4. Weights: written once, shared by every engine that has the same ones.
                #    Several ranks have a folder each, for their share of them.
                #    Those that go into programs are a file of their own: onnx distrusts links.
                embedded = target.embeds_weights and not plans[out].strip_weights
                places = layout.rank_folders(stage.folder, plans[out], lacking)
                siblings = None if embedded else out.parent
                with stages("write weights"):
                    for rank, place in places.items():
                        done = stage.hashes(place)
                        weights = model.write_weights(place, siblings, rank, done)
                        stage.add(
                            f"rank {rank}" if request.tp > 1 else "weights",
                            {place / name: sha256 for name, sha256 in weights.hashes.items()},
                        )

                # 5. One graph per program: step program -> torch.export -> target.
                #    (Graphs are cycles that live on: looking for garbage is a tenth of it.)
                #    Ranks share them; one that is there already has them.
                first = next(iter(places.values()))
                ready = None if request.force else layout.whole_rank(out, prints[out])
                if ready is not None:
                    layout.share_programs(ready.folder, [first])
                    programs = ready.manifest.programs
                else:
                    lower = partial(target.lower, weights=weights.places, folder=first)
                    with no_garbage_collection():
                        programs = {
                            program.name: make_program(program, plans[out], lower, stage, stages)
                            for program in model.programs(plans[out])
                        }

                # 6. The directory: tokenizer, manifest with hashes, one rename.
                with stages("package"):
                    if embedded:
                        weights.remove(stage.folder)
                    layout.copy_side_files(source.folder, stage.folder)
                    layout.share_programs(first, places.values())
                    manifest = partial(
                        layout.write_manifest,
                        plan=plans[out],
                        fingerprint=prints[out],
                        model=model.info(),
                        target=target.info(plans[out]),
                        programs=programs,
                        state=state_specs(plans[out]),
                        weights=model.weights_type,
                        layers=request.layers,
                    )
                    for rank, place in (places if request.tp > 1 else {}).items():
                        hashes = stage.hashes(first) | stage.hashes(place)
                        manifest(place, hashes=hashes, rank=rank)
                    manifest(stage.folder, hashes=stage.hashes(stage.folder))
    return [BuiltEngine(out, read_manifest(out), unchanged=out not in todo) for out in plans]


def make_program(
    program: "Program",
    plan: Plan,
    lower: "Callable[[Traced], str]",
    stage: Staging,
    stages: Stages,
) -> ProgramSpec:
    """Trace and lower one of an engine's programs, unless an interrupted build has."""
    from mtpbuild.builder import model_source

    done = stage.parts.get(program.name)
    if done is not None and done.program is not None:
        return done.program
    before = set(stage.folder.rglob("*"))
    with stages(f"trace {program.name}"):
        traced = model_source.trace(program, plan)
    with stages(f"lower {program.name}"):
        spec = traced.spec(lower(traced))
    files = set(stage.folder.rglob("*")) - before
    stage.add(program.name, {path: hash_file(path) for path in files}, spec)
    return spec


def make_prints(
    source: Source, plans: Mapping[Path, Plan], request: BuildRequest
) -> dict[Path, str]:
    """Of each engine's inputs: equal, and it would come out the same."""
    return {
        out: fingerprint(source.folder, plan, request.target, request.layers)
        for out, plan in plans.items()
    }


def find_source(request: BuildRequest) -> tuple[Source, ModelConfig]:
    """The model, or what is to be seen of it; a slice has a name of its own."""
    source = find_model(request.model, request.checkpoint)
    config = load_config(source.folder)
    if request.layers is None:
        return source, config
    name, engine = (f"{n}-layers{request.layers}" for n in (source.name, source.engine))
    return replace(source, name=name, engine=engine), request.layers.of(config)


def make_plans(
    config: ModelConfig, request: BuildRequest, engine: str
) -> Iterator[tuple[Path, Plan]]:
    """Place and plan of each nextn."""
    nextns = request.nextn
    if nextns is None:
        if config.num_nextn_predict_layers == 0:
            raise UsageError("the checkpoint has no MTP modules: say --nextn 0 to build without")
        nextns = (config.num_nextn_predict_layers,)
    if "auto" in nextns and request.target != "onnxruntime":
        raise UsageError(f"--nextn auto is for target onnxruntime, not {request.target}")
    if request.fast_build and request.target != "tensorrt":
        raise UsageError(f"--fast-build is for target tensorrt, not {request.target}")
    if request.strip_weights and request.target != "tensorrt":
        raise UsageError(f"--strip-weights is for target tensorrt, not {request.target}")
    check_dtype(request)
    if (request.tp, request.ep) != (1, 1):
        if not takes_ranks(request):
            raise UsageError("--tp and --ep are for target inductor")
        check_share(config, request.tp, request.ep, request.attention_dp)
    if request.attention_dp and request.tp == 1:
        raise UsageError("--attention-dp is for several ranks: say --tp, how many they are")
    if request.attention_dp and request.device != "cpu":
        raise UsageError("--attention-dp is for --device cpu: leave it out, or build for the CPU")
    if request.rank is not None:
        if request.tp == 1:
            raise UsageError("--rank is one of several: say --tp, how many they are")
        within(0, request.rank, request.tp - 1, "--rank")
    capabilities = compute_capabilities(
        request.target, request.compute_capability, compiles=not request.dry_run
    )
    with needs("build", "torch"):
        gpu = compiling_gpu(request.target, request.device)
    length = request.max_seq_len
    if length is None:
        length = min(config.max_position_embeddings, DEFAULT_MAX_SEQ_LEN)
    elif length > config.max_position_embeddings:
        logging.getLogger(__name__).warning(
            "note: --max-seq-len %d is beyond the checkpoint's max_position_embeddings %d: "
            "what the model says there is untested",
            length,
            config.max_position_embeddings,
        )
    for asked in in_order(nextns):
        nextn = ADAPTIVE_NEXTN if asked == "auto" else asked
        out = request.out or Path("engines")
        if request.out is None or len(set(nextns)) > 1:
            out = out / f"{engine}_n{asked}{_suffix(request)}"
        yield (
            out,
            Plan(
                config=config,
                nextn=nextn,
                drafter=choose_drafter(config, asked, request.drafter),
                max_batch=within(1, request.max_batch, MAX_BATCH, "--max-batch"),
                max_seq_len=within(nextn + 4, length, MAX_SEQ_LEN, "--max-seq-len"),
                prefill_chunk=within(1, request.prefill_chunk, MAX_CHUNK, "--prefill-chunk"),
                compute_capabilities=capabilities,
                fast_build=request.fast_build,
                plugins=request.target == "tensorrt",
                strip_weights=request.strip_weights,
                gpu=gpu,
                tp=request.tp,
                ep=request.ep,
                attention_dp=request.attention_dp,
                dtype=request.dtype,
                adaptive=asked == "auto",
            ),
        )


def takes_ranks(request: BuildRequest) -> bool:
    """Target tensorrt has only the graph of a rank so far, with a part of each expert."""
    if request.target == "tensorrt":
        return request.dry_run and request.ep == 1 and not request.attention_dp
    return request.target == "inductor"


def check_dtype(request: BuildRequest) -> None:
    """bfloat16 is for one target; float16 for none: DeepSeek's activations overflow it."""
    if request.dtype not in get_args(FloatType):
        known = ", ".join(get_args(FloatType))
        raise UsageError(f"--dtype {request.dtype} is unknown; supported: {known}")
    if request.dtype == "float32":
        return
    if request.target != "inductor":
        raise UsageError(f"--dtype {request.dtype} is for target inductor, not {request.target}")
    if request.tp > 1:
        raise UsageError(f"--dtype {request.dtype} is for one rank: --tp works in float32")


def _suffix(request: BuildRequest) -> str:
    dtype = "" if request.dtype == "float32" else "_bf16"
    tp = f"_tp{request.tp}" if request.tp > 1 else ""
    ep = f"_ep{request.ep}" if request.ep > 1 else ""
    return dtype + tp + ep + ("_adp" if request.attention_dp else "")


def within(least: int, value: int, most: int, flag: str) -> int:
    if not least <= value <= most:
        raise UsageError(f"{flag} {value} is outside {least}..{most}")
    return value


@contextlib.contextmanager
def needs(group: str, *modules: str) -> Iterator[None]:
    """Turn a missing package of a dependency group into one line that names the group."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in modules:
            raise
        raise MissingDependencyError(
            f"building needs {error.name}: pip install 'mtpbuild[{group}]'"
        ) from None
