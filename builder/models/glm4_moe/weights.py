"""GLM-4.5's table from checkpoint tensors to the program's weights."""

from functools import partial

from mtpbuild.builder.models.common.grouped_weights import grouped_weights
from mtpbuild.builder.models.common.moe_weights import make_moe_table
from mtpbuild.builder.models.common.weight import Share, Weight
from mtpbuild.builder.models.glm4_moe.config import Glm4MoeConfig


def weight_table(c: Glm4MoeConfig, share: Share) -> list[Weight]:
    """Return every weight of main model and MTP modules, in the order of use."""
    return make_moe_table(c, share, partial(grouped_weights, c))
