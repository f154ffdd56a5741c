"""A conversation in the terminal: its turns, its settings, and the commands that change both."""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

from mtpbuild.runtime.checks import did_you_mean
from mtpbuild.runtime.cli.chat_settings import change_setting, list_settable_names, read_value_of
from mtpbuild.runtime.cli.terminal import summary
from mtpbuild.runtime.configuration.input_file import InputLine, read_lines
from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.engine.loaded import Prompt
from mtpbuild.runtime.errors import ContextLengthError, MtpbuildError, RequestError, UsageError
from mtpbuild.runtime.files import read_text, replace_file
from mtpbuild.runtime.requests.answer import ChatResult
from mtpbuild.runtime.sampling.params import SamplingParams
from mtpbuild.runtime.text.chat_template import ChatOptions, Message

COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)  # not /usr/lib, which is a text
KEPT_OPTIONS = ("tools", "documents", "chat_template_kwargs")  # of a conversation's file


class Conversation:
    """A conversation's messages, system message and settings.

    `draft` is the text that the next question begins with, for the user to edit. answer: continues
    a prompt and shows the answer as it is generated. say: shows a line.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        answer: Callable[[Prompt, SamplingParams], ChatResult],
        say: Callable[[str], None],
        *,
        system: str | None = None,
        options: ChatOptions | None = None,
    ) -> None:
        """Begin a conversation; raise RequestError if the engine can't have one like this."""
        self.engine, self.params, self._first_params = engine, params, params
        self._stream_answer, self.say = answer, say
        self.system, self.options = system, options or ChatOptions()
        self.messages: list[Message] = []  # without the system message
        self.draft = ""
        self._files = self._sent_files = ""  # texts before the next question, before the last one
        self._last: ChatResult | None = None
        self._before_edit: _Turns | None = None  # what `restore` puts back
        self._place: Path | None = None  # where it is saved
        self._render([_make_question("?")])

    def take(self, text: str) -> None:
        """Run a command or ask a question; say what is wrong with it, and change nothing then."""
        command = COMMAND.fullmatch(text.strip())
        try:
            if command:
                self._run(command[1], (command[2] or "").strip())
            else:
                self.ask(text)
        except MtpbuildError as error:
            if self.engine.failure is not None:
                raise
            self.say("error: " + " ".join(str(error).split("\n")))

    def ask(self, text: str) -> None:
        """Answer a question, before which the texts of `/file` stand."""
        question = _make_question(self._files + text)
        earlier = self.messages if self.chats else []  # texts don't build on each other
        try:
            self._answer([*earlier, question])
        except MtpbuildError:
            self.draft = text
            raise
        self._files, self._sent_files = "", self._files

    @property
    def chats(self) -> bool:
        """Whether there is a chat template; otherwise each question is a text to continue."""
        tokenizer = self.engine.tokenizer
        return bool(tokenizer and tokenizer.chat_template)

    def help(self, _: str = "") -> None:
        """Say what the commands are."""
        width = max(len(_describe_usage(name)) for name in COMMANDS)
        for name, command in COMMANDS.items():
            self.say(f"{_describe_usage(name):{width}}  {command.help}")
        self.say("Alt-Enter or Ctrl-J begins a line, Ctrl-C clears the text or ends an answer")

    def set_system(self, text: str) -> None:
        """Set the system message of the answers to come; an empty text removes it."""
        before, self.system = self.system, text or None
        try:
            self._render([_make_question("?")])
        except MtpbuildError:
            self.system = before
            raise
        self.say("the system message is set" if text else "there is no system message")

    def set_setting(self, text: str) -> None:
        """Change a setting of the answers to come, or show the settings."""
        name, _, value = text.partition(" ")
        known = list_settable_names()
        if not name:
            params, usual = self.params, SamplingParams()
            names = (
                each for each in known if read_value_of(params, each) != read_value_of(usual, each)
            )
            shown = [f"{each} {read_value_of(params, each)}" for each in names]
            self.say("; ".join(shown) or "all settings are the defaults")
            return
        if name not in known:
            raise UsageError(f"/set: {name} is no setting{did_you_mean(name, known)}")
        if value.strip():
            changed = change_setting(self.params, self._first_params, name, value.strip())
            self.engine.check(changed)
            self.params = changed
        self.say(f"{name} {read_value_of(self.params, name)}")

    def regenerate(self, _: str = "") -> None:
        """Answer the last question again."""
        messages = self.messages[: self._find_last_question() + 1]
        if self.params.temperature == 0 or self.params.seed is not None:
            self.say("the same again? /set temperature 1 and /set seed null let an answer vary")
        self._answer(messages)

    def edit(self, _: str = "") -> None:
        """Take the last question back, as the draft of the next one."""
        last = self._find_last_question()
        text = self.messages[last]["content"]
        if not isinstance(text, str):
            raise UsageError("/edit: the last question is not a text")
        if self._before_edit is None:
            self._before_edit = _Turns(self.messages, self._last, self._files, self._sent_files)
        if self._sent_files and text.startswith(self._sent_files):
            self._files, text = (
                self._sent_files + self._files,
                text.removeprefix(self._sent_files),
            )
        self.messages, self.draft, self._last = self.messages[:last], text, None

    def restore(self) -> None:
        """Put the turns back that `/edit` took, if no question has been answered since."""
        if self._before_edit is not None:
            self.messages, self._last, self._files, self._sent_files = self._before_edit
            self._before_edit = None

    def save(self, text: str) -> None:
        """Write the conversation as a line that `run --input` reads, too."""
        path = _parse_path("/save", text) if text or self._place is None else self._place
        if path != self._place and path.exists():
            raise UsageError(f"/save {path}: it exists; give a new file")
        opening = [] if self.system is None else [_make_system_message(self.system)]
        line = {"messages": [*opening, *self.messages], **self.options}
        try:
            with replace_file(path) as file:
                file.write(f"{json.dumps(line)}\n".encode())
        except OSError as error:
            raise UsageError(f"/save {path}: can't be written ({error.strerror})") from None
        self._place = path
        self.say(f"saved in {path}; turns: {_count_questions(self.messages)}")

    def load(self, text: str) -> None:
        """Go on with a conversation of a file, in place of this one."""
        path = _parse_path("/load", text)
        if not path.is_file():
            raise UsageError(f"/load {path}: no such file")
        lines = read_lines(path, f"/load {path}", InputLine, lambda line, _: line)
        if len(lines) > 1 or lines[0].messages is None:
            raise UsageError(f"/load {path}: must be one line with messages")
        if not self.chats:
            raise UsageError("/load: this engine has no chat template")
        messages, opening = list[Message](lines[0].messages), list[Message]()
        if messages and messages[0].get("role") == "system":
            opening = [messages.pop(0)]
        given = lines[0].chat_options()
        options = cast(ChatOptions, {n: v for n, v in given.items() if n in KEPT_OPTIONS})
        answered = bool(messages) and messages[-1].get("role") != "user"
        trial = [*messages, _make_question("?")] if answered or not messages else messages
        with suppress(ContextLengthError):  # the next question drops the oldest turns
            chat_or_text(self.engine, [*opening, *trial], options)
        self.system = str(opening[0].get("content") or "") if opening else None
        self.messages, self.options, self._place = messages, options, path
        self._last, self._sent_files = None, ""
        self.say(f"loaded {path}; turns: {_count_questions(messages)}")
        if messages and not answered:
            self.edit()
        self._before_edit = None

    def show_stats(self, _: str = "") -> None:
        """Say how full the context is, and how fast the answers were."""
        last, stats = self._last, self.engine.stats
        used = last.metrics.prompt_tokens + last.metrics.output_tokens if last else 0
        turns, limit = _count_questions(self.messages), self.engine.manifest.build.max_seq_len
        self.say(f"context: {used:,} of {limit:,} tokens; turns: {turns}")
        if last:
            self.say(f"last answer: {summary(last)}")
        drafting = stats.speculative_decoding
        length, rate = drafting.mean_acceptance_length, drafting.draft_acceptance_rate
        accepted = "" if rate is None else f", {rate:.0%} of drafts accepted"
        written = f"{stats.output_tokens:,} tokens, acceptance length {length or 0:.2f}{accepted}"
        reused = f"{stats.prefix_hits:,} of {stats.prompt_tokens:,} prompt tokens were cached"
        self.say(f"all answers: {written}; {reused}")

    def attach(self, text: str) -> None:
        """Put a file's text before the next question."""
        path = _parse_path("/file", text)
        try:
            content = read_text(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UsageError(f"/file {path}: can't be read ({reason})") from None
        whole = f'<file name="{path.name}">\n{content}\n</file>\n\n'
        self._render([_make_question(self._files + whole)])  # is it too long?
        self._files += whole
        self.say(f"{path.name}: {len(content):,} characters, sent with the next question")

    def show_thought(self, _: str = "") -> None:
        """Say the thought before the last answer."""
        thought = self._last.reasoning_content.strip() if self._last else ""
        self.say(thought or "the last answer has no thought")

    def clear(self, _: str = "") -> None:
        """Begin anew, with the system message and the settings."""
        self.messages, self._last, self._place = [], None, None
        self._files, self._sent_files, self._before_edit = "", "", None
        self.say("a new conversation")

    def leave(self, _: str = "") -> None:
        """End the conversation, as Ctrl-D does."""
        raise EOFError

    def _run(self, name: str, argument: str) -> None:
        if name not in COMMANDS:
            near = did_you_mean(f"/{name}", [f"/{each}" for each in COMMANDS])
            raise UsageError(f"/{name} is no command{near}; /help lists them")
        COMMANDS[name].run(self, argument)

    def _answer(self, messages: Sequence[Message]) -> None:
        """Answer the last of the messages, which become the conversation with the answer."""
        kept, prompt = self._drop_oldest(messages)
        if dropped := _count_questions(messages) - _count_questions(kept):
            limit = self.engine.manifest.build.max_seq_len
            self.say(f"the context of {limit:,} tokens is full; old turns dropped: {dropped}")
        result = self._stream_answer(prompt, self.params)
        if not result.text:
            raise RequestError(f"the answer is empty ({result.finish_reason})")
        self.messages, self._last = [*kept, result.message], result
        self._before_edit = None

    def _drop_oldest(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Prompt]:
        """Return the newest turns, with their prompt, that leave room for an answer.

        If a turn is dropped, half the context gets free: the beginning, which the prefix cache
        has, then stays the same for several turns.
        """
        limit = self.engine.manifest.build.max_seq_len
        most = limit - min(self.params.max_tokens, limit // 4)
        *older, newest = _turn_starts(messages)
        for start in older:
            with suppress(ContextLengthError):
                prompt = self._render(messages[start:])
                if len(prompt) <= (limit // 2 if start else most):
                    return messages[start:], prompt
        return messages[newest:], self._render(messages[newest:])

    def _render(self, messages: Sequence[Message]) -> Prompt:
        opening = [] if self.system is None else [_make_system_message(self.system)]
        return chat_or_text(self.engine, [*opening, *messages], self.options)

    def _find_last_question(self) -> int:
        """Return the place of the last question; raise UsageError if there is none."""
        for at in range(len(self.messages) - 1, -1, -1):
            if self.messages[at]["role"] == "user":
                return at
        raise UsageError("there is no question yet")


class _Turns(NamedTuple):
    """A conversation's turns before the last ones are edited."""

    messages: list[Message]
    last: ChatResult | None
    files: str
    sent_files: str


class Command(NamedTuple):
    """A command of a conversation."""

    run: Callable[[Conversation, str], None]
    argument: str
    help: str


COMMANDS = {
    "help": Command(Conversation.help, "", "these lines"),
    "system": Command(Conversation.set_system, "[TEXT]", "set the system message, or remove it"),
    "set": Command(Conversation.set_setting, "[NAME [VALUE]]", "change a setting: temperature 0.6"),
    "regenerate": Command(Conversation.regenerate, "", "answer the last question again"),
    "edit": Command(Conversation.edit, "", "take the last question back and change it"),
    "file": Command(Conversation.attach, "PATH", "put a file before the next question"),
    "clear": Command(Conversation.clear, "", "begin a new conversation"),
    "save": Command(Conversation.save, "[PATH]", "write the conversation to a file"),
    "load": Command(Conversation.load, "PATH", "go on with a saved conversation"),
    "stats": Command(Conversation.show_stats, "", "context, speed and acceptance"),
    "thought": Command(Conversation.show_thought, "", "the thought before the last answer"),
    "exit": Command(Conversation.leave, "", "end the conversation, as Ctrl-D does"),
    "bye": Command(Conversation.leave, "", "the same"),
}


def chat_or_text(engine: Engine, messages: Sequence[Message], options: ChatOptions) -> Prompt:
    """Render the messages with the chat template, or return the last message as a text to continue.

    Raises RequestError without a tokenizer, or without a template if the messages need it.
    """
    if engine.tokenizer is None:
        raise RequestError("this engine was built without a tokenizer: give --prompt-ids")
    if engine.tokenizer.chat_template or messages[0]["role"] == "system" or options:
        return engine.chat_ids(messages, **options)
    return str(messages[-1]["content"])


def _parse_path(command: str, text: str) -> Path:
    """Return the file that a command names, in quotes as in a shell or as it stands."""
    try:
        words = shlex.split(text)
    except ValueError:  # such as Tom's notes.txt
        words = []
    if not (name := words[0] if len(words) == 1 else text):
        raise UsageError(f"{command}: give a file")
    return Path(name).expanduser()


def _make_question(text: str) -> Message:
    return {"role": "user", "content": text}


def _make_system_message(text: str) -> Message:
    return {"role": "system", "content": text}


def _turn_starts(messages: Sequence[Message]) -> list[int]:
    """Return where turns begin: at each question, and at the first message."""
    return [i for i, message in enumerate(messages) if not i or message["role"] == "user"]


def _count_questions(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "user" for message in messages)


def _describe_usage(name: str) -> str:
    return f"/{name} {COMMANDS[name].argument}".rstrip()
