"""Choice of the prompts, built-in or from a file, and their groups for concurrent requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path

from mtpbuild.builder.flags import DatasetFlags
from mtpbuild.builder.plan.recipe import PROMPT_SETS, find_built_in
from mtpbuild.runtime.checks import in_range
from mtpbuild.runtime.configuration.input_file import read_requests
from mtpbuild.runtime.engine.engine import Engine
from mtpbuild.runtime.errors import RequestError, UsageError
from mtpbuild.runtime.sampling.params import SamplingParams

OUTPUT_LEN = 256
NUM_REQUESTS = 20  # of the built-in prompts, without --num-requests


@dataclass(frozen=True)
class Dataset(DatasetFlags):
    """A choice of requests: from which file, how many, and how long."""

    # Defaults for parameters that neither a line nor a flag sets.
    params: SamplingParams = field(default_factory=lambda: SamplingParams(OUTPUT_LEN))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request that every engine gets."""

    kind: str  # the name of the built-in dataset or of the file
    task_id: str | int
    token_ids: list[int]
    params: SamplingParams


Group = list[Prompt]  # of one kind; its requests run concurrently


def load_groups(dataset: Dataset, engine: Engine, concurrency: int) -> list[Group]:
    """Make groups of `concurrency` requests, in which the kinds alternate; raise UsageError."""
    names = PROMPT_SETS if dataset.dataset is None else (dataset.dataset,)
    paths = [find_built_in(name) if name in PROMPT_SETS else Path(name) for name in names]
    prompts = {path.stem: _read(path, dataset, engine) for path in paths}
    default = NUM_REQUESTS if names[0] in PROMPT_SETS else None
    return make_groups(prompts, concurrency, dataset.num_requests, default)


def make_groups(
    prompts: dict[str, list[Prompt]], size: int, count: int | None, default: int | None
) -> list[Group]:
    """Group `count` prompts; if None, `default` rounded up to whole groups; if both None, all."""
    longest = max(map(len, prompts.values()))
    turns = [kind[i : i + size] for i in range(0, longest, size) for kind in prompts.values()]
    groups = [group for group in turns if len(group) == size]
    available = len(groups) * size
    if not groups:
        raise UsageError(f"--concurrency {size} needs as many requests; the dataset has {longest}")
    if count is None:
        count = available if default is None else min(-(-default // size) * size, available)
    if count % size:
        raise UsageError(f"--num-requests {count} is not a multiple of --concurrency {size}")
    return groups[: in_range(count, 1, available, "--num-requests") // size]


def add_seed(params: SamplingParams, number: int) -> SamplingParams:
    """Seed a sampled request that has no seed with its number, for the same draws in every run."""
    if params.temperature == 0 or params.seed is not None:
        return params
    return replace(params, seed=number)


def split_groups(groups: Sequence[Group], size: int) -> list[Group]:
    """Split groups into smaller ones; `size` divides theirs."""
    return [group[i : i + size] for group in groups for i in range(0, len(group), size)]


def resize_prompt(prompt: Prompt, length: int, others: Sequence[Prompt], bos: int | None) -> Prompt:
    """Bring a prompt to `length` tokens: cut its beginning, or prepend other prompts; keep BOS."""
    bodies = [p.token_ids[p.token_ids[:1] == [bos] :] for p in (prompt, *others)]  # without BOS
    start = [bos] if bos is not None and prompt.token_ids[:1] == [bos] and length > 1 else []
    wanted = length - len(start)
    backwards = chain.from_iterable(body[::-1] for body in bodies * (wanted + 1))
    body = list(islice(backwards, wanted))[::-1]
    return replace(prompt, token_ids=[*start, *body])


def _read(path: Path, dataset: Dataset, engine: Engine) -> list[Prompt]:
    capacity = engine.manifest.build.max_seq_len
    hint = f"; built in: {', '.join(PROMPT_SETS)}"
    prompts = [
        Prompt(path.stem, r.task_id, r.token_ids, add_seed(r.params, number))
        for number, r in enumerate(read_requests(path, engine, dataset.params, "--dataset", hint))
    ]
    if dataset.output_len is not None:
        length = in_range(dataset.output_len, 1, capacity, "--output-len")
        prompts = [replace(p, params=replace(p.params, max_tokens=length)) for p in prompts]
    if dataset.input_len is not None:
        length = in_range(dataset.input_len, 1, capacity, "--input-len")
        bos = engine.manifest.model.bos_token_id
        prompts = [resize_prompt(p, length, prompts, bos) for p in prompts]
    hint = ": see --input-len, --output-len"
    for p in prompts:
        check_room(engine, len(p.token_ids), p.params.max_tokens, f"request {p.task_id}: ", hint)
    return prompts


def check_room(engine: Engine, prompt: int, output: int, name: str = "", hint: str = "") -> None:
    """Raise RequestError for a request with more tokens than the engine has room for."""
    capacity = engine.manifest.build.max_seq_len
    if prompt + output > capacity:
        raise RequestError(
            f"{name}{prompt} prompt and {output} output tokens are more than the engine holds "
            f"({capacity}){hint}"
        )
