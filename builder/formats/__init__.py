"""Number formats of weights: a module for each, found by what this folder's modules define.

    FORMATS      formats of one geometry, found by `Format.stores`
    find_format  finds a format whose geometry the checkpoint chooses: (name, entries, settings)
    NAMES        endings of a checkpoint's tensors -> our own, as `.qweight` -> `.weight`
    METHODS      values of quant_method -> a function that says what of the settings is not read
    READS        what the module reads, for messages

settings: the object `quantization_config`, {} if there is none.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from mtpbuild.builder.formats.format import DTYPES as DTYPES
from mtpbuild.builder.formats.format import Entry as Entry
from mtpbuild.builder.formats.format import Format as Format
from mtpbuild.builder.formats.format import Shape as Shape
from mtpbuild.builder.formats.format import make_entry as make_entry
from mtpbuild.builder.formats.format import refuse_out_of_range as refuse_out_of_range
from mtpbuild.builder.formats.format import refuse_too_large as refuse_too_large
from mtpbuild.builder.formats.format import refuse_too_small as refuse_too_small

Settings = Mapping[str, Any]
_modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]


def _load_defined(what: str) -> Iterator[Any]:
    return (getattr(module, what) for module in _modules if hasattr(module, what))


ALL: tuple[Format, ...] = tuple(
    format for formats in _load_defined("FORMATS") for format in formats
)
# Formats that engines keep; the others are older variants of the same names.
FORMATS = {format.name: format for format in ALL if format.kept is format}
_FINDERS: list[Callable[..., Format | None]] = [*_load_defined("find_format")]
_NAMES: dict[str, str] = {
    old: new for names in _load_defined("NAMES") for old, new in names.items()
}
METHODS: dict[str, Callable[[Settings], str | None]] = {
    name: check for methods in _load_defined("METHODS") for name, check in methods.items()
}
READS = ", ".join(("none (bf16, fp16, fp32)", *_load_defined("READS")))
_shown = (f"{name} with weight{format.suffixes[1]}" for name, format in FORMATS.items())
SUPPORTED = ", ".join((*DTYPES, *_shown))


def find_stored_format(
    name: str, entries: Mapping[str, Entry], settings: Settings | None = None
) -> Format | None:
    """Return the format of weight `name`; None if it is not quantised, or in an unknown format.

    The weight's tensors decide, as checkpoints' lists of excluded modules are not reliable;
    settings tell what tensors do not show.
    """
    found = next((format for format in ALL if format.stores(name, entries)), None)
    if found is not None:
        return found
    made = (find(name, entries, settings or {}) for find in _FINDERS)
    return next((format for format in made if format is not None), None)


def name_own(name: str) -> str:
    """Return the name that a checkpoint's tensor has here: `X.weight`, with a part's suffix."""
    ending = f".{name.rpartition('.')[2]}"
    return name.removesuffix(ending) + _NAMES.get(ending, ending)
