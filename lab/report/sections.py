"""The parts of a report: each measures one thing and returns it as JSON."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mtpbuild.builder.checkpoint.shards import INDEX
from mtpbuild.builder.checkpoint.side_files import CONFIG
from mtpbuild.builder.garbage import pause_garbage_collection
from mtpbuild.builder.plan.recipe import PROMPT_SETS, find_built_in, find_recipe_folder
from mtpbuild.builder.stages import Watch
from mtpbuild.builder.weights.scheme import AS_STORED
from mtpbuild.lab.forecast.cpu import CpuForecast, make_cpu_plan_json
from mtpbuild.lab.measure.checks import make_prompts
from mtpbuild.lab.measure.prompts import Prompt, resize_prompt
from mtpbuild.lab.measure.runs import (
    TimedAnswer,
    make_endless,
    rotate,
    run_group,
    run_prompts,
    run_settled,
)
from mtpbuild.lab.measure.statistics import count_decoded, sum_drafting
from mtpbuild.runtime import Engine, Manifest, SamplingParams
from mtpbuild.runtime.contract.manifest import hash_file
from mtpbuild.runtime.contract.programs import Adaptive, Programs
from mtpbuild.runtime.limits import SYSTEM, read_or_empty
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.requests.stats import SELDOM
from mtpbuild.runtime.text.tokenizer import TOKENIZER

HASHED = (CONFIG, TOKENIZER, "tokenizer_config.json", INDEX)
LONG_PROMPT = 512  # tokens of the prompt whose speed is measured
ARBITRARY = "arbitrary tokens"  # prompts for an engine without a tokenizer
Json = dict[str, Any]
Engines = Mapping[int | str, Callable[[], Engine]]  # by the number of drafts that the call sets


@dataclass(frozen=True)
class ReportSize:
    """How much a report measures."""

    prompts: int  # of each kind
    tokens: int  # of each answer
    timed: int  # prompts that are timed with each number of drafts


QUICK, WHOLE = ReportSize(2, 48, 2), ReportSize(8, 256, 6)


@dataclass(frozen=True)
class FixedEngine:
    """An engine whose steps have the number of drafts that `draft` sets, if it is adaptive."""

    engine: Engine
    programs: Programs
    manifest: Manifest

    @property
    def nextns(self) -> list[int]:
        """The numbers of drafts that it can make."""
        most = self.manifest.build.nextn
        return [*range(most + 1)] if self.manifest.build.adaptive else [most]

    def draft(self, nextn: int) -> Engine:
        if self.manifest.build.adaptive:
            cast(Adaptive, self.programs).draft(nextn)
        return self.engine


def load_fixed_engine(folder: Path, manifest: Manifest, threads: int | None) -> FixedEngine:
    """Load an engine whose number of drafts does not adapt itself."""
    with Engine.load(folder, threads=threads, prefix_cache=False) as checked:
        tokenizer = checked.tokenizer
    programs = load_programs(folder, manifest, threads=threads)
    build = manifest.build.model_copy(update={"adaptive": False})
    fixed = manifest.model_copy(update={"build": build})
    return FixedEngine(Engine(programs, fixed, tokenizer), programs, manifest)


def hash_files(folder: Path) -> Json:
    """Return the sha256 of a checkpoint's small files, as far as they are there."""
    hashes = {name: hash_file(folder / name) for name in HASHED if (folder / name).is_file()}
    names = "\n".join(sorted(path.name for path in folder.iterdir()))
    return hashes | {"names of its files": hashlib.sha256(names.encode()).hexdigest()}


def collect_prompts(engine: Engine, count: int, tokens: int) -> dict[str, list[list[int]]]:
    """Return prompts of each kind that the package ships, thinking on and off, as far as they fit.

    Without a tokenizer: arbitrary tokens.
    """
    if engine.tokenizer is None:
        return {ARBITRARY: [*make_prompts(engine)]}
    code, reasoning = (_read_lines(find_built_in(name)) for name in PROMPT_SETS)
    kinds = {"code": [engine.token_ids(line["prompt"]) for line in code]}
    if engine.tokenizer.chat_template is not None:
        chats = _read_lines(find_recipe_folder() / "calibration" / "prompts.jsonl")
        for name, lines in {"reasoning": reasoning, "chat": chats}.items():
            on, off = (_render(engine, lines, thinking) for thinking in (True, False))
            if on == off:  # the template has no such switch
                kinds[name] = on
            else:
                kinds |= {f"{name}, thinking": on, f"{name}, not thinking": off}
    room = engine.manifest.build.max_seq_len - tokens
    fitting = {name: [p for p in ids if len(p) <= room][:count] for name, ids in kinds.items()}
    return {name: ids for name, ids in fitting.items() if ids}


def _read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _render(engine: Engine, lines: Sequence[Any], thinking: bool) -> list[list[int]]:
    kwargs = {"enable_thinking": thinking, "thinking": thinking}  # the names that templates have
    return [engine.chat_ids(line["messages"], chat_template_kwargs=kwargs) for line in lines]


def answer_all(
    fixed: FixedEngine, prompts: dict[str, list[list[int]]], tokens: int, watch: Watch
) -> dict[str, list[TimedAnswer]]:
    """Answer the prompts greedily, with as many drafts as the engine can make."""
    engine, answers = fixed.draft(fixed.nextns[-1]), dict[str, list[TimedAnswer]]()
    for kind, ids in prompts.items():
        watch(f"answers: {kind}")
        answers[kind] = run_prompts(engine, ids, [SamplingParams(max_tokens=tokens)] * len(ids))
    return answers


def measure_acceptance(answers: Sequence[TimedAnswer]) -> Json:
    """Return how often a step's draft is accepted at each position.

    A request's first step has no drafts, and does not count. The first k positions are those of
    steps with k drafts, so they give the acceptance length with k drafts.
    """
    drafting = sum_drafting(answers)
    nextn = drafting.num_spec_tokens
    steps = drafting.num_draft_tokens // nextn if nextn else 0
    reached = [sum(drafting.acceptance_histogram[i + 1 :]) for i in range(nextn)]
    rates = [count / steps for count in reached] if steps else []
    return {
        "prompts": len(answers),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "steps_with_drafts": steps,
        "accepted_by_position": rates,
        "acceptance_lengths": [1 + sum(rates[: k + 1]) for k in range(len(rates))],
    }


def judge(acceptance: Json, verification: Json) -> list[str]:
    """Say what is wrong with the texts, and with the head: its drafts beside the plain model's."""
    failed = verification.get("verdict") == "failed"
    problems = [f"verify: {verification['detail']}"] if failed else []
    rates, plain = acceptance["accepted_by_position"], verification.get("plain_first_drafts")
    if not rates or plain is None:
        return problems
    both = f"of the first drafts {rates[0]:.0%} are right, of the plain model's {plain:.0%}"
    if rates[0] < plain / 2:
        why = "the engine drafts worse than its checkpoint; please send this report"
        problems.append(f"{both}: {why}")
    elif rates[0] < SELDOM:
        why = "the head is another model's, or damaged, or is read as it was not trained"
        problems.append(f"{both}: {why}")
    return problems


def time_drafts(
    engines: Engines,
    prompts: Sequence[list[int]],
    tokens: int,
    watch: Watch,
) -> dict[int | str, list[TimedAnswer]]:
    """Time the same prompts with each number of drafts; `engines` sets it."""
    params = SamplingParams(max_tokens=tokens)
    timed = {nextn: list[TimedAnswer]() for nextn in engines}
    with pause_garbage_collection():
        for i, ids in enumerate(prompts):
            watch(f"tokens/s: prompt {i + 1} of {len(prompts)}")
            for nextn in rotate([*engines], i):
                group = make_endless([Prompt("", i, ids, params)], tokens)
                timed[nextn] += run_settled(engines[nextn](), group)
    return timed


def describe_speeds(timed: Mapping[int | str, Sequence[TimedAnswer]]) -> list[Json]:
    """Return the speed with each number of drafts; the first one's texts are those to compare."""
    texts, rows = [answer.token_ids for answer in next(iter(timed.values()))], list[Json]()
    for nextn, answers in timed.items():
        count, seconds = count_decoded([answers])
        steps = sum(len(answer.intervals) for answer in answers)
        same = sum(a.token_ids == text for a, text in zip(answers, texts, strict=True))
        rows.append(
            {
                "nextn": nextn,
                "tokens_per_s": count / seconds,
                "ms_per_step": 1000 * seconds / steps,
                "tokens_per_step": count / steps,
                "same_texts": same,
                "texts": len(texts),
            }
        )
    return rows


def time_prompt(engine: Engine, prompts: Sequence[list[int]]) -> Json:
    """Time a long prompt, made of the others: the better of two runs."""
    manifest = engine.manifest
    length = min(LONG_PROMPT, manifest.build.max_seq_len - 2)
    params = SamplingParams(max_tokens=1)
    first, *others = (Prompt("", i, ids, params) for i, ids in enumerate(prompts))
    whole = resize_prompt(first, length, others, manifest.model.bos_token_id)
    answers = [run_group(engine, [whole])[0] for _ in range(2)]
    seconds = min(answer.times[0] - answer.submitted for answer in answers)
    return {"tokens": length, "seconds": seconds, "tokens_per_s": length / seconds}


def measure_resident_bytes() -> int | None:
    """Return the bytes of memory that this process holds; None where the system does not say."""
    for line in read_or_empty(SYSTEM / "proc/self/status").splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    return None


def foresee(forecast: CpuForecast, weights: str | None) -> Json:
    """Return what `mtpbuild plan --cpu` says of the engine with these weights."""
    plan = make_cpu_plan_json(forecast)
    engines = {engine["weights"]: engine for engine in plan["engines"]}
    engine = engines.get(weights or AS_STORED) or engines[AS_STORED]
    names = ("engine_bytes", "memory_bytes", "bytes_per_step", "tokens_per_s")
    return {
        "nextn": plan["nextn"],
        "acceptance_lengths": plan["acceptance_lengths"],
        "bandwidth_bytes_per_s": plan["bandwidth_bytes_per_s"],
        **{name: engine[name] for name in names},
    }
