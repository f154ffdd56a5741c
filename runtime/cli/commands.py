"""The commands `run`, `list`, `rm`, `inspect` and `diff`; errors are printed as one line."""

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from json import dumps, loads  # `json` is a flag of the commands
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, ParamSpec

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
    OptionFlags,
    list_changed_flags,
    load_options,
    make_option_flags,
)
from mtpbuild.runtime.errors import (
    MtpbuildError,
    UsageError,
    explain_missing_package,
    in_one_line,
)
from mtpbuild.runtime.flag_groups import (
    engine_flag,
    find_given_flags,
    flag,
    group_flags,
    make_context_flag,
    name_flag,
    output_flag,
)
from mtpbuild.runtime.threads import make_threads_flag

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import Manifest
    from mtpbuild.runtime.engine.engine import Engine
    from mtpbuild.runtime.engine.loaded import Prompt
    from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs
    from mtpbuild.runtime.text.chat_template import ChatOptions, Message

INTERRUPTED = 130  # the exit code of shells after SIGINT
DIFFERENT = 1  # exit code, as in diff(1)
PROMPTS = "--prompt, --prompt-file, --prompt-ids, --chat and --input"
STDIN = Path("-")

P = ParamSpec("P")
if TYPE_CHECKING:
    LoadFlags = OptionFlags
else:
    LoadFlags = make_option_flags(load_options)


def error_line(command: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command to print errors as one line on standard error and exit with their code."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except MtpbuildError as error:
            typer.echo(f"error: {in_one_line(error)}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("\ninterrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return wrapped


@dataclass(frozen=True, kw_only=True)
class PromptFlags:
    """The flags that say what to answer; without one, it is typed in or piped in."""

    PANEL: ClassVar = "Prompt"

    prompt: str | None = flag(None, "Text to continue.")
    prompt_file: Path | None = flag(None, "File with the text to continue; -: standard input.")
    prompt_ids: str | None = flag(None, "Token ids to continue: 5,7,9.")
    chat: str | None = flag(None, "Question, put by the chat template.")
    input: Path | None = flag(None, "JSONL file, one request per line (docs/cli-json.md).")
    system: str | None = flag(None, "System message of a chat.")
    chat_template: Path | None = flag(None, "Jinja file in place of the engine's chat template.")
    chat_template_kwargs: str | None = flag(
        None, """For the chat template: '{"enable_thinking": false}'."""
    )

    def __post_init__(self) -> None:
        """Raise UsageError for flags that contradict each other."""
        if self.count > 1:
            raise UsageError(f"give one of {PROMPTS}, not {self.count}")
        for name in ("chat_template_kwargs", "system"):
            if getattr(self, name) is not None and self.count and self.chat is None:
                raise UsageError(
                    f"{name_flag(name)} goes with --chat; a line of --input has its own messages"
                )

    @property
    def count(self) -> int:
        """The number of prompts."""
        prompts = self.prompt, self.prompt_file, self.prompt_ids, self.chat, self.input
        return sum(prompt is not None for prompt in prompts)

    def read_chat_options(self) -> "ChatOptions":
        """Return what --chat-template-kwargs gives the template."""
        if self.chat_template_kwargs is None:
            return {}
        kwargs = _parse_json(self.chat_template_kwargs, "--chat-template-kwargs")
        return {"chat_template_kwargs": kwargs}

    def read_prompt(self, engine: "Engine", options: "ChatOptions") -> "Prompt":
        """Return the prompt that flags give, else the one on standard input."""
        from mtpbuild.runtime.cli.conversation import chat_or_text

        if self.prompt_ids is not None:
            ids = self.prompt_ids
            return parse_list("--prompt-ids", ids, int, "5,7,9") if ids else ()
        if self.prompt_file is not None:
            return _read_text(self.prompt_file, "--prompt-file")
        if self.prompt is not None:
            return self.prompt
        messages: list[Message] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        source = "standard input" if self.chat is None else "--chat"
        question = _read_text(STDIN, "--prompt-file").strip() if self.chat is None else self.chat
        if not question:
            raise UsageError(f"{source}: the question is empty; or give one of {PROMPTS}")
        messages.append({"role": "user", "content": question})
        if self.chat is not None:
            return engine.chat_ids(messages, **options)
        return chat_or_text(engine, messages, options)


@error_line
@group_flags
def run(
    context: typer.Context,
    model: Annotated[
        str | None,
        Argument(help="Engine, by folder or by name under engines/, else a recipe or OWNER/NAME."),
    ] = None,
    *,
    prompts: PromptFlags,
    sampling: RunFlags,
    relaxed: RelaxedFlags,
    json: bool = output_flag(False, "One JSON object per request on standard output."),
    trace: list[Path] | None = output_flag(
        None, "Write every step to FILE.jsonl or FILE.html; may be repeated."
    ),
    json_schema: Path | None = output_flag(None, "File with a JSON schema that answers must fit."),
    engine: Path | None = engine_flag(None, "Engine, by folder or by name under engines/."),
    yes: bool = engine_flag(False, "Fetch and build a model's engine without asking."),
    threads: int | None = make_threads_flag(),
    max_seq_len: int | None = make_context_flag(),
    verify_hashes: bool = engine_flag(False, "Hash all files, however large."),
    load_flags: LoadFlags,
    compat: CompatFlags,
) -> None:
    """Generate text; without a prompt, chat in the terminal, or answer what is piped in.

    A model without an engine is fetched and built first, after a question. Text goes to standard
    output, accepted draft tokens in green if that is a terminal; the summary goes to standard
    error.
    """
    talks = not prompts.count and sys.stdin is not None and sys.stdin.isatty()
    if talks and (json or trace):
        raise UsageError("--json and --trace need a prompt: a conversation has neither")
    settings = read_flags(compat, relaxed)
    from mtpbuild.runtime.cli import terminal
    from mtpbuild.runtime.cli.engines import choose_engine
    from mtpbuild.runtime.configuration.settings import check_engine
    from mtpbuild.runtime.contract.manifest import read_manifest
    from mtpbuild.runtime.engine.engine import Engine
    from mtpbuild.runtime.programs.follow import lead_or_follow
    from mtpbuild.runtime.trace.recorder import Trace, check_paths

    check_paths(trace or ())
    options = prompts.read_chat_options()
    if sampling.logprobs is not None and not json:
        raise UsageError("--logprobs is part of the JSON output: add --json")
    if talks:
        with explain_missing_package("a chat in the terminal", "cpu"):
            from mtpbuild.runtime.cli import chat_terminal
    folder = choose_engine(
        model, engine, yes=yes, make_engine=context.obj, acceptance=sampling.acceptance
    )
    manifest = read_manifest(folder)
    check_engine(settings, manifest.build)
    if talks:
        sampling = _add_model_sampling(sampling, context, folder, manifest)
    form = None if json_schema is None else _read_form(json_schema)
    params = make_sampling_params(sampling, settings, manifest, structured_outputs=form)
    if params.synthetic:
        typer.echo(f"warning: {terminal.SYNTHETIC}", err=True)
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(lead_or_follow(folder, manifest, threads)):
            return
        loaded = stack.enter_context(
            Engine.load(
                folder,
                threads=threads,
                max_seq_len=max_seq_len,
                verify_hashes=verify_hashes,
                warm=[params],
                chat_template=prompts.chat_template,
                prefix_cache=talks,  # each turn of a conversation extends the last one
                **list_changed_flags(load_flags),
            )
        )
        recorder = stack.enter_context(Trace(loaded, *trace)) if trace else None
        if prompts.input is not None:
            terminal.answer_file(loaded, prompts.input, params, json, recorder)
        elif talks:
            chat_terminal.converse(loaded, params, prompts.system, options)
        else:
            prompt = prompts.read_prompt(loaded, options)
            terminal.answer_prompt(loaded, prompt, params, json, recorder)


def _add_model_sampling(
    sampling: RunFlags, context: typer.Context, folder: Path, manifest: "Manifest"
) -> RunFlags:
    """Return the flags with the model's own sampling and answers of any length, as in `serve`.

    Flags that the user gave stay.
    """
    from mtpbuild.runtime.sampling.defaults import choose_sampling_defaults

    usual = choose_sampling_defaults(folder, manifest) | {"max_tokens": manifest.build.max_seq_len}
    typed = find_given_flags(context, usual)
    return replace(sampling, **{n: v for n, v in usual.items() if n not in typed})


@error_line
@group_flags
def list_engines(json: bool = flag(False, "One JSON object per engine.")) -> None:
    """List the engines under engines/: model, drafts, weights, size, context and last use."""
    from mtpbuild.runtime.cli import engines

    listed = [engines.describe_engine(folder) for folder in engines.list_folders()]
    if json:
        for engine in listed:
            typer.echo(dumps(asdict(engine)))
    elif listed:
        engines.print_engine_list(listed)
    else:
        where = engines.ENGINES.absolute()
        typer.echo(f"no engine in {where}: `mtpbuild run MODEL` makes one", err=True)


@error_line
@group_flags
def remove_engine(
    name: Annotated[Path, Argument(help="Name under engines/, or an engine's folder.")],
    yes: bool = flag(False, "Do not ask."),
) -> None:
    """Remove an engine."""
    from mtpbuild.runtime.cli import engines

    folder = engines.find_removable(name)
    if confirm(f"remove {folder}?", yes=yes):
        left = ", ".join(engines.remove_folder(folder))
        rest = f"; what is not the engine's stays there: {left}" if left else ""
        typer.echo(f"removed {folder}{rest}", err=True)


def confirm(question: str, *, yes: bool) -> bool:
    """Ask on the terminal; raise UsageError if there is none and `--yes` was not given."""
    if yes:
        return True
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{question} There is no terminal to ask on: add --yes")
    return typer.confirm(question, default=False, err=True)


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
    difference = diff_traces(*traces)
    lines = [difference.to_json()] if json else describe_diff(difference, traces, spell)
    typer.echo("\n".join(lines))
    if not difference.equal:
        raise typer.Exit(DIFFERENT)


def _read_form(schema: Path) -> "StructuredOutputs":
    """Read the file of --json-schema."""
    from mtpbuild.runtime.sampling.structured_outputs import StructuredOutputs

    text = _read_text(schema, "--json-schema")
    return StructuredOutputs(json=_parse_json(text, f"--json-schema {schema}"))


def _parse_json(text: str, source: str) -> Any:
    try:
        return loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not JSON ({error})") from None


def _read_text(path: Path, flag: str) -> str:
    """Read a UTF-8 text; `STDIN` is standard input."""
    try:
        if path == STDIN:
            return "" if sys.stdin is None else sys.stdin.buffer.read().decode("utf-8")
        return path.read_bytes().decode("utf-8")  # keeps the text's line ends
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path} can't be read ({error})") from None
