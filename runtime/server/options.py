"""The options of a server: flags that concern its requests, and values without flags."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mtpbuild.runtime import checks
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import flag, make_context_flag
from mtpbuild.runtime.sampling.defaults import VLLM_DEFAULTS
from mtpbuild.runtime.threads import make_threads_flag

if TYPE_CHECKING:
    from mtpbuild.runtime.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class ReplicaFlags:
    """The flags that concern requests or the loading of the engine."""

    PANEL: ClassVar = "Requests"

    served_model_name: str | None = flag(None, "The model's name to clients.")
    api_key: Path | None = flag(
        None, "File whose first line is the API key; else MTPBUILD_API_KEY, if it is set."
    )
    max_queue: int = flag(256, "Requests that may wait; more get 429.")
    request_timeout: float | None = flag(None, "Seconds that a request may take.")
    max_body: int = flag(8 * 1024 * 1024, "Bytes that a request's body may have.")
    allow_origin: list[str] | None = flag(None, "Let pages of this origin ask (CORS).")
    allowed_hosts: list[str] | None = flag(
        None, "Name by which clients may call the server; *: any. Addresses and localhost may."
    )
    no_prefix_cache: bool = flag(False, "Fill in every prompt from its beginning.")
    prefix_cache_bytes: int | None = flag(
        None, "Memory for what ended requests leave beyond the slots; default: 1/8 of the free one."
    )
    prefix_cache_dir: Path | None = flag(
        None, "Folder where it is kept for the next server, too; of this server alone."
    )
    chunked_prefill_size: int | None = flag(
        None, "Tokens of a prompt between two steps of others; default: the engine's chunk."
    )
    chat_template: Path | None = flag(None, "Jinja file in place of the engine's chat template.")
    no_thinking_split: bool = flag(False, "Leave thoughts in the text.")
    tool_call_parser: str | None = flag(
        None,
        "deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, gemma4, glm45, glm47, hermes, "
        "kimi_k2, minimax_m2, qwen3_coder or none; default: as the chat template.",
    )
    threads: int | None = make_threads_flag()
    max_seq_len: int | None = make_context_flag()

    def load_engine(self, folder: Path, **options: Any) -> "Engine":
        """Load the engine, and run greedy and sampling programs once."""
        from mtpbuild.runtime import Engine, SamplingParams

        return Engine.load(
            folder,
            prefix_cache=not self.no_prefix_cache,
            warm=[SamplingParams(), SamplingParams(temperature=1.0)],
            **{name: getattr(self, name) for name in LOADING},
            **options,
        )


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ReplicaFlags):
    """All options of a server: a replica's flags, and the options below."""

    key: str | None = None  # that clients must give
    header_timeout: float = 30.0  # seconds, like the next two
    body_timeout: float = 60.0
    send_timeout: float = 60.0
    log_requests: bool = False
    access_log: bool = False  # a line for each request: client, method, path and status
    defaults: dict[str, float | int] = field(default_factory=VLLM_DEFAULTS.copy)

    def __post_init__(self) -> None:
        """Raise UsageError for a value that can't be."""
        # Imported here, as `mtpbuild --help` needs none.
        from mtpbuild.runtime.tool_calls.forms import FORMS

        forms = {"tool_call_parser": checks.check_choice(*FORMS, "none")}
        for name, check in {**CHECKS, **forms}.items():
            value = getattr(self, name)
            try:
                if value is not getattr(ServerOptions, name):  # the default
                    check(value)
            except ValueError as error:
                raise UsageError(f"{SPELLED.get(name, name)} {error}") from None


def check_texts(pattern: str, example: str) -> checks.Check:
    """Return a check for a list of texts; a text alone would be a list of its letters."""

    def read(values: object) -> None:
        texts = values if isinstance(values, list | tuple) else [None]
        if not all(isinstance(text, str) and re.fullmatch(pattern, text) for text in texts):
            raise ValueError(
                f'must be a list such as ["{example}"], not {checks.format_value(values)}'
            )

    return read


def check_key(value: object) -> None:
    """Check an API key, which a header carries; its message does not show it."""
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]([ -~]*[!-~])?", value):
        raise ValueError("must be a text in ASCII that is not empty and has no space around it")


LOADING = (  # flags that are also options of Engine.load
    *("threads", "max_seq_len", "chunked_prefill_size", "chat_template"),
    *("prefix_cache_bytes", "prefix_cache_dir"),
)
SPELLED = {"key": "api_key", "no_thinking_split": "split_thought"}  # as users write them
CHECKS: Mapping[str, checks.Check] = {
    "served_model_name": checks.check_text(1, 1024),
    "key": check_key,
    "max_queue": checks.check_integer(0, 10**9),
    "max_body": checks.check_integer(0, 10**9),
    "request_timeout": checks.check_number(0, 10**9),
    "prefix_cache_bytes": checks.check_integer(0, 10**15),
    "chunked_prefill_size": checks.check_integer(1, 10**9),
    "allow_origin": check_texts(r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]*", "https://a.example"),
    "allowed_hosts": check_texts(r"[^/\s]+", "a.example"),
    "no_thinking_split": checks.check_bool,
}


def read_key(file: Path | None) -> str | None:
    """Read the API key from a file's first line, else from MTPBUILD_API_KEY; None: no key."""
    if file is None:
        return os.environ.get("MTPBUILD_API_KEY") or None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key {file}: can't be read ({error})") from None
    key = lines[0].strip() if lines else ""
    if not key or not key.isascii():
        raise UsageError(f"--api-key {file}: the first line is the key, in ASCII")
    return key


def parse_keep(text: str) -> float:
    """Read --keep, in ollama's words: 90s, 10m, 1h, a number of seconds; negative: for ever."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None:
        raise UsageError(f"--keep {text} is no time: give 90s, 10m, 1h, 0 or -1 (for ever)")
    seconds = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
    return math.inf if seconds < 0 else seconds
