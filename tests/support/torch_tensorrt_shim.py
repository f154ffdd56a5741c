"""Runs target tensorrt on a machine without a GPU: Torch-TensorRT over TensorRT-RTX's library.

    python -m tests.support.torch_tensorrt_shim CHECKPOINT
    python -m tests.support.torch_tensorrt_shim deepseek-r1-fp4

lists as JSON each program's network: its tensors, kinds of layers, writes of caches, quantised
constants, plugins and names of weights. Networks are compiled for sm120, with constants in place of
the plugins and with their weights, as stripping needs a GPU; nothing can be loaded here. With a
recipe of R1 it lists four layers' share of one of 8 ranks, and compiles nothing. It fakes CUDA and
patches internals of Torch-TensorRT 2.13.0, so it needs a process of its own.
"""

import json
import os
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from mtpbuild.runtime.contract.manifest import WEIGHTS
from tests.support import tensorrt_plugin_shim

GPU = types.SimpleNamespace(major=12, minor=0, name="none", total_memory=1 << 34)


def install() -> Any:
    """Put TensorRT-RTX in TensorRT's place and return its module."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: (GPU.major, GPU.minor)
    cuda.get_device_properties = lambda device=None: GPU
    cuda.mem_get_info = lambda device=None: (GPU.total_memory, GPU.total_memory)
    cuda.empty_cache = cuda.synchronize = lambda *args: None
    if not torch.backends.cuda.is_built():  # its C++ run time links libtorch_cuda: hide it
        internals: Any = torch._C
        internals._CudaDeviceProperties = object
        there: Any = os.path
        real = os.path.isfile
        there.isfile = lambda path: "libtorchtrt" not in str(path) and real(path)
    import tensorrt_rtx
    import torch_tensorrt

    torch_tensorrt.Device.to = lambda self, kind: torch.device("cpu")
    return tensorrt_rtx


def spy(trt: Any) -> set[str]:
    """Let networks be compiled for sm120; return a set, to which names of weights are added."""
    named, flags = set[str](), set[str]()
    make, compile_network = trt.Builder.create_builder_config, trt.Builder.build_serialized_network
    set_weights_name = trt.INetworkDefinition.set_weights_name

    def for_sm120(builder: Any) -> Any:
        config = make(builder)
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM120, 0)
        return config

    def seen(builder: Any, network: Any, config: Any) -> Any:
        assert not config.get_flag(trt.BuilderFlag.TF32)
        assert flags == {"STRIP_PLAN", "REFIT_IDENTICAL"}, "not set, as that needs a GPU"
        assert config.profiling_verbosity == trt.ProfilingVerbosity.DETAILED
        return compile_network(builder, network, config)

    def name(network: Any, weights: Any, text: str) -> Any:
        named.add(text)
        return set_weights_name(network, weights, text)

    trt.INetworkDefinition.set_weights_name = name
    trt.IBuilderConfig.set_flag = lambda config, flag: flags.add(flag.name)
    trt.Builder.create_builder_config = for_sm120
    trt.Builder.build_serialized_network = seen
    return named


def listing(what: str) -> dict[str, Any]:
    """List the programs of a checkpoint, or of a recipe's layers 0 to 3 and its module.

    A checkpoint's are for MTP vanilla and two slots, whatever its module count. Its caches are so
    long that the attention's kernel splits them among programs. A recipe's are for MTP Eagle with
    nextn 3, for one of 8 ranks: the network is the same for all, as its rank is a weight. Its
    weights are zeros that take no memory, in those of the recipe's formats that the target keeps.
    """
    trt = install()
    plugins = tensorrt_plugin_shim.install(sys.modules["tensorrt"])

    from mtpbuild.builder.checkpoint.layers_slice import parse_layers
    from mtpbuild.builder.models import load_config
    from mtpbuild.builder.plan.plan import Plan
    from mtpbuild.builder.plan.recipe import find_recipe
    from mtpbuild.builder.program.engine_weights import EngineWeights
    from mtpbuild.builder.program.opened_model import make_model
    from mtpbuild.builder.program.programs import make_programs
    from mtpbuild.builder.targets.tensorrt import TensorRt, lowering
    from mtpbuild.builder.targets.tensorrt.compiling import find_timing_cache
    from mtpbuild.builder.weights.quantised_view import format_by
    from mtpbuild.builder.weights.scheme import SCHEMES
    from mtpbuild.builder.weights.table import choose_formats, make_family_table
    from mtpbuild.runtime.ranks import Ranks
    from tests.support.opened import opened

    found: dict[str, Any] = {}
    recipe = find_recipe(what)
    target = TensorRt(dtype="float32", strip_weights=recipe is None)
    with tempfile.TemporaryDirectory() as scratch:
        if recipe is not None:
            config = parse_layers("0-3").of(load_config(recipe.config_folder))
            plan = Plan(config, 3, "mtp-eagle", 1, 4096, 256, target.style, Ranks(8), ("10.0",))
            scheme = SCHEMES[recipe.layout]
            table = choose_formats(
                make_family_table(config, plan.ranks),
                lambda stored: format_by(scheme, config, stored),
                target.style,
            )
            model = make_model(table, target.style, "cpu")
            weights = {
                name: torch.from_numpy(np.zeros(weight.shape, str(weight.dtype)[6:]))
                for name, weight in model.named_parameters()
            }
            found["weights"] = {name: list(weight.shape) for name, weight in weights.items()}
        else:
            named, os.environ["XDG_CACHE_HOME"] = spy(trt), scratch
            assert not list(lowering.list_missing_packages()), "all but a GPU is here"
            config = load_config(Path(what))
            sizes = (config.num_nextn_predict_layers, "mtp-vanilla", 2, 1100, 4)
            plan = Plan(config, *sizes, target.style, compute_capabilities=("12.0",))
            source = opened(Path(what), config, **vars(plan.style))
            places = EngineWeights(source).write(Path(scratch), siblings=Path("none")).places
            model, weights = source.model, load_file(Path(scratch) / WEIGHTS)
        for program in make_programs(plan, model):
            traced = target.trace(program, plan)
            interpreter = lowering.convert(traced, weights)  # holds the network's constants
            listed = describe(trt, interpreter.ctx.net) | {"plugins": plugins.copy()}
            plugins.clear()
            if recipe is not None:
                listed["totals"] = totals(trt, interpreter.ctx.net)
            else:
                compiled = lowering.compile_program(traced, weights, strip=True, fast=False)
                engine, constants, listed["shared"] = compiled
                listed["weights"] = sorted(named - constants.keys())
                assert constants.keys() <= named
                assert engine.nbytes > sum(places[name].size for name in listed["weights"])
                assert not {*listed["shared"]} & {*listed["weights"]}
                assert find_timing_cache(trt.__version__, "12.0").is_file()
                plugins.clear()
                named.clear()
            found[program.name] = listed
    return found


def quantised(trt: Any, network: Any) -> dict[str, int]:
    """Count the constants of quantised values and scales by their kind."""
    layers = (network.get_layer(i) for i in range(network.num_layers))
    constants = (layer.get_output(0) for layer in layers if layer.type == trt.LayerType.CONSTANT)
    kinds = [f"{t.dtype.name} {list(t.shape)}" for t in constants if t.dtype in (trt.fp4, trt.fp8)]
    return dict(sorted(Counter(kinds).items()))


def totals(trt: Any, network: Any) -> list[str]:
    """List each all-reduce's operand and its number of ranks."""
    layers = (network.get_layer(i) for i in range(network.num_layers))
    found = (layer for layer in layers if layer.type == trt.LayerType.DIST_COLLECTIVE)
    return [f"{list(layer.get_input(0).shape)} of {layer.num_ranks} ranks" for layer in found]


def describe(trt: Any, network: Any) -> dict[str, Any]:
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    writes = [layer for layer in layers if layer.type == trt.LayerType.KV_CACHE_UPDATE]
    return {
        "inputs": [f"{t.name} {t.dtype.name} {list(t.shape)}" for t in inputs],
        "outputs": [f"{t.name} {t.dtype.name} {list(t.shape)}" for t in outputs],
        "layers": sorted({layer.type.name for layer in layers}),
        "written": [f"{w.get_input(0).name} -> {w.get_output(0).name}" for w in writes],
        "quantised": quantised(trt, network),
    }


if __name__ == "__main__":
    stdout = os.dup(1)
    os.dup2(2, 1)  # TensorRT's own message
    found = listing(sys.argv[1])
    os.dup2(stdout, 1)
    print(json.dumps(found, indent=1))
