"""Which part of a model one of several ranks holds (spec/deepseek-v3.md section 5)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mtpbuild.builder.models.deepseek_v3.config import ModelConfig
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.ranks import MAX_RANKS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Share:
    """One of `tp` ranks; tp 1 holds the whole.

    The ranks form `ep` groups: those of group g hold only the g-th part of the routed experts, and
    of each of these one of tp / ep column parts. Everything else is split tp ways or replicated;
    with attention-DP it is whole on each, which has requests of its own.
    """

    tp: int = 1
    ep: int = 1
    rank: int = 0  # matters to weights alone: the graph is the same for all ranks
    attention_dp: bool = False

    @property
    def parts(self) -> int:
        """Of all that is split, but for the routed experts."""
        return 1 if self.attention_dp else self.tp

    @property
    def group(self) -> int:
        """Which part of the routed experts, in the order of TensorRT-LLM: neighbours differ."""
        return self.rank % self.ep

    def experts(self, c: ModelConfig) -> range:
        """Ids of the routed experts."""
        count = c.n_routed_experts // self.ep
        return range(self.group * count, (self.group + 1) * count)

    def expert_inner(self, c: ModelConfig) -> int:
        """Columns of each of them."""
        return c.moe_intermediate_size * self.ep // self.tp

    def cut(self, name: str, axis: int | None, tensor: "Tensor") -> "Tensor":
        """This rank's part of a checkpoint tensor that ranks split along `axis`; None: all of it.

        An expert that is not among `experts` must not be asked for.
        """
        parts, part = self.parts, self.rank
        if ".mlp.experts." in name:
            parts, part = self.tp // self.ep, self.rank // self.ep
        if axis is None or parts == 1:
            return tensor
        size = tensor.shape[axis] // parts
        return tensor.narrow(axis, part * size, size)


WHOLE = Share()


def check_share(c: ModelConfig, tp: int, ep: int, attention_dp: bool = False) -> None:
    """Raise UsageError unless so many ranks can share the model; it names the numbers that can."""
    for flag, value in (("--tp", tp), ("--ep", ep)):
        if not 1 <= value <= MAX_RANKS:
            raise UsageError(f"{flag} {value} is outside 1..{MAX_RANKS}")
    share, experts = Share(tp, ep, attention_dp=attention_dp), c.n_routed_experts
    splits = [n for n in range(1, tp + 1) if tp % n == 0 and max(experts, 1) % n == 0]
    if ep not in splits:
        raise UsageError(
            f"--ep {ep} does not divide both --tp {tp} and the {experts} routed experts; "
            f"possible: {_list(splits)}"
        )
    why = next(_obstacles(c, share), None)
    if why:
        others = (replace(share, tp=n) for n in range(ep, MAX_RANKS + 1, ep))
        good = [other.tp for other in others if next(_obstacles(c, other), None) is None]
        raise UsageError(f"--tp {tp} does not divide {why}; possible: {_list(good)}")


def _obstacles(c: ModelConfig, share: Share) -> Iterator[str]:
    """What does not split into so many parts."""
    layers = range(c.num_hidden_layers + c.num_nextn_predict_layers)
    sizes = {"num_attention_heads": c.num_attention_heads, "vocab_size": c.vocab_size}
    if not all(c.is_moe(layer) for layer in layers):
        sizes["intermediate_size"] = c.intermediate_size
    if c.num_nextn_predict_layers:
        sizes["2 x hidden_size"] = 2 * c.hidden_size
    if c.n_shared_experts:
        sizes["moe_intermediate_size x n_shared_experts"] = (
            c.moe_intermediate_size * c.n_shared_experts
        )
    for name, size in sizes.items():
        if size % share.parts:
            yield f"{name} {size}"
    if c.n_routed_experts and c.moe_intermediate_size * share.ep % share.tp:
        yield f"moe_intermediate_size {c.moe_intermediate_size}" + (
            f" (into tp / ep = {share.tp // share.ep})" if share.ep > 1 else ""
        )


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "none"
