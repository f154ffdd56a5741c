"""Fakes NVIDIA's packages for target tensorrt: TensorRT's module, Torch-TensorRT's and NCCL.

The lowering runs on the fakes unchanged, with our converters of collectives, cache writes,
quantised constants and sums. The resulting engine is a list of PyTorch calls (`fake_tensorrt.py`),
which runs the ops' references in place of our kernels; `make test-tensorrt` checks the plugins.
Ranks are real processes. Their collectives go over gloo and must match: number, place in the
program, name, type and shape are the same on all ranks.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
import torch._dynamo  # must look for packages before they are replaced
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from mtpbuild.builder.targets.tensorrt.pipeline import TENSORRT
from mtpbuild.plugins import OPS
from mtpbuild.runtime.group.communicator import UniqueId
from mtpbuild.runtime.group.start import read_time_limit
from mtpbuild.runtime.programs.tensorrt_api import make_error_logger
from tests.support.fake_tensorrt import (
    NUMBERS,
    TYPES,
    DataType,
    FakeTensorRt,
    ITensor,
    LayerType,
    Network,
    Sum,
    Weights,
    name_of,
)
from tests.support.stand_ins import importing

FUSED = "tensorrt::fused_nccl_all_reduce"
MISMATCH = "a collective does not match the other ranks'"


class FakeNccl:
    """NCCL's library over gloo: it sums by a communicator's handle."""

    def __init__(self) -> None:
        self.sums: dict[int, Sum] = {}
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
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=read_time_limit()))
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
        """Add up all ranks' terms, if all are at the same place of the same program."""
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

# The ops whose launches are plugins; that of `SCALED` is one in steps.
SCALED = OPS["matmul_scaled"]._opoverload
PLUGINS = {OPS[name]._opoverload for name, file in TENSORRT.facets.items() if file == "plugins"}


class TRTInterpreter(Interpreter):
    """A stand-in for Torch-TensorRT's: each operator becomes layers, by a converter or as it is."""

    trt: FakeTensorRt
    converters: dict[Any, Callable[..., Any]]

    def __init__(self, module: GraphModule, inputs: list[Any], compilation_settings: Any) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.given, self.node = iter(inputs), next(iter(module.graph.nodes))
        self.builder = self.trt.Builder(make_error_logger(cast(ModuleType, self.trt)))
        self.ctx = SimpleNamespace(net=Network())

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
        plugin = target in PLUGINS or (target == SCALED and self.ctx.few_tokens)
        if target in self.converters and not plugin:
            before = len(net.layers)
            result = self.converters[target](self.ctx, target, args, kwargs, node.name)
            for layer in net.layers[before:]:
                layer.name = layer.name or node.name
            return result
        if all(isinstance(each, int) for each in args) and target in NUMBERS.values():
            return target(*args)
        if getattr(target, "__name__", "") == "getitem":
            return args[0][args[1]]
        kind = LayerType.PLUGIN_V3 if plugin else LayerType.OTHER
        if plugin:
            shapes = [each.shape for each in _flat(args) if isinstance(each, ITensor)]
            assert not any(-1 in shape for shape in shapes), "a plugin has fixed shapes"
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
    """Make a weight a constant of the network."""
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
    """Fuse an all-reduce and its wait into one call, as Torch-TensorRT's lowering does."""
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
    """One network input, of a fixed shape or of a range of shapes."""

    def __init__(self, dtype: torch.dtype, shape: Any = None, **shapes: tuple[int, ...]) -> None:
        self.dtype = dtype
        least, most = shapes.get("min_shape", shape), shapes.get("max_shape", shape)
        self.shape = tuple(n if n == m else -1 for n, m in zip(least, most, strict=True))


def modules(trt: FakeTensorRt) -> dict[str, Any]:
    """Return the modules by name, for `importing`."""
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
def installed(trt: FakeTensorRt) -> Iterator[None]:
    """Let this process build and run with the fakes."""
    from mtpbuild.builder.targets.tensorrt import lowering

    caches = lowering.torch_tensorrt, lowering._make_interpreter_class
    for cache in caches:
        cache.cache_clear()
    os.environ.setdefault("XDG_CACHE_HOME", "/nonexistent")
    with importing(modules(trt)):
        yield
    for cache in caches:
        cache.cache_clear()
