"""`--attention-backend flashinfer`: what a step gives to FlashInfer, over a stand-in for it.

FlashInfer itself needs a GPU. Of the real package the signature is read, where it is installed.
"""

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mtpbuild.builder.plan import Plan
from mtpbuild.builder.program.programs import make_programs
from mtpbuild.builder.program.trace import trace
from mtpbuild.builder.step_counts import counted
from mtpbuild.builder.targets.inductor import TARGET, InductorOptions
from mtpbuild.builder.targets.passes.attention_backend import check
from mtpbuild.builder.targets.passes.gpu_graph import op_name
from mtpbuild.plugins import mla_attention
from mtpbuild.runtime.errors import BuildError, EngineError, MissingDependencyError
from mtpbuild.runtime.programs import flashinfer_attention
from mtpbuild.runtime.programs.flashinfer_attention import GIVEN, mla_decode
from tests.support.checkpoints import lower, make_model, make_predictable
from tests.support.gpu_steps import ON_GPU, check_step, graph_of
from tests.support.invoke import invoke
from tests.support.steps import CHUNK

STAND_IN = Path(__file__).parents[1] / "support" / "flashinfer_stand_in"
FUNCTION = "trtllm_batch_decode_with_kv_cache_mla"
ASKED = InductorOptions("cuda", "bfloat16", None, "flashinfer")


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Put the stand-in in FlashInfer's place."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setattr(flashinfer_attention, "_kept", {})
    yield importlib.import_module("flashinfer.mla")
    for name in ("flashinfer", "flashinfer.mla"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_it_is_the_attention_of_the_op(dtype: torch.dtype, flashinfer: ModuleType) -> None:
    """They agree where fresh rows stand behind the base; rows behind them are not seen."""
    g = torch.Generator().manual_seed(3)
    B, H, T, S, rank, C = 3, 2, 4, 128, 16, 24
    q, cache = torch.randn(B, H, T, C, generator=g), torch.randn(B, 1, S, C, generator=g)
    base = torch.tensor([0, 63, 124])
    q, cache = q.to(dtype), cache.to(dtype)
    fresh = torch.stack([cache[b, :, at : at + T] for b, at in enumerate(base.tolist())])
    wanted = mla_attention(q, cache, fresh, base, torch.zeros_like(base), 0.3, rank)
    lengths = (base + T).int()
    got = mla_decode(q.transpose(1, 2).contiguous(), cache, lengths, 0.3, 12, rank)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.transpose(1, 2), wanted, rtol=tolerance, atol=tolerance)
    for row in (67, 127):
        cache[1, 0, row] = 1e4
    again = mla_decode(q.transpose(1, 2).contiguous(), cache, lengths, 0.3, 12, rank)
    assert torch.equal(got, again)


@torch.no_grad()
@pytest.mark.usefixtures("traced_without_running")
@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # torch's own, of copied graphs
def test_a_step(flashinfer: ModuleType) -> None:
    """The graph that AOTInductor gets, by Triton's interpreter and the stand-in.

    Tokens and state are those of the step without any of the ops. One of two slots idles: what
    is computed for it is another thing here, and nobody reads it.
    """
    pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    torch.set_num_threads(1)
    reference, slots = make_predictable(num_hidden_layers=1, num_nextn_predict_layers=1), 2
    plan = Plan(reference.config, 2, "mtp-eagle", slots, 40, CHUNK, ON_GPU, options=ASKED)
    program = make_programs(plan, lower(reference))[1]
    ours, traced = counted(trace(program, plan)), TARGET.trace(program, plan)
    counts = counted(traced)
    assert counts.kernels == ours.kernels, "as ours count where the number of slots is open"
    assert counts.others == ours.others + 3, "queries by token, results by head, lengths"
    graph = graph_of(traced)
    called = [op_name(node) for node in graph.graph.nodes]
    assert called.count("mtpbuild_flashinfer::mla_decode") == 1
    assert called.count("mtpbuild_triton::mla_attention") == 2, "two drafts"
    check_step(graph, reference, plan, 3, idle=False)
    assert vars(flashinfer)["calls"] == 3


RUN = """
import sys
import torch
from mtpbuild.runtime.programs.aot_package import Package
from mtpbuild.runtime.programs import flashinfer_attention

class Attend(torch.nn.Module):
    def forward(self, query, cache, lengths):
        cache = cache * 2
        return flashinfer_attention.mla_decode(query, cache, lengths, 0.3, 12, 16) + 1

g = torch.Generator().manual_seed(3)
given = torch.randn(2, 4, 3, 24, generator=g), torch.randn(2, 1, 128, 24, generator=g)
given = *given, torch.tensor([70, 4], dtype=torch.int32)
exported = torch.export.export(Attend(), given)
path = torch._inductor.aoti_compile_and_package(exported, package_path=sys.argv[1])
runner = torch._inductor.aoti_load_package(path)
torch.testing.assert_close(runner(*given), Attend()(*given))
import flashinfer.mla
print(flashinfer.mla.calls)
"""


@pytest.mark.full
def test_a_compiled_program_calls_it(tmp_path: Path) -> None:
    """AOTInductor's code calls Python's operator; a CPU's does it as a GPU's."""
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(tmp_path / "attend.pt2")]
    environment = {**os.environ, "PYTHONPATH": str(STAND_IN)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "2"  # eagerly, and compiled


def parameters(file: Path) -> list[str]:
    """The function's parameters, read from its source: the package may need a GPU to import."""
    functions = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == FUNCTION
    ]
    return [argument.arg for node in functions for argument in node.args.args]


def test_the_stand_in_takes_what_is_given() -> None:
    assert set(parameters(STAND_IN / "flashinfer" / "mla.py")) == set(GIVEN)


def test_the_real_function_takes_what_is_given() -> None:
    spec = find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer is not installed: pip install --no-deps flashinfer-python")
    folder = Path(spec.origin).parent
    files = [folder / "mla.py", *sorted((folder / "mla").glob("*.py"))]
    found = [names for file in files if file.is_file() and (names := parameters(file))]
    assert any(set(GIVEN) <= set(names) for names in found)


def plan(capability: str, **shape: int) -> Plan:
    config = make_model(num_hidden_layers=1, num_nextn_predict_layers=1).config
    sizes = 1, "mtp-eagle", 1, 64, 8
    return Plan(
        replace(config, **shape),  # type: ignore[arg-type]
        *sizes,
        ON_GPU,
        compute_capabilities=(capability,),
        options=ASKED,
    )


R1 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}


def test_what_it_has_no_kernels_for() -> None:
    check(plan("10.0", **R1))
    check(plan("10.3", **R1))
    with pytest.raises(BuildError, match=r"10\.0 and 10\.3 alone, not 9\.0; leave it out"):
        check(plan("9.0", **R1))
    for heads in (96, 256):
        with pytest.raises(BuildError, match=f"up to 64 heads of a rank, or 128, not {heads}"):
            check(plan("10.0", **R1, num_attention_heads=heads))
    check(plan("10.0", **R1, num_attention_heads=128))
    with pytest.raises(BuildError, match="of 512, 64, 128 or 256, 64, 64, not 512, 32, 128"):
        check(plan("10.0", **R1 | {"qk_rope_head_dim": 32}))


FOR_GPU = ("--device", "cuda", "--dtype", "bfloat16", "--compute-capability")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("flashinfer",), "is for --device cuda --dtype bfloat16"),
        (("flashinfer", "--device", "cuda"), "is for --device cuda --dtype bfloat16"),
        (("flashinfer", *FOR_GPU, "sm90"), "capability 10.0 and 10.3 alone, not 9.0; leave it out"),
        (("flashinfer", *FOR_GPU, "sm_100"), "256, 64, 64, not "),
        (("flashmla",), "--attention-backend flashmla is unknown; supported: triton, flashinfer"),
    ],
)
def test_what_is_refused(flags: tuple[str, ...], says: str, smallest: Path) -> None:
    asked = ("--target", "inductor", "--attention-backend", *flags)
    code, _, said = invoke("build", "--model", smallest, *asked)
    assert code != 0
    assert says in said
    assert len(said.strip().splitlines()) == 1


def test_an_engine_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(MissingDependencyError, match="pip install flashinfer-python, or build"):
        flashinfer_attention.check(tmp_path)


@pytest.mark.parametrize("error", ["OSError('libcuda.so.1')", "RuntimeError('no GPU')"])
def test_a_package_that_fails_to_load(
    error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flashinfer.py").write_text(f"raise {error}\n")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        MissingDependencyError, match=r"FlashInfer's \((libcuda.so.1|no GPU)\): pip"
    ):
        flashinfer_attention.check(Path("engine"))


def test_an_older_package(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_attention.check(Path("engine"))

    def older(query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor) -> None: ...

    monkeypatch.setattr(flashinfer, FUNCTION, older)
    with pytest.raises(EngineError, match=r"has no qk_nope_head_dim, .*backend, .*; 0\.7\.2 has"):
        flashinfer_attention.check(Path("engine"))
