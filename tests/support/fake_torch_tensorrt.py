"""Fakes NVIDIA's packages for target tensorrt: TensorRT's module, Torch-TensorRT's and NCCL.

`lower_tensorrt` runs on the fakes unchanged, with our converters of collectives, cache writes,
quantised constants and sums. The resulting engine is a list of PyTorch calls (`fake_network.py`),
which runs the ops' references in place of our kernels; `make test-tensorrt` checks the plugins.
Ranks are real processes. Their collectives go over gloo and must match: number, place in the
program, name, type and shape are the same on all ranks.
"""

import contextlib
import ctypes
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch._dynamo  # must look for packages before they are replaced
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from mtpbuild.builder.targets.lower_tensorrt import TENSORRT
from mtpbuild.plugins import matmul_wide, moe
from mtpbuild.runtime.group.communicator import CAPSULE, UniqueId
from mtpbuild.runtime.group.start import time_limit
from mtpbuild.runtime.programs.tensorrt_api import errors_of
from tests.support import fake_network, fake_tensorrt
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_network import (
    BITS,
    TORCH,
    TYPES,
    Choice,
    Compiled,
    DataType,
    IConstantLayer,
    ITensor,
    LayerType,
    Network,
    Weights,
    compiled,
    name_of,
)
from tests.support.fake_tensorrt import SCRATCH, Context, Flag, Profile, Strategy
from tests.support.stand_ins import importing

VERSION = "11.0.0.114"
FUSED = "tensorrt::fused_nccl_all_reduce"
NUMPY = {
    **{DataType.FLOAT: np.float32, DataType.INT32: np.int32, DataType.INT64: np.int64},
    DataType.BOOL: np.bool_,
    DataType.INT8: np.uint8,
}
MISMATCH = "a collective does not match the other ranks'"


class BuilderFlag(IntEnum):
    TF32, STRIP_PLAN, REFIT_IDENTICAL = 7, 12, 16


class TimingCache:
    def serialize(self) -> bytes:
        return b"timings"


class Config:
    def __init__(self) -> None:
        self.profiling_verbosity, self.builder_optimization_level = 0, 3
        self.flags, self.profiles = {BuilderFlag.TF32}, list[Profile]()

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)

    def add_optimization_profile(self, profile: Profile) -> None:
        self.profiles.append(profile)

    def create_timing_cache(self, data: bytes) -> TimingCache:
        return TimingCache()

    def set_timing_cache(self, cache: TimingCache, ignore: bool) -> bool:
        return True

    def get_timing_cache(self) -> TimingCache:
        return TimingCache()


class Builder:
    """Compiles a network for this GPU."""

    def __init__(self, trt: "FakeDataCentre", logger: Any) -> None:
        self.trt, self.logger = trt, logger

    def create_network(self, flags: int) -> Network:
        assert flags == 1 << Flag.STRONGLY_TYPED
        return Network()

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        self.trt.networks.append(network)
        assert BuilderFlag.TF32 not in config.flags
        varying = {tensor.name for tensor in network.inputs if -1 in tensor.shape}
        shapes = config.profiles[0].shapes if config.profiles else {}
        assert set(shapes) == varying, "a varying size has no profile"
        try:
            done = compiled(network, BuilderFlag.STRIP_PLAN in config.flags)
        except ValueError as error:
            self.logger.log(fake_tensorrt.ILogger.ERROR, str(error))
            return None
        header = json.dumps({"profile": shapes, "version": self.trt.__version__})
        return header.encode() + b"\n" + done.to_bytes()


class Engine:
    """Is a list of PyTorch calls, where TensorRT has kernels."""

    def __init__(self, trt: "FakeDataCentre", header: dict[str, Any], done: Compiled) -> None:
        self.trt, self.profile, self.done = trt, header["profile"], done
        self.inputs, self.outputs, self.aliases = done.inputs, done.outputs, done.aliases
        self.tensors = self.inputs | self.outputs
        self.device_memory_size_v2 = SCRATCH + len(self.outputs)
        self.stripped, self.total = done.stripped, None

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.tensors[name][1]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name][2]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def host_dtype(self, name: str) -> np.dtype[Any]:
        return _host_dtype(self.get_tensor_dtype(name))

    def run(
        self, feed: dict[str, np.ndarray[Any, Any]], total: fake_network.Sum | None
    ) -> list[np.ndarray[Any, Any]]:
        assert not self.stripped, "its weights were put back"
        given = {
            name: torch.from_numpy(array).view(TORCH[self.get_tensor_dtype(name)])
            for name, array in feed.items()
        }
        with torch.no_grad():
            results = self.done.run(given, total)
        outputs = []
        for name, result in zip(self.outputs, results, strict=True):
            _, dtype, shape = self.outputs[name]
            assert result.dtype == TORCH[dtype], f"{name} is {result.dtype}"
            assert len(result.shape) == len(shape)
            assert all(n in (-1, m) for n, m in zip(shape, result.shape, strict=True)), name
            bits = result.view(torch.uint16) if dtype == DataType.BF16 else result
            outputs.append(bits.contiguous().numpy())
        return outputs

    def create_execution_context(self, strategy: Strategy) -> "RankContext":
        assert strategy is Strategy.USER_MANAGED
        self.trt.contexts.append(RankContext(self))
        return self.trt.contexts[-1]


def _host_dtype(dtype: DataType) -> np.dtype[Any]:
    return np.dtype("uint16") if dtype == DataType.BF16 else np.dtype(nptype(dtype))


class RankContext(Context):
    """Is a context whose engine's collectives run in a given communicator."""

    total: fake_network.Sum | None = None

    def set_communicator(self, capsule: object) -> bool:
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        self.total = self.engine.trt.nccl.sums[pointer(capsule, CAPSULE)]
        return True

    def results(self, feed: dict[str, np.ndarray[Any, Any]]) -> Any:
        return self.engine.run(feed, self.total)


class Runtime:
    def __init__(self, trt: "FakeDataCentre", logger: Any) -> None:
        self.trt, self.logger = trt, logger

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        header, _, stored = data.partition(b"\n")
        try:
            known = json.loads(header)
        except ValueError:
            self.logger.log(fake_tensorrt.ILogger.ERROR, "Magic tag does not match")
            return None
        return Engine(self.trt, known, torch.load(io.BytesIO(stored), weights_only=False))


class Refitter:
    """Restores weights by the names that `set_weights_name` gave."""

    def __init__(self, engine: Engine, logger: Any) -> None:
        self.engine, self.given = engine, dict[str, Any]()

    def get_all_weights(self) -> list[str]:
        return list(self.engine.stripped)

    def get_weights_prototype(self, name: str) -> Any:
        _, dtype, shape = self.engine.stripped[name]
        count = math.prod(shape) * (8 // BITS.get(dtype, 8))
        return SimpleNamespace(dtype=dtype, size=count, nbytes=Weights(dtype, 0, count).nbytes)

    def set_named_weights(self, name: str, weights: Any) -> bool:
        _, dtype, shape = self.engine.stripped[name]
        if not isinstance(weights, Weights):
            weights = Weights(
                TYPES[torch.from_numpy(np.zeros(0, weights.dtype)).dtype],
                weights.ctypes.data,
                weights.size,
            )
        if (weights.dtype, weights.nbytes) != (dtype, self.get_weights_prototype(name).nbytes):
            return False
        raw = (ctypes.c_uint8 * weights.nbytes).from_address(weights.address)
        held = torch.frombuffer(raw, dtype=torch.uint8).clone()
        self.given[name] = held.view(TORCH.get(dtype, torch.uint8)).view(shape)
        return True

    def refit_cuda_engine(self) -> bool:
        for name, (numbers, _, _) in self.engine.stripped.items():
            self.engine.done.constants.update(dict.fromkeys(numbers, self.given[name]))
        self.engine.stripped = {}
        return True


class FakeDataCentre:
    """Stands in for `tensorrt`; `networks` are the compiled ones."""

    ILogger, NetworkDefinitionCreationFlag = fake_tensorrt.ILogger, Flag
    ExecutionContextAllocationStrategy = Strategy
    ITensor, IConstantLayer, Weights, LayerType = ITensor, IConstantLayer, Weights, LayerType
    BuilderFlag = BuilderFlag
    float32, bfloat16, int32 = DataType.FLOAT, DataType.BF16, DataType.INT32
    int64, bool, fp8, fp4 = DataType.INT64, DataType.BOOL, DataType.FP8, DataType.FP4
    int8 = DataType.INT8
    CumulativeOperation = ReduceOperation = CollectiveOperation = Choice
    GatherMode = KVCacheMode = Choice
    ProfilingVerbosity = SimpleNamespace(DETAILED=2)
    PreviewFeature = SimpleNamespace()
    __version__ = VERSION

    def __init__(self, gpu: FakeCuda | None = None, nccl: "FakeNccl | None" = None) -> None:
        self.gpu, self.nccl = gpu or FakeCuda(), nccl or FakeNccl()
        self.networks, self.contexts = list[Network](), list[RankContext]()
        self.DataType = DataType

    def Builder(self, logger: Any) -> Builder:  # noqa: N802
        return Builder(self, logger)

    def Runtime(self, logger: Any) -> Runtime:  # noqa: N802
        return Runtime(self, logger)

    def Refitter(self, engine: Engine, logger: Any) -> Refitter:  # noqa: N802
        return Refitter(engine, logger)

    @staticmethod
    def nptype(dtype: DataType) -> Any:
        return nptype(dtype)


def nptype(dtype: DataType) -> Any:
    """Returns NumPy's type, where it has one."""
    if dtype not in NUMPY:
        raise TypeError(f"NumPy has no {dtype.name}")
    return NUMPY[dtype]


class FakeNccl:
    """Is NCCL's library over gloo: it sums by a communicator's handle."""

    def __init__(self) -> None:
        self.sums: dict[int, fake_network.Sum] = {}
        self.done: list[str] = []  # collectives, in order
        self.lost = False
        self.ncclGetErrorString: Any = lambda code: b"unhandled cuda error"

    def ncclGetUniqueId(self, name: Any) -> int:  # noqa: N802  # NCCL's names
        name._obj.bytes[:] = [7] * 128
        return 0

    def ncclCommInitRank(  # noqa: N802
        self, handle: Any, ranks: Any, name: UniqueId, rank: Any
    ) -> int:
        assert list(name.bytes) == [7] * 128, "all have rank 0's id"
        assert (rank.value, ranks.value) == (dist.get_rank(), dist.get_world_size())
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=time_limit()))
        handle._obj.value = len(self.sums) + 1
        self.sums[handle._obj.value] = lambda what, x: self._sum(group, what, x)
        return 0

    def ncclCommGetAsyncError(self, handle: Any, error: Any) -> int:  # noqa: N802
        assert handle.value in self.sums
        error._obj.value = 3 if self.lost else 0
        return 0

    def ncclCommAbort(self, handle: Any) -> int:  # noqa: N802
        del self.sums[handle.value]
        return 0

    def _sum(self, group: Any, what: str, x: Tensor) -> Tensor:
        """Adds up all ranks' terms, if all are at the same place of the same program."""
        own = f"{what}: {x.dtype} {[*x.shape]}"
        digest = torch.frombuffer(
            bytearray(hashlib.sha256(own.encode()).digest()), dtype=torch.uint8
        )
        every = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
        dist.all_gather(every, digest, group=group)
        if any(not torch.equal(other, digest) for other in every):
            raise RuntimeError(f"{MISMATCH} ({own})")
        total = x.clone().contiguous()
        dist.all_reduce(total, group=group)
        self.done.append(own)
        return total


def _fused(x: Tensor, reduce: str, group: str) -> Tensor:
    raise AssertionError("it is converted, not called")


with contextlib.suppress(RuntimeError):  # as in the real package
    torch.library.define(FUSED, "(Tensor x, str reduce, str group) -> Tensor")
    torch.library.impl(FUSED, "CompositeExplicitAutograd")(_fused)

# What a plugin's converter makes of weights.
OPERANDS = {torch.bfloat16: DataType.BF16, torch.float32: DataType.FLOAT, torch.uint8: DataType.FP8}

# The ops whose launches are plugins.
PLUGINS = {op._opoverload for op, file in TENSORRT.items() if file == "plugins"}
PLUGINS |= {moe._opoverload, matmul_wide._opoverload}


class TRTInterpreter(Interpreter):
    """Stands in for Torch-TensorRT's: each operator becomes layers, by a converter or as it is."""

    trt: FakeDataCentre
    converters: dict[Any, Callable[..., Any]]

    def __init__(self, module: GraphModule, inputs: list[Any], compilation_settings: Any) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.given, self.node = iter(inputs), next(iter(module.graph.nodes))
        self.builder = self.trt.Builder(errors_of(cast(ModuleType, self.trt)))
        self.ctx = SimpleNamespace(net=self.builder.create_network(1 << Flag.STRONGLY_TYPED))

    def _construct_trt_network_def(self) -> None:
        self.run(enable_io_processing=False)

    def run_node(self, n: Node) -> Any:
        self.node = n
        return super().run_node(n)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        spec = next(self.given)
        return self.ctx.net.add_input(str(target), TYPES[spec.dtype], spec.shape)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.fetch_attr(target).data

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        for tensor in args[0]:
            self.ctx.net.mark_output(tensor)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        node, net = self.node, self.ctx.net
        if target in self.converters and target not in PLUGINS:
            before = len(net.layers)
            result = self.converters[target](self.ctx, target, args, kwargs, node.name)
            for layer in net.layers[before:]:
                layer.name = layer.name or node.name
            return result
        if all(isinstance(each, int) for each in args) and target in fake_network.NUMBERS.values():
            return target(*args)
        if getattr(target, "__name__", "") == "getitem":
            return args[0][args[1]]
        kind = LayerType.PLUGIN_V3 if target in PLUGINS else LayerType.OTHER
        if kind is LayerType.PLUGIN_V3:
            shapes = [each.shape for each in _flat(args) if isinstance(each, ITensor)]
            assert not any(-1 in shape for shape in shapes), "a plugin has fixed shapes"
        plugin = kind is LayerType.PLUGIN_V3
        frozen = torch.utils._pytree.tree_map(
            lambda value: self._frozen(value, plugin), (args, kwargs)
        )
        return net.add_torch(name_of(target), *frozen, node.meta.get("val"), kind)

    def _frozen(self, value: Any, plugin: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        if plugin and value.dtype in OPERANDS:  # as its converter does
            name = f"{self.node.name}_{self.ctx.net.num_layers}"
            return self.ctx.constants.operand(value, OPERANDS[value.dtype], name)
        return freeze(self.ctx, value, self.node.name)


def _flat(values: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(values)


def freeze(ctx: Any, value: Any, name: str, *others: Any) -> Any:
    """Makes a weight a constant of the network."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.uint8:  # a plugin reads them as bytes
        weights: Any = Weights(DataType.FP8, value.data_ptr(), value.numel())
        return ctx.constants.constant(value, weights.dtype, f"{name}_{ctx.net.num_layers}")
    assert value.dtype != torch.bfloat16, "Torch-TensorRT would make an fp32 constant of it"
    layer = ctx.net.add_constant([*value.shape], value.detach().contiguous().numpy())
    ctx.held = [*getattr(ctx, "held", []), value]
    layer.name = name
    return layer.get_output(0)


def fuse(module: GraphModule, settings: Any) -> GraphModule:
    """Fuses an all-reduce and its wait into one call, as Torch-TensorRT's lowering does."""
    fused = torch.ops.tensorrt.fused_nccl_all_reduce.default
    ops = torch.ops._c10d_functional
    for node in list(module.graph.nodes):
        if node.op == "call_module" or node.target is torch.ops.aten._assert_scalar.default:
            module.graph.erase_node(node)  # guards of sizes
        elif node.target is ops.wait_tensor.default:
            (reduced,) = node.args
            assert isinstance(reduced, Node)
            assert reduced.target is ops.all_reduce.default
            node.target, node.args = fused, reduced.args
            module.graph.erase_node(reduced)
    module.graph.eliminate_dead_code()
    return GraphModule(module, module.graph)


class Input:
    """Is one network input, of a fixed shape or of a range of shapes."""

    def __init__(self, dtype: torch.dtype, shape: Any = None, **shapes: tuple[int, ...]) -> None:
        self.dtype = dtype
        least, most = shapes.get("min_shape", shape), shapes.get("max_shape", shape)
        self.shape = tuple(n if n == m else -1 for n, m in zip(least, most, strict=True))


def modules(trt: FakeDataCentre) -> dict[str, Any]:
    """Returns the modules by name, for `importing`."""
    converters = dict[Any, Callable[..., Any]]()

    def dynamo_tensorrt_converter(op: Any, **how: Any) -> Any:
        assert how["supports_dynamic_shapes"]
        return lambda converter: converters.setdefault(op, converter)

    def matrix_multiply(ctx: Any, target: Any, source: Any, name: str, x: Any, y: Any) -> Any:
        return ctx.net.add_matrix_multiply(x, y).get_output(0)

    interpreter = type("Interpreter", (TRTInterpreter,), {"trt": trt, "converters": converters})
    settings = SimpleNamespace
    conversion = SimpleNamespace(
        TRTInterpreter=interpreter,
        ConverterPriority=SimpleNamespace(HIGH=1),
        dynamo_tensorrt_converter=dynamo_tensorrt_converter,
    )
    lowering = SimpleNamespace(
        # There are no decompositions, and searching for them would take seconds.
        pre_export_lowering=lambda exported, settings: SimpleNamespace(
            run_decompositions=lambda table: exported
        ),
        get_decompositions=lambda enabled: {},
        post_lowering=fuse,
    )
    dynamo = SimpleNamespace(__name__="torch_tensorrt.dynamo", CompilationSettings=settings)
    return {
        "tensorrt": trt,
        "torch_tensorrt": SimpleNamespace(Input=Input),
        "torch_tensorrt.dynamo": dynamo,
        "torch_tensorrt.dynamo.lowering": lowering,
        "torch_tensorrt.dynamo.conversion": conversion,
        "torch_tensorrt.dynamo.conversion.converter_utils": SimpleNamespace(get_trt_tensor=freeze),
        "torch_tensorrt.dynamo.conversion.impl": SimpleNamespace(
            matmul=SimpleNamespace(matrix_multiply=matrix_multiply)
        ),
        "cuda.bindings.runtime": trt.gpu,
    }


@contextlib.contextmanager
def installed(trt: FakeDataCentre) -> Iterator[None]:
    """Lets this process build and run with the fakes."""
    from mtpbuild.builder.targets import lower_tensorrt

    caches = lower_tensorrt.torch_tensorrt, lower_tensorrt._interpreter_class
    for cache in caches:
        cache.cache_clear()
    os.environ.setdefault("XDG_CACHE_HOME", "/nonexistent")
    with importing(modules(trt)):
        yield
    for cache in caches:
        cache.cache_clear()
