"""Texts that a model writes itself: to calibrate with, and to train MTP modules on."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path

from mtpbuild.builder.compiler.calibrate import FLAG, MAX_TOKENS
from mtpbuild.builder.plan.recipe import PROMPT_SETS, find_built_in, find_recipe_folder
from mtpbuild.builder.stages import Watch, say_time_left
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.configuration.input_file import FileRequest, generate_all, read_requests
from mtpbuild.runtime.errors import UsageError

ANSWER = 128  # tokens of an answer to calibrate with
HELD_OUT = 12  # the first built-in prompts of each kind only measure


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """A model's answer to a prompt as token ids, with its steps and the drafts they accepted."""

    prompt: list[int]
    answer: list[int]
    steps: int
    accepted: int


def write_answers(engine: Engine, requests: list[FileRequest], path: Path, watch: Watch) -> None:
    """Write the engine's answers to a file, a line each, which gets its name when it is whole.

    Answers that an earlier run has written stay.
    """
    new, start = path.with_suffix(".new"), time.monotonic()
    whole, end, _ = new.read_text(encoding="utf-8").rpartition("\n") if new.exists() else ("",) * 3
    new.write_text(whole + end, encoding="utf-8")  # without a line that was cut off
    done = len(whole.splitlines())
    with new.open("a", encoding="utf-8", buffering=1) as file:
        answers = generate_all(engine, requests[done:])
        for number, (request, result) in enumerate(answers, start=1):
            drafting = result.metrics.speculative_decoding
            answer = OwnAnswer(
                prompt=request.token_ids,
                answer=result.token_ids,
                steps=drafting.num_spec_steps,
                accepted=drafting.num_accepted_draft_tokens,
            )
            file.write(json.dumps(asdict(answer)) + "\n")
            left = say_time_left(start, number, len(requests) - done - number)
            watch(f"write texts: {done + number} of {len(requests)}{left}")
    new.replace(path)


def read_answers(path: Path) -> list[OwnAnswer]:
    return [OwnAnswer(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def write_calibration_texts(folder: Path, prompts: Path | None, path: Path, watch: Watch) -> None:
    """Let an engine answer a file's prompts, or the package's, with at most `MAX_TOKENS`."""
    with Engine.load(folder, prefix_cache=False) as engine:
        requests = [*shorten_requests(read_prompts(prompts, engine))]
        write_answers(engine, requests, path, watch)


def read_prompts(path: Path | None, engine: Engine) -> list[FileRequest]:
    """Read a file's prompts, or some of the package's three kinds in turn."""
    params = SamplingParams(max_tokens=ANSWER, temperature=1.0)
    if path is not None:
        return read_requests(path, engine, params, FLAG)
    if engine.tokenizer is None:
        raise UsageError(
            f"--calibrate needs texts, and the model has no tokenizer: give {FLAG} with input_ids"
        )
    code, reasoning = (find_built_in(name) for name in PROMPT_SETS)
    kinds = [read_requests(code, engine, params)[HELD_OUT:]]
    if engine.tokenizer.chat_template is not None:
        chats = find_recipe_folder() / "calibration" / "prompts.jsonl"
        kinds.append(read_requests(chats, engine, params))
        kinds.append(read_requests(reasoning, engine, params)[HELD_OUT:])
    return [request for turn in zip_longest(*kinds) for request in turn if request is not None]


def shorten_requests(requests: list[FileRequest]) -> Iterator[FileRequest]:
    """Yield requests with short answers and seeds, as many as `MAX_TOKENS` allows."""
    total = 0
    for seed, request in enumerate(requests):
        limit = min(ANSWER, request.params.max_tokens)
        total += len(request.token_ids) + limit
        if total > MAX_TOKENS:
            return
        yield replace(request, params=replace(request.params, max_tokens=limit, seed=seed))
