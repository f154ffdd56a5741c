"""Runs a Hugging Face hub on the loopback interface, with the few requests that we make.

Requests for large files are redirected to another origin, as the real hub does.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "c0ffee" + "0" * 34
API = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/revision/([^/]+))?")
STORAGE = re.compile(r"/storage/(.+?)//(.+)")
RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hosted:
    """A repository of the hub."""

    folder: Path
    revisions: tuple[str, ...] = ("main", "v1", COMMIT)
    token: str | None = None  # needed to see the repository at all
    gated: bool = False  # everybody can read its card, nobody its files
    card: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sent:
    """An answer: its first byte, and the number of bytes sent."""

    file: str
    first: int
    count: int
    token: str | None


@dataclass
class LoopbackHub:
    """The hub's repositories, and logs its answers."""

    url: str = ""
    repositories: dict[str, Hosted] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    peeked: dict[str, int] = field(default_factory=dict)  # most first bytes that were asked for
    asked: list[str] = field(default_factory=list)  # method and path of each request
    cuts: dict[str, list[int]] = field(default_factory=dict)  # file -> where answers break off
    down_after_cut: bool = False  # answers that the hub is unavailable

    @property
    def files(self) -> set[str]:
        """Return the names of all files whose contents were sent."""
        return {one.file for one in self.sent}

    def bytes_of(self, file: str) -> list[tuple[int, int]]:
        """Return the first byte and the number of bytes of each answer with that file."""
        return [(one.first, one.count) for one in self.sent if one.file == file]


@contextmanager
def serving() -> Iterator[LoopbackHub]:
    """Serve a hub while the block runs."""
    hub = LoopbackHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def connect(patch: pytest.MonkeyPatch, hub: LoopbackHub, home: Path) -> None:
    """Let this process download from the hub, into a cache of its own."""
    from huggingface_hub import constants

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        patch.delenv(name, raising=False)
    patch.setenv("HF_HOME", str(home))
    name_hub(patch, hub.url)
    # huggingface_hub reads these at its import, which was offline in tests.
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))


def name_hub(patch: pytest.MonkeyPatch, url: str) -> None:
    """Let this process use the hub at an address, as HF_ENDPOINT does at the start."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_large(path: Path) -> bool:
    """Return whether the hub keeps a file in Git LFS."""
    return path.suffix in (".safetensors", ".bin", ".gguf")


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if (match := API.fullmatch(path)) is not None:
            self.describe(match[1], match[2] or "main")
        elif (match := RESOLVE.fullmatch(path)) is not None:
            self.resolve(match[1], match[2], match[3])
        elif (match := STORAGE.fullmatch(path)) is not None:
            self.send_file(self.hub.repositories[match[1]].folder / match[2])
        else:
            self.answer(404, {})

    def find(self, name: str, revision: str) -> Hosted | None:
        """Find the repository, or answer with an error in the hub's words."""
        hosted = self.hub.repositories.get(name)
        if hosted is None or hosted.token not in (None, self.token()):
            self.answer(401, {"X-Error-Code": "RepoNotFound"})
            return None
        if revision not in hosted.revisions:
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return hosted

    def describe(self, name: str, revision: str) -> None:
        hosted = self.find(name, revision)
        if hosted is None:
            return
        siblings = list[dict[str, Any]]()
        for path in sorted(filter(Path.is_file, hosted.folder.rglob("*"))):
            size, name_there = path.stat().st_size, path.relative_to(hosted.folder).as_posix()
            one = {"rfilename": name_there, "size": size, "blobId": sha256(path)[:40]}
            if is_large(path):
                one["lfs"] = {"sha256": sha256(path), "size": size, "pointerSize": 130}
            siblings.append(one)
        output = {"id": name, "sha": COMMIT, "siblings": siblings, "cardData": hosted.card}
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(output).encode())

    def resolve(self, name: str, revision: str, file: str) -> None:
        hosted = self.find(name, revision)
        if hosted is None:
            return
        path = hosted.folder / file
        commit = {"X-Repo-Commit": COMMIT}
        if hosted.gated:
            self.answer(403, {"X-Error-Code": "GatedRepo"})
        elif not path.is_file():
            self.answer(404, commit | {"X-Error-Code": "EntryNotFound"})
        elif is_large(path):
            linked = {"X-Linked-Etag": f'"{sha256(path)}"', "X-Linked-Size": path.stat().st_size}
            other = self.hub.url.replace("127.0.0.1", "localhost")
            place = {"Location": f"{other}/storage/{name}//{file}"}
            self.answer(302, {key: str(value) for key, value in (commit | linked | place).items()})
        else:
            self.send_file(path, commit | {"ETag": f'"{sha256(path)[:40]}"'})

    def send_file(self, path: Path, headers: dict[str, str] | None = None) -> None:
        """Send a file, or the requested range of it; some answers break off in the middle."""
        data, asked = path.read_bytes(), self.headers.get("Range")
        begin, _, end = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        first, last = int(begin), min(int(end or len(data)), len(data) - 1)
        headers = {"Accept-Ranges": "bytes"} | (headers or {})
        if asked:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        body, cuts = data[first : last + 1], self.hub.cuts.get(path.name)
        length, status = len(body), 206 if asked else 200
        if end:  # the first bytes of a file, with which its header is read
            self.hub.peeked[path.name] = max(length, self.hub.peeked.get(path.name, 0))
        elif cuts == [] and self.hub.down_after_cut and self.command != "HEAD":
            return self.answer(503, {})
        elif self.command != "HEAD":
            if cuts:
                body = data[first : cuts.pop(0)]
                self.close_connection = True
            self.hub.sent.append(Sent(path.name, first, len(body), self.token()))
        return self.answer(status, headers, body, length)

    def answer(
        self, status: int, headers: dict[str, str], body: bytes = b"", length: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def token(self) -> str | None:
        bearer = self.headers.get("Authorization")
        return bearer.removeprefix("Bearer ") if bearer else None

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing, because `asked` and `sent` are the log."""
