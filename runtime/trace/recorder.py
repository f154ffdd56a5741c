"""Recording of the steps of requests in JSONL files and HTML pages."""

import contextlib
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mtpbuild.runtime.contract.programs import Floats, StepOutput
from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.requests.request import FinishReason, Request
from mtpbuild.runtime.trace import lines
from mtpbuild.runtime.trace.page import Page


class Trace(contextlib.AbstractContextManager["Trace", None]):
    """A recorder of each step of an engine's requests, which are given it as their observer.

        with Trace(engine, "out.jsonl", "out.html") as trace:
            engine.generate(["def f(x):", "def g(x):"], observer=trace)

    So do `chat`, `achat`, `stream` and `astream`. A JSONL file grows line by line and can be read
    at any time; its last line says that it is complete. A page is written when the trace is closed,
    also after an error. Later steps are not recorded. Raises UsageError for a file that cannot be
    written or has another suffix. `manifest` is the engine's.
    """

    def __init__(self, engine: Engine, *paths: str | Path) -> None:
        check_paths(paths)
        self.manifest = engine.manifest
        self._sinks: list[Page | JsonLines] = [
            Page(path, engine.tokenizer) if path.suffix == ".html" else JsonLines(path)
            for path in map(Path, paths)
        ]
        self._lock = threading.RLock()
        self._closed = False
        self._names: set[lines.TaskId] = set()
        self._requests: weakref.WeakKeyDictionary[Request, RequestTrace] = (
            weakref.WeakKeyDictionary()
        )
        self._counts = {"requests": 0, "steps": 0, "output_tokens": 0}  # of the summary
        self._ended = 0

    def request(self, task_id: lines.TaskId | None = None) -> "RequestTrace":
        """Return an observer for one request by this name; others are numbered from 0."""
        name = len(self._names) if task_id is None else task_id
        if name in self._names:
            raise UsageError(f"two requests have task_id {name}: a trace needs one of its own each")
        self._names.add(name)
        return RequestTrace(name, self)

    def step(self, request: Request, output: StepOutput, slot: int) -> None:
        """Record a step of a request, which gets a number with its first one."""
        if request not in self._requests:
            self._requests[request] = self.request()
        self._requests[request].step(request, output, slot)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Record the end of a request that has had a step."""
        if request in self._requests:
            self._requests[request].end(request, reason)

    def close(self, *, complete: bool = True) -> None:
        """Complete the files; `complete` is False if the run was interrupted."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if complete and self._counts["requests"] == self._ended > 0:
                self._write_to_all(lines.SummaryLine.model_validate(self._counts))
            for sink in self._sinks:
                sink.close()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(complete=kind is None)

    def write(self, line: lines.Line) -> None:
        """Write a line to all files, unless the trace is closed."""
        with self._lock:
            if self._closed:
                return
            self._counts["requests"] += isinstance(line, lines.RequestLine)
            self._counts["steps"] += isinstance(line, lines.StepLine)
            if isinstance(line, lines.EndLine):
                self._ended += 1
                self._counts["output_tokens"] += line.output_tokens
            try:
                self._write_to_all(line)
            except UsageError:  # the requests of this step fail; later steps are not recorded
                self.close(complete=False)
                raise

    def _write_to_all(self, line: lines.Line) -> None:
        for sink in self._sinks:
            sink.write(line)


class RequestTrace:
    """The observer of one request."""

    def __init__(self, task_id: lines.TaskId, trace: Trace) -> None:
        self._task_id, self._manifest, self._write = task_id, trace.manifest, trace.write
        self._steps = 0
        self._uniforms: Floats | None = None  # [3, positions]

    def step(self, request: Request, output: StepOutput, slot: int) -> None:
        if self._steps == 0:
            self._write(self._begin(request))
        n, m = int(output.num_tokens[slot]), int(output.num_drafts[slot])
        wanted, top = request.params.logprobs is not None, output.top_logprobs
        self._write(
            lines.StepLine(
                task_id=self._task_id,
                step=self._steps,
                position=request.length,
                num_drafts=m,
                window=output.window[slot, : m + 1].tolist(),
                n=n,
                tokens=output.tokens[slot, :n].tolist(),
                logprobs=_shorten_numbers(output.logprobs[slot, :n]),
                margins=_shorten_numbers(output.margins[slot, :n]),
                entropies=compute_entropies(top[slot, :n]) if wanted and top is not None else None,
                **(self._record_drafts(request, output, slot, m) if wanted else {}),
                uniforms=self._list_drawn(request.length + 1, m + 1),
            )
        )
        self._steps += 1

    @staticmethod
    def _record_drafts(request: Request, output: StepOutput, slot: int, m: int) -> dict[str, Any]:
        """Return the fields about a step's m drafts that its program reports."""
        fields: dict[str, Any] = {}
        if output.draft_logprobs is not None and output.draft_ranks is not None:
            fields["draft_logprobs"] = _shorten_numbers(output.draft_logprobs[slot, :m])
            fields["draft_ranks"] = output.draft_ranks[slot, :m].tolist()
        if output.draft_q is not None and request.controls.temperature > 0:
            fields["draft_q"] = _shorten_numbers(output.draft_q[slot, :m])
        return fields

    def end(self, request: Request, reason: FinishReason) -> None:
        if self._steps:  # else it was cancelled while it waited
            line = lines.EndLine(
                task_id=self._task_id,
                finish_reason=reason,
                output_tokens=len(request.token_ids),
                speculative_decoding=asdict(request.acceptance.report()),
            )
            self._write(line)

    def _begin(self, request: Request) -> lines.RequestLine:
        manifest, controls = self._manifest, request.controls
        if controls.temperature > 0 or controls.synthetic:
            self._uniforms = controls.uniforms(manifest.build.max_seq_len + manifest.window)
        weights = manifest.files.get("weights.safetensors")
        return lines.RequestLine(
            task_id=self._task_id,
            model=manifest.model.name,
            nextn=manifest.build.nextn,
            drafter=manifest.build.drafter,
            target=manifest.target.name,
            hardware=manifest.target.hardware,
            fingerprint=manifest.build.fingerprint,
            weights=weights.sha256 if weights else None,
            prompt=request.prompt,
            params=asdict(request.params) | {"seed": request.seed},
        )

    def _list_drawn(self, first: int, count: int) -> lines.Uniforms | None:
        """Return the numbers of positions first .. first + count - 1, if the request draws any."""
        if self._uniforms is None:
            return None
        rows = [_shorten_numbers(row) for row in self._uniforms[:, first : first + count]]
        return lines.Uniforms(**dict(zip(("draft", "accept", "recover"), rows, strict=True)))


class JsonLines:
    """A file that is created with the first line and gets each line at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, line: lines.Line) -> None:
        try:
            if self._file is None:
                self._file = self._path.open("w", encoding="utf-8", newline="\n")
            self._file.write(line.model_dump_json() + "\n")
            self._file.flush()
        except OSError as error:
            raise UsageError(f"{self._path}: can't be written ({error.strerror})") from None

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # all lines that could be written are there
                self._file.close()


def check_paths(paths: Sequence[str | Path]) -> None:
    """Raise UsageError for a trace file of an unknown kind, in no folder, or given twice."""
    for number, path in enumerate(map(Path, paths)):
        if path in map(Path, paths[:number]):
            raise UsageError(f"trace {path}: given twice")
        if path.suffix not in (".jsonl", ".html"):
            raise UsageError(f"trace {path}: the name must end in .jsonl or .html")
        if path.is_dir() or not path.parent.is_dir():
            reason = "it is a folder" if path.is_dir() else f"no folder {path.parent}"
            raise UsageError(f"trace {path}: can't be written ({reason})")


def _shorten_numbers(row: Floats) -> list[Any]:
    """Return the shortest decimals for 32-bit numbers; None for infinities and NaN."""
    return [float(str(x)) if math.isfinite(x) else None for x in row]


def compute_entropies(top: Floats) -> list[Any]:
    """Return each row's entropy in nats; all tokens after the most probable ones count as one.

    top: [n, MAX_LOGPROBS] log-probabilities.
    """
    shares = np.exp(top.astype(np.float64))
    rest = np.maximum(1 - shares.sum(1, keepdims=True), 0)
    shares = np.concatenate([shares, rest], 1)
    each = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return _shorten_numbers(-(shares * each).sum(1).astype(np.float32))
