"""Choose which weights of an int4 trunk are int8, within a budget of bits.

Most of what int4 costs comes from few products. In some layers a unit of the MLP is hundreds of
times stronger than the others, so that rounding its column of `down_proj` changes the largest
channels that later layers read. Weights alone tell: a unit's strength is the norm of its row of
gate times that of up, more if both rows point the same way, times that of its column.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from math import prod

from mtpbuild.builder.formats import FORMATS
from mtpbuild.builder.lazy_torch import Tensor, torch
from mtpbuild.builder.models import ModelConfig, find_family_of
from mtpbuild.builder.models.common.weight import StoredTensor
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.scheme import WEIGHT_BITS, AnyScheme, Scheme, find_weight_role
from mtpbuild.builder.weights.table import make_family_table
from mtpbuild.runtime.errors import UsageError

DOWN = "mlp.down_proj.weight"
# Times the median unit. Massive ones make channels that later layers need and take away again.
STRONG, MASSIVE = 9.0, 15.0
ALIGNED = 10.0  # how much stronger a unit is whose rows of gate and up point the same way


def spend_bits(
    scheme: AnyScheme, config: ModelConfig, checkpoint: Checkpoint | None = None
) -> AnyScheme:
    """Choose which int4 weights are int8 until the budget is spent; no budget changes nothing.

    checkpoint: None if its weights are not known yet; then layers are chosen in their order. Raises
    UsageError for a budget that is too small or too large.
    """
    if scheme is None or scheme.bits is None:
        return scheme
    if not (weights := list_products(scheme, config)):
        raise UsageError(f"{WEIGHT_BITS}: no product of this model splits into blocks of 32")
    count = sum(prod(weight.shape) for weight in weights)
    sizes = {w.name: [count_bits(f, w) for f in ("int4", "int8")] for w in weights}
    plain = replace(scheme, int8_modules=())
    spent = sum(sizes[w.name][plain.wanted(config, w.name) == "int8"] for w in weights)
    budget, in_int8 = scheme.bits * count, sum(size for _, size in sizes.values())
    if not spent <= budget < in_int8:
        raise UsageError(
            f"{WEIGHT_BITS} {scheme.bits:g}: this model's int4 weights take "
            f"{spent / count:.2f} bits on average and int8 {in_int8 / count:.2f}: give a number "
            "between them"
        )
    globs = list[str]()
    for glob, names in order_groups(config, weights, checkpoint):
        more = sum(sizes[n][1] - sizes[n][0] for n in names if plain.wanted(config, n) == "int4")
        if spent + more <= budget:
            spent += more
            globs.append(glob)
    return replace(scheme, int8_modules=tuple(globs))


def list_products(scheme: Scheme, config: ModelConfig) -> list[StoredTensor]:
    """Return the weights of the trunk that int4 engines quantise."""
    return [
        stored
        for stored in make_family_table(config).stored.values()
        if find_weight_role(config, stored.name) == "main"
        and scheme.wanted(config, stored.name) is not None
        and FORMATS["int8"].fits(stored.shape)
    ]


def count_bits(format: str, weight: StoredTensor) -> int:
    return 8 * sum(entry.nbytes for entry in FORMATS[format].parts(weight.shape).values())


def order_groups(
    config: ModelConfig, weights: Iterable[StoredTensor], checkpoint: Checkpoint | None
) -> list[tuple[str, list[str]]]:
    """Return globs of modules that get one format, with their weights.

    Those come first whose rounding costs most: `down_proj` of layers with strong units, attention,
    `down_proj` of other layers, the rest. The rest of an MLP is two thirds of it, so that its glob
    covers a `down_proj` that is chosen already.
    """
    family = find_family_of(config)
    groups = defaultdict[tuple[int, float, int, str], list[str]](list)
    for weight in weights:
        place = family.place(config, weight.name)
        assert place is not None
        layer, part = place
        if "down_proj" in part:
            strength = 0.0  # of experts
            if checkpoint is not None and part == DOWN:
                strength = measure_strength(checkpoint, config, layer)
            key = (2 * (strength < STRONG), -min(strength, MASSIVE), layer, "*down_proj")
            groups[key].append(weight.name)
        else:
            glob = "mlp.*" if part.startswith("mlp.") else "*attn.*"
            groups[1 + 2 * part.startswith("mlp."), 0.0, layer, glob].append(weight.name)
    ordered = sorted(groups.items())
    return [(f"model.layers.{layer}.{glob}", names) for (_, _, layer, glob), names in ordered]


def measure_strength(checkpoint: Checkpoint, config: ModelConfig, layer: int) -> float:
    """Return how much stronger the strongest unit of a layer's MLP is than the median one."""
    at = f"model.layers.{layer}"
    norm = checkpoint.read(f"{at}.post_attention_layernorm.weight") + config.norms_minus_one
    gates, ups = (checkpoint.rows(f"{at}.mlp.{name}_proj.weight") for name in ("gate", "up"))
    units = list[Tensor]()
    for gate, up in zip(gates, ups, strict=True):
        g, u = gate * norm, up * norm
        units.append(g.norm(dim=1) * u.norm(dim=1) + ALIGNED * (g * u).sum(1).abs())
    squares = sum(rows.square().sum(0) for rows in checkpoint.rows(f"{at}.{DOWN}"))
    strengths = torch.cat(units) * torch.as_tensor(squares).sqrt()
    return (strengths.max() / strengths.median().clamp_min(1e-30)).item()
