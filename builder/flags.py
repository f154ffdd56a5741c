"""Flags that a command passes on unchanged: each group is a base class of the command's request.

The command line imports these groups, so this module imports nothing heavy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mtpbuild.runtime.configuration.settings import Given
from mtpbuild.runtime.contract.drafters import list_drafters
from mtpbuild.runtime.flag_groups import drafts_flag, engine_flag, flag, model_flag, output_flag
from mtpbuild.runtime.threads import make_threads_flag


def make_drafter_flag() -> str | None:
    """Return the default value of a parameter that is the flag `--drafter`."""
    return drafts_flag(None, f"{' or '.join(list_drafters())}.")


def make_target_flag() -> str | None:
    """Return the default value of a parameter that is the flag `--target`."""
    return engine_flag(None, "What to compile for. Default: the recipe's, onnxruntime.")


@dataclass(frozen=True, kw_only=True)
class CalibrationFlags:
    """The flags for rounding int4 weights by texts."""

    PANEL: ClassVar = "Weights"

    calibrate: bool = flag(False, "Round int4 weights by texts that the model writes first.")
    calibration_text: Path | None = flag(
        None, "The same with a text, or with the model's answers to a JSONL file of prompts."
    )


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """The flags for the number of ranks that share a model, and for how they share it."""

    PANEL: ClassVar = "Ranks"

    tp: int | None = flag(None, "Ranks that share the model. Default: 1.")
    ep: int | None = flag(None, "Groups of ranks with routed experts of their own. Default: 1.")
    attention_dp: bool = flag(False, "Give each rank its own requests; they share routed experts.")

    def settings(self) -> list[Given]:
        """Return the flags as settings, to be joined with a configuration's."""
        switch = ("attention_dp", "--attention-dp", self.attention_dp or None)
        return [("tp", "--tp", self.tp), ("ep", "--ep", self.ep), switch]


@dataclass(frozen=True, kw_only=True)
class BuildFlags:
    """Flags of `build`."""

    max_batch: int = engine_flag(1, "Requests that run at once.")
    max_seq_len: int | None = engine_flag(None, "Prompt and output tokens of a request together.")
    prefill_chunk: int = engine_flag(256, "Prompt tokens per prefill call.")
    rank: int | None = output_flag(None, "Build this rank alone, from 0; default: all that lack.")
    out: Path | None = output_flag(None, "Engine directory; with several nextn, their parent.")
    force: bool = output_flag(False, "Rebuild, and replace another model's engine.")
    checkpoint: Path | None = model_flag(None, "Folder with the recipe's or repository's weights.")
    revision: str | None = model_flag(None, "Branch, tag or commit. Default: main.")
    mtp: Path | None = model_flag(
        None, "File, folder or repository with the MTP head, if the checkpoint has none or a worse."
    )
    chat_template: Path | None = model_flag(
        None, "Jinja file that the engine has in place of the checkpoint's chat template."
    )
    draft_vocab: str | None = drafts_flag(
        None, "Draft only from this many frequent tokens, or a file's ids; the text is the same."
    )
    exact: bool = engine_flag(
        False, "Refuse an engine whose texts may depend on nextn, batch, chunks or threads."
    )
    score: bool = engine_flag(
        False, "Let prompts have log-probabilities, by a program of their own."
    )
    dry_run: bool = output_flag(False, "Check all, say what it would be, write nothing.")
    dump: Path | None = output_flag(
        None, "New folder for each program's graph as text, after each pass of the compiler."
    )


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Flags of `plan`."""

    gpu: str = engine_flag("b200", "h100, h200 or b200.")
    max_seq_len: int = engine_flag(4096, "Prompt and output tokens of a request together.")
    max_batch: int = engine_flag(1, "Requests that run at once.")
    bandwidth: float | None = engine_flag(
        None, "GB/s of memory, with --cpu. Default: measured now."
    )
    memory: float | None = engine_flag(
        None,
        "GB of a machine's memory, with --cpu: its speed where weights exceed them.",
        parser=lambda text: float(text.removesuffix("GB")),
    )
    disk_bandwidth: float = engine_flag(1.0, "GB/s of that machine's disk, with --memory.")
    context_len: int = engine_flag(2048, "Cached tokens that a step reads per request.")
    cache_dtype: str = engine_flag(
        "auto", "Type of caches: bfloat16 or float32; with --cpu float32, bfloat16 or int8."
    )
    prefill_chunk: int = engine_flag(256, "Prompt tokens per prefill call.")
    checkpoint: Path | None = model_flag(None, "Folder with the recipe's weights.")


@dataclass(frozen=True)
class DatasetFlags:
    """Flags of `bench` that choose the requests."""

    PANEL: ClassVar = "Requests"

    dataset: str | None = flag(None, "code, reasoning, or JSONL (docs/bench.md). Default: both.")
    num_requests: int | None = flag(None, "Default: 20 of the built-in ones, all of a file's.")
    input_len: int | None = flag(None, "Cut or extend every prompt to so many tokens.")
    output_len: int | None = flag(None, "Most output tokens; default: the dataset's, or 256.")


@dataclass(frozen=True, kw_only=True)
class EvalFlags:
    """Flags of `eval`."""

    task: str = flag("reasoning", "reasoning, or a JSONL file with answers (docs/eval.md).")
    num_problems: int | None = flag(None, "Default: 60 of the built-in ones, all of a file's.")
    threads: int | None = make_threads_flag()
    out: Path = output_flag(Path("eval_results"), "Folder for eval.json and eval.png.")


@dataclass(frozen=True, kw_only=True)
class VerifyFlags:
    """Flags of `verify`."""

    against: Path | None = engine_flag(
        None, "Engine to compare with; default: nextn 0, built if absent."
    )
    model: str | None = engine_flag(
        None, "Recipe name, checkpoint folder, or OWNER/NAME; default: the recipe of that name."
    )
    prompts: Path | None = flag(None, "JSONL file (docs/cli-json.md); default: built-in ones.")
    output_len: int = flag(64, "Tokens of each text.")
    seeds: int = flag(250, "Sampled texts per prompt, for their distribution.")
    threads: int | None = make_threads_flag()
    exact: bool = flag(False, "Refuse an engine whose results depend on more than its input.")


@dataclass(frozen=True, kw_only=True)
class TuneFlags:
    """Flags of `tune-head`."""

    data: Path | None = flag(None, "JSONL file of prompts, as of `run --input`.")
    prompts_by_model: int | None = flag(None, "Instead, let the model write this many prompts.")
    new: bool = drafts_flag(False, "Make a module for a model that has none.")
    draft_vocab: int | None = drafts_flag(
        None, "Draft only from this many tokens, the commonest of the answers."
    )
    nextn: int = drafts_flag(3, "Draft tokens per step of the engines that the head is for.")
    drafter: str | None = drafts_flag(None, "mtp-eagle or mtp-vanilla, as of `build`.")
    weights: str | None = model_flag(None, "Format of those engines' weights, as of `build`.")
    mtp: Path | None = model_flag(
        None, "File or folder with the head to begin with, as of `build`."
    )
    max_tokens: int = flag(256, "Most tokens of an answer whose line sets no number.")
    held_out: int | None = flag(None, "Prompts that only measure. Default: one in ten.")
    lora: int | None = flag(None, "Train updates of this rank. Default: all of the modules.")
    dtype: str = flag("fp32", "Number format of the training: fp32 or bf16.")
    epochs: int = flag(10, "How often each text is trained on.")
    lr: float | None = flag(None, "Learning rate. Default: 0.4 / hidden size.")
    force: bool = output_flag(False, "Begin anew, and replace a head that stands there.")
