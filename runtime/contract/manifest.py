"""`engine.json`, the manifest of an engine directory, and the check of the engine's files."""

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
from mtpbuild.runtime.contract.programs import MIXED, PLAIN, PREFILL, SCORE
from mtpbuild.runtime.contract.state import StateSpec
from mtpbuild.runtime.contract.targets import find_target
from mtpbuild.runtime.errors import EngineFileError, EngineFormatError, UsageError
from mtpbuild.runtime.files import check_regular, read_json
from mtpbuild.runtime.ranks import MAX_RANKS, Ranks

FORMAT_VERSION = 4
MANIFEST = "engine.json"
WEIGHTS = "weights.safetensors"  # of all programs; some targets embed weights in programs
PREFIXES = "prefixes"  # the folder of prompt prefixes that were added to the engine
CONSTANTS = "{}.constants.safetensors"  # of one program: constants that are not in the checkpoint
SHARED = "{}.shared.json"  # of one program: names of the weights that it reads from WEIGHTS
MAX_BATCH, MAX_SEQ_LEN, MAX_CHUNK = 1024, 1 << 24, 1 << 16  # a manifest beyond them is damaged
MAX_SIZE = 1 << 32  # of a dimension of a state
COPY_AGAIN = "copy it again or rebuild the engine"  # advice for a file that has changed
MAX_MANIFEST = 1 << 22  # bytes; the manifests of large models have a few hundred thousand
PROBE_VERSION = 2  # of the rules and trials by which a build calls an engine exact
HASH_LIMIT = 10**9  # bytes; larger engines are hashed only on request

AllreduceStrategy = Literal["one-shot"]  # how ranks sum tensors without NCCL
FloatType = Literal["float32", "bfloat16"]
CacheType = Literal[FloatType, "int8"]
QuantisedType = Literal["int8", "int4", "fp8", "nvfp4"]
HeadType = Literal["int8", "int4"]  # of embedding and head, if they are quantised
WeightsType = Literal[FloatType, QuantisedType, "mxfp4"]  # mxfp4: as checkpoints have it
Dimension = int | str  # a number, or the name of a size that varies between calls


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorSpec(_Record):
    """An input or output of a program."""

    name: str
    dtype: Literal["int64", "int32", "bool", "float32", "bfloat16", "int8"]
    shape: tuple[Dimension, ...]


class ProgramSpec(_Record):
    """A compiled graph of the engine."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    # Estimated peak bytes of the program's intermediate results on a GPU.
    temporary: int = Field(default=0, ge=0)


class FileSpec(_Record):
    size: int
    sha256: str


class ModelInfo(_Record):
    """The model that was compiled."""

    name: str
    architecture: str
    parameters: int  # of the main model and the MTP modules; shared tensors count once
    vocab_size: int = Field(ge=1)
    num_hidden_layers: int
    num_nextn_predict_layers: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    thinking_token_ids: tuple[int, int] | None = None  # as <think> and </think>, if it has them
    # What can draft, such as "its MTP module". None: nothing, or an engine of an older mtpbuild.
    head: str | None = None


class BuildInfo(_Record):
    """The flags of `mtpbuild build` and other properties of the build."""

    nextn: int = Field(ge=0, le=NEXTN_LIMIT)
    drafter: str | None  # the drafter's name; its package need not be installed to run
    adaptive: bool = False  # a step may draft fewer than nextn tokens
    max_batch: int = Field(ge=1, le=MAX_BATCH)
    max_seq_len: int = Field(ge=2, le=MAX_SEQ_LEN)
    capacity: int = Field(ge=2, le=2 * MAX_SEQ_LEN)  # rows per slot in each cache
    prefill_chunk: int = Field(ge=1, le=MAX_CHUNK)
    weights: WeightsType
    # Columns of a weight that share a scale, if `weights` are integers.
    block_size: int | None = Field(default=None, ge=16)
    # Layout in which weights are packed for mtpbuild's library of CPU kernels. None: the engine
    # does not use it.
    cpu_layout: str | None = None
    # Whether texts and log-probabilities with strict acceptance depend on tokens and weights alone.
    # It is true if all operators are known and the checks in `probed` passed. None: no probe has
    # run, which counts as not exact.
    exact: bool | None = None
    probed: tuple[str, ...] = ()  # the checks that the build made for `exact`
    probe_version: int = Field(default=1, ge=1)  # PROBE_VERSION of that build
    # The build's --weights: the format that weights were quantised to, or "floats". None: they
    # have the checkpoint's formats, as far as the target keeps them.
    quantised_to: QuantisedType | Literal["floats"] | None = None
    head_weights: HeadType | None = None  # the same for embedding and head
    # The bits that int4 weights may take on average, some of them in int8. None: no such limit.
    weight_bits: float | None = Field(default=None, gt=0)
    int8_modules: tuple[str, ...] = ()  # globs of the trunk's products that are int8 by this
    # The text that int4 weights were calibrated with: "own text" or a file. None: they were not.
    calibrated: str | None = None
    # The number of tokens that drafts are chosen from, listed in draft_vocab.json. None: all.
    draft_vocab: int | None = Field(default=None, ge=1)
    dtype: FloatType = "float32"  # of caches and hidden states
    # Keys and queries are multiplied by powers of two, so that int8 caches lose less of them.
    balanced_keys: bool = False
    fingerprint: str  # hash of all inputs of the build; equal means that nothing changed
    tp: int = Field(default=1, ge=1, le=MAX_RANKS)  # ranks that share the model
    ep: int = Field(default=1, ge=1, le=MAX_RANKS)  # parts that the routed experts are split into
    attention_dp: bool = False  # each rank has its own requests, up to max_batch at once
    # Name and version of the package that each rule or drafter comes from, if it is another one.
    packages: dict[str, str] = {}
    revision: str | None = None  # --revision of the repository. None: main, or no repository
    # The range of the model's main layers that the engine has. None: all.
    layers: str | None = Field(default=None, pattern=r"^\d{1,6}-\d{1,6}$")

    @property
    def counts_as_exact(self) -> bool:
        """Whether the engine is exact by the rules of today."""
        return self.exact is True and self.probe_version >= PROBE_VERSION

    @property
    def exact_note(self) -> str | None:
        """A line for an engine that only older rules call exact."""
        if not self.exact or self.counts_as_exact:
            return None
        return (
            f"it counts as not exact: probe version {self.probe_version} found it exact, "
            f"this mtpbuild has {PROBE_VERSION}: build it again"
        )

    @property
    def drafts(self) -> str:
        """The number of drafts per step as text, such as "3" or "0 to 3"."""
        return f"0 to {self.nextn}" if self.adaptive else str(self.nextn)

    @property
    def ranks(self) -> Ranks:
        """The way in which processes share the model."""
        return Ranks(self.tp, self.ep, self.attention_dp)

    @property
    def slots(self) -> int:
        """The number of requests that run at once, on all ranks."""
        return self.max_batch * self.ranks.serving


class CrossCompiled(_Record):
    """The compilation of an engine on a machine without its GPU, which could not load it."""

    architecture: str  # of its kernels, such as sm_90
    assumed: str  # the GPU whose properties the compiler used
    left_out: tuple[str, ...]  # steps that need the GPU and were skipped


class TargetInfo(_Record):
    """The target, and the machine that the engine was compiled for."""

    name: str
    hardware: str
    versions: dict[str, str]
    compute_capabilities: tuple[str, ...] = ()  # of the GPUs that run the engine, such as 12.0
    cross_compiled: CrossCompiled | None = None  # None: compiled on a machine that runs it
    allreduce_strategy: AllreduceStrategy | None = None  # None: NCCL sums between GPUs

    @field_validator("name")
    @classmethod
    def is_known(cls, name: str) -> str:
        try:
            return find_target(name).name
        except UsageError as error:
            raise ValueError(str(error)) from None


class Manifest(_Record):
    """The contents of `engine.json`; docs/engine-format.md explains each field.

    The fields: `format_version`, `mtpbuild` (the version that built it), `model`, `build`,
    `target`, `capabilities`, `lookahead`, `programs`, `state`, `files`, `rank`.
    """

    format_version: int = Field(default=FORMAT_VERSION, ge=FORMAT_VERSION, le=FORMAT_VERSION)
    mtpbuild: str
    model: ModelInfo
    build: BuildInfo
    target: TargetInfo
    capabilities: dict[str, list[str]]
    lookahead: int = Field(ge=0)  # tokens after a chunk that prefill reads
    programs: dict[str, ProgramSpec]
    state: tuple[StateSpec, ...]
    files: dict[str, FileSpec]
    rank: int | None = None  # the rank whose folder this is, in an engine of several ranks

    def check_sizes(self) -> None:
        """Raise ValueError unless flags, states and programs tell the same sizes.

        Arrays are made by them.
        """
        build, states = self.build, {state.name: state for state in self.state}
        known = {"batch": build.max_batch, "window": self.window, "drafts": build.nextn}
        for spec in self.state:
            sizes = known | ({"rows": build.capacity} if spec.role == "rows" else {})
            for size, count in spec.sizes.items():
                if not 0 <= count <= MAX_SIZE or count != sizes.get(size, count):
                    raise ValueError(f"state {spec.name}: {size} {count} contradicts the rest")
        if len(states) < len(self.state):
            raise ValueError("two states have one name")
        ahead = {t.name: t for p in self.programs.values() for t in p.inputs}.get("ahead")
        if ahead is not None and ahead.shape != (1, self.lookahead):
            raise ValueError(f"lookahead {self.lookahead} is not that of its programs")
        if self.lookahead > max(1, build.nextn) or build.capacity < build.max_seq_len:
            raise ValueError("lookahead or capacity does not fit nextn and max_seq_len")
        for name in (PREFILL, PLAIN):
            if name not in self.programs:
                raise ValueError(f"programs: there is no {name}")
        for name, program in self.programs.items():
            results = {t.name for t in program.outputs if t.name.endswith(".out")}
            if results != {f"{t.name}.out" for t in program.inputs if t.name in states}:
                raise ValueError(f"programs.{name}: other states go in than come out")
            for tensor in (*program.inputs, *program.outputs):
                state = states.get(tensor.name.removesuffix(".out"))
                if state is not None and not _fits(tensor, state):
                    raise ValueError(f"programs.{name}: {tensor.name} is not the state's")

    @property
    def whole_model(self) -> str:
        """The model's name without the suffix for a range of layers."""
        layers = self.build.layers
        return self.model.name.removesuffix(f"-layers{layers}") if layers else self.model.name

    @property
    def drafting(self) -> str:
        """A line that says whether drafts are made, and by what head."""
        build, model = self.build, self.model
        if build.drafter in (None, "none"):
            built = "it was built for none" if model.num_nextn_predict_layers else "it has no head"
            return f"no drafts: {built}"
        head = f", {model.head}" if model.head else ""
        return f"drafts: {build.drafts} a step, by {build.drafter}{head}"

    @property
    def split(self) -> bool:
        """Whether programs and weights are in one folder per rank."""
        return self.build.tp > 1 and self.rank is None

    @property
    def window(self) -> int:
        """T: the number of a step's input tokens: the newest token and nextn drafts."""
        return self.build.nextn + 1

    @property
    def features(self) -> Features:
        """The features that graphs and states allow; the target's programs may add others."""
        mixed = self.programs.get(MIXED)
        has = {
            Feature.PREFIX_CACHE: self.build.ranks.serving == 1
            and all(s.kept or s.role == "recurrent" for s in self.state),
            Feature.ADAPT: self.build.adaptive,
            Feature.CONSTRAIN: mixed is not None and any(t.name == ALLOWED for t in mixed.inputs),
            Feature.PENALISE: any(s.role == "history" for s in self.state),
            Feature.SCORE: SCORE in self.programs,
        }
        return frozenset(feature for feature, there in has.items() if there)

    def to_json(self) -> str:
        """Return the text of `engine.json`."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def _fits(spec: TensorSpec, state: StateSpec) -> bool:
    """Return whether a program's tensor is of a state's type and sizes, but for slots and rows."""
    sizes = spec.shape[1:], state.shape[1:]
    return (
        spec.dtype == state.dtype
        and len(spec.shape) == len(state.shape)
        and all(a == b for a, b in zip(*sizes, strict=True) if isinstance(a, int))
    )


def read_manifest(folder: Path) -> Manifest:
    """Parse `folder/engine.json`; raise EngineFormatError that says what to do."""
    path = folder / MANIFEST
    try:
        raw = read_json(path, MAX_MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        what = f"not an engine (no {MANIFEST})" if folder.is_dir() else "no such engine directory"
        raise EngineFormatError(f"{folder}: {what}{_suggest_engine(folder)}") from None
    except OSError as error:
        what = f"can't be read ({error.strerror or error})"
        raise EngineFormatError(f"{path}: {what}; {COPY_AGAIN}") from None
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
        manifest = Manifest.model_validate(raw)
        manifest.check_sizes()
    except ValueError as error:
        what = str(error)
        if isinstance(error, ValidationError):
            what = describe_first_error(error, slice(None))
        raise EngineFormatError(f"{path}: {what}; rebuild the engine") from None
    return manifest


def _suggest_engine(folder: Path) -> str:
    """Return a hint: an engine inside this folder, or one beside it with a similar name."""
    places = (folder,) if folder.is_dir() else (folder.parent, Path("engines"))
    paths = (path.parent for place in places for path in place.glob(f"[!.]*/{MANIFEST}"))
    engines = {path.name: path for path in sorted(paths)}
    near = list(engines) if folder.is_dir() else difflib.get_close_matches(folder.name, engines, 1)
    return f"; did you mean {engines[near[0]]}?" if near else "; make one with `mtpbuild build`"


def describe_first_error(error: ValidationError, part: slice) -> str:
    """Return pydantic's message for the first wrong field, prefixed by `part` of its location."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"][part]))
    return (f"{where}: " if where else "") + first["msg"].removeprefix("Value error, ")


def name_rank(rank: int) -> str:
    return f"rank{rank}"


def read_rank(folder: Path, manifest: Manifest, rank: int) -> Manifest:
    """Read a rank's manifest; raise EngineFormatError if it belongs to another build."""
    place = folder / name_rank(rank)
    rank_manifest = read_manifest(place)
    if rank_manifest.build != manifest.build or rank_manifest.rank != rank:
        raise EngineFormatError(
            f"{place}: rank {rank_manifest.rank} of another build; rebuild the engine"
        )
    return rank_manifest


def list_ranks_here(folder: Path, manifest: Manifest) -> list[int]:
    """Return the ranks whose folders are on this machine, which may have built only its own."""
    ranks = range(manifest.build.tp if manifest.split else 0)
    return [rank for rank in ranks if (folder / name_rank(rank)).is_dir()]


def list_engine_folders(folder: Path, manifest: Manifest) -> Iterator[tuple[Path, Manifest]]:
    """Yield the engine's folder and those of the ranks on this machine, with their manifests."""
    yield folder, manifest
    for rank in list_ranks_here(folder, manifest):
        yield folder / name_rank(rank), read_rank(folder, manifest, rank)


def check_files(folder: Path, manifest: Manifest, *, verify_hashes: bool = False) -> None:
    """Check that the folder has exactly the manifest's files, with their sizes and hashes.

    Hashes are checked if the files have at most HASH_LIMIT bytes together, or with `verify_hashes`.
    The folders of ranks are skipped. Raises EngineFileError that names the first wrong file.
    """
    try:
        _check_names(folder, manifest)
        for name, spec in manifest.files.items():
            if (size := check_regular(folder / name).st_size) != spec.size:
                sizes = f"{size} bytes, the manifest says {spec.size}"
                raise EngineFileError(f"{folder / name}: {sizes}; {COPY_AGAIN}")
        _check_hashes(folder, manifest, verify_hashes)
    except OSError as error:
        what = f"can't be read ({error.strerror or error})"
        raise EngineFileError(f"{error.filename or folder}: {what}; {COPY_AGAIN}") from None


def _check_names(folder: Path, manifest: Manifest) -> None:
    ranks = {name_rank(rank) for rank in range(manifest.build.tp if manifest.split else 0)}
    files = (p.relative_to(folder) for p in folder.rglob("*") if not p.is_dir())
    present = {f.as_posix() for f in files if f.parts[0] not in ranks}
    listed = manifest.files.keys()
    if missing := sorted(listed - present):
        raise EngineFileError(f"{folder}: file {missing[0]} is missing; {COPY_AGAIN}")
    if foreign := sorted(present - listed - {MANIFEST}):
        raise EngineFileError(f"{folder}: {foreign[0]} is not part of the engine; remove it")
    needed = {program.file for program in manifest.programs.values()}
    if (unlisted := sorted(needed - listed)) and not manifest.split:
        where = folder / MANIFEST
        raise EngineFormatError(f"{where}: files lacks the program {unlisted[0]}; {COPY_AGAIN}")


def _check_hashes(folder: Path, manifest: Manifest, verify_hashes: bool) -> None:
    # A prefix is hashed at its first use, so only `verify_hashes` includes it here.
    files = {n: f for n, f in manifest.files.items() if verify_hashes or not n.startswith(PREFIXES)}
    if not verify_hashes and sum(f.size for f in files.values()) > HASH_LIMIT:
        return
    for name, spec in files.items():
        try:
            changed = hash_file(folder / name) != spec.sha256
        except PermissionError:
            if not name.startswith(PREFIXES):  # `open_prefixes` reports those
                raise
            continue
        if changed:
            what = "differs from what the build wrote (sha256)"
            raise EngineFileError(f"{folder / name} {what}; {COPY_AGAIN}")


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
