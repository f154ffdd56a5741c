"""The values that heads have in common which draft a block of tokens in one pass."""

from dataclasses import dataclass
from typing import Any

from mtpbuild.builder.checkpoint.config import HeadConfig, Reader, fixed
from mtpbuild.runtime.checks import NEXTN_LIMIT
from mtpbuild.runtime.contract.drafters import BLOCK_HEAD
from mtpbuild.runtime.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class BlockHeadConfig(HeadConfig):
    """The values of a block: its size, its mask, and what its drafts are made of."""

    drafter = BLOCK_HEAD

    block_size: int = fixed(0)
    mask_token_id: int = fixed(0)
    taps: tuple[int, ...] = fixed(())  # layers of the trunk whose inputs make the context
    markov_rank: int = fixed(0)  # of the bias by the token before; 0: there is none
    from_anchor: bool = fixed(False)  # the newest token's place has a draft, too

    @property
    def added_width(self) -> int:
        return self.hidden_size

    @property
    def cached_layers(self) -> int:
        return self.num_hidden_layers

    @property
    def usual_nextn(self) -> int:
        return min(5, self.most_drafts)

    @property
    def most_drafts(self) -> int:
        return min(self.block_size - (not self.from_anchor), NEXTN_LIMIT)


def read_layer_ids(read: Reader, key: str, layers: int) -> tuple[int, ...]:
    """Read numbers of the trunk's layers, whose outputs are tapped, as layers that read these."""

    def are_layers(value: Any) -> bool:
        return isinstance(value, list) and all(type(i) is int and -1 <= i < layers for i in value)

    ids: list[int] = read.get(key, [], are_layers, f"a list of layers up to {layers - 1}")
    if not ids:
        raise CheckpointError(f"{key} is missing")
    return tuple(i + 1 for i in ids)
