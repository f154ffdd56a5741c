"""What packages can add by a name: those of this package, registered ones, and entry points.

A package adds its own without being imported, by an entry point of the registry's group. Entry
points are only looked at for a name that isn't registered, or for a list of all names.
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
    """Finds the items of one kind by their names."""

    def __init__(self, kind: str, group: str, built_in: Iterable[Item] = ()) -> None:
        self.kind, self.group = kind, group
        self._registered = {item.name: item for item in built_in}

    def register(self, item: Item) -> None:
        """Make an item known; it takes the place of another one of that name."""
        self._registered[item.name] = item

    def find(self, name: str) -> Item:
        """Returns the item of that name; raises UsageError that lists the known names."""
        if name in self._registered:
            return self._registered[name]
        if entry := self._installed().get(name):
            item: Item = entry.load()
            return item
        known = ", ".join(self.names()) or "none"
        raise UsageError(f"unknown {self.kind} {name!r}; supported: {known}")

    def names(self) -> tuple[str, ...]:
        """Returns all names that can be found, those of registered items first."""
        return (*dict.fromkeys((*self._registered, *self._installed())),)

    def all(self) -> tuple[Item, ...]:
        """Returns all items that can be found, in the order of `names`."""
        return tuple(map(self.find, self.names()))

    def _installed(self) -> dict[str, EntryPoint]:
        return _entry_points(self.group, tuple(sys.path))


@lru_cache
def _entry_points(group: str, path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Returns the entry points on a path: to look for them takes milliseconds."""
    return {entry.name: entry for entry in entry_points(group=group)}
