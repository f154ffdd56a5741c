"""Acceptance in TensorRT: the Triton kernels as AOT plugins; none of them sorts."""

from torch import Tensor

from mtpbuild.plugins.accept_rewind.distribution import Shaping
from mtpbuild.plugins.accept_rewind.mixed import Judging
from mtpbuild.plugins.accept_rewind.triton import greedy_launches
from mtpbuild.plugins.accept_rewind.triton_law import law_launch
from mtpbuild.plugins.accept_rewind.triton_mixed import mixed_launches
from mtpbuild.plugins.aot import as_plugins
from mtpbuild.plugins.launch import Launch


def _mixed_launches(
    logits: Tensor,
    window: Tensor,
    num_drafts: Tensor,
    lengths: Tensor,
    active: Tensor,
    thinking: Tensor,
    draft_probs: Tensor,
    *asked: Tensor,
) -> tuple[Launch, ...]:
    """Operands as of the op."""
    judging = Judging(Shaping(*asked[:4]), *asked[4:])
    return mixed_launches(
        logits, window, num_drafts, lengths, active, thinking, draft_probs, judging
    )


accept_rewind_tensorrt = as_plugins(greedy_launches, lambda made: made[-1].outputs)
accept_mixed_tensorrt = as_plugins(
    _mixed_launches, lambda made: (*made[-1].outputs, made[-2].outputs[1])
)
shaped_probs_tensorrt = as_plugins(
    lambda *operands: (law_launch(*operands),), lambda made: made[0].outputs[0]
)
