"""Start and end of the processes that share a multi-rank engine, and this process's rank.

Rank 0 is the engine that the user sees. The other ranks are followers: they run the same programs,
each on its share of the weights, and take no requests. `torchrun` starts all ranks, or rank 0
starts the followers (`start_ranks`). Ranks connect through torch.distributed (`channel.py`).
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path

from mtpbuild.runtime.contract.manifest import (
    Manifest,
    list_engine_folders,
    list_ranks_here,
    name_rank,
    read_rank,
)
from mtpbuild.runtime.contract.rules import list_rules_of
from mtpbuild.runtime.contract.sums import GROUP as GROUP
from mtpbuild.runtime.contract.targets import find_target
from mtpbuild.runtime.errors import EngineError, EngineFileError, RankError, UsageError
from mtpbuild.runtime.limits import measure_limits

LISTENER = "MTPBUILD_RANKS_LISTENER"  # environment: rank 0's listening socket, set by `start_ranks`
TIMEOUT, SECONDS = "MTPBUILD_RANK_TIMEOUT", 60.0  # environment: the time limit, and its default
PER_CORE = 4  # ranks per core, at most; more must be a mistake
FOLLOWER = (sys.executable, "-m", "mtpbuild.runtime.programs.follow")
FLAGS = (  # flags of `mtpbuild build` in the command that builds missing ranks
    *("model", "layers", "nextn", "drafter", "max_batch", "max_seq_len", "prefill_chunk"),
    *("head_weights", "weight_bits", "revision", "target", "tp", "ep"),
)
LOST = 3  # exit code of a follower that ended because another rank had ended


def in_group() -> bool:
    """Return whether this process was started as one of several ranks."""
    return "RANK" in os.environ


def read_time_limit() -> float:
    """Return the seconds after which a silent rank counts as lost; raises UsageError."""
    text = os.environ.get(TIMEOUT, str(SECONDS))
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= 86400:
            return seconds
    raise UsageError(f"{TIMEOUT} must be a number of seconds up to 86400, not {text!r}")


def find_own_rank(folder: Path, manifest: Manifest) -> int:
    """Return this process's rank; raises EngineError if the group does not fit the engine."""
    tp = manifest.build.tp
    if not in_group():
        raise EngineError(
            f"{folder}: an engine of {tp} ranks: use `mtpbuild run`, or start the program with "
            f"`torchrun --nproc-per-node {tp}`"
        )
    try:
        rank, ranks = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise EngineError(f"RANK and WORLD_SIZE in the environment: {error}") from None
    if ranks != tp:
        raise EngineError(f"{folder} needs {tp} ranks, and torchrun started {ranks}")
    return rank


def count_ranks_on_machine(ranks: int) -> int:
    """Return how many of the ranks this machine runs, as torchrun says; all, if nobody says."""
    text = os.environ.get("LOCAL_WORLD_SIZE", str(ranks))
    if not text.isdecimal():
        raise EngineError(f"LOCAL_WORLD_SIZE in the environment must be a number, not {text!r}")
    return max(int(text), 1)


def find_own_gpu() -> int:
    """Return the index of this rank's GPU; raise EngineError if LOCAL_RANK is no number."""
    text = os.environ.get("LOCAL_RANK", "")
    if not text.isdecimal():
        raise EngineError(
            f"LOCAL_RANK in the environment must say which GPU this rank takes, not {text!r}: "
            "start ranks with torchrun"
        )
    return int(text)


def find_own_folders(folder: Path, manifest: Manifest) -> Iterator[tuple[Path, Manifest]]:
    """Yield the folders that this process reads, the engine's and its rank's, and manifests."""
    yield folder, manifest
    if manifest.split:
        rank = find_own_rank(folder, manifest)
        require_ranks(folder, manifest, [rank])
        yield folder / name_rank(rank), read_rank(folder, manifest, rank)


def require_ranks(folder: Path, manifest: Manifest, ranks: Iterable[int]) -> None:
    """Raise EngineFileError if ranks are missing, with the command that builds them."""
    missing = sorted(set(ranks) - set(list_ranks_here(folder, manifest)))
    if missing:
        names = ", ".join(map(str, missing))
        which = f"rank {names} is" if len(missing) == 1 else f"ranks {names} are"
        command = build_command(folder, manifest, missing[0] if len(missing) == 1 else None)
        raise EngineFileError(
            f"{folder}: {which} missing (of {manifest.build.tp}): copy what was built elsewhere, "
            f"or `{command}`"
        )


def build_command(folder: Path, manifest: Manifest, rank: int | None) -> str:
    """Return the command that builds one rank of an engine, or all missing ranks for None."""
    target = find_target(manifest.target.name)
    known = manifest.build.model_dump() | {"model": manifest.whole_model, "target": target.name}
    values: dict[str, object] = {name: known[name] for name in FLAGS}
    values |= {"weights": manifest.build.quantised_to, **target.build_flags(manifest)}
    values |= {"rank": rank, "out": folder}
    flag_values = ((name, value) for name, value in values.items() if value is not None)
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in flag_values]
    flags += ["--attention-dp"] * manifest.build.attention_dp
    flags += [f"--acceptance-rule {name}" for name in list_rules_of(manifest)]
    return " ".join(["mtpbuild build", *flags])


class Follower:
    """A process of another rank that this process started on this machine."""

    def __init__(self, folder: Path, rank: int, threads: int | None, group: dict[str, str]) -> None:
        self._name = f"rank {rank}"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `end`
        self._process = subprocess.Popen(
            [*FOLLOWER, str(folder), *([] if threads is None else [str(threads)])],
            env=os.environ | group | _make_rank_variables(rank),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,  # Ctrl-C reaches rank 0 alone
        )

    def reason(self) -> str | None:
        """Return why the process failed; None if it runs, ended well, or another rank ended it."""
        code = self._process.poll()
        if code in (None, 0, LOST):
            return None
        if code is not None and code < 0:
            return f"{self._name} was killed by signal {-code}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        message = lines[-1].removeprefix("error: ") if lines else f"exit code {code}"
        return message if message.startswith(self._name) else f"{self._name}: {message}"

    def end(self, patience: float) -> None:
        """Wait up to `patience` seconds for its end, then kill it."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()  # SIGKILL also ends a stopped process
            self._process.wait()
        self._errors.close()


@contextlib.contextmanager
def start_ranks(folder: Path, manifest: Manifest, threads: int | None = None) -> Iterator[None]:
    """Start an engine's other ranks on this machine; this process is rank 0 in the block.

    The ranks end with the block. Raises RankError with the rank that failed and why; UsageError
    if the machine has too few cores or GPUs for the ranks.
    """
    tp, cores = manifest.build.tp, measure_limits().processors
    if tp > PER_CORE * cores:
        raise UsageError(
            f"{folder}: {tp} ranks are too many for {cores} cores (at most {PER_CORE} each): "
            "spread them over machines with torchrun"
        )
    if manifest.target.compute_capabilities:
        _require_gpus(folder, manifest, tp)
    read_time_limit()
    require_ranks(folder, manifest, range(tp))
    list(list_engine_folders(folder, manifest))  # raises if a rank belongs to another build
    with socket.create_server(("127.0.0.1", 0)) as listener:
        group = {
            "WORLD_SIZE": str(tp),
            "LOCAL_WORLD_SIZE": str(tp),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            LISTENER: "",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        leader = _make_rank_variables(0) | {LISTENER: str(listener.fileno())}
        followers, patience = list[Follower](), 0.0
        try:
            for rank in range(1, tp):
                followers.append(Follower(folder, rank, threads, group))
            with environment(group | leader):
                yield
            patience = 10.0
        except RankError as error:
            raise RankError(_find_first_failure(followers) or str(error)) from error
        finally:
            for follower in followers:
                follower.end(patience)


def _require_gpus(folder: Path, manifest: Manifest, tp: int) -> None:
    target = find_target(manifest.target.name)
    with target.importing():
        gpus: int = import_module(target.programs).visible_gpus()
    if tp > gpus:
        raise UsageError(
            f"{folder}: {tp} ranks need a GPU each, this machine has {gpus}: spread them over "
            "machines with torchrun"
        )


def _make_rank_variables(rank: int) -> dict[str, str]:
    """Return the environment variables of a rank, if all ranks are on one machine."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _find_first_failure(followers: list[Follower]) -> str | None:
    """Return the reason of the first failed rank; wait up to 2 seconds for it."""
    end = time.monotonic() + 2
    while True:
        for follower in followers:
            if reason := follower.reason():
                return reason
        if time.monotonic() > end:
            return None
        time.sleep(0.05)


@contextlib.contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """Set environment variables while the block runs."""
    before = {name: value for name, value in os.environ.items() if name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del os.environ[name]
        os.environ.update(before)
