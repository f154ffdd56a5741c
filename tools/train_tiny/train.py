"""Trains trunk and MTP modules within a wall-clock budget; it can resume, and logs JSON lines."""

import argparse
import json
import os
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

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
from families import FAMILIES, Phase
from model import TrainedModel
from muon import Optimizer
from problems import training_problems
from threads import Threads

MTP_WEIGHT = 0.5  # of the modules' mean loss; 0.3 in DeepSeek-V3, but here acceptance counts more
BALANCE_RATE = 0.001
LONGEST_COMPILED = 1024
SMOKE_PHASES = (Phase(0.5, (1, 64), (1, 256), mtp=False), Phase(1.0, (1, 128), (1, 256), mtp=True))


def cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross-entropy over the valid targets."""
    logits = F.linear(hidden, head).flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")


class Trainer:
    """A model and its loss function, both compiled if wanted; computes losses and gradients."""

    def __init__(self, model: TrainedModel, device: str, dtype: str, compiled: bool) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.model = model.to(self.device)
        self.loss = cross_entropy
        if compiled:
            torch._dynamo.config.recompile_limit = 64
            torch._inductor.config.cpp.dynamic_threads = True
            for layer in [*self.model.layers, *(m.block for m in self.model.mtp)]:
                layer.compile(dynamic=False)
            self.loss = torch.compile(cross_entropy, dynamic=False)

    def autocast(self) -> Any:
        if self.dtype == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def losses(self, batch: Batch, length: int, mtp: bool) -> tuple[list[Tensor], list[int]]:
        """Return the summed losses of the trunk and of each module, and the targets of each."""
        batch = batch.to(self.device)
        model, mask = self.model, batch.mask(length)
        with self.autocast():
            hidden = model.trunk(batch.tokens[:, :length], mask)
            hiddens = [hidden]
            for k in range(len(model.mtp) if mtp else 0):
                following = batch.tokens[:, k + 1 : length + k + 1]
                hiddens.append(model.draft(k, hiddens[-1], following, mask))
            targets = [batch.targets(k + 1, length) for k in range(len(hiddens))]
            sums = [self.loss(h, model.head, t) for h, t in zip(hiddens, targets, strict=True)]
        return sums, [int((t >= 0).sum()) for t in targets]

    def backward(self, batch: Batch, length: int, mtp: bool, share: float) -> list[float]:
        """Add `share` of the batch's mean loss to the gradients; return modules' mean losses."""
        sums, counts = self.losses(batch, length, mtp)
        means = [s / max(1, n) for s, n in zip(sums, counts, strict=True)]
        extra = sum(means[1:], torch.zeros_like(means[0])) * MTP_WEIGHT / max(1, len(means) - 1)
        ((means[0] + extra) * share).backward()
        return [m.item() for m in means]


@dataclass
class State:
    step: int = 0
    seen: int = 0
    elapsed: float = 0.0


def join_processes() -> int:
    """Join the processes that torchrun started, if it did, and return this one's rank."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    return int(os.environ.get("RANK", "0"))


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def average(trainer: Trainer, state: State) -> None:
    """Average gradients over the processes that torchrun started, and their times."""
    if not dist.is_initialized():
        return
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    flat = torch.cat([*(g.flatten() for g in gradients), torch.tensor([state.elapsed])])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    state.elapsed = float(flat[-1])
    means = flat[:-1].split([g.numel() for g in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def eager_if(long: bool) -> Any:
    """Run compiled functions eagerly if `long`: a rare length isn't worth its compilation."""
    return torch.compiler.set_stance("force_eager") if long else nullcontext()


def schedule(progress: float) -> float:
    """Return the learning rates' factor: a warm-up, a flat part, then linear to zero."""
    return min(1.0, progress / 0.01 + 0.05, max(0.0, (1 - progress) / 0.65))


def save(path: Path, trainer: Trainer, optimizer: Optimizer, state: State) -> None:
    content = {
        "model": trainer.model.state_dict(),
        "optimizer": optimizer.state(),
        "state": vars(state),
        "shape": vars(trainer.model.shape),
    }
    torch.save(content, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def load_tokenizer(folder: Path, words: list[str]) -> Tokenizer:
    """Load the stored tokenizer, or train one on the code and on some problems."""
    if not (folder / "tokenizer.json").exists():
        problems = training_problems(6000, words, seed=1)
        texts = [read(f) for f in library_files(held_out=False, tests=False)]
        texts += [tokens.chat(p.question, p.reply) for p in problems]
        tokens.save(tokens.train(texts), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def rows(args: argparse.Namespace, seed: int, held_out: bool = False) -> tuple[CodeRows, ChatRows]:
    words = common_words(every=20 if args.smoke else 1)
    tokenizer = load_tokenizer(Path(args.tokenizer), words)
    files = library_files(held_out=held_out)[:: 200 if args.smoke else 1]
    count = 200 if args.smoke or held_out else args.problems
    chats = reasoning_documents(tokenizer, count, words, seed, held_out)
    return CodeRows(code_documents(tokenizer, files), seed), ChatRows(chats, seed)


def run(args: argparse.Namespace) -> None:
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    rank = join_processes()
    torch.manual_seed(args.seed)
    family = FAMILIES[args.model]
    args.phases = SMOKE_PHASES if args.smoke else family.phases
    model = family.make(family.smoke if args.smoke else family.shape)
    trainer = Trainer(model, args.device, args.dtype, compiled=not (args.smoke or args.eager))
    optimizer = Optimizer(trainer.model.parameters(), args.muon_lr, args.adam_lr)
    state, checkpoint = State(), out / "train.pt"
    if checkpoint.exists() and not args.fresh:
        stored = torch.load(checkpoint, map_location=trainer.device)
        trainer.model.load_state_dict(stored["model"])
        optimizer.load(stored["optimizer"])
        state = State(**stored["state"])
    elif args.start_from:
        trainer.model.load_state_dict(torch.load(args.start_from, map_location="cpu")["model"])
    seed = args.seed + state.step + 1000 * rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    code, chats = rows(args, seed)
    with nullcontext() if rank else (out / "train.jsonl").open("a") as log:
        loop(args, trainer, optimizer, state, code, chats, log, checkpoint)


def loop(
    args: argparse.Namespace, trainer: Trainer, optimizer: Optimizer, state: State,
    code: CodeRows, chats: ChatRows, log: Any, checkpoint: Path,
) -> None:  # fmt: skip
    """Train until the budget is spent: seconds, or steps if --steps is given."""
    threads = Threads(args.polite)
    saved = shown = counted = time.monotonic()
    found: dict[str, list[float]] = {}
    while (progress := progress_of(args, state)) < 1:
        threads.adjust()
        phase = next(p for p in args.phases if progress < p.end)
        for kind, (count, length) in list_parts(phase, state.step).items():
            batch = make_batch(code, chats, count, length, float(kind == "code"))
            with eager_if(length > LONGEST_COMPILED):
                found[kind] = trainer.backward(batch, length, phase.mtp, 0.5)
            state.seen += count * length * processes()
        state.elapsed, counted = state.elapsed + time.monotonic() - counted, time.monotonic()
        average(trainer, state)
        optimizer.step(schedule(progress))
        for moe in trainer.model.moes():
            if processes() > 1:
                dist.all_reduce(moe.load)
            moe.rebalance(BALANCE_RATE * (progress < 0.9))
        state.step += 1
        if not log:
            continue
        if state.step % args.log_every == 0:
            report(log, state, found, progress, args.log_every, time.monotonic() - shown)
            shown = time.monotonic()
        if time.monotonic() - saved > 240:
            save(checkpoint, trainer, optimizer, state)
            saved = time.monotonic()
    if log:
        save(checkpoint, trainer, optimizer, state)


def list_parts(phase: Phase, step: int) -> dict[str, tuple[int, int]]:
    """Return the (rows, length) of a step's code, if it has any, and of its problems."""
    parts = {"reasoning": phase.chat}
    if phase.long_every and step % phase.long_every == 0:
        return {"code": (1, 2048)} | parts
    return {"code": phase.code} | parts if step % phase.code_every == 0 else parts


def progress_of(args: argparse.Namespace, state: State) -> float:
    done = state.step / args.steps if args.steps else state.elapsed / args.seconds
    return float(done)


def report(
    log: Any, state: State, found: dict[str, list[float]], progress: float, n: int, s: float
) -> None:
    line = {
        "step": state.step,
        "progress": round(progress, 4),
        "seconds": round(state.elapsed, 1),
        "tokens": state.seen,
        "steps_per_s": round(n / s, 3),
        **{kind: [round(x, 4) for x in means] for kind, means in found.items()},
    }
    print(json.dumps(line), file=log, flush=True)
    print(json.dumps(line), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=FAMILIES, default="deepseek-tiny")
    parser.add_argument("--start-from", help="take the first weights of this checkpoint")
    parser.add_argument("--out", default="runs/tiny", help="folder of the checkpoint and the log")
    parser.add_argument("--tokenizer", default="recipes/deepseek_tiny")
    parser.add_argument(
        "--seconds", type=float, default=5400, help="training time, which sets the schedule"
    )
    parser.add_argument("--steps", type=int, default=0, help="schedule by steps, not --seconds")
    parser.add_argument("--problems", type=int, default=150_000)
    parser.add_argument("--muon-lr", type=float, default=0.007)
    parser.add_argument("--adam-lr", type=float, default=0.002)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--polite", action="store_true", help="with `nice`: see threads.py")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--fresh", action="store_true", help="ignore a stored checkpoint")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a small shape")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.log_every = args.steps or 4, 1
    return args


if __name__ == "__main__":
    run(arguments())
