"""ExportedProgram -> AOTInductor package that updates state in place and holds no weights."""

import contextlib
import logging
import os
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import torch._inductor
from safetensors.torch import save
from torch._C import _distributed_c10d as c10d
from torch._inductor import config as inductor_config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.decomposition import fast_random_decomps, register_decomposition
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch._inductor.package.package import package_aoti
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import GroupName
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.targets.inductor import cross_cuda
from mtpbuild.builder.targets.inductor.pipeline import INDUCTOR
from mtpbuild.builder.targets.passes import run_passes
from mtpbuild.builder.weights.placed import ByteRange
from mtpbuild.plugins import facets
from mtpbuild.runtime.contract.manifest import CONSTANTS, AllreduceStrategy, TargetInfo
from mtpbuild.runtime.errors import BuildError, MissingDependencyError, advise_install
from mtpbuild.runtime.group.start import GROUP
from mtpbuild.runtime.programs.aot_package import HARDWARE, TORCH, name_this_machine

OPTIONS: dict[str, Any] = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,  # weights are in the engine's weights file
    "always_keep_tensor_constants": True,  # even small ones: no weight has values yet
    "aot_inductor.enable_line_tables": False,  # they would contain paths of the build machine
    "aot_inductor.precompile_headers": False,  # they would stay in the temporary folder
    "compile_threads": 1,  # one C++ file per program, so nothing runs in parallel
    # Sums of up to 16 parts, such as a token's experts, are written out: as a reduction, R1's took
    # 18 us on an H100.
    "unroll_reductions_threshold": 17,
}
MARCH = "cpp.march"
KERNELS = "TRITON_CACHE_DIR"
CPU_OPTIONS: dict[str, Any] = {
    MARCH: "x86-64-v3",  # not `native`: an engine runs on any machine that HARDWARE describes
    "cpp.simdlen": 256,
    "cpp.vec_isa_ok": True,  # `check` has verified the instruction set
    "cpp.dynamic_threads": True,  # the number of threads is chosen when the engine is loaded
}

for op, facet in facets(INDUCTOR.ops).items():
    register_decomposition([op])(facet)
fast_random_decomps.cache_clear()  # discard the decomposition table of an earlier compilation


def check(plan: Plan, *, crosses: bool) -> None:
    """Raise BuildError unless this machine can compile the plan.

    crosses: whether it is compiled for a GPU that need not be here.
    """
    on_gpu = bool(plan.compute_capabilities)
    if (crosses or not on_gpu) and name_this_machine() != HARDWARE:
        raise BuildError(
            f"target inductor builds on an {HARDWARE}, this is an {name_this_machine()}"
        )
    if (crosses or not on_gpu) and MARCH not in aoti_options(on_gpu=False):
        where = "for a GPU that is not here" if crosses else "on a CPU"
        raise BuildError(
            f"torch {torch.__version__} compiles for this very CPU alone: target inductor {where} "
            "needs torch 2.13"
        )
    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        compiler = ""
    if on_gpu and find_spec("triton") is None:
        raise MissingDependencyError(
            f"target inductor on a GPU needs triton: {advise_install('triton')}"
        )
    if not shutil.which(compiler):
        raise BuildError("target inductor needs a C++ compiler (g++): none is found")
    if crosses:
        cross_cuda.check()


def aoti_options(on_gpu: bool, known: Any = inductor_config) -> dict[str, Any]:
    """Return AOTInductor's options, without those that this version of torch lacks."""
    return drop_unknown_options(OPTIONS if on_gpu else CPU_OPTIONS | OPTIONS, known)


def drop_unknown_options(wanted: dict[str, Any], known: Any = inductor_config) -> dict[str, Any]:
    return {name: value for name, value in wanted.items() if _has(known, name)}


def _has(config: Any, name: str) -> bool:
    group, _, option = name.rpartition(".")
    return hasattr(getattr(config, group, None) if group else config, option)


def info(plan: Plan, *, crosses: bool, strategy: str) -> TargetInfo:
    gpus = plan.compute_capabilities
    return TargetInfo(
        name="inductor",
        hardware=f"NVIDIA GPU of compute capability {gpus[0]}" if gpus else HARDWARE,
        versions={"torch": TORCH},
        compute_capabilities=gpus,
        cross_compiled=cross_cuda.info(gpus[0]) if crosses else None,
        # The one that replaces NCCL for small sums between ranks.
        allreduce_strategy=None if strategy == "nccl" else cast(AllreduceStrategy, strategy),
    )


@contextlib.contextmanager
def share_kernels() -> Iterator[None]:
    """Let the programs of an engine share compiled Triton kernels, in a temporary folder.

    The folder is Triton's cache. If TRITON_CACHE_DIR is set, that folder is used and kept.
    """
    with contextlib.ExitStack() as undo:
        if KERNELS not in os.environ:
            os.environ[KERNELS] = undo.enter_context(tempfile.TemporaryDirectory())
            undo.callback(os.environ.pop, KERNELS, None)
        yield


def lower(
    traced: TracedProgram, weights: Mapping[str, ByteRange], folder: Path, *, crosses: bool
) -> str:
    """Write the package, and the constants that no checkpoint holds; return the package's name."""
    plan, file = traced.plan, f"{traced.name}.pt2"
    values = {**traced.exported.constants, **traced.exported.state_dict}
    with (
        tempfile.TemporaryDirectory(dir=_choose_place(folder)) as scratch,
        contextlib.ExitStack() as machine,
        _pretend_group(plan.ranks.tp),
        # Ignore torch's warnings about the graphs that it copies.
        warnings.catch_warnings(action="ignore"),
    ):
        if crosses:
            machine.enter_context(
                cross_cuda.without_gpu(plan.compute_capabilities[0], Path(scratch))
            )
            cross_cuda.without_values(traced.exported)
        program = run_passes(plan.style.pipeline.lowered_passes, traced.exported, traced)
        exported = program.meta["exported"]
        examples = pytree.tree_leaves(exported.example_inputs)
        settings = aoti_options(bool(plan.compute_capabilities))
        if crosses:  # the engine's host is another machine too
            settings |= aoti_options(on_gpu=False) | drop_unknown_options(cross_cuda.OPTIONS)
        package_aoti(str(folder / file), _compile(program, tuple(examples), scratch, settings))
    _write_constants(traced.name, exported, weights, folder, values)
    return file


def _choose_place(folder: Path) -> Path | None:
    """Return where to compile: `folder`, which is removed with the leftovers of an aborted build.

    torch gives the C++ compiler its paths without quotes: one with a space or a quote would be
    torn. Then return None, the system's folder for temporary files.
    """
    return folder if shlex.quote(str(folder)) == str(folder) else None


@contextlib.contextmanager
def _pretend_group(ranks: int) -> Iterator[None]:
    """Register a process group of this size, which the compiler looks up for collectives."""
    # Bound to a name, as torch's registry holds no reference to the group.
    group = c10d.ProcessGroup(c10d.HashStore(), 0, ranks)
    c10d._register_process_group(GroupName(GROUP), group)
    try:
        yield
    finally:
        c10d._unregister_process_group(GroupName(GROUP))


def _compile(
    program: GraphModule, examples: tuple[Any, ...], scratch: str, settings: dict[str, Any]
) -> list[Any]:
    """Compile the program; return the paths of its library and metadata in `scratch`."""
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    kernels = os.environ.get(KERNELS)
    with fresh_cache(dir=scratch, delete=False):
        if kernels is not None:
            os.environ[KERNELS] = kernels  # `fresh_cache` restores the variable afterwards
        try:
            parts = torch._inductor.aot_compile(program, examples, options=settings)
            assert isinstance(parts, list)
        except InductorError as error:
            cause = error.inner_exception
            if not isinstance(cause, CppCompileError):
                raise
            lines = (line for line in cause.output.splitlines() if "error" in line)
            raise BuildError(f"the C++ compiler failed ({next(lines, 'silently')})") from None
    check_parts([Path(str(part)) for part in parts])
    return parts


def check_parts(parts: Iterable[Path]) -> None:
    """Raise BuildError if PyTorch could not load these parts of a program; empty the sources."""
    for part in parts:
        if part.suffix == ".cpp":  # nobody reads it, but torch 2.11 looks for its name
            part.write_text("")
        if part.suffix == ".so" and b"libstdc++.so" not in part.read_bytes():
            raise BuildError(
                "the C++ compiler links libstdc++ statically, and PyTorch could not load the "
                "programs: give another one in CXX, or install libstdc++.so"
            )


def _write_constants(
    program: str,
    exported: ExportedProgram,
    weights: Mapping[str, ByteRange],
    folder: Path,
    values: Mapping[str, Any],
) -> None:
    """Write the constants that no checkpoint holds, such as the rotary frequencies.

    values: the constants as they were on the CPU, as the program may be on another device.
    """
    constants = {
        name: values.get(name, value)
        for name, value in {**exported.constants, **exported.state_dict}.items()
        if isinstance(value, torch.Tensor) and name.removeprefix("model.") not in weights
    }
    assert not any(isinstance(value, FakeTensor) for value in constants.values()), (
        "they have values"
    )
    (folder / CONSTANTS.format(program)).write_bytes(save(constants))
