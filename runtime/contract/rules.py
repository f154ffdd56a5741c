"""Acceptance rules of other packages: a rule decides which drafts of a step are accepted.

    @dataclass(frozen=True)
    class Settings:
        typical_epsilon: float = setting(
            0.3, check_number(0, 1), "Help.", control=Control("float32")
        )

    def keeps(judged):  # of plugins/accept_mixed/op.py; returns [B, T] bool
        return judged.p_draft >= judged.controls["typical_epsilon"][:, None]

    register(Rule("typical", keeps, Settings))

A package adds its rules by entry points of the group `mtpbuild.acceptance_rules`. An engine has the
rules that `build --acceptance-rule` names; a request chooses one by `acceptance`.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpbuild.runtime.contract.registry import Registry
from mtpbuild.runtime.contract.settings import (
    Control,
    Setting,
    declarations,
    list_settings_controls,
)
from mtpbuild.runtime.errors import RequestError

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import Manifest

REQUESTABLE = ("strict", "rejection")  # built-in rules that a request names as its `acceptance`
BUILT_IN = (*REQUESTABLE, "block", "relaxed", "synthetic")  # in every engine


@dataclass(frozen=True)
class NoSettings:
    """The settings of a rule that has none."""


@dataclass(frozen=True)
class Rule:
    """A rule of acceptance that is not built in.

    keeps: takes `RuleInputs` and returns [B, T] bool: whether a draft is accepted if all drafts
    before it are. It is traced into the mixed program, so it runs at build time alone.

    settings: a frozen dataclass whose fields are `setting(...)` with a `Control`. The fields become
    fields of requests, so prefix their names with the rule's.

    kernel: the same function without branches, in operators that targets with acceptance kernels
    support. Without it those targets refuse the rule.

    chooses: the token after a rejection. It takes `RuleInputs` and numbers [B, T], uniform in
    [0, 1), which nothing else reads. It returns tokens [B, T] and their margins, as `draw` of
    plugins/draw/op.py does. Without it, and where no draft was rejected, the token is that
    of strict acceptance. Targets with acceptance kernels refuse a rule that chooses.

    lossless: whether the rule claims that texts above temperature 0 have the model's distribution,
    which `verify` then checks.

    A token whose probability is 0 is neither accepted nor chosen.
    """

    name: str
    keeps: Callable[[Any], Any]
    settings: type[Any] = NoSettings
    kernel: Callable[[Any], Any] | None = None
    chooses: Callable[[Any, Any], tuple[Any, Any]] | None = None
    lossless: bool = False

    def __post_init__(self) -> None:
        if self.name in BUILT_IN:
            raise ValueError(f"an acceptance rule called {self.name!r} is built in")

    @property
    def controls(self) -> tuple[Control, ...]:
        """The rule's inputs of the mixed program: whether a request chose it, and its settings."""
        chosen = Control("bool", setting="acceptance", name=self.name)
        return (chosen, *list_settings_controls(self.settings))

    @property
    def declarations(self) -> dict[str, Setting]:
        """The rule's settings by name."""
        return declarations(self.settings, Setting)

    def check_settings(self, settings: Mapping[str, object]) -> dict[str, Any]:
        """Return a value for each setting, defaults included; RequestError for a wrong value."""
        defaults = self.settings()
        values = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
        for name, value in settings.items():
            if name not in values:
                raise RequestError(f"{name} is no setting of acceptance {self.name!r}", name)
            try:
                values[name] = self.declarations[name].check(value)
            except (ValueError, TypeError, ArithmeticError) as error:
                raise RequestError(f"{name} {error}", name) from None
        return values

    def identity(self) -> str:
        """Return a hash of the files that define the rule; if it changes, builds start again."""
        parts: list[Any] = [self.keeps, self.settings, self.kernel, self.chooses]
        files = {inspect.getsourcefile(part) for part in parts if part} - {None}
        texts = (Path(file).read_bytes() for file in sorted(map(str, files)))
        return hashlib.sha256(b"".join(texts)).hexdigest()


_rules = Registry[Rule]("acceptance rule", "mtpbuild.acceptance_rules")
register, find_rule, all_rules, rule_names = _rules.register, _rules.find, _rules.all, _rules.names
package_of_rule = _rules.package


def list_rules_of(engine: "Manifest") -> list[str]:
    """Return the names of an engine's rules that are of other packages."""
    return [name for name in engine.capabilities.get("acceptance", []) if name not in BUILT_IN]


def explain_missing_rule(name: str, engine: "Manifest") -> str | None:
    """Return why a rule that an engine has is unknown here; None if it is known."""
    if name not in list_rules_of(engine) or name in rule_names():
        return None
    package = engine.build.packages.get(name, "another package")
    return f"the engine has this rule of {package}, which is not installed here"
