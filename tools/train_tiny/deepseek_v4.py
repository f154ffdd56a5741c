"""Trains a small DeepSeek-V4, and counts which drafts an engine of it and its plain model accept.

    python tools/train_tiny/deepseek_v4.py runs/v4 --seconds 1200    # 20 minutes of one core
    python tools/train_tiny/deepseek_v4.py runs/v4 --dspark 1200     # a head for it, 20 more
    python tools/train_tiny/deepseek_v4.py runs/v4                   # only counts

The first command again goes on where the training was. The head learns what the trained trunk
predicts. The plain model computes each draft without caches, from all tokens before it.
"""

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

import train
from data import Batch, ChatRows, CodeRows, common_words, make_batch, reasoning_documents
from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.models.deepseek_v4.config import DeepseekV4Config
from mtpbuild.builder.models.deepseek_v4.reference import PlainDeepseekV4
from mtpbuild.builder.plan.recipe import find_built_in
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.lab.measure.workbench import WORKBENCH
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.configuration.input_file import read_requests
from muon import Optimizer

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": 2048,
    "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 1, "qk_rope_head_dim": 16, "q_lora_rank": 64, "o_groups": 2,
    "o_lora_rank": 32, "sliding_window": 32, "compress_ratios": [0, 4, 16, 4, 0],
    "index_n_heads": 4, "index_head_dim": 32, "index_topk": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 128,
    "num_hash_layers": 1, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu", "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0, "max_position_embeddings": 2048, "bos_token_id": 0,
    "eos_token_id": 1, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
}  # fmt: skip
BLOCK = 5  # tokens of a DSpark head's block
DSPARK: dict[str, Any] = {
    "compress_ratios": [0, 4, 16, 4, 0, 0], "dspark_block_size": BLOCK, "dspark_noise_token_id": 9,
    "dspark_target_layer_ids": [1, 2, 3], "dspark_markov_rank": 64,
}  # fmt: skip
TOKENIZER, HEAD = Path("recipes/deepseek_tiny"), "dspark"
NEXTN, TOKENS, PROMPTS = 3, 96, 40  # the module's drafts, tokens of a text, held-out problems
ROWS, LENGTH, ANCHORS = 8, 256, 16  # of a batch: texts, their tokens, blocks in each
LATER = 0.8  # what a draft's loss weighs of that of the one before
Histogram = Counter[int]  # how many steps accepted so many drafts


def write_source(folder: Path) -> Path:
    """Write the files that a training begins with."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in train.FILES:
        shutil.copyfile(TOKENIZER / name, folder / name)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    return folder


def train_head(model: Path, out: Path, seconds: float, steps: int) -> None:
    """Train a DSpark head for so much CPU time, or for steps; write it with the model's trunk."""
    out.mkdir(exist_ok=True)
    (out / "model.safetensors").unlink(missing_ok=True)
    (out / "config.json").write_text(json.dumps(CONFIG | DSPARK, indent=2) + "\n")
    plain = PlainDeepseekV4(cast(DeepseekV4Config, load_config(out)))
    train.initialise(plain)
    stored = load_file(model / "model.safetensors")
    trunk = {name: value for name, value in stored.items() if not name.startswith("mtp.")}
    plain.load_state_dict(trunk, strict=False)
    plain.requires_grad_(False)
    for stage in plain.stages:
        stage.requires_grad_(True)
    optimizer = Optimizer(plain, muon_lr=0.007, adam_lr=0.002)
    words, tokenizer = common_words(), Tokenizer.from_file(str(model / "tokenizer.json"))
    chats = ChatRows(
        reasoning_documents(tokenizer, 200 if steps else 50_000, words, seed=1), seed=1
    )
    started, step, progress = time.process_time(), 0, 0.0
    while progress < 1:
        loss = measure_blocks(plain, make_batch(CodeRows([], 0), chats, ROWS, LENGTH, 0.0))
        loss.backward()
        optimizer.step(min(1.0, progress / 0.01 + 0.05, (1 - progress) / 0.65))
        step, spent = step + 1, time.process_time() - started
        progress = step / steps if steps else spent / seconds
        if step % 20 == 0:
            print(json.dumps({"step": step, "seconds": spent, "loss": round(loss.item(), 4)}))
    train.write_checkpoint(plain, model, out)
    (out / "config.json").write_text(json.dumps(CONFIG | DSPARK, indent=2) + "\n")


def measure_blocks(plain: PlainDeepseekV4, batch: Batch) -> Tensor:
    """Return the loss of blocks at random places of a batch on the trunk's own predictions.

    Before the Markov head a block's tokens are the text's; a later draft counts less.
    """
    text, W, k = batch.tokens[:, :LENGTH], CONFIG["sliding_window"], BLOCK
    with torch.no_grad():
        streams = plain.run(text)
        wanted = (train.SHARPNESS * plain.logits(streams[-1].flatten(2))).softmax(-1)
    at = torch.randint(W, LENGTH - k, (ROWS, ANCHORS))  # the last known token, after W others
    row = torch.arange(ROWS)[:, None, None]
    before = (row, at[..., None] + torch.arange(-W, 0))
    ahead = (row, at[..., None] + torch.arange(k))
    context = [part[before].flatten(0, 1) for part in streams]
    tokens = text[ahead].flatten(0, 1)
    logits = plain.run_block(context, tokens[:, 0], k) + plain.stages[-1].markov_head(tokens)
    losses = -(wanted[ahead].flatten(0, 1) * logits.log_softmax(-1)).sum(-1)
    weights = (batch.targets(1, LENGTH)[ahead].flatten(0, 1) >= 0) * LATER ** torch.arange(k)
    return (losses * weights).sum() / weights.sum().clamp(min=1)


def draft(plain: PlainLM, tokens: Sequence[int], hidden: Tensor) -> list[int]:
    """Return the drafts after tokens; hidden [1, T - 1, ..]: the trunk's of all but the last."""
    if isinstance(plain, PlainDeepseekV4) and plain.config.head:
        return [int(logits.argmax()) for logits in plain.draft_block([*tokens], BLOCK)]
    following = list(tokens[1:])
    for _ in range(NEXTN):
        y = plain.mtp(1, torch.tensor([following]), hidden)[:, -1:]
        following.append(int(plain.draft_logits(1, y).argmax()))
        hidden = torch.cat([hidden, y], dim=1)
    return following[-NEXTN:]


@torch.no_grad()
def continue_plainly(plain: PlainLM, prompt: Sequence[int], text: Sequence[int]) -> list[int]:
    """Return the plain model's greedy text after a prompt, with room for a step's drafts.

    text: what it says, as far as that is known; other tokens are replaced.
    """
    while True:
        tokens = [*prompt, *text]
        logits = plain.logits(plain.main(torch.tensor([tokens])))[0, len(prompt) - 1 :]
        best = logits.argmax(-1).tolist()
        right = next(
            (i for i, (a, b) in enumerate(zip(text, best, strict=False)) if a != b), len(text)
        )
        text = best[: right + 1]
        if len(text) > TOKENS + BLOCK:
            return text


@torch.no_grad()
def count_accepted(plain: PlainLM, prompt: Sequence[int], text: Sequence[int]) -> Histogram:
    """Count the steps that give a text's first tokens; the first step has no drafts to accept."""
    tokens, at, accepted = [*prompt, *text], len(prompt) + 1, Counter({0: 1})
    hidden = plain.main(torch.tensor([tokens]))
    while at < len(prompt) + TOKENS:
        drafts = draft(plain, tokens[:at], hidden[:, : at - 1])
        wrong = [d != t for d, t in zip(drafts, tokens[at:], strict=False)]
        right = wrong.index(True) if True in wrong else len(drafts)
        accepted[right] += 1
        at += right + 1
    return accepted


def describe(accepted: Histogram, nextn: int) -> str:
    """Return the share of steps that accepted each draft, and the mean number of tokens."""
    steps = accepted.total()
    shares = [sum(n for j, n in accepted.items() if j > i) / steps for i in range(nextn)]
    length = 1 + sum(j * n for j, n in accepted.items()) / steps
    places = " ".join(f"{share:.4f}" for share in shares)
    return f"by position {places}, tokens a step {length:.3f}, steps {steps}"


def measure(model: Path, prompts: int) -> None:
    """Print acceptance by position of an engine, and of the plain model on the same prompts."""
    plain = load_plain(model)
    nextn = BLOCK if plain.config.head else NEXTN
    (built,) = build(BuildRequest(str(model), nextn=(nextn,), out=model / "engines"), WORKBENCH)
    how = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    engines, plains = Histogram(), Histogram()
    same = alike = 0
    with Engine.load(built.folder, threads=1, prefix_cache=False) as engine:
        for request in read_requests(find_built_in("reasoning"), engine, how)[:prompts]:
            answer = engine.generate(request.token_ids, how)
            drafting = answer.metrics.speculative_decoding
            counted = Counter(dict(enumerate(drafting.acceptance_histogram)))
            text = continue_plainly(plain, request.token_ids, answer.token_ids)
            wanted = count_accepted(plain, request.token_ids, text)
            engines += counted
            plains += wanted
            same += list(answer.token_ids) == text[:TOKENS]
            alike += +counted == +wanted
    print(f"engine       {describe(engines, nextn)}")
    print(f"plain model  {describe(plains, nextn)}")
    print(
        f"{same} of {prompts} texts are the plain model's; steps of {alike} accept as many drafts"
    )


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("out", type=Path, help="folder of the checkpoint and the training's state")
    parser.add_argument("--seconds", type=float, help="how much CPU time to train")
    parser.add_argument("--dspark", type=float, help="how much of it to train a DSpark head")
    parser.add_argument("--small", action="store_true", help="some steps and prompts, for a try")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.seconds is not None or args.small:
        source = write_source(args.out / "source")
        budget = ["--steps", "6", "--small"] if args.small else ["--seconds", str(args.seconds)]
        sys.argv[1:] = [str(source), "--out", str(args.out), "--cpu-time", *budget]
        train.main()
    if args.dspark is not None or args.small:
        train_head(args.out, args.out / HEAD, args.dspark, 2 if args.small else 0)
    for model in (args.out, args.out / HEAD):
        if model.exists() and (args.dspark is None or model.name == HEAD):
            measure(model, 1 if args.small else PROMPTS)


if __name__ == "__main__":
    main()
