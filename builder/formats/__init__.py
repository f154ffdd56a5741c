"""Number formats of weights: each module has a `MODULE`, which says what it reads."""

from importlib import import_module
from pkgutil import iter_modules

from mtpbuild.builder.formats.format import DTYPES as DTYPES
from mtpbuild.builder.formats.format import Entries, FormatModule
from mtpbuild.builder.formats.format import Entry as Entry
from mtpbuild.builder.formats.format import Format as Format
from mtpbuild.builder.formats.format import Settings as Settings
from mtpbuild.builder.formats.format import Shape as Shape
from mtpbuild.builder.formats.format import make_entry as make_entry
from mtpbuild.builder.formats.format import refuse_out_of_range as refuse_out_of_range
from mtpbuild.builder.formats.format import refuse_too_large as refuse_too_large
from mtpbuild.builder.formats.format import refuse_too_small as refuse_too_small
from mtpbuild.builder.formats.mxfp4 import POWERS

MODULES: list[FormatModule] = [
    import_module(f"{__name__}.{module.name}").MODULE
    for module in iter_modules(__path__)
    if module.name != "format"
]
FORMATS = {format.name: format for module in MODULES for format in module.formats}
NAMES = {old: new for module in MODULES for old, new in module.names.items()}
METHODS = {method: check for module in MODULES for method, check in module.methods.items()}
READS = ", ".join(
    ("none (bf16, fp16, fp32)", *(module.reads for module in MODULES if module.reads))
)
_formats = (f"{name} with weight{format.suffixes[1]}" for name, format in FORMATS.items())
SUPPORTED = ", ".join((*DTYPES, *_formats))


def find_stored_format(
    name: str, entries: Entries, settings: Settings | None = None
) -> Format | None:
    """Return the format of weight `name`; None if it is not quantised, or in an unknown format.

    The weight's tensors decide, as checkpoints' lists of excluded modules are not reliable;
    settings tell what tensors do not show.
    """
    formats = (module.find(name, entries, settings or {}) for module in MODULES)
    return next(filter(None, formats), None)


def name_own(name: str, dtype: str = "") -> str:
    """Return the name that a checkpoint's tensor has here: `X.weight`, with a part's suffix."""
    ending = f".{name.rpartition('.')[2]}"
    if ending == ".scale" and dtype in POWERS:  # DeepSeek-V4's; Gemma-4's routers have floats
        return f"{name.removesuffix(ending)}.weight_scale"
    return name.removesuffix(ending) + NAMES.get(ending, ending)
