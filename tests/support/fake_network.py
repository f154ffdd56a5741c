"""A TensorRT network as a list of PyTorch calls, of which fake engines of target tensorrt are made.

A layer that our converters add does what TensorRT documents for it; an operator that Torch-TensorRT
would convert is called as it is. A method that is missing here fails, and so does a layer whose
operands TensorRT would refuse.
"""

import ctypes
import io
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from mtpbuild.builder.formats.nvfp4 import unpack
from mtpbuild.plugins.matmul_scaled.op import e4m3

# A collective of the ranks that run a network: takes name, type and shape, and this rank's term.
Sum = Callable[[str, Tensor], Tensor]


class DataType(Enum):
    FLOAT, BF16, INT32, INT64, BOOL, FP8, FP4, INT8 = range(8)


TORCH = {
    DataType.FLOAT: torch.float32, DataType.BF16: torch.bfloat16, DataType.INT32: torch.int32,
    DataType.INT64: torch.int64, DataType.BOOL: torch.bool,
    DataType.INT8: torch.uint8,  # our kernels read bytes
}  # fmt: skip
TYPES = {dtype: name for name, dtype in TORCH.items()}
BITS = {DataType.FP8: 8, DataType.FP4: 4}  # types in which PyTorch does not compute
PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, DataType)


class LayerType(Enum):
    CONSTANT, CAST, CUMULATIVE, GATHER, REDUCE, DEQUANTIZE = range(6)
    KV_CACHE_UPDATE, DIST_COLLECTIVE, PLUGIN_V3, OTHER = range(6, 10)


class Choice(Enum):
    """The modes of layers that our networks use."""

    SUM, ELEMENT, ALL_REDUCE, LINEAR, MAX, MIN = range(6)


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

    def get_input(self, index: int) -> Any:
        return self.args[index]


class IConstantLayer(ILayer):
    @property
    def weights(self) -> Any:
        """Returns the values as an array, or as an address where NumPy has no such type."""
        assert self.tensor is not None
        assert self.dtype is not None
        if self.dtype in BITS or self.dtype == DataType.BF16:
            size = self.tensor.numel() * (8 // BITS.get(self.dtype, 8))
            return Weights(self.dtype, self.tensor.data_ptr(), size)
        return self.tensor.numpy()


@dataclass
class Network:
    """A network that grows by the calls that converters make."""

    layers: list[ILayer] = field(default_factory=list)
    inputs: list[ITensor] = field(default_factory=list)
    outputs: list[ITensor] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # weights by their address
    count: int = 0

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        return len(self.outputs)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

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
            raw = (ctypes.c_uint8 * weights.nbytes).from_address(weights.address)
            tensor = torch.frombuffer(raw, dtype=torch.uint8)
            dtype = weights.dtype
            if dtype in BITS:
                tensor = tensor.view(*shape[:-1], -1)
            else:
                tensor = tensor.view(TORCH[dtype]).view(shape)
        else:
            tensor = torch.from_numpy(weights).view(shape)
            dtype = TYPES[tensor.dtype]
        made = self._layer(LayerType.CONSTANT, "constant", (), dtype, tuple(shape))
        made.tensor, made.dtype = tensor, dtype
        return made

    def add_cast(self, given: ITensor, dtype: DataType) -> ILayer:
        return self._layer(LayerType.CAST, "cast", (given, dtype), dtype, given.shape)

    def add_cumulative(
        self, given: ITensor, axis: ITensor, how: Choice, exclusive: bool, reverse: bool
    ) -> ILayer:
        assert (how, exclusive, reverse) == (Choice.SUM, False, False)
        given_to = (given, axis)
        return self._layer(LayerType.CUMULATIVE, "cumulative", given_to, given.dtype, given.shape)

    def add_gather_v2(self, values: ITensor, ids: ITensor, mode: Choice) -> ILayer:
        assert mode is Choice.ELEMENT
        return self._layer(LayerType.GATHER, "gather", (values, ids), values.dtype, ids.shape)

    def add_reduce(self, given: ITensor, how: Choice, axes: int, keep: bool) -> ILayer:
        assert (how, keep) == (Choice.SUM, False)
        left = tuple(size for axis, size in enumerate(given.shape) if not axes >> axis & 1)
        return self._layer(LayerType.REDUCE, "reduce", (given, axes), given.dtype, left)

    def add_topk(self, values: ITensor, how: Choice, k: int, axes: int) -> ILayer:
        assert k == values.shape[axes.bit_length() - 1] <= 3840, "TensorRT's bound"
        given = (values, how is Choice.MAX, axes.bit_length() - 1)
        made = self._layer(LayerType.OTHER, "sort", given, values.dtype, values.shape)
        made.outputs.append(self._tensor(DataType.INT32, values.shape))
        return made

    def add_dequantize(self, values: ITensor, scales: ITensor, dtype: DataType) -> ILayer:
        assert values.dtype in BITS
        assert scales.dtype == dtype, "a scale has the result's type"
        given = (values, scales, values.dtype)
        return self._layer(LayerType.DEQUANTIZE, "dequantize", given, dtype, values.shape)

    def add_kv_cache_update(
        self, cache: ITensor, rows: ITensor, start: ITensor, mode: Choice
    ) -> ILayer:
        assert mode is Choice.LINEAR
        assert start.dtype == DataType.INT32
        assert cache.dtype == rows.dtype
        assert len(cache.shape) == 4
        assert -1 not in cache.shape
        given = (cache, rows, start)
        return self._layer(LayerType.KV_CACHE_UPDATE, "kv_update", given, cache.dtype, cache.shape)

    def add_dist_collective(
        self, given: ITensor, what: Choice, how: Choice, root: int, groups: Any
    ) -> ILayer:
        assert (what, how, root) == (Choice.ALL_REDUCE, Choice.SUM, -1)
        made = self._layer(
            LayerType.DIST_COLLECTIVE, "all_reduce", (given,), given.dtype, given.shape
        )
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
        every = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        self.layers.append(ILayer(kind, function, args, kwargs, every))
        return outputs

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


@dataclass
class Compiled:
    """A network that can be run and stored: calls by name, values by number."""

    inputs: dict[str, tuple[int, DataType, tuple[int, ...]]]
    outputs: dict[str, tuple[int, DataType, tuple[int, ...]]]
    aliases: dict[str, str]  # output -> the input that it overwrites
    calls: list[tuple[str, Any, Any, list[int], dict[str, Any]]]
    constants: dict[int, Tensor]
    stripped: dict[str, tuple[list[int], DataType, tuple[int, ...]]]
    collectives: list[str]

    def to_bytes(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(self, buffer)
        return buffer.getvalue()

    def run(self, feed: Mapping[str, Tensor], total: Sum | None) -> list[Tensor]:
        values: dict[int, Any] = dict(self.constants)
        values |= {self.inputs[name][0]: tensor for name, tensor in feed.items()}

        def given(value: Any) -> Any:
            return values[value.id] if isinstance(value, Ref) else value

        for function, args, kwargs, outputs, how in self.calls:
            given_args, given_kwargs = tree_map(given, (args, kwargs))
            if function == "all_reduce":
                assert total is not None, "a collective wants a communicator"
                result = total(how["what"], given_args[0])
            elif function in OWN:
                result = OWN[function](*given_args, **how)
            else:
                result = resolve(function)(*given_args, **given_kwargs)
            results = result if isinstance(result, tuple | list) else [result]
            results = [_whole(each) for each in results]
            values.update(zip(outputs, results, strict=True))
        return [values[number] for number, _, _ in self.outputs.values()]


def compiled(network: Network, strip: bool) -> Compiled:
    """Compiles a network; raises ValueError where TensorRT would refuse it."""
    producers = {id(layer.outputs[0]): layer for layer in network.layers if layer.outputs}
    calls, collectives = list[Any](), list[str]()
    constants, stripped = dict[int, Tensor](), dict[str, Any]()
    aliases = dict[str, str]()
    for output in network.outputs:
        layer = producers.get(id(output))
        if layer is not None and layer.type is LayerType.KV_CACHE_UPDATE:
            aliases[output.name] = layer.args[0].name
    for layer in network.layers:
        if layer.type is LayerType.KV_CACHE_UPDATE and (
            layer.args[0] not in network.inputs or layer.outputs[0].name not in aliases
        ):
            raise ValueError("the cache of a KVCacheUpdate is a network input and output")
        if layer.type is LayerType.CONSTANT:
            assert layer.tensor is not None
            assert layer.dtype is not None
            if strip:
                name = network.names[layer.tensor.data_ptr()]  # each has one
                shape = tuple(layer.tensor.shape)
                stripped.setdefault(name, ([], layer.dtype, shape))[0].append(layer.outputs[0].id)
            else:
                constants[layer.outputs[0].id] = layer.tensor
            continue
        how: dict[str, Any] = {}
        if layer.type is LayerType.DIST_COLLECTIVE:
            if layer.num_ranks < 2 or layer.groups != tuple(range(layer.num_ranks)):
                raise ValueError(f"{layer.name}: {layer.groups} of {layer.num_ranks} ranks")
            how["what"] = f"{len(collectives)} {layer.num_ranks} ranks {layer.name}"
            collectives.append(how["what"])
        if layer.type is LayerType.GATHER:
            how["axis"] = layer.axis
        outputs = [output.id for output in layer.outputs]
        call = _stored(layer.args), _stored(layer.kwargs)
        calls.append((layer.function, *call, outputs, how))
    inputs, outputs_by_name = (
        {tensor.name: (tensor.id, tensor.dtype, tensor.shape) for tensor in side}
        for side in (network.inputs, network.outputs)
    )
    rest = (calls, constants, stripped, collectives)
    return Compiled(inputs, outputs_by_name, aliases, *rest)


def _whole(result: Any) -> Any:
    """Make a tensor contiguous, as a TensorRT tensor has no strides."""
    return result.contiguous() if isinstance(result, Tensor) else result


def _stored(value: Any) -> Any:
    """Replace the network's values in operands by their numbers."""
    if isinstance(value, ITensor | Number):
        return Ref(value.id)
    if isinstance(value, dict):
        named = value.items()  # TensorRT chooses a result's memory layout
        return {name: _stored(each) for name, each in named if name != "memory_format"}
    if isinstance(value, list | tuple):
        return [_stored(each) for each in value]
    assert value is None or isinstance(value, PLAIN), f"{value!r} is no operand"
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
    found: Callable[..., Any] = getattr(packet_of, overload or "default")
    return found


def _dequantize(values: Tensor, scales: Tensor, dtype: DataType) -> Tensor:
    """Scales blocks; at most one dimension has blocks of more than one value."""
    numbers = e4m3(values) if dtype == DataType.FP8 else unpack(values)
    for axis, (n, m) in enumerate(zip(numbers.shape, scales.shape, strict=bool(scales.dim()))):
        scales = scales.repeat_interleave(n // m, dim=axis)
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


OWN: dict[str, Callable[..., Any]] = {
    "cast": lambda x, dtype: x.to(TORCH[dtype]), "cumulative": lambda x, axis: x.cumsum(int(axis)),
    "gather": lambda x, ids, axis: x.gather(axis, ids), "reduce": _sum_over,
    "dequantize": _dequantize, "kv_update": _update, "sort": _sort,
}  # fmt: skip
NUMBERS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)
}
