"""Which MTP modules a checkpoint holds, by the names of its tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

from mtpbuild.builder.models.config import ModelConfig
from mtpbuild.builder.models.family import Family
from mtpbuild.runtime.errors import CheckpointError

KEY = "num_nextn_predict_layers"


def stored_modules(family: Family, c: ModelConfig, names: Iterable[str]) -> int:
    """How many modules from the first on have tensors."""
    layers = {place[0] for name in names if (place := family.place(c, name))}
    count = 0
    while c.num_hidden_layers + count in layers:
        count += 1
    return count


def with_modules(family: Family, raw: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """A `config.json` that says how many modules there are.

    transformers takes one where nothing is said; what is stored is more to be trusted
    (spec/families.md section 3).
    """
    if raw.get(KEY) is not None:
        return raw
    return {**raw, KEY: stored_modules(family, family.parse_config(raw), names)}


def refuse_stripped(where: object, family: Family, c: ModelConfig, there: int) -> None:
    """Refuse a checkpoint that lacks modules which its configuration promises."""
    if there < c.num_nextn_predict_layers:
        raise CheckpointError(
            f"{where}: config.json says {KEY} {c.num_nextn_predict_layers}, but MTP layer "
            f"{family.module_name(c, there)} was stripped (quantised and fine-tuned copies often "
            "lack it): build with --nextn 0"
        )
