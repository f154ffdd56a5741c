"""Trains a model of any family with its MTP modules, by its plain model; it can resume.

    python tools/train_tiny/train.py recipes/deepseek_tiny --out runs/tiny --seconds 5900
    python tools/train_tiny/train.py recipes/deepseek_tiny --out runs/tiny --modules --seconds 600

The first folder has config.json and the tokenizer; without a tokenizer one is trained. --out gets a
checkpoint that `mtpbuild build` takes, and a log of JSON lines. With --modules the trunk stays as
an earlier run left it, and the modules learn its predictions.
"""

import argparse
import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

import tokenizer as tokens
from data import (
    Batch,
    ChatRows,
    CodeRows,
    code_documents,
    common_words,
    library_files,
    make_batch,
    read,
    reasoning_documents,
)
from mtpbuild.builder.checkpoint.config import MoEConfig
from mtpbuild.builder.models import find_family_of, load_config
from mtpbuild.builder.models.common.plain import PlainCausalLM, PlainLM, PlainRMSNorm
from mtpbuild.lab.tune.chains import run_chain
from muon import Optimizer
from problems import training_problems

MTP_WEIGHT = 0.5  # of the modules' mean loss; 0.3 in DeepSeek-V3, but here acceptance counts more
BALANCE_RATE, BIAS = 0.001, "e_score_correction_bias"
# The trunk's logits are multiplied by this, because acceptance depends on its first choice alone.
SHARPNESS = 2.0
EAGLE_DRAFTS, EAGLE_WEIGHT = 3, 0.7  # drafts that module 1 makes alone; the weight of their loss
SAVE_SECONDS = 240
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class Phase:
    """A phase up to share `end` of the budget; code and chat are (rows, length) of each step."""

    end: float
    code: tuple[int, int]
    chat: tuple[int, int]
    mtp: bool = True


PHASES = (
    Phase(0.45, (8, 256), (8, 256), mtp=False),
    Phase(0.75, (8, 256), (8, 256)),
    Phase(0.92, (4, 512), (8, 256)),
    Phase(1.00, (2, 512), (14, 256)),
)
MODULES = (Phase(1.00, (4, 512), (8, 256)),)
SMALL = (Phase(0.5, (1, 64), (1, 256), mtp=False), Phase(1.0, (1, 128), (1, 256)))


def initialise(plain: PlainLM) -> None:
    """Draw the first weights; products that end a branch are smaller in deeper models."""
    c = plain.config
    std, branches = 0.5 * c.hidden_size**-0.5, math.sqrt(2 * c.num_hidden_layers)
    ends = ("o_proj", "o_b_proj", "out_proj", "down_proj")
    deviations = dict.fromkeys(ends, std / branches)
    deviations |= dict.fromkeys(("eh_proj", "fc"), 2 * std)
    deviations |= {"embed_tokens": 0.5, "lm_head": 0.02, "gate": 0.02}
    for name, weight in plain.named_parameters():
        last = name.removesuffix(".weight").rpartition(".")[2]
        if weight.ndim == 2:
            nn.init.normal_(weight, std=deviations.get(last, std))
        elif last == "A_log":
            nn.init.constant_(weight, math.log(4))
        elif last == "dt_bias":  # the inverse of softplus of the steps
            steps = torch.logspace(math.log10(0.0005), math.log10(0.125), len(weight))
            weight.data = steps.expm1().log()
        elif last == "conv1d":  # the newest input passes
            nn.init.normal_(weight, std=0.2)
            weight.data[..., -1] += 1
        elif last in ("base", "hc_base"):  # residual streams begin with different weights
            nn.init.normal_(weight)
        elif last in ("scale", "hc_scale"):
            nn.init.ones_(weight)
        elif last == "sinks":
            nn.init.zeros_(weight)
    for name, table in plain.named_buffers():
        if name.endswith("tid2eid"):
            assert isinstance(c, MoEConfig)
            experts = torch.rand(len(table), c.n_routed_experts).argsort(1)
            table.copy_(experts[:, : table.shape[1]])
    for part in plain.modules():
        if isinstance(part, PlainRMSNorm) and part.minus_one:
            nn.init.zeros_(part.weight)


def measure_trunk(plain: PlainLM, batch: Batch, length: int, mtp: bool) -> list[Tensor]:
    """Return the mean losses of the trunk and of each module on a batch's own next tokens."""
    text = batch.tokens[:, :length]
    hidden = plain.main(text)
    losses = [entropy(plain.logits(hidden), batch.targets(1, length))]
    if mtp:
        count = plain.config.num_nextn_predict_layers
        for j, (k, g) in enumerate(run_chain(plain, text, hidden, count, eagle=False), 1):
            logits = plain.draft_logits(k, g)
            losses.append(entropy(logits, batch.targets(j + 1, length)[:, : length - j]))
    return losses


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross-entropy over the valid targets, which may be none."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (targets >= 0).sum().clamp(min=1)


def measure_modules(plain: PlainLM, batch: Batch, length: int, mtp: bool) -> list[Tensor]:
    """Return the mean losses of drafts on the trunk's predictions: each module's, then Eagle's."""
    text = batch.tokens[:, :length]
    with torch.no_grad():
        hidden = plain.main(text)
        wanted = (SHARPNESS * plain.logits(hidden)).softmax(-1)
    modules, losses = plain.config.num_nextn_predict_layers, list[Tensor]()
    for eagle, count in ((False, modules), (True, EAGLE_DRAFTS)):
        for j, (k, g) in enumerate(run_chain(plain, text, hidden, count, eagle=eagle), 1):
            valid = batch.targets(j + 1, length)[:, : length - j] >= 0
            guess = plain.draft_logits(k, g).log_softmax(-1)
            loss = -((wanted[:, j:] * guess).sum(-1) * valid).sum() / valid.sum().clamp(min=1)
            losses.append(loss * (EAGLE_WEIGHT if eagle else 1.0))
    return losses


@contextmanager
def count_loads(plain: PlainLM) -> Iterator[dict[nn.Module, Tensor]]:
    """Count the tokens of each expert of each router with a bias while the block runs."""
    loads = dict[nn.Module, Tensor]()

    def count(router: nn.Module, inputs: Any, weights: Tensor) -> None:
        chosen = (weights != 0).flatten(0, -2).sum(0)
        loads[router] = loads.get(router, torch.zeros_like(chosen)) + chosen

    routers = [part for part in plain.modules() if hasattr(part, BIAS)]
    hooks = [router.register_forward_hook(count) for router in routers]
    try:
        yield loads
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Run:
    """A training: its model, how far it is, and its texts."""

    args: argparse.Namespace
    plain: PlainLM
    step: int = 0
    elapsed: float = 0.0
    losses: dict[str, list[float]] = field(default_factory=dict)

    @property
    def progress(self) -> float:
        args = self.args
        return float(self.step / args.steps if args.steps else self.elapsed / args.seconds)

    @property
    def state(self) -> Path:
        return Path(self.args.out) / ("modules.pt" if self.args.modules else "train.pt")

    def train(self) -> None:
        """Train until the budget of seconds or steps is spent."""
        args, saved = self.args, time.monotonic()
        clock = time.process_time if args.cpu_time else time.monotonic
        started = clock()
        if args.modules:
            self.plain.load_state_dict(torch.load(self.state.with_name("train.pt"))["model"])
            train_modules_alone(self.plain)
        optimizer = Optimizer(self.plain, args.muon_lr, args.adam_lr)
        if self.state.exists():
            stored = torch.load(self.state)
            self.plain.load_state_dict(stored["model"])
            optimizer.load(stored["optimizer"])
            self.step, self.elapsed = stored["step"], stored["elapsed"]
        before = self.elapsed
        code, chats = make_rows(args, args.seed + self.step)
        with (Path(args.out) / "train.jsonl").open("a") as log:
            while (progress := self.progress) < 1:
                self.take_step(code, chats, progress)
                # A warm-up, a flat part, then linear to zero.
                rate = min(1.0, progress / 0.01 + 0.05, (1 - progress) / 0.65)
                optimizer.step(rate)
                self.elapsed = before + clock() - started
                if self.step % args.log_every == 0:
                    line = json.dumps({"step": self.step, "seconds": self.elapsed, **self.losses})
                    print(line, file=log, flush=True)
                    print(line, flush=True)
                if time.monotonic() - saved > SAVE_SECONDS or self.progress >= 1:
                    self.save(optimizer)
                    saved = time.monotonic()

    def take_step(self, code: CodeRows, chats: ChatRows, progress: float) -> None:
        """Add the gradients of a batch of code and of one of problems."""
        phases = SMALL if self.args.small else MODULES if self.args.modules else PHASES
        phase = next(phase for phase in phases if progress < phase.end)
        measure = measure_modules if self.args.modules else measure_trunk
        with count_loads(self.plain) as loads:
            for kind, (rows, length) in {"code": phase.code, "reasoning": phase.chat}.items():
                batch = make_batch(code, chats, rows, length, float(kind == "code"))
                first, *rest = measure(self.plain, batch, length, phase.mtp)
                weight = 1.0 if self.args.modules else MTP_WEIGHT / max(1, len(rest))
                ((first + weight * sum(rest)) / 2).backward()
                self.losses[kind] = [round(loss.item(), 4) for loss in (first, *rest)]
        for router, load in loads.items():  # overloaded experts lose bias (DeepSeek-V3's rule)
            sign = torch.sign(load.float().mean() - load)
            router.get_buffer(BIAS).add_(BALANCE_RATE * (progress < 0.9) * sign)
        self.step += 1

    def save(self, optimizer: Optimizer) -> None:
        """Write the state to resume from, and the checkpoint."""
        content: dict[str, Any] = {"step": self.step, "elapsed": self.elapsed}
        content |= {"model": self.plain.state_dict(), "optimizer": optimizer.state()}
        torch.save(content, part := self.state.with_suffix(".part"))
        os.replace(part, self.state)
        write_checkpoint(self.plain, Path(self.args.folder), Path(self.args.out))


def train_modules_alone(plain: PlainLM) -> None:
    """Freeze all weights but the MTP modules'."""
    plain.requires_grad_(False)
    for k in range(1, plain.config.num_nextn_predict_layers + 1):
        plain.module(k).requires_grad_(True)


def write_checkpoint(plain: PlainLM, source: Path, out: Path) -> None:
    """Write weights in bf16, biases in fp32, tables of ids; the other files are the source's."""
    for name in ("config.json", *FILES):
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)
    stored = {
        name: weight.to(torch.float32 if name.endswith("bias") else torch.bfloat16).contiguous()
        if weight.is_floating_point()
        else weight
        for name, weight in plain.state_dict().items()
    }
    save_file(stored, part := out / "model.part", metadata={"format": "pt"})
    os.replace(part, out / "model.safetensors")


def load_tokenizer(folder: Path, words: list[str]) -> Tokenizer:
    """Load the stored tokenizer, or train one on the code and on some problems."""
    if not (folder / "tokenizer.json").exists():
        problems = training_problems(6000, words, seed=1)
        texts = [read(f) for f in library_files(held_out=False, tests=False)]
        texts += [tokens.chat(p.question, p.reply) for p in problems]
        tokens.save(tokens.train(texts), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def make_rows(args: argparse.Namespace, seed: int) -> tuple[CodeRows, ChatRows]:
    words = common_words(every=20 if args.small else 1)
    tokenizer = load_tokenizer(Path(args.folder), words)
    files = library_files(held_out=False)[:: 200 if args.small else 1]
    chats = reasoning_documents(tokenizer, 200 if args.small else args.problems, words, seed)
    return CodeRows(code_documents(tokenizer, files), seed), ChatRows(chats, seed)


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("folder", help="has config.json and the tokenizer")
    parser.add_argument("--out", required=True)
    parser.add_argument("--modules", action="store_true", help="train the MTP modules alone")
    parser.add_argument("--seconds", type=float, default=5400, help="time, which sets the schedule")
    parser.add_argument("--cpu-time", action="store_true", help="--seconds: of all CPUs together")
    parser.add_argument("--steps", type=int, default=0, help="schedule by steps, not --seconds")
    parser.add_argument("--problems", type=int, default=150_000)
    parser.add_argument("--muon-lr", type=float, default=0.007)
    parser.add_argument("--adam-lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="short rows of few texts, for a try")
    args = parser.parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    config = load_config(Path(args.folder))
    plain = find_family_of(config).reference(config)
    if args.modules and not isinstance(plain, PlainCausalLM):
        parser.error("--modules: drafts of drafts are trained through common attentions alone")
    initialise(plain)
    Run(args, plain).train()


if __name__ == "__main__":
    main()
