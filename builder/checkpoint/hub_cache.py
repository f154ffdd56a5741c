"""Find repositories in huggingface_hub's cache, without that library.

models--OWNER--NAME/refs/main             the commit of a branch or tag when it was downloaded
models--OWNER--NAME/snapshots/COMMIT/...  links to the files' contents in models--OWNER--NAME/blobs
"""

import os
from pathlib import Path

from mtpbuild.builder.checkpoint.shards import read_shard_names
from mtpbuild.builder.checkpoint.side_files import CONFIG
from mtpbuild.runtime.errors import CheckpointError

MAIN = "main"


def cache_folder() -> Path:
    """Return the folder of huggingface_hub's cache, from that library's environment variables."""
    env = os.environ
    default = env.get("XDG_CACHE_HOME") or "~/.cache"
    home = env.get("HF_HOME") or os.path.join(default, "huggingface")
    named = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(named)))


def find_repository_folder(repository: str) -> Path:
    return cache_folder() / f"models--{repository.replace('/', '--')}"


def find_cached_snapshot(repository: str, revision: str | None = None) -> Path | None:
    """Return the folder of a downloaded snapshot if it has config.json and all weights.

    revision: branch, tag or commit.
    """
    snapshot = find_snapshot(repository, revision)
    return snapshot if snapshot is not None and _is_complete(snapshot) else None


def find_snapshot(repository: str, revision: str | None = None) -> Path | None:
    """Return the folder of a snapshot, whatever of it is there; None if its commit isn't known."""
    folder = find_repository_folder(repository)
    commit = _read_ref(folder, revision or MAIN) or revision
    return None if commit is None else folder / "snapshots" / commit


def write_ref(repository: str, revision: str, commit: str) -> None:
    """Record the commit of a branch or tag, after its files have been downloaded."""
    path = find_repository_folder(repository) / "refs" / revision
    if revision != commit:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit, encoding="utf-8")


def _read_ref(folder: Path, revision: str) -> str | None:
    try:
        return (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None


def _is_complete(snapshot: Path) -> bool:
    try:
        names = (CONFIG, *read_shard_names(snapshot))
        return all((snapshot / name).is_file() for name in names)
    except (CheckpointError, OSError, ValueError):
        return False
