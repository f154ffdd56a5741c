"""TensorRT-RTX's Python module with onnxruntime inside: its engines are ONNX files that run.

It refuses what the real one refuses (violated rules of KVCacheUpdate, sizes outside the profile, a
foreign GPU or version), and fails an assertion where behaviour would be undefined: tensors without
memory, aliases with two addresses, too little scratch memory, a capture without a warm-up.
"""

import ctypes
import json
import math
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from tests.support.fake_cuda import STREAM, FakeCuda

SCRATCH = 4096  # bytes that a program needs, plus one per output
Arrays = dict[str, np.ndarray[Any, Any]]
DTYPES = {"tensor(int64)": np.int64, "tensor(bool)": np.bool_, "tensor(float)": np.float32}


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


@dataclass
class Weights:
    """An address and a size, for weights of a type that NumPy does not have."""

    dtype: str
    address: int
    size: int


class Network:
    model: onnx.ModelProto

    @property
    def num_inputs(self) -> int:
        return len(self.model.graph.input)

    def get_input(self, index: int) -> Any:
        value = self.model.graph.input[index]
        sizes = [d.dim_value or -1 for d in value.type.tensor_type.shape.dim]
        return SimpleNamespace(name=value.name, shape=tuple(sizes))


class Parser:
    """Parses our graphs as the real one does; the builder checks the rules of caches."""

    def __init__(self, network: Network) -> None:
        self.network, self.errors = network, list[str]()

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    def get_error(self, index: int) -> Any:
        return SimpleNamespace(desc=lambda: self.errors[index])

    def parse_from_file(self, path: str) -> bool:
        model = ir.load(Path(path))
        ir.external_data.load_to_model(model)
        self.network.model = ir.to_proto(model)
        if not list(model.graph):
            self.errors.append("ModelProto has no graph.\n")
        foreign = {n.op_type for n in self.network.model.graph.node if n.domain}
        self.errors += [f"no importer registered for op: {name}\n" for name in sorted(foreign)]
        return not self.errors


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[tuple[int, ...]]] = {}

    def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        assert len(shapes) == 3
        self.shapes[name] = [tuple(shape) for shape in shapes]


class Config:
    def __init__(self) -> None:
        self.num_compute_capabilities, self.builder_optimization_level = 0, 3
        self.capabilities: dict[int, ComputeCapability] = {}
        self.flags, self.profiles = {BuilderFlag.TF32}, list[Profile]()

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)

    def set_compute_capability(self, capability: ComputeCapability, index: int) -> None:
        assert 0 <= index < self.num_compute_capabilities
        self.capabilities[index] = capability

    def add_optimization_profile(self, profile: Profile) -> None:
        self.profiles.append(profile)


class Builder:
    network: Any = Network
    config: Any = Config

    def __init__(self, trt: Any, logger: Any) -> None:
        self.trt, self.logger = trt, logger

    def create_network(self, flags: int) -> Any:
        assert flags == 1 << Flag.STRONGLY_TYPED
        return self.network()

    def create_builder_config(self) -> Any:
        return self.config()

    def create_optimization_profile(self) -> Profile:
        return Profile()

    def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
        inputs = map(network.get_input, range(network.num_inputs))
        shapes = config.profiles[0].shapes if config.profiles else {}
        try:
            if set(shapes) != {tensor.name for tensor in inputs if -1 in tensor.shape}:
                raise ValueError("a varying size has no profile")
            stored = self._compile(network, config)
        except ValueError as error:
            self.logger.log(ILogger.ERROR, str(error))
            return None
        header = json.dumps({"profile": shapes, "version": self.trt.__version__})
        return header.encode() + b"\n" + stored

    def _compile(self, network: Any, config: Any) -> bytes:
        """Compiles a network; raises ValueError where TensorRT would refuse it."""
        graph = network.model.graph
        assert len(config.capabilities) == config.num_compute_capabilities > 0
        self.trt.flags = config.flags
        inputs, outputs = ({v.name: v for v in side} for side in (graph.input, graph.output))
        for node in graph.node:
            if node.op_type == "TensorScatter":
                if node.input[0] not in inputs or node.output[0] not in outputs:
                    raise ValueError("the cache of a KVCacheUpdate is a network input and output")
                if not _has_four_fixed_sizes(inputs[node.input[0]]):
                    raise ValueError("a KVCacheUpdate wants a cache of 4 fixed dimensions")
            if node.op_type == "TopK" and _sorts_more(graph, node, 3840):
                raise ValueError("TopK takes at most 3840")
        compiled: bytes = network.model.SerializeToString()
        return compiled


def _has_four_fixed_sizes(value: Any) -> bool:
    sizes = [d.dim_value for d in value.type.tensor_type.shape.dim]
    return len(sizes) == 4 and 0 not in sizes


def _sorts_more(graph: Any, node: Any, most: int) -> bool:
    values = {i.name: i for i in graph.initializer}
    count = values.get(node.input[1])
    return count is not None and int(onnx.numpy_helper.to_array(count).item()) > most


class Engine:
    """One program; `inputs` and `outputs` have the types and shapes of its tensors."""

    inputs: dict[str, tuple[Any, tuple[int, ...]]]
    outputs: dict[str, tuple[Any, tuple[int, ...]]]

    def __init__(self, trt: Any, header: dict[str, Any], stored: bytes) -> None:
        self.trt, self.profile, self.aliases = trt, header["profile"], dict[str, str]()
        self.stripped: dict[str, Any] = header.get("stripped", {})
        self.graph = stored
        if not self.stripped:
            self._open(stored)

    def _open(self, graph: bytes) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.inputs, self.outputs = (
            {v.name: (DTYPES[v.type], _sizes(v.shape)) for v in side}
            for side in (self.session.get_inputs(), self.session.get_outputs())
        )
        nodes = onnx.load_from_string(graph).graph.node
        self.aliases = {n.output[0]: n.input[0] for n in nodes if n.op_type == "TensorScatter"}

    @property
    def tensors(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        return self.inputs | self.outputs

    @property
    def device_memory_size_v2(self) -> int:
        return SCRATCH + len(self.outputs)

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return self.tensors[name][0]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name][1]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def run(self, feed: Arrays) -> list[np.ndarray[Any, Any]]:
        """Run the program; return the outputs in their order."""
        results: list[np.ndarray[Any, Any]] = self.session.run(None, feed)
        return results

    def host_dtype(self, name: str) -> np.dtype[Any]:
        """Return the NumPy type that holds a tensor in memory."""
        return np.dtype(self.get_tensor_dtype(name))

    def create_execution_context(self, strategy: Strategy) -> "Context":
        assert strategy is Strategy.USER_MANAGED
        context: Context = self.trt.context(self)
        self.trt.contexts.append(context)
        return context


def _sizes(shape: list[int | str]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else -1 for size in shape)


class Runtime:
    def __init__(self, trt: Any, logger: Any) -> None:
        self.trt, self.logger = trt, logger

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        try:
            header, _, stored = data.partition(b"\n")
            engine: Engine = self.trt.engine(self.trt, json.loads(header), stored)
        except ValueError:
            self.logger.log(ILogger.ERROR, "Magic tag does not match")
            return None
        return engine


def without_weights(data: bytes) -> tuple[bytes, Arrays]:
    """Split an engine into the remains after `--strip-weights` and the floats that it removes."""
    header, _, graph = data.partition(b"\n")
    model = onnx.load_from_string(graph)
    floats = [i for i in model.graph.initializer if i.data_type == onnx.TensorProto.FLOAT]
    for initializer in floats:
        model.graph.initializer.remove(initializer)
    stripped = {"stripped": {i.name: list(i.dims) for i in floats}}
    header = json.dumps(json.loads(header) | stripped).encode()
    weights = {i.name: onnx.numpy_helper.to_array(i) for i in floats}
    return header + b"\n" + model.SerializeToString(), weights


class Refitter:
    def __init__(self, engine: Any, logger: Any) -> None:
        self.engine, self.logger, self.given = engine, logger, dict[str, Any]()

    def get_all_weights(self) -> list[str]:
        return list(self.engine.stripped)

    def get_weights_prototype(self, name: str) -> Any:
        return SimpleNamespace(size=math.prod(self.engine.stripped[name]))

    def set_named_weights(self, name: str, weights: Any) -> bool:
        self.given[name] = weights
        fits: bool = weights.size == math.prod(self.engine.stripped[name])
        return fits

    def refit_cuda_engine(self) -> bool:
        if fails := self.engine.trt.refit_fails:
            self.logger.log(ILogger.ERROR, fails)
            return False
        model = onnx.load_from_string(self.engine.graph)
        for name, dims in self.engine.stripped.items():
            array = self.given[name].reshape(dims)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        self.engine._open(model.SerializeToString())
        return True


class Context:
    def __init__(self, engine: Any) -> None:
        self.engine, self.gpu = engine, engine.trt.gpu
        self.addresses: dict[str, int] = {}
        self.shapes = {name: engine.get_tensor_shape(name) for name in engine.inputs}
        self.scratch = 0, 0
        self.runs = 0

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
        feed = {name: self._array(name, places[name], shape) for name, shape in shapes.items()}
        results = self.results({name: a.copy() for name, a in feed.items()})
        for name, result in zip(self.engine.outputs, results, strict=True):
            self._array(name, places[name], result.shape)[...] = result

    def results(self, feed: Arrays) -> list[np.ndarray[Any, Any]]:
        found: list[np.ndarray[Any, Any]] = self.engine.run(feed)
        return found

    def _array(self, name: str, address: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        dtype = self.engine.host_dtype(name)
        size = math.prod(shape) * dtype.itemsize
        assert self.gpu.on_device(address, size), f"{name} has memory of its size"
        raw: Any = (ctypes.c_byte * size).from_address(address)
        return np.frombuffer(raw, dtype).reshape(shape)


class FakeTensorRt:
    """A stand-in for the module: contexts run on `gpu`; `flags` are those of the last build."""

    ILogger, BuilderFlag, ComputeCapability = ILogger, BuilderFlag, ComputeCapability
    NetworkDefinitionCreationFlag = Flag
    ExecutionContextAllocationStrategy = Strategy
    Weights: Any = Weights
    bfloat16: Any = "BF16"
    builder, engine, context, refitter = Builder, Engine, Context, Refitter  # what it makes

    def __init__(self, gpu: FakeCuda | None = None, version: str = "1.7.1.116") -> None:
        self.gpu, self.__version__ = gpu or FakeCuda(), version
        self.flags: set[BuilderFlag] = set()
        self.contexts: list[Any] = []
        self.refit_fails = ""  # and log these words

    def Builder(self, logger: Any) -> Builder:  # noqa: N802  # TensorRT's names
        return self.builder(self, logger)

    def OnnxParser(self, network: Network, logger: Any) -> Parser:  # noqa: N802
        return Parser(network)

    def Runtime(self, logger: Any) -> Runtime:  # noqa: N802
        return Runtime(self, logger)

    def Refitter(self, engine: Engine, logger: Any) -> Refitter:  # noqa: N802
        return self.refitter(engine, logger)

    @staticmethod
    def nptype(dtype: Any) -> Any:
        return dtype
