"""Launches as AOT plugins of a network: how they are wired, described and told to TensorRT.

NVIDIA's own `tensorrt.plugin` is asked the same by `make test-tensorrt`.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from mtpbuild.builder.targets.tensorrt.pipeline import TENSORRT
from mtpbuild.plugins import (
    accept_mixed_op,
    accept_rewind,
    aot,
    facets,
    gated_product,
    matmul_scaled,
    matmul_wide,
    mla_queries,
    mla_rows,
    mla_values,
    moe_route,
    rotary_rows,
)
from mtpbuild.plugins.launch import Launch
from mtpbuild.plugins.ptx import ContractError, Ptx
from mtpbuild.runtime.contract.controls import CORE_CONTROLS, list_control_shapes
from tests.support.kernel_launches import SHAPES, launches
from tests.support.stand_ins import failing, importing

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
PTX = Ptx("entry", "text", "sm_80", (), 128, 1024)


class Plugins:
    """A stand-in for `tensorrt.plugin` that keeps what is registered, by kernel and digest."""

    class TensorDesc: ...

    class KernelLaunchParams(SimpleNamespace): ...

    class SymIntExprs(list[Any]):
        def __init__(self, length: int) -> None:
            super().__init__([None] * length)

    def __init__(self) -> None:
        self.op = SimpleNamespace(mtpbuild=SimpleNamespace())
        self.outputs: dict[str, Callable[..., Any]] = {}
        self.kernels: dict[str, Callable[..., Any]] = {}

    def register(self, plugin_id: str) -> Callable[..., None]:
        namespace, _, name = plugin_id.partition("::")
        setattr(getattr(self.op, namespace), name, lambda *inputs: (name, inputs))
        return lambda function: self.outputs.update({name: function})

    def aot_impl(self, plugin_id: str) -> Callable[..., None]:
        return lambda function: self.kernels.update({plugin_id.partition("::")[2]: function})

    def from_shape_expr(self, shape: tuple[int, ...], dtype: str) -> str:
        return f"{dtype} {list(shape)}"

    def SymInt32(self, value: int) -> tuple[str, int]:  # noqa: N802  # TensorRT's name
        return "int32", value


@pytest.fixture
def trtp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugins]:
    plugins: Any = Plugins()
    utils: Any = SimpleNamespace(get_trt_tensor=lambda ctx, tensor, name: tensor)
    kinds = SimpleNamespace(**{name: name for name in aot.TORCH})
    sums = SimpleNamespace(SUM="SUM")
    tensorrt: Any = SimpleNamespace(DataType=kinds, int32="INT32", ReduceOperation=sums)
    monkeypatch.setattr(aot, "compile_launch", lambda launch, architecture: PTX)
    modules = {
        "tensorrt": tensorrt,
        "tensorrt.plugin": plugins,
        "torch_tensorrt.dynamo.conversion.converter_utils": utils,
    }
    with importing(modules):
        yield plugins


def given(name: str, kind: str, *shape: int) -> Any:
    """Return a tensor of the network."""
    return SimpleNamespace(name=name, dtype=SimpleNamespace(name=kind), shape=shape)


ANGLES = given("cos", "FLOAT", 2, 3, 4), given("sin", "FLOAT", 2, 3, 4)
BETWEEN: dict[str, tuple[Any, tuple[Any, ...], str, tuple[str, ...]]] = {
    "gated": (
        gated_product,
        (given("x", "BF16", 2, 3, 48), given("gate_up", "BF16", 48, 64)),
        "gated",
        ("BF16 [2, 3, 32]",),
    ),
    "queries": (
        mla_queries,
        (given("q", "BF16", 2, 3, 96), given("w_uk", "BF16", 4, 16, 40), *ANGLES, True),
        "absorbed_query",
        ("BF16 [2, 4, 3, 48]",),
    ),
    "rows": (
        mla_rows,
        (
            given("a", "BF16", 2, 3, 72),
            *(given("q_norm", "BF16", 24), given("kv_norm", "BF16", 40)),
            *(*ANGLES, 1e-6, False),
        ),
        "latent_row",
        ("BF16 [2, 3, 24]", "BF16 [2, 1, 3, 48]"),
    ),
    "rows without a norm of queries": (
        mla_rows,
        (
            *(given("a", "BF16", 2, 3, 72), None, given("kv_norm", "BF16", 40)),
            *(*ANGLES, 1e-6, False),
        ),
        "latent_row",
        ("BF16 [2, 3, 24]", "BF16 [2, 1, 3, 48]"),
    ),
    "values": (
        mla_values,
        (given("o", "BF16", 2, 4, 3, 40), given("w_uv", "BF16", 4, 40, 16)),
        "value_of_head",
        ("BF16 [2, 3, 64]",),
    ),
    "routes": (
        moe_route,
        (given("logits", "FLOAT", 6, 24), given("bias", "FLOAT", 24), 4, 2, 3, True, 2.5, 1),
        "route",
        ("FLOAT [6, 4]", "INT32 [6, 4]"),
    ),
    "places": (
        rotary_rows,
        (
            given("start", "INT64", 2),
            *(given("active", "BOOL", 2), given("inv_freq", "FLOAT", 4), 3, 0, 90, 1.0),
        ),
        "place_token",
        ("FLOAT [2, 3, 4]", "FLOAT [2, 3, 4]", "INT64 [2]", "INT64 [2]", "INT64 [2]"),
    ),
}


def recording(made: list[Any]) -> Any:
    """Make a context whose network records its plugins; weights become inputs by their place.

    Results have a kernel's name and a number, a cast has its type in its name.
    """

    def add_plugin(layer: tuple[str, tuple[Any, ...]], aot: bool) -> Any:
        assert aot
        kernel = layer[0].rpartition("_")[0]
        made.append((layer[0], [tensor.name for tensor in layer[1]]))
        return SimpleNamespace(get_output=lambda i: SimpleNamespace(name=f"{kernel}.{i}"))

    def add_cast(tensor: Any, kind: str) -> Any:
        cast = given(f"{tensor.name} as {kind}", kind, *tensor.shape)
        return SimpleNamespace(get_output=lambda i: cast)

    def operand(tensor: torch.Tensor, kind: str, name: str) -> Any:
        return given(name, kind, *tensor.shape)

    net = SimpleNamespace(add_plugin=add_plugin, add_cast=add_cast)
    return SimpleNamespace(net=net, constants=SimpleNamespace(operand=operand))


@pytest.mark.parametrize("case", BETWEEN)
def test_what_stands_between_products(case: str, trtp: Plugins) -> None:
    """The kernel's parameters get the op's operands of their names, attributes are constants."""
    op, operands, kernel, outputs = BETWEEN[case]
    made: list[Any] = []
    results = facets(TENSORRT.facets)[op._opoverload](recording(made), op, operands, {}, "between")
    ((name, taken),) = made
    assert name.rpartition("_")[0] == kernel
    *parameters, _, _ = inspect.signature(trtp.kernels[name]).parameters
    names = [name.partition(" as ")[0] for name in taken]
    assert names == parameters == [t.name for t in operands if isinstance(t, SimpleNamespace)]
    assert trtp.outputs[name](*names) == outputs
    found = results if len(outputs) > 1 else (results,)
    assert [tensor.name for tensor in found] == [f"{kernel}.{i}" for i in range(len(outputs))]


def test_attributes_and_weights_of_a_plugin(trtp: Plugins) -> None:
    """Another attribute is another plugin; a weight goes through the network's constants."""
    made: list[Any] = []
    ctx, convert = recording(made), facets(TENSORRT.facets)[mla_queries._opoverload]
    q, w_uk, *others = BETWEEN["queries"][1]
    weight = torch.zeros(w_uk.shape, dtype=torch.bfloat16)
    for interleaved in (True, False):
        convert(ctx, mla_queries, (q, weight, *others[:-1], interleaved), {}, "queries")
    (name, taken), (other, same) = made
    assert taken == same == ["q", "queries_1", "cos", "sin"]
    assert name != other


@pytest.mark.usefixtures("trtp")
@pytest.mark.parametrize("case", BETWEEN)
def test_an_open_size(case: str) -> None:
    op, (first, *others), _, _ = BETWEEN[case]
    opened = given(first.name, first.dtype.name, -1, *first.shape[1:])
    with pytest.raises(AssertionError, match="a plugin has fixed shapes"):
        facets(TENSORRT.facets)[op._opoverload](recording([]), op, (opened, *others), {}, "between")


def small() -> dict[str, Launch]:
    return {launch.kernel.__name__: launch for launch in launches(SHAPES["small"])}


@pytest.mark.usefixtures("trtp")
def test_layers_take_what_layers_before_them_give() -> None:
    made: list[tuple[str, list[str]]] = []
    operands = (
        given("logits", "FLOAT", 2, 3, 99),
        given("window", "INT64", 2, 3),
        *(given(name, "INT64", 2) for name in ("num_drafts", "lengths")),
        given("active", "BOOL", 2),
    )
    convert = facets(TENSORRT.facets)[accept_rewind._opoverload]
    results = convert(recording(made), accept_rewind._opoverload, operands, {}, "judge")
    first, second = ((name.rpartition("_")[0], taken) for name, taken in made)
    names = ["window", "num_drafts", "lengths", "active as INT32"]
    assert first == ("best_of_block", ["logits"])
    assert second == ("verdict_of_slot", ["best_of_block.0", *names])
    assert [tensor.name for tensor in results] == [f"verdict_of_slot.{i}" for i in range(5)]


HEAD = given("head", "BF16", 1024, 200)
FP8 = given("values", "FP8", 1024, 200), given("scales", "FLOAT", 8, 200)
NVFP4 = (
    *(given("values", "FP8", 512, 200), given("scales", "FP8", 64, 200)),
    given("scales_2", "FLOAT", 1, 200),
)


@pytest.mark.usefixtures("trtp")
@pytest.mark.parametrize(
    ("op", "weight"), [(matmul_wide, (HEAD,)), (matmul_scaled, FP8), (matmul_scaled, NVFP4)]
)
def test_a_product_sums_its_splits(op: Any, weight: tuple[Any, ...]) -> None:
    """The plugin takes the network's own tensors; their sum has the rows of x again."""
    made: list[Any] = []
    layers: list[Any] = []

    def layer(kind: str, *operands: Any) -> Any:
        made.append((kind, *operands))
        layers.append(SimpleNamespace(get_output=lambda i: f"{kind}.{i}"))
        return layers[-1]

    net = SimpleNamespace(
        add_plugin=lambda plugin, aot: layer("plugin", *(t.name for t in plugin[1])),
        add_reduce=lambda *operands: layer("reduce", *operands),
        add_shuffle=lambda tensor: layer("shuffle", tensor),
    )
    operands = given("x", "BF16", 2, 3, 1024), *weight
    ctx = SimpleNamespace(net=net, few_tokens=True)
    result = facets(TENSORRT.facets)[op._opoverload](ctx, op._opoverload, operands, {}, "product")
    assert result == "shuffle.0"
    assert made == [
        ("plugin", *(tensor.name for tensor in operands)),
        ("reduce", "plugin.0", "SUM", 1, False),
        ("shuffle", "reduce.0"),
    ]
    assert layers[-1].reshape_dims == (2, 3, 200)


def test_a_list_is_an_operand(trtp: Plugins) -> None:
    """What requests ask comes as one list; the network gets casts of flags that a kernel reads."""
    kinds = {"float32": "FLOAT", "int64": "INT64", "bool": "BOOL"}
    shapes = list_control_shapes(2, 40)
    asked = [given(c.name, kinds[c.dtype], 2, *shapes[c.name]) for c in CORE_CONTROLS]
    operands = (
        given("logits", "FLOAT", 2, 3, 99),
        given("window", "INT64", 2, 3),
        *(given(name, "INT64", 2) for name in ("num_drafts", "lengths")),
        *(given(name, "BOOL", 2) for name in ("active", "thinking")),
        given("draft_probs", "FLOAT", 2, 2, 99),
        asked,
    )
    taken: dict[str, list[str]] = {}
    cast: list[str] = []

    def add_plugin(layer: tuple[str, tuple[Any, ...]], aot: bool) -> Any:
        taken[layer[0].rpartition("_")[0]] = [tensor.name for tensor in layer[1]]
        return SimpleNamespace(get_output=lambda i: SimpleNamespace(name="-"))

    def add_cast(tensor: Any, kind: str) -> Any:
        cast.append(tensor.name)
        as_number = given(tensor.name, kind, *tensor.shape)
        return SimpleNamespace(get_output=lambda i: as_number)

    ctx = SimpleNamespace(net=SimpleNamespace(add_plugin=add_plugin, add_cast=add_cast))
    op = accept_mixed_op._opoverload
    facets(TENSORRT.facets)[op](ctx, op, operands, {}, "judge")
    assert cast == ["active", "thinking", "rejection", "block"]
    assert taken["share_of_block"][-6:-2] == ["temperature", "top_k", "top_p", "min_p"]
    assert taken["law_of_row"][-5:-2] == ["temperature", "relaxed_topk", "relaxed_delta"]
    assert taken["verdict_of_mixed_slot"][-2:] == ["thinking_ids", "uniforms"]


@pytest.mark.parametrize("kernel", small())
def test_what_tensorrt_is_told(kernel: str, trtp: Plugins) -> None:
    """Names and number of operands, shapes and types of outputs, grid, block and sizes."""
    launch = small()[kernel]
    aot.plugin(launch)
    (describe,), (start,) = trtp.outputs.values(), trtp.kernels.values()
    inputs = [tensor for tensor in launch.inputs if tensor is not None]
    signature = inspect.signature(describe)
    assert len(signature.parameters) == len(inputs)
    assert {p.annotation for p in signature.parameters.values()} == {trtp.TensorDesc}
    assert get_args(signature.return_annotation) == (trtp.TensorDesc,) * len(launch.outputs)
    given = describe(*inputs)
    assert given == tuple(f"{aot.TENSORRT[t.dtype]} {list(t.shape)}" for t in launch.outputs)

    own = [*signature.parameters, "outputs", "tactic"]
    assert list(inspect.signature(start).parameters) == own
    name, text, how, sizes = start(*inputs, given, 0)
    assert (name, text) == (PTX.name, PTX.text)
    assert (how.block_x, how.shared_mem) == (PTX.threads, PTX.shared)
    assert (how.grid_x, how.grid_y, how.grid_z) == (*launch.grid, 1, 1)[:3]
    assert sizes == [("int32", size) for size in launch.sizes]


def test_equal_launches_share_a_plugin(trtp: Plugins) -> None:
    launch, again = small()["mla_partial"], small()["mla_partial"]
    assert aot.plugin(launch) is aot.plugin(again)
    others = [
        replace(launch, sizes=(1, 2)),
        replace(launch, grid=(1, 1, 1)),
        replace(launch, constants={**launch.constants, "SCALE": 0.2}),
        replace(launch, outputs=tuple(torch.empty_like(t).bfloat16() for t in launch.outputs)),
    ]
    assert len({id(aot.plugin(other)) for other in (launch, *others)}) == 5
    assert len(trtp.outputs) == 5


def test_a_kernel_that_can_not_be_launched(trtp: Plugins) -> None:
    """Said when the network is made, before TensorRT asks."""
    refusal = ContractError("mla_partial: 65536 bytes of shared memory > 49152")
    with failing(aot, "compile_launch", refusal), pytest.raises(ContractError):
        aot.plugin(small()["mla_partial"])
    assert not trtp.outputs
