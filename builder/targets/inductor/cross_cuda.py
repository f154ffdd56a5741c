"""AOTInductor compilation for a GPU that this machine lacks.

Code generation reads a GPU's properties and its current device, but needs no GPU to make code.
`without_gpu` patches three things while it is active: PyTorch's queries of the GPU, Triton's driver
and the compile-time run of each kernel, which then only compiles. Weights and examples are fake
tensors (`without_values`). The library is linked against stubs of NVIDIA's driver and of PyTorch's
CUDA library, which define the names that the headers declare, without code.

Tested with torch 2.13 and Triton 3.9. The patched names also exist in the sources of PyTorch 2.11,
2.12 and 2.14, which were not run.
"""

import contextlib
import ctypes
import functools
import importlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from mtpbuild.builder.overrides import override_attribute
from mtpbuild.builder.targets.capability import GPUS, CudaGpu, architecture
from mtpbuild.runtime.contract.manifest import CrossCompiled
from mtpbuild.runtime.errors import (
    BuildError,
    MissingDependencyError,
    MtpbuildError,
    advise_install,
)

# These settings keep the compiler from measuring or computing on the GPU.
OPTIONS: dict[str, Any] = {
    "joint_graph_constant_folding": False,
    "shape_padding": False,
    "use_static_cuda_launcher": False,
    "use_static_triton_launcher": False,
}
LEFT_OUT = (
    "autotuning (the first configuration of each generated kernel is taken)",
    "smaller blocks for reductions that need many registers",
    "padding of matrix products",
    "folding of constants in the joint graph",
)
HEADERS = ("cuda.h", "cuda_runtime.h", "crt/host_config.h", "nv/target")
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using NoGuard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, NoGuard);
"""
# The stub libraries to link with: file -> soname, and patterns of names in the headers.
AOTI = "torch/csrc/inductor/aoti_torch"
STAND_INS = {
    "libcuda.so": ("libcuda.so.1", {"cuda.h": r"\bcu[A-Z]\w+"}),
    "libtorch_cuda.so": (
        "libtorch_cuda.so",
        {
            f"{AOTI}/generated/c_shim_cuda.h": r"\baoti_torch_\w+",
            f"{AOTI}/c/shim.h": r"\baoti_torch_\w*cuda\w*",
        },
    ),
}


def check() -> None:
    """Raise BuildError or MissingDependencyError unless this machine can compile for CUDA."""
    headers()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise BuildError("TRITON_INTERPRET=1: Triton compiles no kernels; unset it")


def info(capability: str) -> CrossCompiled:
    """Return the manifest's record of how the engine was compiled."""
    name = f"sm_{architecture(capability)}"
    return CrossCompiled(architecture=name, assumed=str(GPUS[capability]), left_out=LEFT_OUT)


def headers() -> Path:
    """Find the folder of CUDA's headers, in NVIDIA's wheels or in the toolkit at CUDA_HOME."""
    nvidia = find_spec("nvidia")
    wheels = () if nvidia is None else nvidia.submodule_search_locations or ()
    places = [path for wheel in wheels for path in sorted(Path(wheel).glob("cu*/include"))[::-1]]
    if "CUDA_HOME" in os.environ:
        places.append(Path(os.environ["CUDA_HOME"]) / "include")
    for place in places:
        if all((place / name).is_file() for name in HEADERS):
            return place
    raise MissingDependencyError(
        f"--compute-capability needs CUDA's headers: {advise_install('cross-cuda')}"
    )


def without_values(exported: ExportedProgram) -> None:
    """Turn weights, constants and examples into fake tensors, in place."""
    nodes = (node.meta.get("val") for node in exported.graph.nodes)
    mode = next(value.fake_mode for value in nodes if isinstance(value, FakeTensor))

    def fake(value: Any) -> Any:
        known = isinstance(value, FakeTensor) or not isinstance(value, torch.Tensor)
        return value if known else mode.from_tensor(value, static_shapes=True)

    for values in (exported.state_dict, exported.constants):
        values.update({name: fake(value) for name, value in values.items()})
    exported._example_inputs = pytree.tree_map(fake, exported.example_inputs)


@contextlib.contextmanager
def without_gpu(capability: str, scratch: Path) -> Iterator[None]:
    """Let AOTInductor compile for a GPU of this compute capability; undo everything on exit.

    scratch: a folder for headers and stub libraries, which must outlive the compilation. Raises
    BuildError if the compiler fails, as another version may query the GPU in other ways.
    """
    gpu = GPUS[capability]
    with contextlib.ExitStack() as undo:
        _register_noop_guard()
        undo.callback(_clear_caches)
        for owner, name, value in _list_answers(gpu, capability, _make_cuda_home(scratch)):
            undo.enter_context(override_attribute(owner, name, value))
        _clear_caches()
        try:
            yield
        except MtpbuildError:
            raise
        except Exception as error:
            what = str(error).strip().partition("\n")[0]
            raise BuildError(
                f"torch {torch.__version__} can't compile for {info(capability).architecture} "
                f"without a GPU ({type(error).__name__}: {what}); build on the GPU's machine"
            ) from error


def _list_answers(gpu: CudaGpu, capability: str, cuda_home: Path) -> Iterator[tuple[Any, str, Any]]:
    """List the attributes to replace while compiling: owner, name, value."""
    from torch._dynamo import device_interface
    from torch._inductor import graph, select_algorithm
    from torch._inductor.runtime import triton_heuristics
    from torch.utils import cpp_extension
    from triton.runtime import driver

    for name, answer in _replace_cuda_functions(gpu, capability).items():
        if hasattr(torch.cuda, name):
            yield torch.cuda, name, answer
        if name in vars(device_interface.CudaInterface):
            yield device_interface.CudaInterface, name, staticmethod(answer)
    zero = functools.partial(_answer, 0)
    for name in ("exchange_device", "maybe_exchange_device", "get_raw_stream"):
        yield device_interface.CudaInterface, name, staticmethod(zero)
    yield torch._C, "_cuda_getCurrentRawStream", zero
    yield torch._C._dynamo.guards, "_empty_strided_cuda", _on_meta
    yield driver, "_active", _make_triton_driver(gpu, architecture(capability))

    # Tracing must not touch the GPU, as on a machine without one.
    yield FakeTensorMode, "avoid_device_init", True
    yield fake_tensor, "init_gpu_context", functools.partial(_answer, None)
    # The compiler compares the addresses of weights to find equal ones; fake tensors have none.
    yield graph, "is_same_tensor", lambda a, b: a is b
    yield select_algorithm.AlgorithmSelectorCache, "generate_example_value", staticmethod(_on_meta)
    autotuner = triton_heuristics.CachingAutotuner
    yield autotuner, "run", _compile_kernel
    yield autotuner, "_precompile_worker", _keep_first_configuration(autotuner._precompile_worker)
    yield cpp_extension, "CUDA_HOME", str(cuda_home)


def _replace_cuda_functions(gpu: CudaGpu, capability: str) -> dict[str, Callable[..., Any]]:
    """Return replacements of the functions of `torch.cuda` that the compiler calls, by name."""
    major, minor = map(int, capability.split("."))
    properties = SimpleNamespace(
        name=f"NVIDIA {gpu.name}",
        major=major,
        minor=minor,
        multi_processor_count=gpu.multiprocessors,
        regs_per_multiprocessor=gpu.registers,
        max_threads_per_multi_processor=gpu.threads,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=gpu.memory,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=gpu.block_shared,
        shared_memory_per_multiprocessor=gpu.shared,
        L2_cache_size=gpu.cache,
        gcnArchName="",  # only AMD GPUs have one, but the compiler reads it on all
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "_is_compiled": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (major, minor),
        "get_device_name": properties.name,
        "mem_get_info": (gpu.memory, gpu.memory),
        "_lazy_init": None,
        "set_device": None,
        "synchronize": None,
        "set_rng_state": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    return {name: functools.partial(_answer, value) for name, value in answers.items()}


def _answer(value: Any, *asked: Any, **more: Any) -> Any:
    return value


def _on_meta(
    size: Any, stride: Any, *rest: Any, dtype: torch.dtype | None = None, **more: Any
) -> torch.Tensor:
    """Return a kernel's example operand on the meta device, as only its shape is read."""
    kind = dtype or next((value for value in rest if isinstance(value, torch.dtype)), None)
    return torch.empty_strided(tuple(size), tuple(stride), dtype=kind, device="meta")


def _compile_kernel(self: Any, *operands: Any, stream: Any, **more: Any) -> None:
    """Compile the kernel and register its cubin for the package, instead of launching it."""
    if not self.launchers:
        self.precompile()
    launcher = self.launchers[0]
    if launcher.store_cubin and not self.cuda_kernel_saved:
        self.save_gpu_kernel(stream, launcher)


def _keep_first_configuration(compile_all: Callable[[Any], None]) -> Callable[[Any], None]:
    """Keep only the first configuration, as none can be measured without the GPU."""

    def compile_first(self: Any) -> None:
        if self.configs:
            self.configs = self.configs[:1]
        compile_all(self)

    return compile_first


def _make_triton_driver(gpu: CudaGpu, architecture: int) -> Any:
    """Return a Triton driver that loads nothing and refuses kernels too large for the GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    properties = {
        "max_shared_mem": gpu.block_shared,
        "max_num_regs": gpu.registers,
        "multiprocessor_count": gpu.multiprocessors,
        "warpSize": 32,
    }

    class AbsentGpuDriver(CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:  # the base constructor opens libcuda
            # Triton expects: module (None, so it unloads none), function, registers, spills,
            # threads.
            loaded = None, object(), None, 0, 1024
            self.utils = SimpleNamespace(
                get_device_properties=lambda device: properties,
                load_binary=lambda *kernel: loaded,
            )
            self.launcher_cls = lambda source, metadata: _refuse_launch

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", architecture, 32)

        def get_current_device(self) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_current_stream(self, device: int) -> int:
            return 0

    return AbsentGpuDriver()


def _refuse_launch(*operands: Any) -> None:
    raise AssertionError("a kernel is launched, but its GPU is not here")


def _clear_caches() -> None:
    """Clear caches of a GPU's properties, so that none enters or leaves the compilation."""
    from torch._dynamo import device_interface
    from torch._inductor.runtime.hints import DeviceProperties

    device_interface.caching_worker_device_properties.pop("cuda", None)
    device_interface.caching_worker_current_devices.pop("cuda", None)
    DeviceProperties.create.cache_clear()
    for name in ("torch.utils._triton", "torch._inductor.utils"):
        for function in vars(importlib.import_module(name)).values():
            if hasattr(function, "cache_clear") and hasattr(function, "cache_info"):
                function.cache_clear()


@functools.cache
def _register_noop_guard() -> None:
    """Register a no-op device guard, which operators on fake CUDA tensors need.

    It stays registered for the process. PyTorch built with CUDA has a guard that works without a
    GPU.
    """
    if torch.backends.cuda.is_built():
        return
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as scratch:
        source, library = Path(scratch) / "guard.cpp", Path(scratch) / "guard.so"
        source.write_text(GUARD)
        options = ("-shared", "-fPIC", "-std=c++20", "-w", f"-I{torch_folder / 'include'}")
        _run(*options, str(source), "-o", str(library), f"-L{torch_folder / 'lib'}", "-lc10")
        ctypes.CDLL(str(library))


def _make_cuda_home(scratch: Path) -> Path:
    """Make a folder laid out like the CUDA toolkit's, with its headers and the stub libraries."""
    home = scratch / "cuda"
    (home / "lib64").mkdir(parents=True)
    (home / "include").symlink_to(headers(), target_is_directory=True)
    places = home / "include", Path(torch.__file__).parent / "include"
    for library, (soname, declared) in STAND_INS.items():
        names = set[str]()
        for header, pattern in declared.items():
            place = next(place for place in places if (place / header).exists())
            names.update(re.findall(pattern, (place / header).read_text(errors="replace")))
        source = home / "lib64" / f"{library}.c"
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(names)))
        options = ("-shared", "-fPIC", "-w", "-x", "c", f"-Wl,-soname,{soname}")
        _run(*options, str(source), "-o", str(home / "lib64" / library))
    return home


def _run(*arguments: str) -> None:
    compiler = get_cpp_compiler()
    assert shutil.which(compiler), "the check before has found it"
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (line for line in done.stderr.splitlines() if "error" in line)
        raise BuildError(f"the C++ compiler failed ({next(lines, 'silently')})")
