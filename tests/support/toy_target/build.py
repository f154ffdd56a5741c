"""The builder's side of target toy: torch saves an exported program with its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.targets.target import Target
from mtpbuild.builder.weights.placed import ByteRange
from mtpbuild.runtime.contract.manifest import WEIGHTS, TargetInfo
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.flag_groups import flag


@dataclass(frozen=True)
class Toy(Target):
    """Exports programs, which torch itself runs; its fields are its flags."""

    toy_mark: str = flag("none", "A word for the engine's record.")

    name = "toy"
    style = GraphStyle(embeds_weights=True)

    def check(self, request: BuildRequest) -> None:
        if not self.toy_mark.isalpha():
            raise UsageError(f"--toy-mark {self.toy_mark} is not a word")

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
        return TargetInfo(name=self.name, hardware="any", versions={"mark": self.toy_mark})


TARGET = Toy()
