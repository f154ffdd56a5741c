"""Describes other systems' configurations: keys that we know, ignore, or refuse for now."""

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from mtpbuild.runtime.errors import UsageError


@dataclass(frozen=True)
class Later:
    """Is a key that this version refuses unless its value asks for nothing."""

    instead: str
    idle: tuple[int, ...] = ()  # besides null, false, 0 and empty

    def check(self, key: str, value: object) -> None:
        """Refuses a value that asks for something, so that nothing is ignored silently."""
        if value and not (type(value) is int and value in self.idle):
            refused = f"{key} {show(value)} is not supported by this version"
            raise UsageError(f"{refused}; {self.instead}: leave it out")


@dataclass(frozen=True)
class Vocabulary:
    """Lists the keys of one configuration object of another system."""

    ours: Mapping[str, str]  # key -> field of Settings
    no_effect: Mapping[str, str]  # key -> what to do instead, if anything
    later: Mapping[str, Later]  # keys that would change a result, and that are not supported
    apart: str  # a key that is read by itself, before the others
    switches: Mapping[str, str] = field(default_factory=dict)  # key of ours -> what true means
    idle: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # values that ask for nothing


@dataclass(frozen=True)
class Methods:
    """Names a system's speculative methods; mtpbuild has one of them.

    The names of `others` and `models` are separated by blanks.
    """

    key: str
    ours: str
    others: str
    models: str = ""  # MODEL_mtp is an older name of ours

    def check(self, name: object, where: str) -> tuple[str, ...]:
        """Returns a note about a deprecated name; raises UsageError for another method."""
        known = (self.ours, *self.others.split())
        spelled = {_spelling(method): method for method in known}
        given = _spelling(str(name))
        if given in (_spelling(f"{model}_mtp") for model in self.models.split()):
            return (f"{where} {name!r} is deprecated: write {self.ours!r}",)
        if given not in spelled:
            problem = f"unknown method {reprlib.repr(name)}, known: {', '.join(known)}"
        elif spelled[given] != self.ours:
            problem = f"{name!r} is not supported by mtpbuild; supported: {self.ours}"
        else:
            return ()
        raise UsageError(f"{where}: {problem}")


CHAIN = Later("each step verifies one chain of nextn drafts")
FIXED = Later("nextn is fixed when the engine is built")
RANKS = Later("ranks share a model by --tp, --ep and --attention-dp alone", idle=(1, -1))
ALWAYS = Later("every step drafts")
MODULES = "the MTP modules are those of the checkpoint"  # instead of a model that drafts


def same(*names: str) -> Mapping[str, str]:
    """Returns keys that have the names of our settings."""
    return {name: name for name in names}


def no_effect(names: str, **hints: str) -> Mapping[str, str]:
    """Returns keys that are accepted and do nothing; `hints` say what to do instead."""
    return dict.fromkeys(names.split(), "") | hints


def show(value: object) -> str:
    """Shows a value as its user wrote it, cut to 60 characters."""
    return (value if isinstance(value, str) else json.dumps(value, default=repr))[:60]


def _spelling(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
