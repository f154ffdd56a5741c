"""Both of NVIDIA's TensorRTs, whose engines are lists of PyTorch calls that run on a fake GPU.

A layer that our converters add does what TensorRT documents for it; an operator that Torch-TensorRT
would convert is called as it is; an ONNX file is one call of onnxruntime. The fake refuses what the
real one refuses (violated rules of KVCacheUpdate, sizes outside the profile, damaged engines), and
fails an assertion where behaviour would be undefined: tensors without memory, aliases with two
addresses, too little scratch memory, a capture without a warm-up.
"""

import ctypes
import io
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mtpbuild.builder.formats.nvfp4 import unpack
from mtpbuild.plugins.matmul_scaled.op import e4m3
from mtpbuild.runtime.group.communicator import CAPSULE
from tests.support.fake_cuda import STREAM, FakeCuda

SCRATCH = 4096  # bytes that a program needs, plus one per output
DAMAGED, FOREIGN = b"damaged", b"another GPU's"  # timing caches
# A collective of the ranks that run a network: takes name, type and shape, and this rank's term.
Sum = Callable[[str, Tensor], Tensor]
Place = tuple[int, "DataType", tuple[int, ...]]  # a tensor's number, type and shape


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
OPERANDS = (int, float, str, bytes, torch.dtype, torch.device, torch.layout, DataType)


class LayerType(Enum):
    CONSTANT, CAST, CUMULATIVE, GATHER, REDUCE, DEQUANTIZE = range(6)
    KV_CACHE_UPDATE, DIST_COLLECTIVE, PLUGIN_V3, OTHER = range(6, 10)


class Choice(Enum):
    """The modes of layers that our networks use."""

    SUM, ELEMENT, ALL_REDUCE, LINEAR, MAX, MIN = range(6)


class ILogger:
    ERROR, INTERNAL_ERROR, WARNING = 1, 0, 2

    def log(self, severity: int, text: str) -> None: ...


class BuilderFlag(IntEnum):
    TF32, STRIP_PLAN, REFIT_IDENTICAL = 7, 12, 16


class Flag(IntEnum):
    STRONGLY_TYPED = 1


class ComputeCapability(IntEnum):
    SM75, SM80, SM86, SM89, SM120, SM121 = 75, 80, 86, 89, 120, 121


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


@dataclass(frozen=True)
class Ref:
    """A value of the network, by its number."""

    id: int


@dataclass
class ITensor:
    id: int
    dtype: DataType
    shape: tuple[int, ...]
    name: str = ""


@dataclass(frozen=True)
class Number:
    """A size that is known only when the network runs, such as that of a prompt's chunk."""

    id: int


@dataclass
class ILayer:
    """One layer: the function that it calls, its operands and its outputs."""

    type: LayerType
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Any]
    name: str = ""
    axis: int = 0
    num_ranks: int = 1
    groups: tuple[int, ...] = ()
    tensor: Tensor | None = None  # a constant's values; quantised ones as bits
    dtype: DataType | None = None

    def get_output(self, index: int) -> Any:
        return self.outputs[index]


class IConstantLayer(ILayer):
    @property
    def weights(self) -> Any:
        """The values as an array, or as an address where NumPy has no such type."""
        assert self.tensor is not None
        assert self.dtype is not None
        if self.dtype in BITS or self.dtype == DataType.BF16:
            size = self.tensor.numel() * (8 // BITS.get(self.dtype, 8))
            return Weights(self.dtype, self.tensor.data_ptr(), size)
        return self.tensor.numpy()


@dataclass
class Network:
    """A network that grows by the calls of converters, or is parsed from an ONNX file."""

    layers: list[ILayer] = field(default_factory=list)
    inputs: list[ITensor] = field(default_factory=list)
    outputs: list[ITensor] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # weights by their address
    caches: dict[str, str] = field(default_factory=dict)  # output -> the input it overwrites
    count: int = 0

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
        self.inputs.append(self._tensor(dtype, shape, name))
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
        made = self._layer(LayerType.CONSTANT, "constant", (), dtype, tuple(shape))
        made.tensor, made.dtype = tensor, dtype
        return made

    def add_cast(self, x: ITensor, dtype: DataType) -> ILayer:
        return self._layer(LayerType.CAST, "cast", (x, dtype), dtype, x.shape)

    def add_cumulative(
        self, x: ITensor, axis: ITensor, how: Choice, exclusive: bool, reverse: bool
    ) -> ILayer:
        assert (how, exclusive, reverse) == (Choice.SUM, False, False)
        return self._layer(LayerType.CUMULATIVE, "cumulative", (x, axis), x.dtype, x.shape)

    def add_gather_v2(self, values: ITensor, ids: ITensor, mode: Choice) -> ILayer:
        assert mode is Choice.ELEMENT
        return self._layer(LayerType.GATHER, "gather", (values, ids), values.dtype, ids.shape)

    def add_reduce(self, x: ITensor, how: Choice, axes: int, keep: bool) -> ILayer:
        assert (how, keep) == (Choice.SUM, False)
        left = tuple(size for axis, size in enumerate(x.shape) if not axes >> axis & 1)
        return self._layer(LayerType.REDUCE, "reduce", (x, axes), x.dtype, left)

    def add_topk(self, values: ITensor, how: Choice, k: int, axes: int) -> ILayer:
        axis = axes.bit_length() - 1
        assert k == values.shape[axis] <= 3840, "TensorRT's bound"
        operands = (values, how is Choice.MAX, axis)
        made = self._layer(LayerType.OTHER, "sort", operands, values.dtype, values.shape)
        made.outputs.append(self._tensor(DataType.INT32, values.shape))
        return made

    def add_dequantize(self, values: ITensor, scales: ITensor, dtype: DataType) -> ILayer:
        assert values.dtype in BITS or values.dtype == scales.dtype, "of a scale of scales"
        assert scales.dtype == dtype, "a scale has the result's type"
        operands = (values, scales, values.dtype)
        return self._layer(LayerType.DEQUANTIZE, "dequantize", operands, dtype, values.shape)

    def add_kv_cache_update(
        self, cache: ITensor, rows: ITensor, start: ITensor, mode: Choice
    ) -> ILayer:
        assert mode is Choice.LINEAR
        assert start.dtype == DataType.INT32
        assert cache.dtype == rows.dtype
        assert len(cache.shape) == 4
        assert -1 not in cache.shape
        operands, kind = (cache, rows, start), LayerType.KV_CACHE_UPDATE
        return self._layer(kind, "kv_update", operands, cache.dtype, cache.shape)

    def add_dist_collective(
        self, x: ITensor, what: Choice, how: Choice, root: int, groups: Any
    ) -> ILayer:
        assert (what, how, root) == (Choice.ALL_REDUCE, Choice.SUM, -1)
        made = self._layer(LayerType.DIST_COLLECTIVE, "all_reduce", (x,), x.dtype, x.shape)
        made.groups = tuple(map(int, groups))
        return made

    def add_matrix_multiply(self, x: ITensor, y: ITensor) -> ILayer:
        assert x.dtype == y.dtype
        shape = (*x.shape[:-1], y.shape[-1])
        return self._layer(LayerType.OTHER, "aten::matmul.", (x, y), x.dtype, shape)

    def add_torch(
        self, function: str, args: Any, kwargs: Any, like: Any, kind: LayerType = LayerType.OTHER
    ) -> Any:
        """Add a PyTorch operator, which is not TensorRT's; its results are `like` these."""
        outputs = tree_map(self._like, like)
        all_outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        self.layers.append(ILayer(kind, function, args, kwargs, all_outputs))
        return outputs

    def add_graph(self, graph: onnx.GraphProto, stored: bytes) -> None:
        """Add an ONNX graph as one layer, with all its inputs and outputs."""
        for value in graph.input:
            self.add_input(value.name, *_describe(value))
        outputs = [self._tensor(*_describe(value), value.name) for value in graph.output]
        operands = (stored, [tensor.name for tensor in self.inputs], *self.inputs)
        self.layers.append(ILayer(LayerType.OTHER, "onnx", operands, {}, outputs))
        self.outputs += outputs
        writes = [node for node in graph.node if node.op_type == "TensorScatter"]
        self.caches = {node.output[0]: node.input[0] for node in writes}

    def _like(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            sizes = (size if isinstance(size, int) else -1 for size in value.shape)
            return self._tensor(TYPES[value.dtype], tuple(sizes))
        self.count += 1
        return Number(self.count)

    def _tensor(self, dtype: DataType, shape: tuple[int, ...], name: str = "") -> ITensor:
        self.count += 1
        return ITensor(self.count, dtype, tuple(shape), name)

    def _layer(
        self,
        kind: LayerType,
        function: str,
        args: tuple[Any, ...],
        dtype: DataType,
        shape: tuple[int, ...],
    ) -> ILayer:
        make = IConstantLayer if kind is LayerType.CONSTANT else ILayer
        self.layers.append(make(kind, function, args, {}, [self._tensor(dtype, shape)]))
        return self.layers[-1]


def _describe(value: onnx.ValueInfoProto) -> tuple[DataType, tuple[int, ...]]:
    kind = value.type.tensor_type
    dtype = torch.from_numpy(np.zeros(0, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)))
    return TYPES[dtype.dtype], tuple(size.dim_value or -1 for size in kind.shape.dim)


class Parser:
    """Parses our ONNX graphs as the real one does; the builder checks the rules of caches."""

    def __init__(self, network: Network) -> None:
        self.network, self.errors = network, list[str]()

    def get_error(self, index: int) -> Any:
        return SimpleNamespace(desc=lambda: self.errors[index])

    def parse_from_file(self, path: str) -> bool:
        model = ir.load(Path(path))
        ir.external_data.load_to_model(model)
        proto = ir.to_proto(model)
        if not list(model.graph):
            self.errors.append("ModelProto has no graph.\n")
        foreign = {node.op_type for node in proto.graph.node if node.domain}
        self.errors += [f"no importer registered for op: {name}\n" for name in sorted(foreign)]
        if not self.errors:
            self.network.add_graph(proto.graph, proto.SerializeToString())
        return not self.errors


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[tuple[int, ...]]] = {}

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        assert len(shapes) == 3
        self.shapes[name] = [tuple(shape) for shape in shapes]


class Config:
    """A build's settings; its timing cache gets one measurement more from the build."""

    def __init__(self) -> None:
        self.num_compute_capabilities, self.builder_optimization_level = 0, 3
        self.capabilities: dict[int, ComputeCapability] = {}
        self.flags, self.profiles = {BuilderFlag.TF32}, list[Profile]()
        self.timings = b""

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)

    def set_compute_capability(self, capability: ComputeCapability, index: int) -> None:
        assert 0 <= index < self.num_compute_capabilities
        self.capabilities[index] = capability

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

    def create_network(self, flags: int) -> Network:
        assert flags == 1 << Flag.STRONGLY_TYPED
        return Network()

    def create_builder_config(self) -> Config:
        return Config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
        shapes = config.profiles[0].shapes if config.profiles else {}
        assert BuilderFlag.TF32 not in config.flags
        assert len(config.capabilities) == config.num_compute_capabilities
        try:
            if set(shapes) != {tensor.name for tensor in network.inputs if -1 in tensor.shape}:
                raise ValueError("a varying size has no profile")
            engine = compile_network(network, BuilderFlag.STRIP_PLAN in config.flags)
        except ValueError as error:
            self.logger.log(ILogger.ERROR, str(error))
            return None
        engine.profile = shapes
        self.trt.networks.append(network)
        return engine.to_bytes()


@dataclass
class Engine:
    """One program: calls by name, values by number."""

    inputs: dict[str, Place]
    outputs: dict[str, Place]
    aliases: dict[str, str]  # output -> the input that it overwrites
    calls: list[tuple[str, Any, Any, list[int], dict[str, Any]]] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    stripped: dict[str, tuple[list[int], DataType, tuple[int, ...]]] = field(default_factory=dict)
    profile: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    trt: ClassVar["FakeTensorRt"]  # the one that has loaded it

    def to_bytes(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(self, buffer)
        return buffer.getvalue()

    @property
    def tensors(self) -> dict[str, Place]:
        return self.inputs | self.outputs

    @property
    def device_memory_size_v2(self) -> int:
        return SCRATCH + len(self.outputs)

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

    def create_execution_context(self, strategy: Strategy) -> "Context":
        assert strategy is Strategy.USER_MANAGED
        context = Context(self)
        self.trt.contexts.append(context)
        return context

    def run(self, feed: Mapping[str, Tensor], total: Sum | None = None) -> list[Tensor]:
        """Return the outputs in their order; total: sums a tensor of all ranks."""
        assert not self.stripped, "its weights were put back"
        values: dict[int, Any] = dict(self.constants)
        values |= {self.inputs[name][0]: tensor for name, tensor in feed.items()}

        def find(value: Any) -> Any:
            return values[value.id] if isinstance(value, Ref) else value

        for function, args, kwargs, outputs, how in self.calls:
            operands, named = tree_map(find, (args, kwargs))
            if function == "all_reduce":
                assert total is not None, "a collective wants a communicator"
                result = total(how["what"], operands[0])
            elif function in LAYERS:
                result = LAYERS[function](*operands, **how)
            else:
                result = resolve(function)(*operands, **named)
            results = result if isinstance(result, tuple | list) else [result]
            values.update(zip(outputs, map(_make_contiguous, results), strict=True))
        for name, (number, dtype, shape) in self.outputs.items():
            assert values[number].dtype == TORCH[dtype], f"{name} is {values[number].dtype}"
            sizes = zip(shape, values[number].shape, strict=True)
            assert all(size in (-1, other) for size, other in sizes), name
        return [values[number] for number, _, _ in self.outputs.values()]


def compile_network(network: Network, strip: bool = False) -> Engine:
    """Compile a network; raise ValueError where TensorRT would refuse it."""
    names = [tensor.name for tensor in network.inputs]
    for layer in network.layers:
        if layer.type is LayerType.KV_CACHE_UPDATE:
            network.caches[layer.outputs[0].name] = layer.args[0].name
    outputs = [tensor.name for tensor in network.outputs]
    if not (network.caches.keys() <= {*outputs} and {*network.caches.values()} <= {*names}):
        raise ValueError("the cache of a KVCacheUpdate is a network input and output")
    inputs, results = (
        {tensor.name: (tensor.id, tensor.dtype, tensor.shape) for tensor in side}
        for side in (network.inputs, network.outputs)
    )
    engine = Engine(inputs, results, network.caches)
    collectives = 0
    for layer in network.layers:
        if layer.type is LayerType.CONSTANT:
            assert layer.tensor is not None
            assert layer.dtype is not None
            number = layer.outputs[0].id
            if strip:
                name = network.names[layer.tensor.data_ptr()]  # each has one
                place = (list[int](), layer.dtype, tuple(layer.tensor.shape))
                engine.stripped.setdefault(name, place)[0].append(number)
            else:
                engine.constants[number] = layer.tensor
            continue
        how: dict[str, Any] = {}
        if layer.type is LayerType.DIST_COLLECTIVE:
            if layer.num_ranks < 2 or layer.groups != tuple(range(layer.num_ranks)):
                raise ValueError(f"{layer.name}: {layer.groups} of {layer.num_ranks} ranks")
            how["what"] = f"{collectives} {layer.num_ranks} ranks {layer.name}"
            collectives += 1
        if layer.type is LayerType.GATHER:
            how["axis"] = layer.axis
        call = _store(layer.args), _store(layer.kwargs)
        engine.calls.append((layer.function, *call, [o.id for o in layer.outputs], how))
    return engine


def _make_contiguous(result: Any) -> Any:
    """Return a tensor without strides, as TensorRT's are."""
    return result.contiguous() if isinstance(result, Tensor) else result


def _store(value: Any) -> Any:
    """Replace the network's values in operands by their numbers."""
    if isinstance(value, ITensor | Number):
        return Ref(value.id)
    if isinstance(value, dict):
        named = value.items()  # TensorRT chooses a result's memory layout
        return {name: _store(entry) for name, entry in named if name != "memory_format"}
    if isinstance(value, list | tuple):
        return [_store(entry) for entry in value]
    assert value is None or isinstance(value, OPERANDS), f"{value!r} is no operand"
    return value


def name_of(function: Any) -> str:
    """Return an operator by its name; raise KeyError for an unknown one."""
    if isinstance(function, torch._ops.OpOverload):
        return f"{function._schema.name}.{function._schema.overload_name}"
    if function in NUMBERS.values():
        return str(function.__name__)
    raise KeyError(f"{function} is not known")


def resolve(name: str) -> Callable[..., Any]:
    if name in NUMBERS:
        return NUMBERS[name]
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


SESSIONS: dict[bytes, ort.InferenceSession] = {}


def _run_onnx(stored: bytes, names: list[str], *operands: Tensor) -> list[Tensor]:
    if stored not in SESSIONS:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        SESSIONS[stored] = ort.InferenceSession(stored, options, ["CPUExecutionProvider"])
    feed = {name: tensor.numpy() for name, tensor in zip(names, operands, strict=True)}
    return [torch.from_numpy(array) for array in SESSIONS[stored].run(None, feed)]


LAYERS: dict[str, Callable[..., Any]] = {
    "cast": lambda x, dtype: x.to(TORCH[dtype]), "cumulative": lambda x, axis: x.cumsum(int(axis)),
    "gather": lambda x, ids, axis: x.gather(axis, ids), "reduce": _sum_over,
    "dequantize": _dequantize, "kv_update": _update, "sort": _sort, "onnx": _run_onnx,
}  # fmt: skip
NUMBERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)
}


class Runtime:
    def __init__(self, trt: "FakeTensorRt", logger: Any) -> None:
        self.trt, self.logger = trt, logger

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        try:
            engine: Engine = torch.load(io.BytesIO(data), weights_only=False)
        except Exception:
            self.logger.log(ILogger.ERROR, "Magic tag does not match")
            return None
        engine.trt = self.trt  # type: ignore[misc]
        return engine


class Refitter:
    """Restores weights by the names that `set_weights_name` gave."""

    def __init__(self, engine: Engine, logger: Any) -> None:
        self.engine, self.logger, self.held = engine, logger, dict[str, Tensor]()

    def get_all_weights(self) -> list[str]:
        return list(self.engine.stripped)

    def get_weights_prototype(self, name: str) -> Weights:
        _, dtype, shape = self.engine.stripped[name]
        return Weights(dtype, 0, math.prod(shape) * (8 // BITS.get(dtype, 8)))

    def set_named_weights(self, name: str, weights: Any) -> bool:
        if not isinstance(weights, Weights):
            kind = TYPES[torch.from_numpy(np.zeros(0, weights.dtype)).dtype]
            weights = Weights(kind, weights.ctypes.data, weights.size)
        _, dtype, shape = self.engine.stripped[name]
        if (weights.dtype, weights.nbytes) != (dtype, self.get_weights_prototype(name).nbytes):
            return False
        values = Weights(DataType.INT8, weights.address, weights.nbytes).read((weights.nbytes,))
        self.held[name] = values.clone().view(TORCH.get(dtype, torch.uint8)).view(shape)
        return True

    def refit_cuda_engine(self) -> bool:
        if fails := self.engine.trt.refit_fails:
            self.logger.log(ILogger.ERROR, fails)
            return False
        for name, (numbers, _, _) in self.engine.stripped.items():
            self.engine.constants.update(dict.fromkeys(numbers, self.held[name]))
        self.engine.stripped = {}
        return True


class Context:
    """An engine's tensors bound to addresses; its collectives run in a given communicator."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.gpu = engine, engine.trt.gpu
        self.addresses: dict[str, int] = {}
        self.shapes = {name: engine.get_tensor_shape(name) for name in engine.inputs}
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
        for name, result in zip(self.engine.outputs, results, strict=True):
            self._read(name, places[name], tuple(result.shape)).copy_(result)

    def _read(self, name: str, address: int, shape: tuple[int, ...]) -> Tensor:
        weights = Weights(self.engine.get_tensor_dtype(name), address, math.prod(shape))
        assert self.gpu.on_device(address, weights.nbytes), f"{name} has memory of its size"
        return weights.read(shape)


class FakeTensorRt:
    """A stand-in for the module `tensorrt`, and for TensorRT-RTX's; `networks` were compiled."""

    ILogger, BuilderFlag, ComputeCapability = ILogger, BuilderFlag, ComputeCapability
    NetworkDefinitionCreationFlag = Flag
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

    def __init__(
        self, gpu: FakeCuda | None = None, version: str = "1.7.1.116", nccl: Any = None
    ) -> None:
        self.gpu, self.__version__, self.nccl = gpu or FakeCuda(), version, nccl
        self.networks, self.contexts = list[Network](), list[Context]()
        self.refit_fails = ""  # and log these words

    def Builder(self, logger: Any) -> Builder:  # noqa: N802  # TensorRT's names
        return Builder(self, logger)

    def OnnxParser(self, network: Network, logger: Any) -> Parser:  # noqa: N802
        return Parser(network)

    def Runtime(self, logger: Any) -> Runtime:  # noqa: N802
        return Runtime(self, logger)

    def Refitter(self, engine: Engine, logger: Any) -> Refitter:  # noqa: N802
        return Refitter(engine, logger)

    @staticmethod
    def nptype(dtype: Any) -> Any:
        """Return NumPy's type, where it has one."""
        if dtype not in NUMPY:
            raise TypeError(f"NumPy has no {dtype.name}")
        return NUMPY[dtype]
