"""ExportedProgram -> Torch-TensorRT's converters -> one TensorRT engine per program."""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.export import ExportedProgram

from mtpbuild import plugins
from mtpbuild.builder.models.common.collectives import RANK
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.program.trace import TracedProgram
from mtpbuild.builder.targets.passes import run_passes
from mtpbuild.builder.targets.tensorrt import compiling
from mtpbuild.builder.targets.tensorrt.pipeline import TENSORRT
from mtpbuild.plugins.constants import Constants
from mtpbuild.plugins.matmul_scaled.op import MAX_TOKENS
from mtpbuild.plugins.ptx import ContractError
from mtpbuild.runtime.contract.manifest import CONSTANTS, SHARED, WEIGHTS, TensorSpec
from mtpbuild.runtime.errors import (
    BuildError,
    MissingDependencyError,
    advise_install,
    take_first_line,
)
from mtpbuild.runtime.programs.tensorrt_api import make_error_logger, tensorrt_api

NAME = "tensorrt"
CUMSUM = torch.ops.aten.cumsum.default
GATHER = torch.ops.aten.gather.default
SORT = torch.ops.aten.sort.stable
# The preview feature that TensorRT 10 needs for collectives; TensorRT 11 has them by default.
COLLECTIVES = "MULTIDEVICE_RUNTIME_10_16"
# Ops whose kernels read weights as they are stored.
READERS = {
    op._opoverload
    for op in (
        plugins.gated_product,
        plugins.matmul_wide,
        plugins.mla_queries,
        plugins.mla_rows,
        plugins.mla_values,
        plugins.moe,
        plugins.moe_route,
    )
}
LOGGERS = "torch_tensorrt", "torch_tensorrt [TensorRT Conversion Context]"


def has_few_tokens(plan: Plan) -> bool:
    """Return whether a step has few enough for our kernels of quantised and gated products."""
    return plan.max_batch * plan.window <= MAX_TOKENS


def list_missing_packages() -> Iterator[str]:
    """Yield a line for each package that is missing to compile anything."""
    if find_spec("triton") is None:
        yield _needs("triton")
    try:
        tensorrt_api(NAME)
        torch_tensorrt()
    except MissingDependencyError as error:
        yield str(error)


def lower(traced: TracedProgram, folder: Path, *, strip: bool, fast: bool) -> str:
    """Write the engine and the names of its weight inputs; return the engine's file name.

    strip: leave the weights out of the engine. fast: compile faster, perhaps a slower engine.
    """
    values = load_file(folder / WEIGHTS)  # memory-mapped
    engine, stripped, shared = compile_program(traced, values, strip=strip, fast=fast)
    if strip:
        save_file(stripped, folder / CONSTANTS.format(traced.name))
    if shared:
        (folder / SHARED.format(traced.name)).write_text(json.dumps(shared), encoding="utf-8")
    file = f"{traced.name}.engine"
    (folder / file).write_bytes(engine)
    return file


@cache
def torch_tensorrt() -> ModuleType:
    """Return Torch-TensorRT's compiler with our converters registered."""
    try:
        dynamo = import_module("torch_tensorrt.dynamo")
    except ImportError as error:
        raise MissingDependencyError(_needs((error.name or "").partition(".")[0])) from None
    registry = import_module("torch_tensorrt.dynamo.conversion")
    first = registry.ConverterPriority.HIGH
    sum_op = torch.ops.tensorrt.fused_nccl_all_reduce.default
    converters = {CUMSUM: cumsum, GATHER: gather, SORT: sort, sum_op: all_reduce}
    for op, converter in (plugins.facets(TENSORRT.facets) | converters).items():
        register = registry.dynamo_tensorrt_converter
        register(op, supports_dynamic_shapes=True, priority=first)(converter)
    return dynamo


def _needs(package: str) -> str:
    advice = advise_install("tensorrt,tensorrt-build,build")
    return f"building for target {NAME} needs {package}: {advice}"


def cumsum(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Convert cumsum to one layer; Torch-TensorRT writes a loop, and has no cumsum for RTX."""
    trt = tensorrt_api(NAME)
    utils = import_module("torch_tensorrt.dynamo.conversion.converter_utils")
    values, axis = args
    last = torch.tensor(axis % len(values.shape), dtype=torch.int32)
    constant = utils.get_trt_tensor(ctx, last, f"{name}_axis")  # `ctx` keeps it alive
    how = trt.CumulativeOperation.SUM
    return ctx.net.add_cumulative(values, constant, how, False, False).get_output(0)


def gather(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Convert a gather to one layer; Torch-TensorRT's own converter needs fixed sizes."""
    values, axis, ids = args
    layer = ctx.net.add_gather_v2(values, ids, tensorrt_api(NAME).GatherMode.ELEMENT)
    layer.axis = axis % len(values.shape)
    return layer.get_output(0)


def sort(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> tuple[Any, Any]:
    """Convert a router's sort, of at most 3,840 values, to one layer; Torch-TensorRT lacks it."""
    trt, values = tensorrt_api(NAME), args[0]
    axis = kwargs.get("dim", -1) % len(values.shape)
    largest = trt.TopKOperation.MAX if kwargs.get("descending") else trt.TopKOperation.MIN
    layer = ctx.net.add_topk(values, largest, values.shape[axis], 1 << axis)
    return layer.get_output(0), layer.get_output(1)


def all_reduce(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Convert an all-reduce, which Torch-TensorRT's lowering has fused with its wait."""
    trt = tensorrt_api(NAME)
    what, how = trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM
    ranks = torch.arange(ctx.ranks).numpy()
    layer = ctx.net.add_dist_collective(args[0], what, how, -1, ranks)
    layer.num_ranks = ctx.ranks
    return layer.get_output(0)


def compile_program(
    traced: TracedProgram, values: Mapping[str, torch.Tensor], *, strip: bool, fast: bool
) -> tuple[Any, dict[str, torch.Tensor], list[str]]:
    """Compile an engine; return its bytes, the stripped constants and its weight inputs.

    The second result has the constants that stripping took out of the engine, by name; the third
    lists the weights that are inputs. values: see `convert`. Raises BuildError.
    """
    trt = tensorrt_api(NAME)
    with _silence(trt):
        try:
            interpreter = convert(traced, values)
        except ContractError as error:
            reason = take_first_line(error)  # later lines give the location in the graph
            raise BuildError(f"target {NAME}: TensorRT can't launch a kernel ({reason})") from None
        builder, network = interpreter.builder, interpreter.ctx.net
        plan = traced.plan
        config = compiling.make_compiler_config(trt, builder, network, plan, fast=fast)
        if plan.ranks.tp > 1 and (feature := getattr(trt.PreviewFeature, COLLECTIVES, None)):
            config.set_preview_feature(feature, True)
        # Detailed, for users of TensorRT's engine inspector.
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        constants = interpreter.ctx.constants
        stripped = dict[str, torch.Tensor]()
        if strip:
            stripped = compiling.strip(trt, network, config, values, constants.by_layer)
        with compiling.keep_timing_cache(trt, config, plan.compute_capabilities[0]):
            engine = compiling.compile_network(trt, builder, network, config, traced.name)
        return engine, stripped, sorted(constants.given)


def convert(traced: TracedProgram, values: Mapping[str, torch.Tensor]) -> Any:
    """Convert a program; return Torch-TensorRT's interpreter with builder, network and constants.

    The network's tensors have the manifest's names. The weights that our kernels read are further
    inputs. values: the model's parameters, which were traced without values; the rank's number
    comes from the trace.
    """
    exported = run_passes(traced.plan.style.pipeline.lowered_passes, traced.exported, traced)
    for name in exported.state_dict:
        is_rank = name.rpartition(".")[2] == RANK
        value = torch.tensor([traced.rank]) if is_rank else values[name.removeprefix("model.")]
        exported.state_dict[name] = torch.nn.Parameter(value, requires_grad=False)
    shared = {value.data_ptr(): name for name, value in values.items()}
    interpreter = _interpret(exported, traced, shared)
    network, weight_inputs = interpreter.ctx.net, len(interpreter.ctx.constants.given)
    for count, tensor, specs in (
        (network.num_inputs - weight_inputs, network.get_input, traced.inputs),
        (network.num_outputs, network.get_output, traced.outputs),
    ):
        assert count == len(specs), "every input and output of the program is the network's"
        for i, spec in enumerate(specs):
            tensor(i).name = spec.name
    return interpreter


def decompose(exported: ExportedProgram, traced: TracedProgram) -> ExportedProgram:
    """Before: all operators of PyTorch. After: those with converters of Torch-TensorRT.

    The lowering of each rank asks for the same program, so the graph keeps the result.
    """
    kept = exported.graph_module.meta
    if "decomposed" not in kept:
        prepared = lowering().pre_export_lowering(exported, settings())
        kept["decomposed"] = prepared.run_decompositions(lowering().get_decompositions(False))
    decomposed: ExportedProgram = kept["decomposed"]
    return decomposed


def lowering() -> ModuleType:
    return import_module(f"{torch_tensorrt().__name__}.lowering")


def settings() -> Any:
    return torch_tensorrt().CompilationSettings(truncate_double=True, min_block_size=1)


def _interpret(exported: ExportedProgram, traced: TracedProgram, shared: Mapping[int, str]) -> Any:
    """Run Torch-TensorRT's steps up to the network, which we name and compile ourselves."""
    compilation = settings()
    module = lowering().post_lowering(exported.module(), compilation)
    inputs = [_make_input(spec, traced.plan.prefill_chunk) for spec in traced.inputs]
    interpreter = _make_interpreter_class()(module, inputs, compilation_settings=compilation)
    interpreter.ctx.ranks = traced.plan.ranks.tp  # for `all_reduce`
    few = has_few_tokens(traced.plan) and not traced.of_prompt
    interpreter.ctx.few_tokens = few  # for `matmul_scaled`
    interpreter.ctx.constants = Constants(interpreter.ctx.net, shared)
    interpreter._construct_trt_network_def()
    return interpreter


@cache
def _make_interpreter_class() -> Any:
    trt, conversion = tensorrt_api(NAME), import_module("torch_tensorrt.dynamo.conversion")

    class Interpreter(conversion.TRTInterpreter):  # type: ignore[misc, name-defined]
        """An interpreter that keeps PyTorch's dtypes.

        The converters of where, amax, argmax and others return int32 or float for int64, which is
        exact, as ids and rows stay below 2**24. Torch-TensorRT turns constants in bfloat16 into
        fp32, and each step would cast them back.
        """

        def run_node(self, n: torch.fx.Node) -> Any:
            result, value = super().run_node(n), n.meta.get("val")
            if isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16:
                if all(node.target in READERS for node in n.users):
                    return result  # the op's converter makes it an input
                return self.ctx.constants.constant(result, trt.bfloat16, n.name)
            if not isinstance(result, trt.ITensor) or not isinstance(value, torch.Tensor):
                return result
            wanted = getattr(trt, str(value.dtype).removeprefix("torch."))
            if result.dtype == wanted:
                return result
            return self.ctx.net.add_cast(result, wanted).get_output(0)

    return Interpreter


def _make_input(spec: TensorSpec, chunk: int) -> Any:
    least, largest = (
        tuple(size if isinstance(size, int) else tokens for size in spec.shape)
        for tokens in (1, chunk)
    )
    shapes = {"min_shape": least, "opt_shape": largest, "max_shape": largest}
    fixed = not any(isinstance(size, str) for size in spec.shape)
    Input = import_module("torch_tensorrt").Input
    return Input(dtype=getattr(torch, spec.dtype), **({"shape": largest} if fixed else shapes))


@contextlib.contextmanager
def _silence(trt: ModuleType) -> Iterator[None]:
    """Silence the messages about each node that is converted, folded or named twice."""
    compiler, network = map(logging.getLogger, LOGGERS)
    level, errors = compiler.level, make_error_logger(trt).errors

    def keep(record: logging.LogRecord) -> bool:
        """Collect TensorRT's errors, and show no message of Torch-TensorRT's logger."""
        if record.levelno >= logging.ERROR:
            errors.append(record.getMessage())
        return False

    compiler.setLevel(logging.CRITICAL)
    network.addFilter(keep)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        network.removeFilter(keep)
        compiler.setLevel(level)
