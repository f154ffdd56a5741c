"""Rounds numbers as quantised operators do, and judges engines by them."""

from pathlib import Path

from torch import Tensor, nn

from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.lab.measure.checks import ROUNDED
from mtpbuild.lab.measure.runs import TimedAnswer, run_prompts
from mtpbuild.lab.verify.plain import judge_texts, load_plain
from mtpbuild.runtime import Engine, SamplingParams

EQUAL = 1e-4  # largest difference of log-probabilities where nothing was rounded another way


def in_int8_blocks(x: Tensor) -> Tensor:
    """Round x as our kernels round inputs: to int8, with a scale for each block of 32."""
    blocks = x.unflatten(-1, (-1, 32))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return ((blocks / scales).round() * scales).flatten(-2)


def plain_with_rounding(folder: Path) -> PlainLM:
    """Make the dequantised model, which rounds the inputs of quantised products."""
    model, checkpoint = load_plain(folder), open_checkpoint(folder)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and checkpoint.format(f"{name}.weight") is not None:
            module.register_forward_pre_hook(lambda _, given: (in_int8_blocks(given[0]),))
    return model


def played(engine: Path, prompts: list[list[int]], count: int = 40) -> list[TimedAnswer]:
    """Return greedy texts with their log-probabilities."""
    params = [SamplingParams(max_tokens=count, ignore_eos=True, logprobs=1)] * len(prompts)
    with Engine.load(engine, threads=1, prefix_cache=False) as loaded:
        return run_prompts(loaded, prompts, params)


def check_rounded(plain: PlainLM, prompts: list[list[int]], said: list[TimedAnswer]) -> None:
    """Check that texts are the plain model's but for rounding, and that some drafts are kept.

    A number midway between two integers may be rounded either way, and recurrent states keep the
    difference. So every text is near the model's, and the nearest one is equal.
    """
    found = judge_texts(plain, prompts, said, ROUNDED)
    assert found.passed, found.detail
    each = [judge_texts(plain, [p], [t], ROUNDED) for p, t in zip(prompts, said, strict=True)]
    assert min(text.figures["noise"] for text in each) < EQUAL
    assert sum(text.drafting.num_accepted_draft_tokens for text in said) > 0
