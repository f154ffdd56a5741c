"""The commands `run`, `inspect` and `diff`, and the printing of errors as one line."""

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from json import loads  # `json` is a flag of the commands
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from typer import Argument

from mtpbuild.runtime.checks import parse_list
from mtpbuild.runtime.cli.sampling_flags import (
    CompatFlags,
    RelaxedFlags,
    RunFlags,
    make_sampling_params,
    read_flags,
)
from mtpbuild.runtime.contract.target_options import (
    list_changed_flags,
    load_options,
    make_option_flags,
)
from mtpbuild.runtime.errors import MtpbuildError, UsageError, explain_missing_package
from mtpbuild.runtime.flag_groups import MAX_SEQ_LEN, find_given_flags, flag, group_flags
from mtpbuild.runtime.threads import THREADS, parse_threads

if TYPE_CHECKING:
    from mtpbuild.runtime.engine.engine import Engine
    from mtpbuild.runtime.engine.loaded import Prompt
    from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs
    from mtpbuild.runtime.text.chat_template import ChatOptions, Message

INTERRUPTED = 130  # the exit code of shells after SIGINT
DIFFERENT = 1  # exit code, as in diff(1)
PROMPTS = "--prompt, --prompt-file, --prompt-ids, --chat and --input"
STDIN = Path("-")

P = ParamSpec("P")
LoadFlags: Any = make_option_flags(load_options)


def error_line(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command to print errors as one line on standard error and exit with their code."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except MtpbuildError as error:
            typer.echo("error: " + " ".join(str(error).split("\n")), err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("\ninterrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


@error_line
@group_flags
def run(
    context: typer.Context,
    sampling: RunFlags,
    compat: CompatFlags,
    relaxed: RelaxedFlags,
    load_flags: LoadFlags,
    model: Annotated[
        str | None,
        Argument(help="Engine, by folder or by name under engines/, else a recipe or OWNER/NAME."),
    ] = None,
    engine: Path | None = flag(None, "Engine, by folder or by name under engines/."),
    yes: bool = flag(False, "Fetch and build a model's engine without asking."),
    prompt: str | None = flag(None, "Text to continue."),
    prompt_file: Path | None = flag(None, "File with the text to continue; -: standard input."),
    prompt_ids: str | None = flag(None, "Token ids to continue: 5,7,9."),
    chat: str | None = flag(None, "Question, put by the chat template."),
    system: str | None = flag(None, "System message of a chat."),
    chat_template: Path | None = flag(None, "Jinja file in place of the engine's chat template."),
    chat_template_kwargs: str | None = flag(
        None, """For the chat template: '{"enable_thinking": false}'."""
    ),
    input: Path | None = flag(None, "JSONL file, one request per line (docs/cli-json.md)."),
    json: bool = flag(False, "One JSON object per request on standard output."),
    trace: list[Path] | None = flag(
        None, "Write every step to FILE.jsonl or FILE.html; may be repeated."
    ),
    json_schema: Path | None = flag(None, "File with a JSON schema that answers must fit."),
    threads: int | None = flag(None, THREADS, parser=parse_threads),
    max_seq_len: int | None = flag(None, MAX_SEQ_LEN),
    verify_hashes: bool = flag(False, "Hash all files, however large."),
) -> None:
    """Generate text; without a prompt, chat in the terminal, or answer what is piped in.

    A model without an engine is fetched and built first, after a question. Text goes to standard
    output, accepted draft tokens in green if that is a terminal; the summary goes to standard
    error.
    """
    given = [value for value in (prompt, prompt_file, prompt_ids, chat, input) if value is not None]
    if len(given) > 1:
        raise UsageError(f"give one of {PROMPTS}, not {len(given)}")
    talks = not given and sys.stdin is not None and sys.stdin.isatty()
    if talks and (json or trace):
        raise UsageError("--json and --trace need a prompt: a conversation has neither")
    settings = read_flags(compat, relaxed)
    from mtpbuild.runtime.cli import terminal
    from mtpbuild.runtime.cli.engines import choose_engine
    from mtpbuild.runtime.configuration.settings import check_engine
    from mtpbuild.runtime.contract.manifest import read_manifest
    from mtpbuild.runtime.engine.engine import Engine
    from mtpbuild.runtime.programs.follow import lead_or_follow
    from mtpbuild.runtime.sampling.defaults import choose_sampling_defaults
    from mtpbuild.runtime.trace.recorder import Trace, check_paths

    check_paths(trace or ())
    options = _chat_options(chat_template_kwargs, system, chats=given in ([], [chat]))
    if sampling.logprobs is not None and not json:
        raise UsageError("--logprobs is part of the JSON output: add --json")
    if talks:
        with explain_missing_package("a chat in the terminal", "cpu"):
            from mtpbuild.runtime.cli import chat_terminal
    engine = choose_engine(
        model, engine, yes=yes, make_engine=context.obj, acceptance=sampling.acceptance
    )
    manifest = read_manifest(engine)
    check_engine(settings, manifest.build)
    if talks:  # as in `serve`: the model's own sampling, and answers of any length
        usual = choose_sampling_defaults(engine, manifest) | {
            "max_tokens": manifest.build.max_seq_len
        }
        typed = find_given_flags(context, usual)
        sampling = replace(sampling, **{n: v for n, v in usual.items() if n not in typed})
    form = None if json_schema is None else _read_form(json_schema)
    params = make_sampling_params(sampling, settings, manifest, structured_outputs=form)
    if params.synthetic:
        typer.echo(f"warning: {terminal.SYNTHETIC}", err=True)
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(lead_or_follow(engine, manifest, threads)):
            return
        loaded = stack.enter_context(
            Engine.load(
                engine,
                threads=threads,
                max_seq_len=max_seq_len,
                verify_hashes=verify_hashes,
                warm=[params],
                chat_template=chat_template,
                prefix_cache=talks,  # each turn of a conversation extends the last one
                **list_changed_flags(load_flags),
            )
        )
        recorder = stack.enter_context(Trace(loaded, *trace)) if trace else None
        if input is not None:
            terminal.answer_file(loaded, input, params, json, recorder)
        elif talks:
            chat_terminal.converse(loaded, params, system, options)
        else:
            text = prompt if prompt_file is None else _read_text(prompt_file)
            asked = _find_prompt(loaded, text, prompt_ids, chat, system, options)
            terminal.answer(loaded, asked, params, json, recorder)


def _find_prompt(
    engine: "Engine",
    text: str | None,
    ids: str | None,
    chat: str | None,
    system: str | None,
    options: "ChatOptions",
) -> "Prompt":
    """Return the prompt that flags give, else the one on standard input."""
    from mtpbuild.runtime.cli.conversation import chat_or_text

    if ids is not None:
        return parse_list("--prompt-ids", ids, int, "5,7,9") if ids else ()
    if text is not None:
        return text
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    if chat is not None:
        return engine.chat_ids([*messages, _make_question(chat, "--chat")], **options)
    piped = _make_question(_read_text(STDIN).strip(), "standard input")
    return chat_or_text(engine, [*messages, piped], options)


@error_line
@group_flags
def inspect(
    engine: Annotated[Path, Argument(help="Engine directory.")],
    json: bool = flag(False, "As one JSON object."),
) -> None:
    """Show what is in an engine directory, and check that it is whole."""
    from mtpbuild.runtime.cli import terminal
    from mtpbuild.runtime.contract.manifest import check_files, list_engine_folders, read_manifest
    from mtpbuild.runtime.prefix_cache.files import check_prefixes

    manifest = read_manifest(engine)
    for folder, part in list_engine_folders(engine, manifest):
        check_files(folder, part)
    check_prefixes(engine, manifest)
    if json:
        typer.echo(manifest.to_json(), nl=False)
    else:
        terminal.describe(engine, manifest)


@error_line
@group_flags
def diff(
    a: Annotated[Path, Argument(help="Trace of `mtpbuild run --trace FILE.jsonl`.")],
    b: Annotated[Path, Argument(help="Another one of the same requests.")],
    engine: Path | None = flag(None, "Engine directory: show texts beside token ids."),
    json: bool = flag(False, "As one JSON object."),
) -> None:
    """Name the first step in which two traces differ, and its margin; exit code 1 if one does.

    Engines with another nextn, drafter or target are compared by their tokens; with the same nextn
    and drafter also by their drafts.
    """
    from mtpbuild.runtime.trace.diff import describe_diff, diff_traces, make_speller
    from mtpbuild.runtime.trace.lines import read_trace

    spell = make_speller(engine)
    traces = read_trace(a), read_trace(b)
    found = diff_traces(*traces)
    for line in [found.to_json()] if json else describe_diff(found, traces, spell):
        typer.echo(line)
    if not found.equal:
        raise typer.Exit(DIFFERENT)


def _chat_options(kwargs: str | None, system: str | None, *, chats: bool) -> "ChatOptions":
    """Read --chat-template-kwargs; like --system, it needs a prompt that is a chat."""
    flags = {"--chat-template-kwargs": kwargs, "--system": system}
    for name in (name for name, value in flags.items() if value is not None and not chats):
        raise UsageError(f"{name} goes with --chat; a line of --input has its own messages")
    if kwargs is None:
        return {}
    return {"chat_template_kwargs": _parse_input(kwargs, "--chat-template-kwargs")}


def _read_form(schema: Path) -> "StructuredOutputs":
    """Read the file of --json-schema."""
    from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs

    text = _read_text(schema, "--json-schema")
    return StructuredOutputs(json=_parse_input(text, f"--json-schema {schema}"))


def _parse_input(text: str, flag: str) -> Any:
    try:
        return loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag}: not JSON ({error})") from None


def _make_question(text: str, source: str) -> "Message":
    if not text:
        raise UsageError(f"{source}: the question is empty; or give one of {PROMPTS}")
    return {"role": "user", "content": text}


def _read_text(path: Path, flag: str = "--prompt-file") -> str:
    """Read a UTF-8 text; `STDIN` is standard input."""
    try:
        if path == STDIN:
            return "" if sys.stdin is None else sys.stdin.buffer.read().decode("utf-8")
        return path.read_bytes().decode("utf-8")  # keeps the text's line ends
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: can't be read ({error})") from None
