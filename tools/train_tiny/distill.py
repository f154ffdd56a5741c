"""Runs the last phase of training: the trunk is frozen, and MTP modules learn its predictions."""

import argparse
import json
import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data import EXTRA, Batch, ChatRows, CodeRows, Tokens, make_batch
from eagle import eagle
from export import load_model
from families import FAMILIES, Phase
from generate import continuations
from model import TrainedModel
from muon import Optimizer
from threads import Threads
from train import State, Trainer, average, join_processes, list_parts, processes, rows, save

# The teacher's logits are multiplied by this, because acceptance depends on its argmax alone.
SHARPNESS = 2.0
SMOKE_PHASE = Phase(1.0, (1, 128), (1, 256), mtp=True)
EAGLE_PASSES = 3
EAGLE_WEIGHT = 0.7  # weight of a recycled pass; each module's is 1


def kl_sum(hidden: Tensor, head: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
    """Sum the cross-entropy with the teacher's probabilities [B, T, V] over the valid slots."""
    student = F.log_softmax(F.linear(hidden, head).float(), -1)
    return -((teacher * student).sum(-1) * valid).sum()


class Distiller:
    """The modules' losses against a frozen trunk."""

    def __init__(self, trainer: Trainer, compiled: bool) -> None:
        self.trainer, self.model = trainer, trainer.model
        self.loss = torch.compile(kl_sum, dynamic=False) if compiled else kl_sum
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name.startswith("mtp."))
            if parameter.grad is not None:
                parameter.grad = None

    def losses(self, batch: Batch, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the mean losses of modules 1..D and of module 1's recycled passes from 2 on."""
        model, batch = self.model, batch.to(self.trainer.device)
        mask = batch.mask(length)
        with self.trainer.autocast():
            with torch.no_grad():
                hidden = model.trunk(batch.tokens[:, :length], mask)
                teacher = (model.logits(hidden).float() * SHARPNESS).softmax(-1)
            modules, g = [], hidden
            for k in range(len(model.mtp)):
                g = model.draft(k, g, batch.tokens[:, k + 1 : length + k + 1], mask)
                modules.append(self.mean(g, teacher, batch, length, ahead=k + 1, start=0))
            following = batch.tokens[:, 1 : length + 1]
            passes = eagle(model, hidden, following, mask, EAGLE_PASSES)[1:]
            recycled = [
                self.mean(e, teacher, batch, length, ahead=1, start=j)
                for j, e in enumerate(passes, 1)
            ]
        return modules, recycled

    def mean(
        self, hidden: Tensor, teacher: Tensor, batch: Batch, length: int, ahead: int, start: int
    ) -> Tensor:
        """Return the mean loss of slots p against the trunk at slot p + ahead.

        A slot p counts only if slot p - start is in the same document.
        """
        kept = slice(start, length - ahead)
        valid = batch.targets(ahead + 1, length)[:, kept] >= 0
        valid &= batch.document[:, kept] == batch.document[:, : length - ahead - start]
        probs = teacher[:, start + ahead :]
        return self.loss(hidden[:, kept], self.model.head, probs, valid) / valid.sum().clamp(min=1)

    def backward(self, batch: Batch, length: int, share: float) -> list[float]:
        modules, recycled = self.losses(batch, length)
        total = torch.stack(modules).sum() + EAGLE_WEIGHT * torch.stack(recycled).sum()
        (share * total).backward()
        return [round(m.item(), 4) for m in [*modules, *recycled]]


class MixedRows(CodeRows):
    """Rows of the corpus, or with probability `share` rows of the model's own text."""

    def __init__(self, code: CodeRows, own: list[Tokens], share: float) -> None:
        super().__init__([*code.documents], seed=11)
        self.own, self.share = own, share

    def take(self, count: int, length: int) -> Any:
        for row, used in super().take(count, length):
            if self.own and self.rng.random() < self.share:
                row = self.rng.choice(self.own)[:length]
                used = len(row)
            yield row, used


def own_text(
    args: argparse.Namespace, model: TrainedModel, code: CodeRows, count: int
) -> list[Tokens]:
    """Generate continuations of training code, half greedy, half at temperature 0.6."""
    length = 512 + EXTRA
    prompts = torch.stack(
        [torch.from_numpy(r.astype(np.int64)) for r, used in code.take(4 * count, 64) if used == 64]
    )[:count]
    own: list[Tokens] = []
    for part, temperature in zip(prompts.chunk(2), (0.0, 0.6), strict=True):
        text = continuations(model, part, args.own_tokens, temperature)
        own += list(text[:, :length].numpy().astype(np.uint16))
    return own


def run(args: argparse.Namespace) -> None:
    rank = join_processes()
    seed = args.seed + 1000 * rank
    torch.manual_seed(seed)
    random.seed(seed)
    source = load_model(Path(args.checkpoint))
    compiled = not (args.smoke or args.eager)
    trainer = Trainer(load_model(Path(args.checkpoint)), args.device, args.dtype, compiled)
    code, chats = rows(args, seed)
    own = own_text(args, source, code, args.own) if args.own else []
    distiller = Distiller(trainer, compiled)
    optimizer = Optimizer(distiller.model.parameters(), args.muon_lr, args.adam_lr)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    with nullcontext() if rank else (out / "distill.jsonl").open("a") as log:
        state = loop(args, distiller, optimizer, MixedRows(code, own, args.own_share), chats, log)
    if not rank:
        save(out / "distill.pt", trainer, optimizer, state)


def loop(
    args: argparse.Namespace, distiller: Distiller, optimizer: Optimizer,
    code: CodeRows, chats: ChatRows, log: Any,
) -> State:  # fmt: skip
    started, state, threads = time.monotonic(), State(), Threads(args.polite)
    phase = SMOKE_PHASE if args.smoke else FAMILIES[args.model].distilled
    found: dict[str, list[float]] = {}
    while True:
        progress = state.step / args.steps if args.steps else state.elapsed / args.seconds
        if progress >= 1:
            return state
        threads.adjust()
        for kind, (count, length) in list_parts(phase, state.step).items():
            batch = make_batch(code, chats, count, length, float(kind == "code"))
            found[kind] = distiller.backward(batch, length, 0.5)
            state.seen += count * length * processes()
        state.elapsed = time.monotonic() - started
        average(distiller.trainer, state)
        optimizer.step(min(1.0, 0.1 + progress * 20, 1 - progress))
        state.step += 1
        if log and state.step % args.log_every == 0:
            line: dict[str, Any] = {
                "step": state.step,
                "seconds": round(state.elapsed, 1),
                "tokens": state.seen,
            }
            line |= found
            print(json.dumps(line), file=log, flush=True)
            print(json.dumps(line), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=FAMILIES, default="deepseek-tiny")
    parser.add_argument("--checkpoint", default="runs/tiny/train.pt")
    parser.add_argument("--out", default="runs/tiny")
    parser.add_argument("--tokenizer", default="recipes/deepseek_tiny")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--problems", type=int, default=20_000)
    parser.add_argument("--own", type=int, default=128, help="texts that the trunk writes first")
    parser.add_argument("--own-tokens", type=int, default=256)
    parser.add_argument("--own-share", type=float, default=0.3)
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=0.002)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--polite", action="store_true", help="with `nice`: see threads.py")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.log_every, args.own, args.own_tokens = args.steps or 3, 1, 2, 8
    return args


if __name__ == "__main__":
    run(arguments())
