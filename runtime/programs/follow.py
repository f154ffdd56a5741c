"""Run a rank that follows rank 0: `python -m mtpbuild.runtime.programs.follow ENGINE THREADS`."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from mtpbuild.runtime.contract.manifest import Manifest, read_manifest
from mtpbuild.runtime.contract.targets import find_target
from mtpbuild.runtime.errors import MtpbuildError, RankError
from mtpbuild.runtime.group.start import LOST, find_own_rank, in_group, start_ranks
from mtpbuild.runtime.programs import find_load


def follow(folder: str | Path, threads: int | None = None) -> None:
    """Run a rank other than 0 until rank 0 closes its engine.

    threads: CPU threads, the same number as on rank 0. Raises RankError if another rank dies or
    hangs, EngineError for a problem of this rank.
    """
    manifest = read_manifest(Path(folder))
    load = find_load(manifest, threads, {})
    with find_target(manifest.target.name).importing():
        from mtpbuild.runtime.group.lead import repeat_calls  # with torch.distributed
    repeat_calls(Path(folder), manifest, load)


@contextlib.contextmanager
def lead_or_follow(
    folder: Path,
    manifest: Manifest,
    threads: int | None,
    before_following: Callable[[], None] = lambda: None,
) -> Iterator[bool]:
    """Yield whether this process has the engine's requests: it has, unless it is a later rank.

    Starts the other ranks of an engine that has several, unless torchrun has. A later rank runs
    until rank 0 has closed the engine, before False is yielded. Raises EngineError or RankError.
    """
    with contextlib.ExitStack() as stack:
        follows = manifest.split and in_group() and find_own_rank(folder, manifest) > 0
        if follows:
            before_following()
            follow(folder, threads)
        elif manifest.split and not in_group():
            stack.enter_context(start_ranks(folder, manifest, threads))
        yield not follows


def run_follower(folder: str, threads: str | None = None) -> int:
    """Run the rank, and return the process's exit code."""
    try:
        follow(folder, None if threads is None else int(threads))
    except MtpbuildError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return LOST if isinstance(error, RankError) else error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run_follower(*sys.argv[1:]))
