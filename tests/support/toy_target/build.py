"""The builder's side of target toy: torch saves an exported program with its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.targets.target import Target
from mtpbuild.builder.weights.placed import ByteRange
from mtpbuild.runtime.contract.manifest import WEIGHTS, TargetInfo
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import flag


@dataclass(frozen=True)
class ToyOptions:
    """The flags that only this target has."""

    toy_mark: str = flag("none", "A word for the engine's record.")


class Toy(Target):
    """Exports programs, which torch itself runs."""

    name = "toy"
    Options = ToyOptions

    def check(self, request: BuildRequest, options: ToyOptions) -> None:
        if not options.toy_mark.isalpha():
            raise UsageError(f"--toy-mark {options.toy_mark} is not a word")

    def check_machine(self, plan: Plan) -> None:
        """Accept every machine: wherever an engine is built, there is torch."""

    def embeds_weights(self, options: ToyOptions) -> bool:
        return True

    def lower(self, traced: TracedProgram, weights: Mapping[str, ByteRange], folder: Path) -> str:
        import torch
        from safetensors.torch import load_file

        values = load_file(folder / WEIGHTS)
        program = traced.exported
        for name in program.state_dict:
            value = torch.nn.Parameter(values[name.removeprefix("model.")], requires_grad=False)
            program.state_dict[name] = value
        torch.export.save(program, folder / traced.name)
        return traced.name

    def info(self, plan: Plan) -> TargetInfo:
        return TargetInfo(name=self.name, hardware="any", versions={"mark": plan.options.toy_mark})


TARGET = Toy()
