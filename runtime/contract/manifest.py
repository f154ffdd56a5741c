"""`engine.json`: what an engine directory is made of, and the check that it is whole."""

import difflib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mtpbuild.runtime.checks import NEXTN_LIMIT
from mtpbuild.runtime.contract.controls import ALLOWED
from mtpbuild.runtime.contract.features import Feature, Features
from mtpbuild.runtime.contract.programs import MIXED, SCORE
from mtpbuild.runtime.contract.state import StateSpec
from mtpbuild.runtime.errors import EngineFileError, EngineFormatError, UsageError
from mtpbuild.runtime.files import check_regular, read_json
from mtpbuild.runtime.ranks import MAX_RANKS, Ranks
from mtpbuild.runtime.targets import find_target

FORMAT_VERSION: Literal[4] = 4
MANIFEST = "engine.json"
WEIGHTS = "weights.safetensors"  # of all programs; a target may put them into its programs
PREFIXES = "prefixes"  # the folder of rows of prompts that an engine was built with
CONSTANTS = "{}.constants.safetensors"  # of one: what it needs and no checkpoint has
SHARED = "{}.shared.json"  # of one: names of weights that it is given, and holds no copy of
MAX_BATCH, MAX_SEQ_LEN, MAX_CHUNK = 1024, 1 << 24, 1 << 16  # a manifest beyond them is damaged
COPY_AGAIN = "copy it again or rebuild the engine"  # of a file that is not what was built
MOST_MANIFEST = 1 << 22  # bytes; those of large models have some hundred thousand
HASH_LIMIT = 10**9  # bytes; larger engines are hashed only on request

AllreduceStrategy = Literal["one-shot"]  # what sums between ranks in NCCL's place
FloatType = Literal["float32", "bfloat16"]
QuantisedType = Literal["int8", "int4", "fp8", "nvfp4"]
HeadType = Literal["int8", "int4"]  # of embedding and head, where they are quantised
WeightsType = Literal[FloatType, QuantisedType]
Dimension = int | str  # a number, or the name of a size that varies between calls


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSpec(_Record):
    """Describes one input or output of a program."""

    name: str
    dtype: Literal["int64", "int32", "bool", "float32", "bfloat16"]
    shape: tuple[Dimension, ...]


class ProgramSpec(_Record):
    """Describes one compiled graph of the engine."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    # Bytes of intermediate results that it holds at once on a GPU, at most, by an estimate.
    temporary: int = Field(default=0, ge=0)


class FileSpec(_Record):
    size: int
    sha256: str


class ModelInfo(_Record):
    """Describes the model that was compiled."""

    name: str
    architecture: str
    parameters: int  # of main model and MTP modules, shared tensors once
    vocab_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    thinking_token_ids: tuple[int, int] | None = None  # <think> and </think>, where there are such


class BuildInfo(_Record):
    """Holds the flags of `mtpbuild build` that the engine was compiled with."""

    nextn: int = Field(ge=0, le=NEXTN_LIMIT)
    drafter: str | None  # its name; its package need not be installed here
    adaptive: bool = False  # a step may draft fewer than nextn tokens
    max_batch: int = Field(ge=1, le=MAX_BATCH)
    max_seq_len: int = Field(ge=2, le=MAX_SEQ_LEN)
    capacity: int = Field(ge=2, le=2 * MAX_SEQ_LEN)  # rows that a slot has in each cache
    prefill_chunk: int = Field(ge=1, le=MAX_CHUNK)
    weights: WeightsType
    # Columns of a product that share a scale, where `weights` are integers.
    block_size: int | None = Field(default=None, ge=16)
    # How weights are packed for the CPU's library of kernels; None: its operators are not used.
    cpu_layout: str | None = None
    # Whether texts and log-probabilities by strict acceptance depend on tokens and weights alone:
    # all operators of all programs are ones that were probed.
    exact: bool = False
    probed: tuple[str, ...] = ()  # what the build has tried of it
    # What the build quantised the checkpoint's weights to; None: they are in its own formats.
    quantised_to: QuantisedType | None = None
    head_weights: HeadType | None = None  # likewise embedding and head
    # How many tokens drafts are chosen from, which draft_vocab.json lists; None: all.
    draft_vocab: int | None = Field(default=None, ge=1)
    dtype: FloatType = "float32"  # of caches and hidden states
    fingerprint: str  # of everything that went in; equal means nothing changed
    tp: int = Field(default=1, ge=1, le=MAX_RANKS)  # ranks that share the model
    ep: int = Field(default=1, ge=1, le=MAX_RANKS)  # parts of the routed experts
    attention_dp: bool = False  # each rank has requests of its own, max_batch at once
    revision: str | None = None  # --revision of its repository; None: main, or no repository
    # The main layers of its model that it has; None: all.
    layers: str | None = Field(default=None, pattern=r"^\d{1,6}-\d{1,6}$")

    @property
    def drafts(self) -> str:
        """Returns the number of drafts that a step makes, in words."""
        return f"0 to {self.nextn}" if self.adaptive else str(self.nextn)

    @property
    def ranks(self) -> Ranks:
        """Says how processes share the model."""
        return Ranks(self.tp, self.ep, self.attention_dp)

    @property
    def slots(self) -> int:
        """Requests that run at once, on all ranks."""
        return self.max_batch * self.ranks.serving


class CrossCompiled(_Record):
    """Says how an engine was compiled on a machine without its GPU: it was not loaded there."""

    architecture: str  # of its kernels, such as sm_90
    assumed: str  # the GPU whose properties the compiler was told
    left_out: tuple[str, ...]  # of what compiling on the GPU does


class TargetInfo(_Record):
    """Describes the target and the machine that the engine was compiled for."""

    name: str
    hardware: str
    versions: dict[str, str]
    compute_capabilities: tuple[str, ...] = ()  # of the GPUs that an engine runs on, such as 12.0
    cross_compiled: CrossCompiled | None = None  # None: on a machine that it runs on
    allreduce_strategy: AllreduceStrategy | None = None  # None: NCCL sums between GPUs

    @field_validator("name")
    @classmethod
    def is_known(cls, name: str) -> str:
        try:
            return find_target(name).name
        except UsageError as error:
            raise ValueError(str(error)) from None


class Manifest(_Record):
    """Is the whole of `engine.json`; docs/engine-format.md explains each field."""

    format_version: Literal[4] = FORMAT_VERSION
    mtpbuild: str
    model: ModelInfo
    build: BuildInfo
    target: TargetInfo
    capabilities: dict[str, list[str]]
    lookahead: int = Field(ge=0)  # tokens behind a chunk that prefill wants to see
    programs: dict[str, ProgramSpec]
    state: tuple[StateSpec, ...]
    files: dict[str, FileSpec]
    rank: int | None = None  # of a rank's folder in an engine of several

    @property
    def whole_model(self) -> str:
        """Name of the model, also if the engine is some of its layers."""
        layers = self.build.layers
        return self.model.name.removesuffix(f"-layers{layers}") if layers else self.model.name

    @property
    def split(self) -> bool:
        """Tells whether programs and weights are in the folders of ranks."""
        return self.build.tp > 1 and self.rank is None

    @property
    def window(self) -> int:
        """T: tokens that one step verifies, the newest and nextn drafts."""
        return self.build.nextn + 1

    @property
    def features(self) -> Features:
        """Says what the engine's graphs and states allow; its programs may be able to do more."""
        mixed = self.programs.get(MIXED)
        has = {
            Feature.KEEP: self.build.ranks.serving == 1 and all(s.kept for s in self.state),
            Feature.ADAPT: self.build.adaptive,
            Feature.CONSTRAIN: mixed is not None and any(t.name == ALLOWED for t in mixed.inputs),
            Feature.PENALISE: any(s.role == "history" for s in self.state),
            Feature.SCORE: SCORE in self.programs,
        }
        return frozenset(feature for feature, there in has.items() if there)

    @property
    def pools(self) -> bool:
        """Tells whether a prompt can begin with copies of an earlier one's rows and states."""
        known = all(s.kept or s.role == "recurrent" for s in self.state)
        return self.build.ranks.serving == 1 and known

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Parse `folder/engine.json`; raises EngineFormatError with what to do."""
    path = folder / MANIFEST
    try:
        raw = read_json(path, MOST_MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        what = f"not an engine (no {MANIFEST})" if folder.is_dir() else "no such engine directory"
        raise EngineFormatError(f"{folder}: {what}{_meant(folder)}") from None
    except OSError as error:
        raise EngineFormatError(f"{path}: {_unreadable(error)}; {COPY_AGAIN}") from None
    except ValueError as error:
        raise EngineFormatError(f"{path}: not readable as JSON ({error}); {COPY_AGAIN}") from None
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        raise EngineFormatError(
            f"{path}: format version {version}, this mtpbuild reads {FORMAT_VERSION}; "
            f"{'upgrade mtpbuild' if newer else 'build it again'}"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        what = first_error(error, slice(None))
        raise EngineFormatError(f"{path}: {what}; rebuild the engine") from None


def _meant(folder: Path) -> str:
    """Names an engine in this folder, or of a like name beside it or in `engines`."""
    places = (folder,) if folder.is_dir() else (folder.parent, Path("engines"))
    found = (path.parent for place in places for path in place.glob(f"[!.]*/{MANIFEST}"))
    there = {path.name: path for path in sorted(found)}
    near = list(there) if folder.is_dir() else difflib.get_close_matches(folder.name, there, 1)
    return f"; did you mean {there[near[0]]}?" if near else "; make one with `mtpbuild build`"


def first_error(error: ValidationError, part: slice) -> str:
    """Repeats what pydantic says of the first wrong field, behind that part of its place."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"][part]))
    return (f"{where}: " if where else "") + first["msg"].removeprefix("Value error, ")


def rank_name(rank: int) -> str:
    return f"rank{rank}"


def read_rank(folder: Path, manifest: Manifest, rank: int) -> Manifest:
    """Reads a rank's manifest; raises EngineFormatError if it is not of the engine's build."""
    place = folder / rank_name(rank)
    own = read_manifest(place)
    if own.build != manifest.build or own.rank != rank:
        raise EngineFormatError(f"{place}: rank {own.rank} of another build; rebuild the engine")
    return own


def ranks_here(folder: Path, manifest: Manifest) -> list[int]:
    """Lists the ranks whose folders are here: machines may have built them one by one."""
    ranks = range(manifest.build.tp if manifest.split else 0)
    return [rank for rank in ranks if (folder / rank_name(rank)).is_dir()]


def engine_folders(folder: Path, manifest: Manifest) -> Iterator[tuple[Path, Manifest]]:
    """Returns the engine's folder, then those of the ranks that are there, with their manifests."""
    yield folder, manifest
    for rank in ranks_here(folder, manifest):
        yield folder / rank_name(rank), read_rank(folder, manifest, rank)


def check_files(folder: Path, manifest: Manifest, *, verify_hashes: bool = False) -> None:
    """Require exactly the listed files with their sizes; hash all bytes up to 1 GB, or on request.

    What is in the folders of ranks is their own manifests' business. Raises EngineFileError that
    names the first file that is missing, foreign, changed or not to be read.
    """
    try:
        _check_names(folder, manifest)
        _check_sizes(folder, manifest)
        _check_hashes(folder, manifest, verify_hashes)
    except OSError as error:
        where = error.filename or folder
        raise EngineFileError(f"{where}: {_unreadable(error)}; {COPY_AGAIN}") from None


def _unreadable(error: OSError) -> str:
    return f"can't be read ({error.strerror or error})"


def _check_names(folder: Path, manifest: Manifest) -> None:
    ranks = {rank_name(rank) for rank in range(manifest.build.tp if manifest.split else 0)}
    files = (p.relative_to(folder) for p in folder.rglob("*") if not p.is_dir())
    found = {file.as_posix() for file in files if file.parts[0] not in ranks}
    missing = sorted(set(manifest.files) - found)
    foreign = sorted(found - set(manifest.files) - {MANIFEST})
    if missing:
        raise EngineFileError(f"{folder}: file {missing[0]} is missing; {COPY_AGAIN}")
    if foreign:
        raise EngineFileError(f"{folder}: {foreign[0]} is not part of the engine; remove it")
    for program in manifest.programs.values():
        if program.file not in manifest.files and not manifest.split:
            raise EngineFormatError(
                f"{folder / MANIFEST}: program file {program.file} is not listed"
            )


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    for name, spec in manifest.files.items():
        if (size := check_regular(folder / name).st_size) != spec.size:
            sizes = f"{size} bytes, the manifest says {spec.size}"
            raise EngineFileError(f"{folder / name}: {sizes}; {COPY_AGAIN}")


def _check_hashes(folder: Path, manifest: Manifest, verify_hashes: bool) -> None:
    # A prefix is hashed when it is used for the first time.
    known = {n: f for n, f in manifest.files.items() if verify_hashes or not n.startswith(PREFIXES)}
    if verify_hashes or sum(f.size for f in known.values()) <= HASH_LIMIT:
        for name, spec in known.items():
            try:
                found = hash_file(folder / name)
            except PermissionError:
                if name.startswith(PREFIXES):
                    continue  # whoever opens the prefixes says so
                raise
            if found != spec.sha256:
                changed = "bytes changed since the build (sha256)"
                raise EngineFileError(f"{folder / name}: {changed}; {COPY_AGAIN}")


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
