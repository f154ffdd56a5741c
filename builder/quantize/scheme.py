"""A scheme says by name how weights of main model and MTP modules are quantised, if they are."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from mtpbuild.builder.models import ModelConfig, family_of
from mtpbuild.builder.models.common.copies import EMBEDDING, HEAD
from mtpbuild.builder.models.common.weights import Source
from mtpbuild.builder.quantize.asked import HEADS, NONE, check_choice
from mtpbuild.builder.quantize.formats import FORMATS, Format
from mtpbuild.runtime.contract.manifest import HeadType, QuantisedType
from mtpbuild.runtime.errors import UsageError

PLAIN = "bf16"
CHOICES = (PLAIN, *FORMATS)
# Globs over module names, as in ModelOpt's `exclude_modules`.
EXCLUDED: Mapping[str, tuple[str, ...]] = {
    "fp8": (),
    "nvfp4": ("model.layers.*.self_attn*",),  # nvidia/DeepSeek-R1-FP4
    "int8": ("model.layers.*.self_attn.kv_b_proj",),  # used in the absorbed form, not as a product
    "int4": ("model.layers.*.self_attn.kv_b_proj",),
}
NVFP4_V2 = tuple(  # nvidia/DeepSeek-R1-0528-FP4-v2: o_proj is quantised too
    f"model.layers.*.self_attn.{name}"
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
)


@dataclass(frozen=True)
class Scheme:
    """Formats of the main model's and the MTP modules' weights, and of embedding and head.

    exclude: None for each format's own list.
    """

    main: str
    mtp: str
    exclude: tuple[str, ...] | None = None
    head: str = PLAIN

    def format(self, config: ModelConfig, source: Source) -> Format | None:
        """The format of one weight; None: as it is."""
        format = self.wanted(config, source.name)
        return format if format is not None and format.fits(source.shape) else None

    def wanted(self, config: ModelConfig, name: str) -> Format | None:
        """The format that a weight has if its shape splits into the format's blocks."""
        format = self._asked(config, name)
        place = family_of(config).place(config, name)
        if place is not None:  # globs know modules as layers behind the trunk's
            name = f"model.layers.{place[0]}.{place[1]}"
        module = name.removesuffix(".weight")
        if format == PLAIN or any(fnmatchcase(module, glob) for glob in self.globs(format)):
            return None
        return FORMATS[format]

    def _asked(self, config: ModelConfig, name: str) -> str:
        family = family_of(config)
        if name in (EMBEDDING, HEAD, *(copy.name for copy in family.copies(config))):
            return self.head
        layer = family.may_be_quantised(config, name)
        if layer is None:
            return PLAIN
        return self.main if layer < config.num_hidden_layers else self.mtp

    def exclude_modules(self, config: ModelConfig) -> list[str]:
        """The list as ModelOpt writes it."""
        names = ["lm_head", *self.globs(self.main)]
        if self.mtp == PLAIN:
            family, count = family_of(config), config.num_nextn_predict_layers
            names += [f"{family.module_name(config, j)}*" for j in range(count)]
        return names

    def globs(self, format: str) -> tuple[str, ...]:
        return EXCLUDED.get(format, ()) if self.exclude is None else self.exclude


# The published checkpoints' layouts, and our own.
SCHEMES: Mapping[str, Scheme] = {
    PLAIN: Scheme(PLAIN, PLAIN),
    "fp8": Scheme("fp8", "fp8"),
    "nvfp4": Scheme("nvfp4", PLAIN),  # layer 61 stays in bf16
    "nvfp4-v2": Scheme("nvfp4", PLAIN, NVFP4_V2),
    "int8": Scheme("int8", "int8"),
    "int4": Scheme("int4", "int4"),
}


def make_scheme(
    to: str, mtp: str | None, exclude: tuple[str, ...] | None, head: str | None = None
) -> Scheme:
    """The flags of `mtpbuild quantize`; raises UsageError with the choices."""
    for flag, value, choices in (
        ("--to", to, CHOICES),
        ("--mtp", mtp, CHOICES),
        ("--head", head, HEADS),
    ):
        if value is not None:
            check_choice(flag, value, choices)
    heads = PLAIN if head in (None, NONE) else head
    if {to, mtp or PLAIN, heads} == {PLAIN}:
        raise UsageError(f"--to {PLAIN} quantises nothing; choose --mtp, --head or another --to")
    return Scheme(to, mtp or SCHEMES[to].mtp, exclude, heads)


def engine_scheme(weights: QuantisedType | None, head: HeadType | None) -> Scheme | None:
    """What `build --weights` and `--head-weights` ask for; None: weights are as they are."""
    return None if weights is None else replace(SCHEMES[weights], head=head or PLAIN)
