"""Trains a small DeepSeek-V4, and counts which drafts an engine of it and its plain model accept.

    python tools/train_tiny/deepseek_v4.py runs/v4 --seconds 1200    # 20 minutes of one core
    python tools/train_tiny/deepseek_v4.py runs/v4                   # only counts

The same command again goes on where the training was. The plain model computes each draft without
caches, from all tokens before it.
"""

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import train
from mtpbuild.builder.compiler.build import build
from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.plan.recipe import find_built_in
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.lab.measure.workbench import WORKBENCH
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.configuration.input_file import read_requests

CONFIG = {
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
TOKENIZER = Path("recipes/deepseek_tiny")
NEXTN, TOKENS, PROMPTS = 3, 96, 40  # drafts, tokens of a text, held-out problems
Histogram = Counter[int]  # how many steps accepted so many drafts


def write_source(folder: Path) -> Path:
    """Write the files that a training begins with."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in train.FILES:
        shutil.copyfile(TOKENIZER / name, folder / name)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    return folder


def draft(plain: PlainLM, tokens: Sequence[int], hidden: Tensor) -> list[int]:
    """Return the drafts after tokens; hidden [1, T - 1, ..]: the trunk's of all but the last."""
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
        if len(text) > TOKENS + NEXTN:
            return text


@torch.no_grad()
def count_accepted(plain: PlainLM, prompt: Sequence[int], text: Sequence[int]) -> Histogram:
    """Count the steps that give a text's first tokens; the first step has no drafts to accept."""
    tokens, at, accepted = [*prompt, *text], len(prompt) + 1, Counter({0: 1})
    hidden = plain.main(torch.tensor([tokens]))
    while at < len(prompt) + TOKENS:
        drafts = draft(plain, tokens[:at], hidden[:, : at - 1])
        wrong = [d != t for d, t in zip(drafts, tokens[at:], strict=False)]
        right = wrong.index(True) if True in wrong else NEXTN
        accepted[right] += 1
        at += right + 1
    return accepted


def describe(accepted: Histogram) -> str:
    """Return the share of steps that accepted each draft, and the mean number of tokens."""
    steps = accepted.total()
    shares = [sum(n for j, n in accepted.items() if j > i) / steps for i in range(NEXTN)]
    length = 1 + sum(j * n for j, n in accepted.items()) / steps
    places = " ".join(f"{share:.4f}" for share in shares)
    return f"by position {places}, tokens a step {length:.3f}, steps {steps}"


def measure(model: Path, prompts: int) -> None:
    """Print acceptance by position of an engine, and of the plain model on the same prompts."""
    plain = load_plain(model)
    (built,) = build(BuildRequest(str(model), nextn=(NEXTN,), out=model / "engines"), WORKBENCH)
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
    print(f"engine       {describe(engines)}")
    print(f"plain model  {describe(plains)}")
    print(
        f"{same} of {prompts} texts are the plain model's; steps of {alike} accept as many drafts"
    )


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("out", type=Path, help="folder of the checkpoint and the training's state")
    parser.add_argument("--seconds", type=float, help="how much CPU time to train")
    parser.add_argument("--small", action="store_true", help="some steps and prompts, for a try")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.seconds is not None or args.small:
        source = write_source(args.out / "source")
        budget = ["--steps", "6", "--small"] if args.small else ["--seconds", str(args.seconds)]
        sys.argv[1:] = [str(source), "--out", str(args.out), "--cpu-time", *budget]
        train.main()
    measure(args.out, 1 if args.small else PROMPTS)


if __name__ == "__main__":
    main()
