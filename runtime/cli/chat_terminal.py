"""Chat in the terminal: the line that is edited, and answers as they are generated."""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.bindings.named_commands import get_by_name
from prompt_toolkit.shortcuts import CompleteStyle
from rich.cells import cell_len

from mtpbuild.runtime.cli.conversation import COMMANDS, Conversation
from mtpbuild.runtime.cli.terminal import colour_draft, dim, has_colour, print_dimmed, summary
from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.engine.loaded import Prompt
from mtpbuild.runtime.engine.streams import ChatStream
from mtpbuild.runtime.requests.answer import ChatResult
from mtpbuild.runtime.sampling.params import SamplingParams
from mtpbuild.runtime.text.chat_template import ChatOptions
from mtpbuild.runtime.text.detokenizer import Span

CLEAR_LINE = "\r\x1b[K"
PLACEHOLDER = FormattedText([("fg:ansibrightblack", "a question, or /help; Ctrl-D ends")])


def converse(
    engine: Engine, params: SamplingParams, system: str | None, options: ChatOptions
) -> None:
    """Chat until Ctrl-D; without a chat template, continue texts.

    Ctrl-C ends an answer, and the conversation continues with the partial answer. While a question
    is typed, Ctrl-C gives it up; a question that `/edit` took goes back to its place. Raises
    RequestError if the engine can't have such a conversation.
    """
    answer = partial(show_answer, engine)
    conversation = Conversation(
        engine, params, answer, print_dimmed, system=system, options=options
    )
    print_dimmed(engine.manifest.drafting)
    session = make_session(open_history(find_history_path()))
    with contextlib.suppress(EOFError):
        while True:
            draft, conversation.draft = conversation.draft, ""
            try:
                text = session.prompt("> ", default=draft)
            except KeyboardInterrupt:
                conversation.restore()
                continue
            if text.strip():
                conversation.take(text)


def make_session(history: History) -> PromptSession[str]:
    """Return the editor of questions: Enter sends the text, pasted lines stay together."""
    keys = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)
    keys.add("enter", filter=typing)(get_by_name("accept-line"))

    @keys.add("c-j", filter=typing)
    @keys.add("escape", "enter", filter=typing)
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        history=history,
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
        placeholder=PLACEHOLDER,
        completer=WordCompleter([f"/{name}" for name in COMMANDS], sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
    )


def find_history_path() -> Path:
    """Return the file of earlier questions, which all engines share."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "mtpbuild" / "history"


def open_history(path: Path) -> History:
    """Return the history of a file that its owner alone can read; in memory if it can't be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.open("ab").close()  # it can be written
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def show_answer(engine: Engine, prompt: Prompt, params: SamplingParams) -> ChatResult:
    """Stream an answer to standard output, then print its summary to standard error."""
    screen = AnswerScreen(sys.stdout)
    with engine.chat(prompt, params, stream=True) as stream, end_by_ctrl_c(stream):
        for part in stream:
            screen.show(part.chunk.spans, part.chunk.reasoning_tokens)
        screen.end()
        result = stream.result()
    print_dimmed(summary(result, brief=True))
    return result


@contextlib.contextmanager
def end_by_ctrl_c(stream: ChatStream) -> Iterator[None]:
    """Let the first Ctrl-C end the stream's request; a second Ctrl-C interrupts the program."""

    def end(*signal_and_frame: object) -> None:
        signal.signal(signal.SIGINT, usual)
        stream.cancel()

    usual = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


class AnswerScreen:
    """An answer on the screen: accepted drafts in colour, and the thought folded into one line.

    While the model thinks, the line shows the end of the thought, dimmed. Anything but a terminal
    gets the whole text.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self._colour = out, has_colour(out)
        self._folds = out.isatty() and os.environ.get("TERM") != "dumb"
        self._thought = ""
        self._tokens = 0  # of the thought
        self._began: float | None = None  # when the thought did; None: the model doesn't think
        self._empty = True  # no content was shown

    def show(self, spans: Sequence[Span], reasoning_tokens: int = 0) -> None:
        """Show the next spans; reasoning_tokens: of the answer so far."""
        self._tokens = reasoning_tokens
        for span in spans:
            if not self._folds:
                self._out.write(span.text)
            elif span.kind == "content":
                self._fold()
                text = span.text.lstrip("\n") if self._empty and self._thought else span.text
                self._empty &= not text
                self._out.write(colour_draft(text, self._colour and span.from_draft))
            else:
                self._began = self._began or time.perf_counter()
                self._thought += span.text if span.kind == "reasoning" else ""
        if self._began is not None and self._thought.strip():
            self._out.write(CLEAR_LINE + dim(self._cut_to_line(), self._colour))
        self._out.flush()

    def end(self) -> None:
        """End the answer's last line."""
        self._fold()
        self._out.write("\n")
        self._out.flush()

    def _fold(self) -> None:
        """End the thought's line with its size, if there is a thought."""
        if self._began is not None and self._thought.strip():
            size = f"{self._tokens} tokens, {time.perf_counter() - self._began:.1f} s"
            line = f"thought: {size} (/thought shows it)"
            self._out.write(CLEAR_LINE + dim(line, self._colour) + "\n")
        self._began = None

    def _cut_to_line(self) -> str:
        """Return the end of the thought, as far as it fits into a line."""
        room = shutil.get_terminal_size().columns - 1
        words = " ".join(self._thought[-4 * room :].split())[-room:]
        while cell_len(words) > room:  # some characters take two columns
            words = words[1:]
        return words
