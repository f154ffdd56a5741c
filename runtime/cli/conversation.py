"""A conversation in the terminal: its turns, its settings, and the commands that change both."""

import json
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from mtpbuild.runtime.checks import did_you_mean
from mtpbuild.runtime.cli.terminal import summary
from mtpbuild.runtime.configuration.input_file import InputLine, read_lines
from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.engine.loaded import Prompt
from mtpbuild.runtime.errors import (
    ContextLengthError,
    MtpbuildError,
    RequestError,
    UsageError,
    in_one_line,
)
from mtpbuild.runtime.files import read_text, replace_file
from mtpbuild.runtime.requests.answer import ChatResult
from mtpbuild.runtime.sampling.params import SETTINGS, SamplingParams, list_http_settings
from mtpbuild.runtime.text.chat_template import ChatOptions, Message

COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)  # not /usr/lib, which is a text
SAVED_OPTIONS = ("tools", "documents", "chat_template_kwargs")  # of a conversation's file
UNSEEN = ("logprobs", "prompt_logprobs", "cache_salt")  # settings that a chat doesn't show


@dataclass(frozen=True)
class Turns:
    """The turns of a conversation: its messages, without the system message, and their files."""

    messages: Sequence[Message] = ()
    last: ChatResult | None = None  # the last answer
    files: str = ""  # texts before the next question
    sent_files: str = ""  # texts before the last question

    @property
    def questions(self) -> list[int]:
        """The places of the user's questions among the messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    def find_last_question(self) -> int:
        """Return the place of the last question; raise UsageError if there is none."""
        if not (questions := self.questions):
            raise UsageError("there is no question yet")
        return questions[-1]


class Conversation:
    """A conversation's turns, system message and settings.

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
        self.turns = Turns()
        self.draft = ""
        self._before_edit: Turns | None = None  # what `restore` puts back
        self._place: Path | None = None  # where it is saved
        self._render([_make_message("?")])

    def take(self, text: str) -> None:
        """Run a command or ask a question; say what is wrong with it, and change nothing then."""
        command = COMMAND.fullmatch(text.strip())
        try:
            if command is None:
                self.ask(text)
            elif command[1] in COMMANDS:
                COMMANDS[command[1]][0](self, (command[2] or "").strip())
            else:
                name = f"/{command[1]}"
                near = did_you_mean(name, [f"/{known}" for known in COMMANDS])
                raise UsageError(f"{name} is no command{near}; /help lists them")
        except MtpbuildError as error:
            if self.engine.failure is not None:
                raise
            self.say(f"error: {in_one_line(error)}")

    def ask(self, text: str) -> None:
        """Answer a question, before which the texts of `/file` stand."""
        question = _make_message(self.turns.files + text)
        earlier = self.turns.messages if self.chats else []  # texts don't build on each other
        try:
            self._answer([*earlier, question])
        except MtpbuildError:
            self.draft = text
            raise
        self.turns = replace(self.turns, files="", sent_files=self.turns.files)

    @property
    def chats(self) -> bool:
        """Whether there is a chat template; otherwise each question is a text to continue."""
        tokenizer = self.engine.tokenizer
        return bool(tokenizer and tokenizer.chat_template)

    def help(self, _: str = "") -> None:
        """List the commands."""
        usages = {f"/{name} {argument}": run for name, (run, argument) in COMMANDS.items()}
        width = max(map(len, usages))
        for usage, run in usages.items():
            self.say(f"{usage:{width}} {(run.__doc__ or '').rstrip('.').lower()}")
        self.say("Alt-Enter or Ctrl-J begins a line, Ctrl-C gives the text up or ends an answer")

    def set_system(self, text: str) -> None:
        """Set the system message, or remove it."""
        before, self.system = self.system, text or None
        try:
            self._render([_make_message("?")])
        except MtpbuildError:
            self.system = before
            raise
        self.say("the system message is set" if text else "there is no system message")

    def set_setting(self, text: str) -> None:
        """Change a setting, such as temperature 0.6, or show the settings."""
        name, _, value = text.partition(" ")
        known = list_settable_names()
        if not name:
            values = {name: read_value(self.params, name) for name in known}
            usual = SamplingParams()
            shown = [f"{n} {value}" for n, value in values.items() if value != read_value(usual, n)]
            self.say("; ".join(shown) or "all settings are the defaults")
            return
        if name not in known:
            raise UsageError(f"/set: {name} is no setting{did_you_mean(name, known)}")
        if value.strip():
            changed = change_setting(self.params, self._first_params, name, value.strip())
            self.engine.check(changed)
            self.params = changed
        self.say(f"{name} {read_value(self.params, name)}")

    def regenerate(self, _: str = "") -> None:
        """Answer the last question again."""
        messages = self.turns.messages[: self.turns.find_last_question() + 1]
        self._answer(messages)

    def edit(self, _: str = "") -> None:
        """Take the last question back and change it."""
        turns, last = self.turns, self.turns.find_last_question()
        text = turns.messages[last]["content"]
        if not isinstance(text, str):
            raise UsageError("/edit: the last question is not a text")
        self._before_edit = self._before_edit or turns
        files = turns.files
        if turns.sent_files and text.startswith(turns.sent_files):
            files, text = turns.sent_files + files, text.removeprefix(turns.sent_files)
        self.draft = text
        self.turns = Turns(turns.messages[:last], None, files, turns.sent_files)

    def restore(self) -> None:
        """Put the turns back that `/edit` took, if no question has been answered since."""
        self.turns, self._before_edit = self._before_edit or self.turns, None

    def save(self, text: str) -> None:
        """Write the conversation to a file, as a line that `run --input` reads too."""
        path = _parse_path("/save", text) if text or self._place is None else self._place
        if path != self._place and path.exists():
            raise UsageError(f"/save {path}: it exists; give a new file")
        line = {"messages": self._with_system(self.turns.messages), **self.options}
        try:
            with replace_file(path) as file:
                file.write(f"{json.dumps(line)}\n".encode())
        except OSError as error:
            raise UsageError(f"/save {path}: can't be written ({error.strerror})") from None
        self._place = path
        self.say(f"saved in {path}; turns: {len(self.turns.questions)}")

    def load(self, text: str) -> None:
        """Go on with a saved conversation."""
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
        saved = lines[0].chat_options()
        options = cast(ChatOptions, {n: v for n, v in saved.items() if n in SAVED_OPTIONS})
        answered = bool(messages) and messages[-1].get("role") != "user"
        trial = [*messages, _make_message("?")] if answered or not messages else messages
        with suppress(ContextLengthError):  # the next question drops the oldest turns
            chat_or_text(self.engine, [*opening, *trial], options)
        self.system = str(opening[0].get("content") or "") if opening else None
        self.turns = Turns(messages, files=self.turns.files)
        self.options, self._place = options, path
        self.say(f"loaded {path}; turns: {len(self.turns.questions)}")
        if messages and not answered:
            self.edit()
        self._before_edit = None

    def show_stats(self, _: str = "") -> None:
        """Show context, speed and acceptance."""
        last, stats = self.turns.last, self.engine.stats
        used = last.metrics.prompt_tokens + last.metrics.output_tokens if last else 0
        limit = self.engine.manifest.build.max_seq_len
        turns = len(self.turns.questions)
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
        """Put a file before the next question."""
        path = _parse_path("/file", text)
        try:
            content = read_text(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UsageError(f"/file {path}: can't be read ({reason})") from None
        files = f'{self.turns.files}<file name="{path.name}">\n{content}\n</file>\n\n'
        self._render([_make_message(files)])  # is it too long?
        self.turns = replace(self.turns, files=files)
        self.say(f"{path.name}: {len(content):,} characters, sent with the next question")

    def show_thought(self, _: str = "") -> None:
        """Show the thought before the last answer."""
        thought = self.turns.last.reasoning_content.strip() if self.turns.last else ""
        self.say(thought or "the last answer has no thought")

    def clear(self, _: str = "") -> None:
        """Begin a new conversation, with the same system message and settings."""
        self.turns, self._before_edit, self._place = Turns(), None, None
        self.say("a new conversation")

    def leave(self, _: str = "") -> None:
        """End the conversation, as Ctrl-D does."""
        raise EOFError

    def _answer(self, messages: Sequence[Message]) -> None:
        """Answer the last of the messages, which become the conversation with the answer."""
        newest, prompt = self._drop_oldest(messages)
        if dropped := len(Turns(messages).questions) - len(Turns(newest).questions):
            limit = self.engine.manifest.build.max_seq_len
            self.say(f"the context of {limit:,} tokens is full; old turns dropped: {dropped}")
        result = self._stream_answer(prompt, self.params)
        if not result.text:
            raise RequestError(f"the answer is empty ({result.finish_reason})")
        self.turns = replace(self.turns, messages=[*newest, result.message], last=result)
        self._before_edit = None

    def _drop_oldest(self, messages: Sequence[Message]) -> tuple[Sequence[Message], Prompt]:
        """Return the newest turns, with their prompt, that leave room for an answer.

        If a turn is dropped, half the context gets free: the beginning, which the prefix cache
        has, then stays the same for several turns.
        """
        limit = self.engine.manifest.build.max_seq_len
        room = limit - min(self.params.max_tokens, limit // 4)
        *older, newest = dict.fromkeys([0, *Turns(messages).questions])
        for start in older:
            with suppress(ContextLengthError):
                prompt = self._render(messages[start:])
                if len(prompt) <= (limit // 2 if start else room):
                    return messages[start:], prompt
        return messages[newest:], self._render(messages[newest:])

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        opening = [] if self.system is None else [_make_message(self.system, "system")]
        return [*opening, *messages]

    def _render(self, messages: Sequence[Message]) -> Prompt:
        return chat_or_text(self.engine, self._with_system(messages), self.options)


# The commands and their arguments; a method's docstring is its help.
COMMANDS: dict[str, tuple[Callable[[Conversation, str], None], str]] = {
    "help": (Conversation.help, ""),
    "system": (Conversation.set_system, "[TEXT]"),
    "set": (Conversation.set_setting, "[NAME [VALUE]]"),
    "regenerate": (Conversation.regenerate, ""),
    "edit": (Conversation.edit, ""),
    "file": (Conversation.attach, "PATH"),
    "clear": (Conversation.clear, ""),
    "save": (Conversation.save, "[PATH]"),
    "load": (Conversation.load, "PATH"),
    "stats": (Conversation.show_stats, ""),
    "thought": (Conversation.show_thought, ""),
    "exit": (Conversation.leave, ""),
    "bye": (Conversation.leave, ""),
}


def change_setting(
    params: SamplingParams, first: SamplingParams, name: str, text: str
) -> SamplingParams:
    """Return the settings with one changed; first: those that the text `default` brings back."""
    value: Any = text
    if text == "default":
        value = read_value(first, name)
    elif name in SETTINGS and (parse := SETTINGS[name].parse) is not None:
        value = parse(f"/set {name}", text)
    else:
        with suppress(ValueError, RecursionError):  # else the text itself is the value
            value = json.loads(text)
    changes = {name: value}
    if name not in SETTINGS:
        rule = {**(params.acceptance_settings or {}), name: value}
        changes = {"acceptance_settings": {n: v for n, v in rule.items() if v is not None}}
    elif name == "acceptance":  # another rule has other settings
        changes["acceptance_settings"] = None
    return replace(params, **changes)


def list_settable_names() -> list[str]:
    """Return the names of the settings that an answer in the terminal can have."""
    names = [name for name, setting in SETTINGS.items() if setting.http or setting.help]
    return [n for n in dict.fromkeys([*names, *list_http_settings()]) if n not in UNSEEN]


def read_value(params: SamplingParams, name: str) -> Any:
    """Return a setting's value, also of a rule's own one."""
    rule = params.acceptance_settings or {}
    return getattr(params, name) if name in SETTINGS else rule.get(name)


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
    words = list[str]()
    with suppress(ValueError):  # such as Tom's notes.txt
        words = shlex.split(text)
    if not (name := words[0] if len(words) == 1 else text):
        raise UsageError(f"{command}: give a file")
    return Path(name).expanduser()


def _make_message(text: str, role: str = "user") -> Message:
    return {"role": role, "content": text}
