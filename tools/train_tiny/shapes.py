"""Makes the card's study of shapes: a step's cost, and the loss after the same training time.

Every shape is trained for the same seconds, exported, built (nextn 0, 3, and 3 without drafting)
and timed by `mtpbuild bench` on the same prompts. Compare v, d and the loss; acceptance means
little after minutes of training.
"""

import argparse
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import train
from data import make_batch
from export import write
from families import Phase
from model import Model, Shape, TrainedModel
from muon import Optimizer

SHAPES = {
    "20 layers of 192, 2 of them MoE": Shape(),
    "20 layers of 192, 12 of them MoE": Shape(first_k_dense_replace=8),
    "12 layers of 256, 2 MoE": Shape(
        hidden_size=256, intermediate_size=512, num_hidden_layers=12, first_k_dense_replace=10,
        q_lora_rank=128,
    ),
    "28 layers of 160, 2 MoE": Shape(
        hidden_size=160, intermediate_size=320, num_hidden_layers=28, first_k_dense_replace=26,
    ),
    "32 layers of 128, 2 MoE": Shape(
        hidden_size=128, intermediate_size=320, num_hidden_layers=32, first_k_dense_replace=30,
        q_lora_rank=64,
    ),
}  # fmt: skip
NEXTN = 3
TRIAL = (Phase(1.0, (8, 256), (8, 256), mtp=True),)
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def trained(shape: Shape, args: argparse.Namespace) -> tuple[TrainedModel, dict[str, float]]:
    """Train a model for `args.seconds`; return it and its losses on held-out text."""
    torch.manual_seed(7)
    torch.set_num_threads(args.threads)
    settings = SimpleNamespace(
        **vars(args), smoke=False, problems=20_000, muon_lr=0.01, adam_lr=0.003, steps=0,
        log_every=20, polite=False, phases=TRIAL,
    )  # fmt: skip
    trainer = train.Trainer(Model(shape), "cpu", "bf16", compiled=True)
    optimizer = Optimizer(trainer.model.parameters(), settings.muon_lr, settings.adam_lr)
    code, chats = train.rows(settings, seed=7)  # type: ignore[arg-type]
    state, log = train.State(), args.out / "train.jsonl"
    warm_up(trainer, code, chats)
    with log.open("a") as file:
        train.loop(
            settings, trainer, optimizer, state, code, chats, file, args.out / "train.pt"  # type: ignore[arg-type]
        )  # fmt: skip
    losses = {"tokens": float(state.seen)}
    with torch.no_grad():
        for kind, share in (("code", 1.0), ("reasoning", 0.0)):
            code, chats = train.rows(settings, seed=8, held_out=True)  # type: ignore[arg-type]
            batch = make_batch(code, chats, 16, 256, share)
            sums, counts = trainer.losses(batch, 256, mtp=True)
            losses[kind] = float(sums[0]) / counts[0]
            losses[f"{kind}, module 1"] = float(sums[1]) / counts[1]
    return trainer.model, losses


def warm_up(trainer: train.Trainer, code: Any, chats: Any) -> None:
    """Compile before the clock starts."""
    for rows, length, share in ((8, 256, 1.0), (8, 256, 0.0)):
        trainer.backward(make_batch(code, chats, rows, length, share), length, True, 0.5)
    trainer.model.zero_grad(set_to_none=True)


def timed(model: TrainedModel, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Measure milliseconds per step and their ratios with mtpbuild's own benchmark."""
    from mtpbuild.builder.bench.bench import BenchRequest, bench
    from mtpbuild.builder.bench.report import make_bench_json
    from mtpbuild.builder.measure.prompts import Dataset
    from mtpbuild.builder.plan.request import BuildRequest

    write(model, folder)
    for name in FILES:
        shutil.copy(Path(args.tokenizer) / name, folder / name)
    asked = Dataset(num_requests=args.requests, output_len=96)
    built = BuildRequest(str(folder), (NEXTN,))
    [report] = bench(BenchRequest(built, asked, threads=args.threads, out=folder / "bench"))
    plain, drafting = make_bench_json(report)["results"]
    v, d = drafting["verify_cost"], drafting["draft_cost"]
    return {
        "step": plain["step_ms"],
        "verify": drafting["verify_step_ms"],
        "draft": (drafting["step_ms"] - drafting["verify_step_ms"]) / NEXTN,
        "v": v,
        "d": d,
        "speedup at 3.15": 3.15 / (v + d),
        "tokens/s at 3.15": 3150 / drafting["step_ms"],
    }


def main(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    os.chdir(args.out)  # keep the study's engines apart from the user's
    lines = []
    for i, (name, shape) in enumerate(SHAPES.items()):
        if args.only and i not in args.only:
            continue
        model, losses = trained(shape, args)
        found = {"shape": name, "parameters": sum(p.numel() for p in model.parameters())}
        found |= losses | timed(model, args.out / f"shape{i}", args)
        lines.append(found)
        print(json.dumps(found), flush=True)
    head = list(lines[0])
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for line in lines:
        cells = (f"{x:.3g}" if isinstance(x, float) else str(x) for x in line.values())
        print(f"| {' | '.join(cells)} |")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=150, help="training time of each shape")
    parser.add_argument("--out", type=Path, default=Path("runs/shapes"))
    parser.add_argument("--tokenizer", default="recipes/deepseek_tiny")
    parser.add_argument("--requests", type=int, default=6, help="timed requests of each kind")
    parser.add_argument("--threads", type=int, default=2, help="for training and for the engines")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the shapes, from 0")
    args = parser.parse_args()
    args.out, args.tokenizer = args.out.resolve(), str(Path(args.tokenizer).resolve())
    return args


if __name__ == "__main__":
    main(arguments())
