"""The main program of the processes that render chat templates within time and memory limits.

`template_pool.py` starts it by path, with the folders of Jinja's packages; it imports nothing of
mtpbuild. It reads requests from standard input and writes an answer to each to standard output.
"""

import json
import marshal
import os
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import IO, Any, NoReturn

SECONDS, MEMORY = 2.0, 256 << 20  # per rendering; memory in addition to an idle process's
MAX_TEXT = 16 << 20  # bytes of a prompt; no engine takes that many
MAX_REASON = 1000  # characters of a template's own error message
DONE, REFUSED, SYNTAX, LIMIT = b"dryl"  # the first byte of an answer, before its text
OUT_OF_MEMORY = 77  # exit code
Answer = tuple[int, str]


def main() -> None:
    sys.path += sys.argv[1:]
    compiled = lru_cache(maxsize=16)(make_environment().from_string)
    limit_memory()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        while request := read_block(requests):
            set_alarm(SECONDS)
            kind, text = render(compiled, *marshal.loads(request))
            answer = bytes([kind]) + text.encode("utf-8", "surrogatepass")
            if len(answer) > MAX_TEXT:
                answer = bytes([LIMIT]) + f"it writes more than {MAX_TEXT >> 20} MB".encode()
            set_alarm(0)
            write_block(answers, answer)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def render(compiled: Any, source: str, variables: dict[str, Any]) -> Answer:
    from jinja2 import TemplateSyntaxError

    try:
        template = compiled(source)
    except TemplateSyntaxError as error:
        return SYNTAX, f"line {error.lineno}: {error.message}"
    try:
        return DONE, template.render(variables)
    except MemoryError:
        raise
    except Exception as error:  # a template is a program and can fail in any way
        return REFUSED, str(error)[:MAX_REASON]


def limit_memory() -> None:
    """Limit memory to MEMORY in addition to what is in use, on Linux."""
    if sys.platform == "linux":
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = used + MEMORY
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def set_alarm(seconds: float) -> None:
    """Let the system end this process after some seconds; 0 cancels the alarm."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_REAL, seconds)


def read_block(file: IO[bytes]) -> bytes:
    """Read a block after its length; return b"" if the other end is closed."""
    size = int.from_bytes(file.read(8), "little")
    block = file.read(size)
    return block if len(block) == size else b""


def write_block(file: IO[bytes], block: bytes) -> None:
    file.write(len(block).to_bytes(8, "little"))
    file.write(block)
    file.flush()


def make_environment() -> Any:
    """Return a Jinja environment with the extensions and functions of transformers."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """The `{% generation %}` tag, which marks text for training; it only shows its body."""

        tags = {"generation"}  # noqa: RUF012  (Jinja's own way)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class GuardedNamespace(Namespace):
        """A namespace without names that could lead to Python's internals."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # an attribute may be called `self`
            self, *rest = args
            Namespace.__init__(self)
            for name, value in dict(*rest, **kwargs).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"namespace: an attribute can't be called {name!r}")
            super().__setitem__(name, value)

    class Dict:
        """The function `dict` without the attributes of the type."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        fromkeys = staticmethod(dict.fromkeys)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, *positional: Any, **options: Any) -> str:
        """Write JSON; Jinja's own filter would escape HTML."""
        names = ("ensure_ascii", "indent", "separators", "sort_keys")
        arguments = dict(zip(names, positional, strict=False))
        return json.dumps(value, **{"ensure_ascii": False} | arguments | options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": Dict(),
        "namespace": GuardedNamespace,
    }
    return environment


if __name__ == "__main__":
    main()
