"""Quantisation schemes: the format of each weight of a model, by the weight's name.

This module needs no torch: formats are names, and None means that a weight stays as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TypeVar, get_args

from mtpbuild.builder.models import ModelConfig, find_family_of
from mtpbuild.builder.models.common.copies import EMBEDDING, HEAD
from mtpbuild.runtime.checks import check_one_of
from mtpbuild.runtime.contract.manifest import BuildInfo, HeadType, QuantisedType
from mtpbuild.runtime.errors import UsageError

# How the command line, recipes and reports spell the absence of a format.
UNQUANTISED, AS_STORED = "bf16", "none"
WEIGHT_BITS = "--weight-bits"
FLOATS = "floats"  # value of --weights with which an engine quantises nothing and keeps no format
OWN_TEXT = "own text"  # of the model, to calibrate with
# Globs over module names, as in ModelOpt's `exclude_modules`.
EXCLUDED: Mapping[str, tuple[str, ...]] = {
    "fp8": (),
    "nvfp4": ("model.layers.*.self_attn*",),  # nvidia/DeepSeek-R1-FP4
    "int8": ("model.layers.*.self_attn.kv_b_proj",),  # used in the absorbed form, not as a product
    "int4": ("model.layers.*.self_attn.kv_b_proj",),
}
# Small projections whose errors every later token reads from the cache: in int4 models they are
# int8, which is 0.1 to 0.4 % of a published model.
ALWAYS_INT8: Mapping[str, tuple[str, ...]] = {
    "int4": tuple(
        f"model.layers.*.self_attn.{name}"
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "k_proj", "v_proj")
    )
}
NVFP4_V2 = tuple(  # nvidia/DeepSeek-R1-0528-FP4-v2: o_proj is quantised too
    f"model.layers.*.self_attn.{name}"
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
)
# Default formats of embedding and head; with fp8 and nvfp4 they stay as they are.
USUAL_HEADS = {"int8": "int8", "int4": "int8"}
# Formats of the projection that joins an MTP module's inputs. Only engines quantise it: in
# published layouts it is not quantised.
JOINS = {"int8": "int8", "int4": "int8"}


AnyScheme = TypeVar("AnyScheme", bound="Scheme | None")


@dataclass(frozen=True)
class Scheme:
    """The formats of the main model, of the MTP modules, and of embedding and head.

    exclude: globs of modules that are not quantised; None means each format's own list. join: the
    format of the projection that joins an MTP module's inputs; only drafts depend on it.
    calibration: the text that int4 weights are calibrated with, `OWN_TEXT` or a file; None: they
    are not calibrated. bits: what the trunk's int4 weights may take on average.
    int8_modules: globs of those that are int8 by that, which `spend_bits` chooses.
    """

    main: str | None
    mtp: str | None
    exclude: tuple[str, ...] | None = None
    head: str | None = None
    join: str | None = None
    calibration: str | None = None
    bits: float | None = None
    int8_modules: tuple[str, ...] = ()

    def wanted(self, config: ModelConfig, name: str) -> str | None:
        """Return the format for a weight of the checkpoint; callers check that its blocks fit."""
        rules = self.rules.get(find_weight_role(config, name))
        if rules is None:
            return None
        module = find_module_of(config, name)
        return next(format for glob, format in rules if fnmatchcase(module, glob))

    @cached_property
    def rules(self) -> Mapping[str, tuple[tuple[str, str | None], ...]]:
        """Globs over modules for each role, each with a format; the first that matches wins.

        In int8 "model.layers.*.self_attn.kv_b_proj" has None: attention absorbs this weight.
        """
        roles = {
            # Beside an int4 head the embedding is int8, since a step reads only a few of its rows.
            "embedding": "int8" if self.head == "int4" else self.head,
            "head": self.head,
            # No text depends on the head of a published draft head, so it is as coarse as drafts.
            "draft_head": "int4" if self.head and self.mtp == "int4" else self.head,
            "join": self.join,
            "mtp": self.mtp,
            "main": self.main,
        }
        return {
            role: (
                *((glob, None) for glob in self.globs(format)),
                *(
                    (glob, "int8")
                    for glob in (*ALWAYS_INT8.get(format or "", ()), *self.int8_modules)
                ),
                ("*", format),
            )
            for role, format in roles.items()
        }

    def exclude_modules(self, config: ModelConfig) -> list[str]:
        """Return the list of excluded modules as ModelOpt writes it."""
        names = ["lm_head", *self.globs(self.main)]
        if self.mtp is None:
            count = config.num_nextn_predict_layers
            names += [f"{config.name_module(j)}*" for j in range(count)]
        return names

    def globs(self, format: str | None) -> tuple[str, ...]:
        if format is None:
            return ()
        return EXCLUDED[format] if self.exclude is None else self.exclude


def find_weight_role(config: ModelConfig, name: str) -> str:
    """Return a weight's role in `Scheme.rules`; "" if it is never quantised."""
    family = find_family_of(config)
    layer = family.may_be_quantised(config, name)
    if layer is not None:
        return "main" if layer < config.num_hidden_layers else "mtp"
    if name in family.tables:
        return "embedding"
    place = family.place(config, name)
    if config.head and place and place[1].removesuffix(".weight") in config.head.heads:
        return "draft_head"
    if name in (EMBEDDING, HEAD, *(copy.name for copy in family.copies(config))):
        return "embedding" if name.endswith(EMBEDDING.removeprefix("model.")) else "head"
    return "join" if family.is_module_input_proj(config, name) else ""


def find_module_of(config: ModelConfig, name: str) -> str:
    """Return the name of a weight's module, with MTP modules as layers after the trunk's."""
    place = find_family_of(config).place(config, name)
    name = name if place is None else f"model.layers.{place[0]}.{place[1]}"
    return name.removesuffix(".weight")


# The published checkpoints' layouts, and our own, as recipes name them.
SCHEMES: Mapping[str, Scheme] = {
    UNQUANTISED: Scheme(None, None),
    "fp8": Scheme("fp8", "fp8"),
    "nvfp4": Scheme("nvfp4", None),  # layer 61 stays in bf16
    "nvfp4-v2": Scheme("nvfp4", None, NVFP4_V2),
    "int8": Scheme("int8", "int8"),
    "int4": Scheme("int4", "int4"),
}


# With this scheme an engine holds floats, whatever the checkpoint has.
IN_FLOATS = SCHEMES[UNQUANTISED]
IN_INT8 = replace(SCHEMES["int8"], head="int8", join="int8")


def make_scheme(
    to: str, mtp: str | None, exclude: tuple[str, ...] | None, head: str | None = None
) -> Scheme:
    """Return the scheme for `mtpbuild quantize`'s flags.

    Raises UsageError, which lists the choices, for an unknown format.
    """
    choices = (UNQUANTISED, *EXCLUDED)
    main = parse_format("--to", to, choices)
    module = SCHEMES[to].mtp if mtp is None else parse_format("--mtp", mtp, choices)
    head_format = None if head is None else parse_format("--head", head, _list_head_choices())
    if {main, module, head_format} == {None}:
        raise UsageError(f"--to {to} quantises nothing; choose --mtp, --head or another --to")
    return Scheme(main, module, exclude, head_format)


def build_scheme(
    weights: str | None, head: str | None = None, bits: float | None = None
) -> Scheme | None:
    """Return the scheme for `--weights`, `--head-weights` and `--weight-bits` of `mtpbuild build`.

    Returns None if weights stay as the checkpoint has them, as far as the target keeps them. Raises
    UsageError, which lists the choices, for an unknown format.
    """
    choices: tuple[str, ...] = get_args(QuantisedType)
    if bits is not None and weights != "int4":
        raise UsageError(f"{WEIGHT_BITS} {bits:g} goes with --weights int4")
    if weights is None or weights == FLOATS:
        if head is not None:
            names = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise UsageError(f"--head-weights {head} goes with --weights: say {names}")
        return None if weights is None else IN_FLOATS
    main = parse_format("--weights", weights, (*choices, FLOATS))
    if head is None:
        return make_engine_scheme(main, USUAL_HEADS.get(weights), bits)
    parsed = parse_format("--head-weights", head, _list_head_choices())
    return make_engine_scheme(main, parsed, bits)


def read_scheme(build: BuildInfo) -> Scheme | None:
    """Return the scheme by which an engine's weights were quantised, but for a calibration."""
    scheme = make_engine_scheme(build.quantised_to, build.head_weights)
    return scheme and replace(scheme, int8_modules=build.int8_modules)


def make_engine_scheme(
    weights: str | None, head: str | None, bits: float | None = None
) -> Scheme | None:
    """Return the scheme for the values of flags; None if weights stay as they are."""
    if weights is None:
        return None
    if weights == FLOATS:
        return IN_FLOATS
    return replace(SCHEMES[weights], head=head, join=JOINS.get(weights), bits=bits)


def add_calibration(scheme: AnyScheme, by_own_text: bool, text: Path | None) -> AnyScheme:
    """Return the scheme with the calibration that the flags `--calibrate*` ask for, if any."""
    if text is None and not by_own_text:
        return scheme
    flag = "--calibrate" if text is None else f"--calibration-text {text}"
    if scheme is None or "int4" not in (scheme.main, scheme.mtp, scheme.head):
        raise UsageError(f"{flag} is for int4: other formats need no calibration")
    if text is not None and not text.is_file():
        raise UsageError(f"{flag}: no such file")
    return replace(scheme, calibration=OWN_TEXT if text is None else str(text))


def parse_format(flag: str, value: str, choices: tuple[str, ...]) -> str | None:
    """Return the format that a flag names; None for bf16 and none. Raises UsageError."""
    check_one_of(value, choices, flag)
    return None if value in (UNQUANTISED, AS_STORED) else value


def _list_head_choices() -> tuple[str, ...]:
    return (*get_args(HeadType), AS_STORED)
