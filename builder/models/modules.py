"""Find the MTP modules that a checkpoint holds, by the names of its tensors."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.models.family import Family

KEY = "num_nextn_predict_layers"
# Tensors beside `Family.join` by which a layer after the trunk's is known as a module.
SIGNS = ("enorm", "hnorm", "shared_head")
OWN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")  # in files that hold a head alone
OWN_PREFIX = "mtp."
NOT_OWN = ("model.", "lm_head.")
# Prefixes of a module that has no number, as MLX keeps it in a file of its own.
PREFIXES = ("mtp.", "model.mtp_block.", "model.", "")
SPELLED = {"shared_head_norm.": "shared_head.norm.", "lm_head.": "shared_head.head."}
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


def name_head_tensor(family: Family, c: ModelConfig, name: str) -> str | None:
    """Return a module's tensor's name in the model's checkpoint, from a file that holds heads.

    Such files may count layers from 0, and leave out the prefix `mtp.`.
    """
    bare = name.removeprefix(OWN_PREFIX)
    if match := OWN_LAYER.fullmatch(bare):
        return f"{family.name_module(c, int(match[1]))}.{match[2]}"
    if family.module_extra_prefix and not bare.startswith(NOT_OWN):
        return family.module_extra_prefix + bare
    return None


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
