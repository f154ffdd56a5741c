"""Initialises qwen-tiny from deepseek-tiny: copies equal parts, and fits the mixers."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data import Batch, ChatRows, CodeRows, make_batch
from export import load_folder
from model import Block as TeacherBlock
from model import DenseFFN, TrainedModel
from muon import Optimizer
from qwen import Block, QwenModel, QwenShape, links
from train import State, Trainer, rows, save

LENGTH = 256


@torch.no_grad()
def copy_fitting(student: TrainedModel, teacher: TrainedModel) -> None:
    """Copy embedding, head, norms and dense feed-forward weights."""
    student.embed.copy_(teacher.embed)
    student.head.copy_(teacher.head)
    student.norm.weight.copy_(teacher.norm.weight - 1)
    module, theirs = student.mtp[0], teacher.mtp[0]
    module.fc.copy_(theirs.eh_proj)
    for name in ("enorm", "hnorm", "norm"):
        getattr(module, name).weight.copy_(getattr(theirs, name).weight - 1)
    for ours, given in zip(parts(student), parts(teacher), strict=True):
        ours.input_norm.weight.copy_(given.input_norm.weight - 1)
        ours.post_norm.weight.copy_(given.post_norm.weight - 1)
        if isinstance(given.ffn, DenseFFN):
            ours.ffn.load_state_dict(given.ffn.state_dict())


def parts(model: TrainedModel) -> list[Any]:
    return [*model.layers, *(module.block for module in model.mtp[:1])]


def mixed(block: TeacherBlock, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    return block.attention(block.input_norm(x), cos, sin, mask).float()  # without the residual


def fed(block: TeacherBlock, x: Tensor) -> Tensor:
    return block.ffn(block.post_norm(x)).float()  # without the residual


def mixer_error(block: Block, x: Tensor, target: Tensor, valid: Tensor, *given: Tensor) -> Tensor:
    return error(block.attention(block.input_norm(x), *given), target, valid)


def ffn_error(block: Block, x: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    return error(block.ffn(block.post_norm(x)), target, valid)


def error(made: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Return the squared error relative to the target's square, over valid slots."""
    wrong = ((made.float() - target).square().sum(-1) * valid).sum()
    return wrong / ((target.square().sum(-1) * valid).sum() + 1e-6)


class Aligner:
    """The student's errors, computed layer by layer, each on the teacher's own hidden states."""

    def __init__(self, student: TrainedModel, teacher: TrainedModel, compiled: bool) -> None:
        self.student, self.teacher = student, teacher
        for parameter in teacher.parameters():
            parameter.requires_grad_(False)
        wrap: Any = torch.compile(dynamic=False) if compiled else lambda f: f
        self.mixed, self.fed = wrap(mixed), wrap(fed)
        self.mixer_error, self.ffn_error = wrap(mixer_error), wrap(ffn_error)

    def backward(self, batch: Batch) -> list[float]:
        """Add the gradients of all layers' errors to the parameters; return the errors."""
        mask, tokens, teacher = batch.mask(LENGTH), batch.tokens, self.teacher
        valid = (batch.document[:, :LENGTH] >= 0).float()
        x = F.embedding(tokens[:, :LENGTH], teacher.embed)
        errors: list[float] = []
        for ours, given in zip(parts(self.student), parts(teacher), strict=True):
            if given is teacher.mtp[0].block:
                following = F.embedding(tokens[:, 1 : LENGTH + 1], teacher.embed)
                x = teacher.mtp[0].join(teacher.norm(x), following)
            x = self.layer(ours, given, x, valid, mask, errors)
        return errors

    def layer(
        self, ours: Block, given: TeacherBlock, x: Tensor, valid: Tensor, mask: Tensor,
        errors: list[float],
    ) -> Tensor:  # fmt: skip
        """Fit the mixer, and the feed-forward part if not copied; return the teacher's output."""
        student, teacher = self.student, self.teacher
        with torch.no_grad():
            target = self.mixed(given, x, teacher.cos[:LENGTH], teacher.sin[:LENGTH], mask)
        seen = links(mask, student.shape.linear_conv_kernel_dim)
        angles = student.cos[:LENGTH], student.sin[:LENGTH]
        found = [self.mixer_error(ours, x, target, valid, *angles, mask, seen)]
        x = x + target
        with torch.no_grad():
            target = self.fed(given, x)
        if not isinstance(given.ffn, DenseFFN):
            found.append(self.ffn_error(ours, x, target, valid))
        torch.stack(found).sum().backward()
        errors += [round(e.item(), 3) for e in found]
        return x + target


def rows_of_both(code: CodeRows, chats: ChatRows) -> Batch:
    made = [make_batch(code, chats, n, LENGTH, share) for n, share in ((4, 1.0), (12, 0.0))]
    fields = zip(*(vars(batch).values() for batch in made), strict=True)
    return Batch(*(torch.cat(field) for field in fields))


def run(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    teacher = load_folder(Path(args.teacher))
    trainer = Trainer(QwenModel(QwenShape()), args.device, args.dtype, compiled=False)
    copy_fitting(trainer.model, teacher)
    aligner = Aligner(trainer.model, teacher, not args.eager)
    code, chats = rows(args, args.seed)
    optimizer = Optimizer(trainer.model.parameters(), args.muon_lr, args.adam_lr)
    started, step = time.monotonic(), 0
    with (out / "align.jsonl").open("a") as log:
        while (progress := (time.monotonic() - started) / args.seconds) < 1:
            with trainer.autocast():
                found = aligner.backward(rows_of_both(code, chats))
            optimizer.step(min(1.0, progress / 0.02 + 0.05, 2 * (1 - progress)))
            step += 1
            if step % args.log_every == 0:
                line = {"step": step, "seconds": round(time.monotonic() - started, 1)}
                print(json.dumps(line | {"errors": found}), file=log, flush=True)
                print(json.dumps(line | {"errors": found}), flush=True)
    save(out / "align.pt", trainer, optimizer, State())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", default="recipes/deepseek_tiny")
    parser.add_argument("--out", default="runs/qwen")
    parser.add_argument("--tokenizer", default="recipes/deepseek_tiny")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--problems", type=int, default=40_000)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.003)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    args.smoke = False
    return args


if __name__ == "__main__":
    run(arguments())
