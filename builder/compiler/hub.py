"""Download a Hugging Face repository's files into huggingface_hub's cache.

`hf_hub_download` fetches the small files; like `snapshot_download`, it starts an interrupted file
again from its beginning. This module fetches weights itself, so that an interrupted file resumes,
and puts them where huggingface_hub looks for them.
"""

import errno
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from filelock import FileLock
from httpx2 import HTTPError
from huggingface_hub import HfApi, constants, errors, hf_hub_download, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)
from huggingface_hub.utils import logging as hub_logging

from mtpbuild.builder.checkpoint.hub_cache import cache_folder, find_repository_folder
from mtpbuild.builder.gguf.container import find_header_end
from mtpbuild.builder.gguf.header import MAGIC
from mtpbuild.runtime.contract.manifest import hash_file
from mtpbuild.runtime.errors import CheckpointError, DownloadError
from mtpbuild.runtime.safetensors_header import MAX_BYTES, Header, parse_header, read_header

NAME = "mtpbuild"  # our name in requests to the hub
START = 100_000  # bytes of a file that most headers fit into
RETRY: dict[str, Any] = {"retry_on_exceptions": (), "retry_on_status_codes": (408, 429)}
RETRY_LATER = "run the same command when it can, which goes on with what has been fetched"
RESUMES = "what has been fetched stays, and the same command goes on from there"


class UnreachableError(DownloadError):
    """The error for a hub that does not answer, or may not be asked."""

    def __init__(self, why: str, todo: str) -> None:
        super().__init__(f"{why}: {todo}")
        self.why, self.todo = why, todo


@dataclass(frozen=True)
class Repository:
    """One commit of a repository, with its place in the cache."""

    name: str
    commit: str
    files: Mapping[str, RepoSibling]
    made_from: tuple[str, ...]  # the repositories of its base models

    @property
    def folder(self) -> Path:
        return find_repository_folder(self.name) / "snapshots" / self.commit

    def fetch(self, name: str) -> None:
        """Download a file into the folder, unless it is there already."""
        with explain_errors(self.name, self.commit):
            place = cache_folder()
            hf_hub_download(
                self.name, name, revision=self.commit, cache_dir=place, library_name=NAME
            )

    def fetch_weights(self, name: str) -> None:
        """Download a large file into the folder; bytes from earlier calls are kept."""
        blob, size = self._find_blob(name), self.files[name].size
        # huggingface_hub fetches larger files by another protocol, the only one that serves them.
        if blob is not None and size is not None and size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            with explain_errors(self.name, self.commit):
                self._resume(name, blob, size)
        self.fetch(name)  # it finds the contents there and links them to their name

    def read_header(self, name: str) -> Header:
        """Read a safetensors file's header; no more than that is fetched.

        Raises CheckpointError if it is damaged.
        """
        try:
            if (here := self.folder / name).exists():
                return read_header(here)[0]
            start = self._read_start(name, START)
            length = 8 + int.from_bytes(start[:8], "little")
            if START < length <= MAX_BYTES:
                start = self._read_start(name, length)
            return parse_header(BytesIO(start))[0]
        except ValueError as error:
            what = f"{self.name}/{name}: not a readable safetensors file ({error})"
            raise CheckpointError(what) from None

    def fetch_gguf_header(self, name: str, place: Path) -> None:
        """Fetch a GGUF file's header into a file of the whole file's size."""
        size, count = self.files[name].size or 0, 10 * START
        limit = min(size, MAX_BYTES)
        while True:
            start = self._read_start(name, count)
            with place.open("wb") as file:
                file.write(start)
                file.truncate(size)
            end = find_header_end(place) if start.startswith(MAGIC) else 0
            if count >= limit or (end is not None and end <= count):
                return
            count *= 4

    def _read_start(self, name: str, count: int) -> bytes:
        """Fetch the first bytes of a file; stop there even if the hub sends all of it."""
        headers = build_hf_headers(library_name=NAME)
        headers |= {"Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
        url = hf_hub_url(self.name, name, revision=self.commit)
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with (
            explain_errors(self.name, self.commit),
            http_stream_backoff("GET", url, headers=headers, timeout=timeout, **RETRY) as response,
        ):
            hf_raise_for_status(response)
            return b"".join(islice(response.iter_bytes(count), 1))

    def count_lacking_bytes(self, name: str) -> int:
        """Return the bytes of a file that are still to be fetched."""
        size, blob = self.files[name].size, self._find_blob(name)
        if size is None or (self.folder / name).exists():
            return 0
        if blob is None:
            return size
        return max(0, size - sum(_parse_size(path) for path in (blob, _name_partial(blob))))

    def _find_blob(self, name: str) -> Path | None:
        """Return the path of a file's contents, named by hash; None if the hash is unknown."""
        file = self.files[name]
        etag = file.blob_id if file.lfs is None else file.lfs.sha256
        return None if etag is None else find_repository_folder(self.name) / "blobs" / etag

    def _resume(self, name: str, blob: Path, size: int) -> None:
        """Fetch the rest of a file's contents, after any other process that is fetching them."""
        lock = cache_folder() / ".locks" / blob.parents[1].name / f"{blob.name}.lock"
        for folder in (blob.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with FileLock(lock, mode=0o664):  # as huggingface_hub takes it
            if blob.exists() or (self.folder / name).exists():
                return
            partial = _name_partial(blob)
            url = hf_hub_url(self.name, name, revision=self.commit)
            with partial.open("ab") as file:
                if (done := file.tell()) > size:
                    done = file.truncate(0)
                http_get(
                    url,
                    file,
                    resume_size=done,
                    headers=build_hf_headers(library_name=NAME),
                    expected_size=size,
                    displayed_filename=name,
                )
            # A resumed file may mix two versions. A large file's blob is named by its hash.
            if done and self.files[name].lfs is not None and hash_file(partial) != blob.name:
                partial.unlink()
                raise DownloadError(
                    f"{self.name}: {name} came damaged; the same command fetches it anew"
                )
            partial.replace(blob)


def open_repository(name: str, revision: str) -> Repository:
    """Ask the hub about a repository; raise DownloadError, such as UnreachableError."""
    hub_logging.set_verbosity(logging.ERROR)  # besides errors it shows only progress bars
    with explain_errors(name, revision):
        api = HfApi(library_name=NAME)
        try:
            timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
            info = api.model_info(name, revision=revision, files_metadata=True, timeout=timeout)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, errors.HFValidationError | errors.BadRequestError):
                raise
            fault = f"{constants.ENDPOINT} does not answer as a Hugging Face hub does"
            raise DownloadError(fault) from None
    if info.sha is None:
        raise DownloadError(f"{constants.ENDPOINT} names no commit of {name}")
    files = {file.rfilename: file for file in info.siblings or ()}
    base = None if info.card_data is None else info.card_data.get("base_model")
    bases = [base] if isinstance(base, str) else base if isinstance(base, list) else []
    return Repository(name, info.sha, files, tuple(map(str, bases)))


@contextmanager
def explain_errors(name: str, revision: str) -> Iterator[None]:
    """Turn huggingface_hub's errors into a DownloadError that says what to do."""
    try:
        yield
    except (HTTPError, errors.HFValidationError, OSError) as error:
        absent = isinstance(error, errors.LocalEntryNotFoundError)  # here, as the hub failed
        raise _explain((error.__cause__ if absent else None) or error, name, revision) from None


def _explain(error: BaseException, name: str, revision: str) -> DownloadError:
    hub = constants.ENDPOINT
    match error:
        case errors.OfflineModeIsEnabled():
            return UnreachableError("HF_HUB_OFFLINE is set", "unset it")
        case errors.GatedRepoError():
            todo = f"ask for access at {hub}/{name}, then set HF_TOKEN or run `hf auth login`"
            return DownloadError(f"{name} is gated: {todo}")
        case errors.RepositoryNotFoundError():
            fault = f"{name} is neither a folder here nor a repository of {hub}"
            return DownloadError(f"{fault} (a private one needs an HF_TOKEN that may read it)")
        case errors.RevisionNotFoundError():
            return DownloadError(f"{name} has no revision {revision}: name a branch, tag or commit")
        case errors.HFValidationError():
            return DownloadError(f"{name} is no folder here, and can't be a repository: {error}")
        case errors.HfHubHTTPError():
            status = f"{hub} answers {error.response.status_code} for {name}"
            message = f" ({error.server_message})" if error.server_message else ""
            return DownloadError(f"{status}{message}; {RESUMES}")
        case HTTPError():
            return UnreachableError(f"{hub} can't be reached ({_shorten(error)})", RETRY_LATER)
        case OSError(errno=errno.ENOSPC):
            return DownloadError(f"the disk of {cache_folder()} is full; {RESUMES}")
        case OSError(strerror=str(strerror), filename=str(filename)):
            return DownloadError(f"{filename}: can't be written ({strerror})")
    return DownloadError(f"{name}: {_shorten(error)}; {RESUMES}")


def _shorten(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _name_partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.incomplete")


def _parse_size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
