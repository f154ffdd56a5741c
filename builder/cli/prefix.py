"""The commands `prefix add`, `list` and `remove`."""

from json import dumps  # `json` is a flag of the commands
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from mtpbuild.builder.cli.shared import show_progress
from mtpbuild.runtime.cli.commands import error_line
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import flag, group_flags
from mtpbuild.runtime.threads import make_threads_flag

EngineFolder = Annotated[Path, Option(help="Engine directory.")]
Name = Annotated[str, Option(help="The prefix's name.")]


@error_line
@group_flags
def add_prefix(
    engine: EngineFolder,
    name: Name,
    file: Path | None = flag(None, "File with a text that prompts begin with."),
    chat: bool = flag(False, "The text is the system message of chats."),
    messages: Path | None = flag(None, "JSON file with the messages that chats begin with."),
    tools: Path | None = flag(None, "JSON file with the tools of such chats."),
    private: bool = flag(False, "Only you may read it; others load the engine without it."),
    threads: int | None = make_threads_flag(),
) -> None:
    """Compute what prompts begin with, and put it into the engine."""
    paths = [path for path in (file, messages) if path is not None]
    if len(paths) != 1:
        raise UsageError("give --file or --messages")
    from mtpbuild.builder.compiler import prefixes

    path = paths[0]
    beginning = prefixes.read_beginning(path, messages=path is messages, chat=chat, tools=tools)
    with show_progress(f"computing {name}"):
        count = prefixes.add_prefix(engine, name, beginning, threads, private=private)
    typer.echo(f"{engine}: prefix {name}, {count} tokens")


@error_line
@group_flags
def list_prefixes(engine: EngineFolder, json: bool = flag(False, "As one JSON list.")) -> None:
    """List the prefixes of an engine."""
    from mtpbuild.builder.compiler import prefixes

    rows = prefixes.list_prefixes(engine)
    if json:
        typer.echo(dumps(rows))
        return
    for row in rows:
        typer.echo(f"{row['name']}: {row['tokens']} tokens, {row['bytes'] / 1e6:.1f} MB")


@error_line
@group_flags
def remove_prefix(engine: EngineFolder, name: Name) -> None:
    """Remove a prefix from an engine."""
    from mtpbuild.builder.compiler import prefixes

    prefixes.remove_prefix(engine, name)
    typer.echo(f"{engine}: prefix {name} removed")
