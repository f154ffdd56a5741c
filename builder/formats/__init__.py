"""Number formats of weights, from the tuples `FORMATS` of this folder's modules."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from mtpbuild.builder.formats.format import DTYPES as DTYPES
from mtpbuild.builder.formats.format import Entry as Entry
from mtpbuild.builder.formats.format import Format as Format
from mtpbuild.builder.formats.format import Shape as Shape
from mtpbuild.builder.formats.format import entry_of as entry_of
from mtpbuild.builder.formats.format import refuse_too_large as refuse_too_large

_modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
ALL: tuple[Format, ...] = tuple(f for each in _modules for f in getattr(each, "FORMATS", ()))
# Formats that engines keep; the others are older variants of the same names.
FORMATS = {format.name: format for format in ALL if format.kept is format}
_shown = (f"{name} with weight{format.suffixes[1]}" for name, format in FORMATS.items())
SUPPORTED = ", ".join((*DTYPES, *_shown))


def stored_format(name: str, entries: Mapping[str, Entry]) -> Format | None:
    """Return the format of weight `name`; None if it is not quantised, or in an unknown format.

    The weight's tensors decide, as checkpoints' lists of excluded modules are not reliable.
    """
    return next((format for format in ALL if format.stores(name, entries)), None)
