"""A registry of named items: built in, registered, or from installed packages.

A package adds an item by an entry point of the registry's group and is imported only when that item
is used. Entry points are read only for a name that is not registered, or to list all names.
"""

import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar

from mtpbuild.runtime.errors import UsageError


class Named(Protocol):
    @property
    def name(self) -> str: ...


Item = TypeVar("Item", bound=Named)


class Registry(Generic[Item]):
    """The items of one kind, found by name."""

    def __init__(self, kind: str, group: str, built_in: Iterable[Item] = ()) -> None:
        self.kind, self.group = kind, group
        self._registered = {item.name: item for item in built_in}

    def register(self, item: Item) -> None:
        """Add an item; it replaces an item of the same name."""
        self._registered[item.name] = item

    def find(self, name: str) -> Item:
        """Return the item of that name; raise UsageError that lists the known names."""
        if name in self._registered:
            return self._registered[name]
        if entry := self._find_installed().get(name):
            item: Item = entry.load()
            return item
        known = ", ".join(self.names()) or "none"
        raise UsageError(f"unknown {self.kind} {name!r}; supported: {known}")

    def names(self) -> tuple[str, ...]:
        """Return all known names, registered items first."""
        return (*dict.fromkeys((*self._registered, *self._find_installed())),)

    def all(self) -> tuple[Item, ...]:
        """Return all known items, in the order of `names`."""
        return tuple(map(self.find, self.names()))

    def package(self, name: str) -> str | None:
        """Return name and version of the package that an item comes from; None if of no other."""
        entry = None if name in self._registered else self._find_installed().get(name)
        if entry is None or entry.dist is None:
            return None
        return f"{entry.dist.name} {entry.dist.version}"

    def _find_installed(self) -> dict[str, EntryPoint]:
        return _find_entry_points(self.group, tuple(sys.path))


@lru_cache
def _find_entry_points(group: str, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Return a group's entry points on a path; cached, as the search takes milliseconds."""
    return {entry.name: entry for entry in entry_points(group=group)}
