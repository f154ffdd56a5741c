"""Find the MTP modules that a checkpoint holds, by the names of its tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

from mtpbuild.builder.checkpoint.config import ModelConfig
from mtpbuild.builder.models.family import Family
from mtpbuild.runtime.errors import CheckpointError

KEY = "num_nextn_predict_layers"


def stored_modules(family: Family, c: ModelConfig, names: Iterable[str]) -> int:
    """Count the modules that have tensors, up to the first one without any."""
    layers = {place[0] for name in names if (place := family.place(c, name))}
    count = 0
    while c.num_hidden_layers + count in layers:
        count += 1
    return count


def with_modules(family: Family, raw: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return config.json's values with the number of MTP modules, which some files leave out.

    In that case transformers assumes one module; we count the modules that have tensors.
    """
    if raw.get(KEY) is not None:
        return raw
    return {**raw, KEY: stored_modules(family, family.parse_config(raw), names)}


def refuse_stripped(
    where: object, family: Family, c: ModelConfig, there: int, instead: str = ""
) -> None:
    """Raise CheckpointError if a checkpoint holds fewer modules than its config.json says.

    instead: the end of the message, which may say how to add a module.
    """
    if there < c.num_nextn_predict_layers:
        raise CheckpointError(
            f"{where}: config.json says {family.modules_key} {c.num_nextn_predict_layers}, but "
            "MTP layer "
            f"{family.module_name(c, there)} was stripped (quantised and fine-tuned copies often "
            f"lack it): build with --nextn 0{instead}"
        )
