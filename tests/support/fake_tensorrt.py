"""NVIDIA's TensorRT: a network is a list of PyTorch calls, which a fake GPU runs.

A layer that our converters add does what TensorRT documents for it; an operator that Torch-TensorRT
would convert is called as it is. The fake refuses what the real one refuses (violated rules of
KVCacheUpdate, sizes outside the profile, damaged engines), and fails an assertion where behaviour
would be undefined: tensors without memory, aliases with two addresses, too little scratch memory, a
capture without a warm-up.
"""

import ctypes
import io
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mtpbuild.builder.formats.nvfp4 import unpack
from mtpbuild.plugins.matmul_scaled.op import e4m3
from mtpbuild.runtime.group.communicator import CAPSULE
from tests.support.fake_cuda import STREAM, FakeCuda

VERSION = "11.0.0.114"
SCRATCH = 4096  # bytes that a program needs, plus one per output
DAMAGED, FOREIGN = b"damaged", b"another GPU's"  # timing caches
# A collective of the ranks that run a network: takes name, type and shape, and this rank's term.
Sum = Callable[[str, Tensor], Tensor]


class DataType(Enum):
    FLOAT, BF16, INT32, INT64, BOOL, FP8, FP4, INT8 = range(8)


TORCH = {
    DataType.FLOAT: torch.float32, DataType.BF16: torch.bfloat16, DataType.INT32: torch.int32,
    DataType.INT64: torch.int64, DataType.BOOL: torch.bool,
    DataType.INT8: torch.uint8,  # our kernels read bytes
}  # fmt: skip
NUMPY = {
    **{DataType.FLOAT: np.float32, DataType.INT32: np.int32, DataType.INT64: np.int64},
    **{DataType.BOOL: np.bool_, DataType.INT8: np.uint8},
}
TYPES = {dtype: name for name, dtype in TORCH.items()}
BITS = {DataType.FP8: 8, DataType.FP4: 4}  # types in which PyTorch does not compute


class LayerType(Enum):
    CONSTANT, KV_CACHE_UPDATE, DIST_COLLECTIVE, PLUGIN_V3, OTHER = range(5)


class Choice(Enum):
    """The modes of layers that our networks use."""

    SUM, ELEMENT, ALL_REDUCE, LINEAR, MAX, MIN = range(6)


class ILogger:
    ERROR, INTERNAL_ERROR, WARNING = 1, 0, 2

    def log(self, severity: int, text: str) -> None: ...


class BuilderFlag(IntEnum):
    TF32, STRIP_PLAN, REFIT_IDENTICAL = 7, 12, 16


class Strategy(IntEnum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = 0, 1, 2


@dataclass(frozen=True)
class Weights:
    """An address and a size, as TensorRT's own do; the caller keeps the values."""

    dtype: DataType
    address: int
    size: int

    @property
    def nbytes(self) -> int:
        bits = BITS.get(self.dtype) or 8 * TORCH[self.dtype].itemsize
        return self.size * bits // 8

    def read(self, shape: tuple[int, ...]) -> Tensor:
        """Return the values where they are; quantised ones as bytes."""
        raw = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
        tensor = torch.frombuffer(raw, dtype=torch.uint8)
        if self.dtype in BITS:
            return tensor.view(*shape[:-1], -1)
        return tensor.view(TORCH[self.dtype]).view(shape)


@dataclass(eq=False)
class ITensor:
    dtype: DataType
    shape: tuple[int, ...]
    name: str = ""


class Number:
    """A size that is known only when the network runs, such as that of a prompt's chunk."""


@dataclass(eq=False)
class ILayer:
    """One layer: the function that it calls, its operands and its outputs."""

    type: LayerType
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Any]
    name: str = ""  # a stripped constant's: of its weights
    axis: int = 0
    num_ranks: int = 1
    groups: tuple[int, ...] = ()
    tensor: Tensor | None = None  # a constant's values, unless stripped; quantised ones as bits

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class IConstantLayer(ILayer):
    @property
    def weights(self) -> Any:
        """The values as an array, or as an address where NumPy has no such type."""
        assert self.tensor is not None
        dtype, shape = self.outputs[0].dtype, self.outputs[0].shape
        if dtype not in NUMPY:
            return Weights(dtype, self.tensor.data_ptr(), math.prod(shape))
        return self.tensor.numpy()


@dataclass
class Network:
    """A network, which grows by the calls of converters, and its compiled engine."""

    layers: list[ILayer] = field(default_factory=list)
    inputs: list[ITensor] = field(default_factory=list)
    outputs: list[ITensor] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # weights by their address
    profile: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    trt: ClassVar["FakeTensorRt"]  # the one that has loaded the engine

    num_inputs = property(lambda self: len(self.inputs))
    num_outputs = property(lambda self: len(self.outputs))
    num_layers = property(lambda self: len(self.layers))

    def get_input(self, index: int) -> ITensor:
        return self.inputs[index]

    def get_output(self, index: int) -> ITensor:
        return self.outputs[index]

    def get_layer(self, index: int) -> ILayer:
        return self.layers[index]

    def set_weights_name(self, weights: Any, name: str) -> bool:
        address = weights.address if isinstance(weights, Weights) else weights.ctypes.data
        self.names[address] = name
        return True

    def add_input(self, name: str, dtype: DataType, shape: tuple[int, ...]) -> ITensor:
        self.inputs.append(ITensor(dtype, tuple(shape), name))
        return self.inputs[-1]

    def mark_output(self, tensor: ITensor) -> None:
        assert tensor not in self.inputs, "an input can't be an output"
        self.outputs.append(tensor)

    def add_constant(self, shape: list[int], weights: "Weights | np.ndarray[Any, Any]") -> ILayer:
        if isinstance(weights, Weights):
            assert weights.size == math.prod(shape)
            tensor, dtype = weights.read(tuple(shape)), weights.dtype
        else:
            tensor = torch.from_numpy(weights).view(shape)
            dtype = TYPES[tensor.dtype]
        made = self._layer("constant", (), dtype, tuple(shape), LayerType.CONSTANT)
        made.tensor = tensor
        return made

    def add_cast(self, x: ITensor, dtype: DataType) -> ILayer:
        return self._layer("cast", (x, dtype), dtype, x.shape)

    def add_cumulative(
        self, x: ITensor, axis: ITensor, how: Choice, exclusive: bool, reverse: bool
    ) -> ILayer:
        assert (how, exclusive, reverse) == (Choice.SUM, False, False)
        return self._layer("cumulative", (x, axis), x.dtype, x.shape)

    def add_gather_v2(self, values: ITensor, ids: ITensor, mode: Choice) -> ILayer:
        assert mode is Choice.ELEMENT
        return self._layer("gather", (values, ids), values.dtype, ids.shape)

    def add_reduce(self, x: ITensor, how: Choice, axes: int, keep: bool) -> ILayer:
        assert (how, keep) == (Choice.SUM, False)
        left = tuple(size for axis, size in enumerate(x.shape) if not axes >> axis & 1)
        return self._layer("reduce", (x, axes), x.dtype, left)

    def add_topk(self, values: ITensor, how: Choice, k: int, axes: int) -> ILayer:
        axis = axes.bit_length() - 1
        assert k == values.shape[axis] <= 3840, "TensorRT's bound"
        operands = (values, how is Choice.MAX, axis)
        made = self._layer("sort", operands, values.dtype, values.shape)
        made.outputs.append(ITensor(DataType.INT32, values.shape))
        return made

    def add_dequantize(self, values: ITensor, scales: ITensor, dtype: DataType) -> ILayer:
        assert values.dtype in BITS or values.dtype == scales.dtype, "of a scale of scales"
        assert scales.dtype == dtype, "a scale has the result's type"
        return self._layer("dequantize", (values, scales, values.dtype), dtype, values.shape)

    def add_kv_cache_update(
        self, cache: ITensor, rows: ITensor, start: ITensor, mode: Choice
    ) -> ILayer:
        assert mode is Choice.LINEAR
        assert start.dtype == DataType.INT32
        assert cache.dtype == rows.dtype
        assert len(cache.shape) == 4
        assert -1 not in cache.shape
        operands, kind = (cache, rows, start), LayerType.KV_CACHE_UPDATE
        return self._layer("kv_update", operands, cache.dtype, cache.shape, kind)

    def add_dist_collective(
        self, x: ITensor, what: Choice, how: Choice, root: int, groups: Any
    ) -> ILayer:
        assert (what, how, root) == (Choice.ALL_REDUCE, Choice.SUM, -1)
        made = self._layer("all_reduce", (x,), x.dtype, x.shape, LayerType.DIST_COLLECTIVE)
        made.groups = tuple(map(int, groups))
        return made

    def add_matrix_multiply(self, x: ITensor, y: ITensor) -> ILayer:
        assert x.dtype == y.dtype
        return self._layer("aten::matmul.", (x, y), x.dtype, (*x.shape[:-1], y.shape[-1]))

    def add_torch(
        self, function: str, args: Any, kwargs: Any, like: Any, kind: LayerType = LayerType.OTHER
    ) -> Any:
        """Add a PyTorch operator, which is not TensorRT's; its results are `like` these."""
        outputs = tree_map(_make_like, like)
        all_outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        # TensorRT chooses a result's memory layout.
        named = {name: value for name, value in kwargs.items() if name != "memory_format"}
        self.layers.append(ILayer(kind, function, args, named, all_outputs))
        return outputs

    def _layer(
        self,
        function: str,
        args: tuple[Any, ...],
        dtype: DataType,
        shape: tuple[int, ...],
        kind: LayerType = LayerType.OTHER,
    ) -> ILayer:
        self.layers.append(ILayer(kind, function, args, {}, [ITensor(dtype, tuple(shape))]))
        return self.layers[-1]

    @property
    def aliases(self) -> dict[str, str]:
        """The input that each cache's output overwrites."""
        writes = [layer for layer in self.layers if layer.type is LayerType.KV_CACHE_UPDATE]
        return {layer.outputs[0].name: layer.args[0].name for layer in writes}

    def check(self) -> None:
        """Raise ValueError where TensorRT would refuse the network."""
        names, outputs = ({t.name for t in side} for side in (self.inputs, self.outputs))
        if not (self.aliases.keys() <= outputs and {*self.aliases.values()} <= names):
            raise ValueError("the cache of a KVCacheUpdate is a network input and output")
        for layer in self.layers:
            ranks = tuple(range(layer.num_ranks))
            if layer.type is LayerType.DIST_COLLECTIVE and (
                len(ranks) < 2 or layer.groups != ranks
            ):
                raise ValueError(f"{layer.name}: {layer.groups} of {layer.num_ranks} ranks")
        if {*self.profile} != {t.name for t in self.inputs if -1 in t.shape}:
            raise ValueError("a varying size has no profile")

    def to_bytes(self, strip: bool = False) -> bytes:
        """Serialise it; stripped constants have the names of their weights in place of values."""
        layers = [
            replace(layer, tensor=None, name=self.names[layer.tensor.data_ptr()])
            if strip and layer.tensor is not None
            else layer
            for layer in self.layers
        ]
        buffer = io.BytesIO()
        torch.save(replace(self, layers=layers, names={}), buffer)
        return buffer.getvalue()

    @property
    def tensors(self) -> dict[str, ITensor]:
        return {tensor.name: tensor for tensor in (*self.inputs, *self.outputs)}

    @property
    def stripped(self) -> dict[str, list[ILayer]]:
        """The constants without values, by the names of their weights."""
        found = dict[str, list[ILayer]]()
        for layer in self.layers:
            if layer.type is LayerType.CONSTANT and layer.tensor is None:
                found.setdefault(layer.name, []).append(layer)
        return found

    @property
    def device_memory_size_v2(self) -> int:
        return SCRATCH + len(self.outputs)

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.tensors[name].dtype

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def create_execution_context(self, strategy: Strategy) -> "Context":
        assert strategy is Strategy.USER_MANAGED
        context = Context(self)
        self.trt.contexts.append(context)
        return context

    def run(self, feed: Mapping[str, Tensor], total: Sum | None = None) -> list[Tensor]:
        """Return the outputs in their order; total: sums a tensor of all ranks."""
        values: dict[Any, Any] = {tensor: feed[tensor.name] for tensor in self.inputs}
        sums = 0
        for layer in self.layers:
            operands, named = tree_map(
                lambda value: values[value] if isinstance(value, ITensor | Number) else value,
                (layer.args, layer.kwargs),
            )
            if layer.type is LayerType.CONSTANT:
                assert layer.tensor is not None, "its weights were put back"
                result = layer.tensor
            elif layer.type is LayerType.DIST_COLLECTIVE:
                assert total is not None, "a collective wants a communicator"
                result = total(f"{sums} {layer.num_ranks} ranks {layer.name}", *operands)
                sums += 1
            elif layer.function == "gather":
                result = operands[0].gather(layer.axis, operands[1])
            else:
                result = resolve(layer.function)(*operands, **named)
            results = result if isinstance(result, tuple | list) else [result]
            values.update(zip(layer.outputs, map(_make_contiguous, results), strict=True))
        for tensor in self.outputs:
            assert values[tensor].dtype == TORCH[tensor.dtype], tensor.name
            sizes = zip(tensor.shape, values[tensor].shape, strict=True)
            assert all(size in (-1, other) for size, other in sizes), tensor.name
        return [values[tensor] for tensor in self.outputs]


def _make_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return Number()
    sizes = (size if isinstance(size, int) else -1 for size in value.shape)
    return ITensor(TYPES[value.dtype], tuple(sizes))


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[tuple[int, ...]]] = {}

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        assert len(shapes) == 3
        self.shapes[name] = [tuple(shape) for shape in shapes]


class Config:
    """A build's settings; its timing cache gets one measurement more from the build."""

    def __init__(self) -> None:
        self.builder_optimization_level = 3
        self.flags, self.profiles = {BuilderFlag.TF32}, list[Profile]()
        self.timings = b""

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)

    def add_optimization_profile(self, profile: Profile) -> None:
        self.profiles.append(profile)

    def create_timing_cache(self, timings: bytes) -> bytes | None:
        return None if timings == DAMAGED else timings

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        fits = not cache.startswith(FOREIGN)
        self.timings = cache if fits else self.timings
        return fits

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: memoryview(self.timings + b"+"))


class Builder:
    def __init__(self, trt: "FakeTensorRt", logger: Any) -> None:
        self.trt, self.logger = trt, logger

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        assert BuilderFlag.TF32 not in config.flags
        network.profile = config.profiles[0].shapes if config.profiles else {}
        try:
            network.check()
        except ValueError as error:
            self.logger.log(ILogger.ERROR, str(error))
            return None
        self.trt.networks.append(network)
        return network.to_bytes(BuilderFlag.STRIP_PLAN in config.flags)


def _make_contiguous(result: Any) -> Any:
    """Return a tensor without strides, as TensorRT's are."""
    return result.contiguous() if isinstance(result, Tensor) else result


def name_of(function: Any) -> str:
    """Return an operator by its name; raise KeyError for an unknown one."""
    if isinstance(function, torch._ops.OpOverload):
        return f"{function._schema.name}.{function._schema.overload_name}"
    if function in NUMBERS.values():
        return str(function.__name__)
    raise KeyError(f"{function} is not known")


def resolve(name: str) -> Callable[..., Any]:
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    space, _, operation = name.partition("::")
    packet, _, overload = operation.partition(".")
    packet_of = getattr(getattr(torch.ops, space), packet)
    operator: Callable[..., Any] = getattr(packet_of, overload or "default")
    return operator


def _dequantize(values: Tensor, scales: Tensor, dtype: DataType) -> Tensor:
    """Scale blocks; at most one dimension has blocks of more than one value."""
    numbers = values
    if dtype in BITS:
        numbers = e4m3(values) if dtype == DataType.FP8 else unpack(values)
    if scales.dim():
        blocks = [n // m for n, m in zip(numbers.shape, scales.shape, strict=True)]
        assert sum(block > 1 for block in blocks) <= 1
        for axis, block in enumerate(blocks):
            scales = scales.repeat_interleave(block, dim=axis)
    return numbers.to(scales.dtype) * scales


def _update(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    assert int(start.max()) + rows.shape[2] <= cache.shape[2], "an overrun would be silent"
    index = start.long()[:, None] + torch.arange(rows.shape[2])
    return cache.scatter(2, index[:, None, :, None].expand(rows.shape), rows)


def _sum_over(x: Tensor, axes: int) -> Tensor:
    return x.sum([axis for axis in range(x.dim()) if axes >> axis & 1])


def _sort(values: Tensor, descending: bool, axis: int) -> tuple[Tensor, Tensor]:
    in_order, indices = values.sort(dim=axis, descending=descending, stable=True)
    return in_order, indices.int()


NUMBERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)
}
FUNCTIONS = NUMBERS | {
    "cast": lambda x, dtype: x.to(TORCH[dtype]), "cumulative": lambda x, axis: x.cumsum(int(axis)),
    "reduce": _sum_over, "dequantize": _dequantize, "kv_update": _update, "sort": _sort,
}  # fmt: skip


class Runtime:
    def __init__(self, trt: "FakeTensorRt", logger: Any) -> None:
        self.trt, self.logger = trt, logger

    def deserialize_cuda_engine(self, data: bytes) -> Network | None:
        try:
            engine: Network = torch.load(io.BytesIO(data), weights_only=False)
        except Exception:
            self.logger.log(ILogger.ERROR, "Magic tag does not match")
            return None
        engine.trt = self.trt  # type: ignore[misc]
        return engine


class Refitter:
    """Restores weights by the names that `set_weights_name` gave."""

    def __init__(self, engine: Network, logger: Any) -> None:
        self.engine, self.logger, self.held = engine, logger, dict[str, Tensor]()

    def get_all_weights(self) -> list[str]:
        return list(self.engine.stripped)

    def get_weights_prototype(self, name: str) -> Weights:
        like = self.engine.stripped[name][0].outputs[0]
        return Weights(like.dtype, 0, math.prod(like.shape))

    def set_named_weights(self, name: str, weights: Any) -> bool:
        if not isinstance(weights, Weights):
            kind = TYPES[torch.from_numpy(np.zeros(0, weights.dtype)).dtype]
            weights = Weights(kind, weights.ctypes.data, weights.size)
        if fits := replace(weights, address=0) == self.get_weights_prototype(name):
            shape = self.engine.stripped[name][0].outputs[0].shape
            self.held[name] = weights.read(shape).clone()
        return fits

    def refit_cuda_engine(self) -> bool:
        if fails := self.engine.trt.refit_fails:
            self.logger.log(ILogger.ERROR, fails)
            return False
        for name, layers in self.engine.stripped.items():
            for layer in layers:
                layer.tensor = self.held[name]
        return True


class Context:
    """An engine's tensors bound to addresses; its collectives run in a given communicator."""

    def __init__(self, engine: Network) -> None:
        self.engine, self.gpu = engine, engine.trt.gpu
        self.addresses: dict[str, int] = {}
        self.shapes = {tensor.name: tensor.shape for tensor in engine.inputs}
        self.scratch = 0, 0
        self.runs = 0
        self.total: Sum | None = None

    def set_communicator(self, capsule: object) -> bool:
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        self.total = self.engine.trt.nccl.sums[pointer(capsule, CAPSULE)]
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        assert size >= self.engine.device_memory_size_v2
        assert self.gpu.on_device(address, size)
        self.scratch = address, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self.engine.profile[name]
        fits = all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))
        if fits:
            self.shapes[name] = shape
        return fits

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % 256 == 0
        self.addresses[name] = address
        return name in self.engine.tensors

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == STREAM
        assert self.scratch[1], "memory is the caller's"
        assert not any(-1 in shape for shape in self.shapes.values()), "a size is not set"
        assert self.addresses.keys() == self.engine.tensors.keys()
        for output, cache in self.engine.aliases.items():
            assert self.addresses[output] == self.addresses[cache], "in place"
        assert self.runs or self.gpu.captured is None, "a warm-up comes first"
        places, shapes = dict(self.addresses), dict(self.shapes)
        self.gpu.queue(lambda: self._run(places, shapes))
        return True

    def _run(self, places: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        self.runs += 1
        ctypes.memset(*self.scratch[:1], 0xFF, self.scratch[1])
        feed = {name: self._read(name, places[name], shape) for name, shape in shapes.items()}
        with torch.no_grad():
            results = self.engine.run({name: x.clone() for name, x in feed.items()}, self.total)
        for tensor, result in zip(self.engine.outputs, results, strict=True):
            place = self._read(tensor.name, places[tensor.name], tuple(result.shape))
            place.copy_(result)

    def _read(self, name: str, address: int, shape: tuple[int, ...]) -> Tensor:
        weights = Weights(self.engine.get_tensor_dtype(name), address, math.prod(shape))
        assert self.gpu.on_device(address, weights.nbytes), f"{name} has memory of its size"
        return weights.read(shape)


class FakeTensorRt:
    """A stand-in for the module `tensorrt`; `networks` were compiled."""

    ILogger, BuilderFlag = ILogger, BuilderFlag
    ExecutionContextAllocationStrategy = Strategy
    ITensor, IConstantLayer, Weights, LayerType = ITensor, IConstantLayer, Weights, LayerType
    DataType: Any = DataType
    float32, bfloat16, int32 = DataType.FLOAT, DataType.BF16, DataType.INT32
    int64, bool, fp8, fp4 = DataType.INT64, DataType.BOOL, DataType.FP8, DataType.FP4
    int8 = DataType.INT8
    CumulativeOperation = ReduceOperation = CollectiveOperation = Choice
    GatherMode = KVCacheMode = TopKOperation = Choice
    ProfilingVerbosity = SimpleNamespace(DETAILED=2)
    PreviewFeature = SimpleNamespace()

    def __init__(self, gpu: FakeCuda | None = None, nccl: Any = None) -> None:
        self.gpu, self.__version__, self.nccl = gpu or FakeCuda(), VERSION, nccl
        self.networks, self.contexts = list[Network](), list[Context]()
        self.refit_fails = ""  # and log these words

    def Builder(self, logger: Any) -> Builder:  # noqa: N802  # TensorRT's names
        return Builder(self, logger)

    def Runtime(self, logger: Any) -> Runtime:  # noqa: N802
        return Runtime(self, logger)

    def Refitter(self, engine: Network, logger: Any) -> Refitter:  # noqa: N802
        return Refitter(engine, logger)

    @staticmethod
    def nptype(dtype: Any) -> Any:
        """Return NumPy's type, where it has one."""
        if dtype not in NUMPY:
            raise TypeError(f"NumPy has no {dtype.name}")
        return NUMPY[dtype]
