"""Find the MTP modules that a checkpoint holds, by the names of its tensors."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mtpbuild.builder.checkpoint.config import MODULE_COUNT, ModelConfig
from mtpbuild.builder.models.family import Family

# Names beside the input projection's by which a layer after the trunk's is known as a module.
SIGNS = ("enorm", "hnorm", "shared_head")
OWN_LAYER = re.compile(r"(.*?layers\.|mtp\.)(\d{1,9})\.(.+)")
NOT_OWN = ("model.", "lm_head.")
# Prefixes of a module that has no number, as MLX keeps it in a file of its own.
PREFIXES = ("mtp.", "model.mtp_block.", "model.", "")
SPELLED = {
    "shared_head_norm.": "shared_head.norm.",
    "lm_head.": "shared_head.head.",
    "decoder.": "",
}
# What to do about a head that can't be used.
JOIN_A_HEAD_HINT = (
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
    if c.module_names.prefix:
        prefixes = tuple(filter(None, (c.module_names.prefix, c.module_names.own_prefix)))
        module_tensors = [name for name in names if name.startswith(prefixes)]
    else:
        signs = [f".{sign}." for sign in (c.module_names.input_proj, *SIGNS)]
        module_tensors = [name for name in names if any(sign in name for sign in signs)]
    return count_stored_modules(family, c, module_tensors)


def with_modules(family: Family, raw: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return config.json's values with the number of MTP modules, which some files leave out.

    In that case transformers assumes one module; we count the modules that have tensors. Modules
    that have tensors count, too, if config.json says that there are fewer.
    """
    config = family.config.parse(raw)
    names = list(names)
    if raw.get(MODULE_COUNT) is None:
        raw = {**raw, MODULE_COUNT: count_stored_modules(family, config, names)}
        config = family.config.parse(raw)
    count = count_sure_modules(family, config, names)
    return set_modules(family, raw, count) if count > config.num_nextn_predict_layers else raw


def set_modules(family: Family, raw: Mapping[str, Any], count: int) -> Mapping[str, Any]:
    """Return config.json's values with another number of MTP modules."""
    text = raw.get("text_config")
    key = family.config.module_names.count
    if key != MODULE_COUNT and isinstance(text, dict):
        return {**raw, "text_config": {**text, key: count}}
    return {**raw, MODULE_COUNT: count, key: count}


def name_modules(c: ModelConfig, names: Collection[str]) -> dict[str, str]:
    """Return the names of modules' tensors in the model's checkpoint, from a file that has heads.

    Such files may leave out the prefix `mtp.`, and number layers from 0 or as another model does:
    SGLang's have `model.layers.0`. So modules are known by what only modules have.
    """
    layers = {name: match for name in names if (match := OWN_LAYER.fullmatch(name))}
    signs = tuple(f"{sign}." for sign in (c.module_names.input_proj, *SIGNS))
    prefix, own_prefix = c.module_names.prefix, c.module_names.own_prefix
    prefixes = (prefix, prefix.removeprefix("model."), "layers.")
    modules = {
        (match[1], int(match[2]))
        for match in layers.values()
        if (match[1] in prefixes if prefix else match[3].startswith(signs))
    }
    renamed = {module: c.name_module(j) for j, module in enumerate(sorted(modules))}
    full_names = {
        name: f"{renamed[module]}.{match[3]}"
        for name, match in layers.items()
        if (module := (match[1], int(match[2]))) in renamed
    }
    if own_prefix:
        rest = [name for name in names if name not in layers and not name.startswith(NOT_OWN)]
        prefixed = [name for name in rest if name.startswith(own_prefix)]
        full_names |= {
            name: own_prefix + name.removeprefix(own_prefix) for name in prefixed or rest
        }
    return full_names


def name_lone_tensor(c: ModelConfig, name: str) -> str:
    """Return the name of the first module's tensor, from a file in which it has no number."""
    bare = name.removeprefix(next(prefix for prefix in PREFIXES if name.startswith(prefix)))
    for theirs, ours in SPELLED.items():
        bare = bare.replace(theirs, ours) if bare.startswith(theirs) else bare
    return f"{c.name_module(0)}.{bare}"


def is_module(family: Family, c: ModelConfig, name: str) -> bool:
    """Return whether a tensor belongs to an MTP module."""
    place = family.place(c, name)
    return place is not None and place[0] >= c.num_hidden_layers


def describe_stripped(where: object, c: ModelConfig, there: int) -> str | None:
    """Say that a checkpoint holds fewer modules than its config.json says; None if it does not."""
    if there >= c.num_nextn_predict_layers:
        return None
    return (
        f"{where}: config.json says {c.module_names.count} {c.num_nextn_predict_layers}, but MTP "
        f"layer {c.name_module(there)} is missing, as in many quantised and fine-tuned copies"
    )
