"""Problems with one correct answer, built in or from a file, and an engine's answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtpbuild.builder.garbage import pause_garbage_collection
from mtpbuild.builder.plan.recipe import find_built_in
from mtpbuild.builder.stages import Watch, ignore
from mtpbuild.lab.measure.prompts import Prompt, add_seed, check_room
from mtpbuild.lab.measure.runs import TimedAnswer, change_params, rotate, run_settled
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.checks import in_range
from mtpbuild.runtime.configuration.input_file import PromptLine, read_lines

TASKS = ("reasoning",)
NUM_PROBLEMS = 60  # of a built-in task
# By name: the changes that a setting makes to a request's acceptance.
Settings = Mapping[str, dict[str, Any]]


class ProblemLine(PromptLine):
    """A line of a task's file (docs/eval.md)."""

    PROMPTS = ("question", "messages", "prompt")
    CHATS = ("question", "messages")

    answer: str
    question: str | None = None  # becomes the first message of a chat
    form: str | None = None  # problems of one form are reported together


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its correct answer; the prompt's kind is the problem's form."""

    prompt: Prompt
    answer: str


def load_problems(
    task: str, engine: Engine, params: SamplingParams, count: int | None
) -> list[Problem]:
    """Read the first `count` problems of a task; raise UsageError with file and line."""
    path = find_built_in(f"eval_{task}") if task in TASKS else Path(task)

    def take(line: ProblemLine, number: int) -> Problem:
        asked = [{"role": "user", "content": line.question}]
        ids = line.token_ids(engine) if line.question is None else line.chat_ids(engine, asked)
        settings = add_seed(params, number)
        if line.output_tokens is not None:
            settings = replace(settings, max_tokens=line.output_tokens)
        check_room(engine, len(ids), settings.max_tokens)
        name = number if line.task_id is None else line.task_id
        return Problem(Prompt(line.form or "all", name, ids, settings), line.answer.strip())

    hint = f"; built in: {', '.join(TASKS)}"
    problems = read_lines(path, f"--task {task}", ProblemLine, take, hint)
    if count is None:
        return problems[: NUM_PROBLEMS if task in TASKS else None]
    return problems[: in_range(count, 1, len(problems), "--num-problems")]


def extract_answer(token_ids: Sequence[int], prompt: Sequence[int], engine: Engine) -> str | None:
    """Return the text after the thinking phase, stripped; None if the phase never ended."""
    manifest = engine.manifest
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "problems are texts"
    tokens = list(token_ids)
    if tokens and tokens[-1] in manifest.model.eos_token_ids:
        tokens.pop()
    if manifest.model.thinking_token_ids is not None:
        begin, end = manifest.model.thinking_token_ids
        if end in tokens:
            tokens = tokens[len(tokens) - tokens[::-1].index(end) :]
        elif [t for t in [*prompt, *tokens] if t in (begin, end)][-1:] == [begin]:
            return None
    return b"".join(map(tokenizer.decode_token, tokens)).decode("utf-8", "replace").strip()


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """An answer to one problem under one setting."""

    problem: Problem
    text: str | None  # after the thinking phase; None: still thinking at the last token
    answer: TimedAnswer

    @property
    def right(self) -> bool:
        return self.text == self.problem.answer


def answer_problems(
    engine: Engine, problems: Sequence[Problem], settings: Settings, watch: Watch = ignore
) -> dict[str, list[GradedAnswer]]:
    """Answer the problems under each setting; the settings take turns at being first."""
    graded: dict[str, list[GradedAnswer]] = {name: [] for name in settings}
    with pause_garbage_collection():
        for i, problem in enumerate(problems):
            watch(f"problem {i + 1} of {len(problems)}")
            for name, changes in rotate([*settings.items()], i):
                # The previous run used another program, so let the first steps settle.
                (answer,) = run_settled(engine, change_params([problem.prompt], **changes))
                text = extract_answer(answer.token_ids, problem.prompt.token_ids, engine)
                graded[name].append(GradedAnswer(problem, text, answer))
    return graded
