"""Find the MTP modules that a checkpoint holds, by the names of its tensors."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.models.family import Family

KEY = "num_nextn_predict_layers"
# Tensors beside `Family.join` by which a layer after the trunk's is known as a module.
SIGNS = ("enorm", "hnorm", "shared_head")
OWN_LAYER = re.compile(r"(.*?layers\.)(\d{1,9})\.(.+)")
NOT_OWN = ("model.", "lm_head.")
# Prefixes of a module that has no number, as MLX keeps it in a file of its own.
PREFIXES = ("mtp.", "model.mtp_block.", "model.", "")
SPELLED = {
    "shared_head_norm.": "shared_head.norm.",
    "lm_head.": "shared_head.head.",
    "decoder.": "",
}
# Ends the message about a head that can't be used.
JOIN = (
    "build with --nextn 0, or join a whole head with --mtp FILE_OR_FOLDER, such as that of the "
    "checkpoint that this one was made from"
)


def count_stored_modules(family: Family, c: ModelConfig, names: Iterable[str]) -> int:
    """Count the modules that have tensors, up to the first one without any."""
    layers = {place[0] for name in names if (place := family.place(c, name))}
    count = 0
    while c.num_hidden_layers + count in layers:
        count += 1
    return count


def count_sure_modules(family: Family, c: ModelConfig, names: Iterable[str]) -> int:
    """Count the modules, but not by tensors that a main layer has, too."""
    if family.modules:
        prefixes = tuple(filter(None, (family.modules, family.module_extra_prefix)))
        own = (name for name in names if name.startswith(prefixes))
    else:
        signs = tuple(f".{sign}." for sign in (family.join, *SIGNS))
        own = (name for name in names if any(sign in name for sign in signs))
    return count_stored_modules(family, c, own)


def with_modules(family: Family, raw: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return config.json's values with the number of MTP modules, which some files leave out.

    In that case transformers assumes one module; we count the modules that have tensors. Modules
    that have tensors count, too, if config.json says that there are fewer.
    """
    config, names = family.parse_config(raw), list(names)
    if raw.get(KEY) is None:
        raw = {**raw, KEY: count_stored_modules(family, config, names)}
        config = family.parse_config(raw)
    found = count_sure_modules(family, config, names)
    more = found > config.num_nextn_predict_layers
    return set_modules(family, raw, found) if more else raw


def set_modules(family: Family, raw: Mapping[str, Any], count: int) -> Mapping[str, Any]:
    """Return config.json's values with another number of MTP modules."""
    text = raw.get("text_config")
    if family.modules_key != KEY and isinstance(text, dict):
        return {**raw, "text_config": {**text, family.modules_key: count}}
    return {**raw, KEY: count, family.modules_key: count}


def name_modules(family: Family, c: ModelConfig, names: Collection[str]) -> dict[str, str]:
    """Return the names of modules' tensors in the model's checkpoint, from a file that has heads.

    Such files may leave out the prefix `mtp.`, and number layers from 0 or as another model does:
    SGLang's have `model.layers.0`. So modules are known by what only modules have.
    """
    layers = {name: match for name in names if (match := OWN_LAYER.fullmatch(name))}
    signs = tuple(f"{sign}." for sign in (family.join, *SIGNS))
    prefixes = (family.modules, family.modules.removeprefix("model."), "layers.")
    own = {
        (match[1], int(match[2]))
        for match in layers.values()
        if (match[1] in prefixes if family.modules else match[3].startswith(signs))
    }
    places = {place: family.name_module(c, j) for j, place in enumerate(sorted(own))}
    found = {
        name: f"{places[place]}.{match[3]}"
        for name, match in layers.items()
        if (place := (match[1], int(match[2]))) in places
    }
    if extra := family.module_extra_prefix:
        rest = [name for name in names if name not in layers and not name.startswith(NOT_OWN)]
        prefixed = [name for name in rest if name.startswith(extra)]
        found |= {name: extra + name.removeprefix(extra) for name in prefixed or rest}
    return found


def name_lone_tensor(family: Family, c: ModelConfig, name: str) -> str:
    """Return the name of the first module's tensor, from a file in which it has no number."""
    bare = name.removeprefix(next(prefix for prefix in PREFIXES if name.startswith(prefix)))
    for theirs, ours in SPELLED.items():
        bare = bare.replace(theirs, ours) if bare.startswith(theirs) else bare
    return f"{family.name_module(c, 0)}.{bare}"


def is_module(family: Family, c: ModelConfig, name: str) -> bool:
    """Return whether a tensor belongs to an MTP module."""
    place = family.place(c, name)
    return place is not None and place[0] >= c.num_hidden_layers


def describe_stripped(where: object, family: Family, c: ModelConfig, there: int) -> str | None:
    """Say that a checkpoint holds fewer modules than its config.json says; None if it does not."""
    if there >= c.num_nextn_predict_layers:
        return None
    return (
        f"{where}: config.json says {family.modules_key} {c.num_nextn_predict_layers}, but MTP "
        f"layer {family.name_module(c, there)} was stripped (quantised and fine-tuned copies often "
        "lack it)"
    )
