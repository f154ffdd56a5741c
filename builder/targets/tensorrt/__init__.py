"""Target tensorrt, for data-centre GPUs: Torch-TensorRT's converters, our kernels as plugins."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.builder.graph.style import Attends, GraphStyle
from mtpbuild.builder.targets.capability import ASSUMED, explain_capability
from mtpbuild.builder.targets.target import Target
from mtpbuild.builder.targets.tensorrt.pipeline import TENSORRT
from mtpbuild.runtime.checks import check_one_of
from mtpbuild.runtime.errors import BuildError, MtpbuildError
from mtpbuild.runtime.flag_groups import flag

if TYPE_CHECKING:
    from mtpbuild.builder.plan.plan import Plan
    from mtpbuild.builder.plan.request import BuildRequest
    from mtpbuild.builder.program.opened_model import OpenedModel
    from mtpbuild.builder.program.trace import TracedProgram
    from mtpbuild.builder.weights.placed import ByteRange
    from mtpbuild.runtime.contract.manifest import TargetInfo

DTYPES = ("bfloat16", "float32")  # the first one is the default
INSTEAD = "`--target inductor --device cuda --dtype bfloat16`"
PROGRAMS = 3  # prefill, decode, decode_mixed; each holds the weights of TensorRT's own layers


class TensorRtFlavour(Target):
    """A target whose engines TensorRT or TensorRT-RTX runs."""

    def info(self, plan: "Plan") -> "TargetInfo":
        from mtpbuild.runtime.contract.manifest import TargetInfo
        from mtpbuild.runtime.programs.tensorrt_api import tensorrt_api

        capabilities = plan.compute_capabilities
        return TargetInfo(
            name=self.name,
            hardware=f"NVIDIA GPU of compute capability {' or '.join(capabilities)}",
            versions={self.name: tensorrt_api(self.name).__version__},
            compute_capabilities=capabilities,
        )


@dataclass(frozen=True)
class TensorRt(TensorRtFlavour):
    dtype: str | None = flag(None, "Type of weights and caches: bfloat16 or float32.")
    fast_build: bool = flag(False, "Compile faster; the engine may run slower.")
    strip_weights: bool = flag(
        False, "Store the weights once for all programs, not in each of the 3."
    )

    def __post_init__(self) -> None:
        """Fill in the default type, so that giving it explicitly does not change the build."""
        object.__setattr__(self, "dtype", self.dtype or DTYPES[0])

    name = "tensorrt"
    packages = ("torch", "triton", "tensorrt", "torch-tensorrt")
    formats = ("fp8", "nvfp4")
    several_ranks = True
    gpu_attention = (Attends.LATENT,)

    def lower(
        self, traced: "TracedProgram", weights: Mapping[str, "ByteRange"], folder: Path
    ) -> str:
        from mtpbuild.builder.targets.tensorrt import lowering

        return lowering.lower(traced, folder, strip=self.strip_weights, fast=self.fast_build)

    @property
    def style(self) -> GraphStyle:
        return GraphStyle(
            for_gpu=True,
            whole_caches=True,
            all_slots=True,
            pipeline=TENSORRT,
            formats=self.formats,
            dtype=self.dtype,  # type: ignore[arg-type]
            embeds_weights=not self.strip_weights,
            # A network is built with its rank's weights, even if they are stripped.
            ranks_share_programs=False,
        )

    def check(self, request: "BuildRequest") -> None:
        check_one_of(str(self.dtype), DTYPES, "--dtype")

    def compute_capabilities(self, request: "BuildRequest") -> tuple[str, ...]:
        """Return the capability of this machine's GPU, as TensorRT compiles on the GPU itself.

        Without a GPU it assumes one, and `check_machine` refuses to build.
        """
        from mtpbuild.runtime.gpu.cuda import Device

        try:
            return (Device(self.name).compute_capability,)
        except MtpbuildError:
            return (ASSUMED,)

    def check_formats(self, formats: Iterable[str | None], plan: "Plan") -> None:
        if why := explain_capability(formats, plan.compute_capabilities):
            raise BuildError(f"target {self.name}: {why}; build with {INSTEAD}")

    def keeps_weights_file(self, folder: Path, plan: "Plan") -> bool:
        """Return True for a stripped engine, and for one whose programs share weights."""
        from mtpbuild.runtime.contract.manifest import SHARED

        return self.strip_weights or any(folder.glob(SHARED.format("*")))

    def count_loaded_weights(self, model: "OpenedModel", plan: "Plan") -> int:
        """Count the weights that our kernels read once, and all others once for each program.

        Weights that only kernels of steps read count twice, as prefill has them as constants.
        """
        from mtpbuild.builder.targets.tensorrt.lowering import has_few_tokens

        always, in_steps = (
            sum(p.numel() * p.element_size() for p in weights.values())
            for weights in (
                model.model.weights_read_by_kernels(),
                model.model.weights_read_by_step_kernels(few_tokens=has_few_tokens(plan)),
            )
        )
        total = super().count_loaded_weights(model, plan)
        return PROGRAMS * total - (PROGRAMS - 1) * always - in_steps

    def check_model(self, model: "OpenedModel", plan: "Plan") -> None:
        """Raise BuildError if the engine would not fit into the memory of this GPU."""
        from mtpbuild.builder.plan.plan import count_state_bytes, make_state_specs
        from mtpbuild.runtime.gpu.cuda import Device

        try:
            free = Device(self.name).free_memory()
        except MtpbuildError:
            return  # `list_missing` reports it
        weights = self.count_loaded_weights(model, plan)
        state = sum(map(count_state_bytes, make_state_specs(plan)))
        if weights + state > free:
            raise BuildError(
                f"target {self.name}: an engine's programs hold {weights / 1e9:.2f} GB of weights "
                f"per rank, state takes {state / 1e9:.2f} GB, and this GPU has {free / 1e9:.2f} GB "
                "free; --tp splits the weights, a smaller --max-seq-len or --max-batch the state"
            )

    def check_machine(self, plan: "Plan") -> None:
        """Raise BuildError, which lists all that is missing, and what was checked all the same."""
        if missing := list(self.list_missing(plan)):
            ranks, drafts = plan.ranks, f"nextn {plan.nextn}"
            split = f"{ranks.tp} ranks" + (f" in {ranks.ep} groups" if ranks.ep > 1 else "")
            adp = ", attention data-parallel" if ranks.attention_dp else ""
            raise BuildError(
                f"target {self.name} can't compile here: {'; '.join(missing)} (checked: flags and "
                f"config.json: {drafts}, {plan.dtype}, {split}{adp}; --dry-run checks the rest); "
                f"build with `--target {self.name}` where such a GPU is, or with {INSTEAD}, and "
                "`--compute-capability sm100` for GPUs elsewhere"
            )

    def list_missing(self, plan: "Plan") -> Iterator[str]:
        from mtpbuild.runtime.gpu.cuda import Device

        try:
            Device(self.name)
        except MtpbuildError as error:
            yield str(error)
        from mtpbuild.builder.targets.tensorrt import lowering

        (capability,) = plan.compute_capabilities
        if float(capability) < 8:
            needed = "kernels are for GPUs of compute capability 8.0 and later"
            yield f"{needed}, this one has {capability}"
        yield from lowering.list_missing_packages()


TARGET = TensorRt()
