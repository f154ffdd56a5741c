"""`--attention-backend`: what a step gives to FlashInfer or FlashMLA, over stand-ins for them.

The packages need a GPU. Of the real ones signatures are read, where they are installed, and
FlashMLA's Python is run over the stand-in for its compiled operator.
"""

import ast
import importlib
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

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
from mtpbuild.runtime.programs.attention_backends import KEPT, Library, module_of
from tests.support.checkpoints import lower, make_model, make_predictable
from tests.support.compiler import needs_compiler
from tests.support.gpu_steps import ON_GPU, check_step, graph_of
from tests.support.invoke import invoke
from tests.support.steps import CHUNK

SUPPORT = Path(__file__).parents[1] / "support"


@dataclass(frozen=True)
class Case:
    """Describes a backend, and what a step of two layers does with it."""

    flag: str
    package: str
    counter: str  # the stand-in's module that counts calls
    more_kernels: int  # than ours, which count once where the number of slots is open
    own: int | bool  # the operand that only this one has

    @property
    def stand_in(self) -> Path:
        return SUPPORT / f"{self.package}_stand_in"

    @property
    def library(self) -> Library:
        return module_of(self.flag).LIBRARY

    def decode(self, q: Tensor, cache: Tensor, lengths: Tensor, rank: int) -> Tensor:
        """Calls the operator with queries ordered by head; returns rows ordered by head."""
        mixed = module_of(self.flag).mla_decode(
            q.transpose(1, 2).contiguous(), cache, lengths, 0.3, self.own, rank
        )
        return mixed.transpose(1, 2)


FLASHINFER = Case("flashinfer", "flashinfer", "flashinfer.mla", 0, 12)
FLASH_MLA = Case("flash-mla", "flash_mla", "flash_mla._loader", 3, True)
CASES = (FLASHINFER, FLASH_MLA)


PARAMETERS = (  # of sgl-flash-mla 1.0.0's function
    *("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata"),
    *("num_splits", "softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink"),
    *("extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"),
    *("enable_batch_invariant", "use_legacy", "kv_format", "descale_q", "descale_k"),
)
OPERATOR = (  # that it calls in the end
    "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor "
    "block_table, float softmax_scale, bool is_causal, Tensor(a!)? tile_scheduler_metadata, "
    "Tensor(b!)? num_splits) -> (Tensor, Tensor, Tensor(a)?, Tensor(b)?)"
)


def forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


@pytest.fixture(params=CASES, ids=lambda case: case.flag)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """Put the stand-in in the package's place."""
    case: Case = request.param
    forget(case.package)
    monkeypatch.syspath_prepend(str(case.stand_in))
    KEPT.clear()
    importlib.import_module(case.counter)
    yield case
    forget(case.package)
    KEPT.clear()


each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.flag)  # without its stand-in


def counts_of(case: Case) -> Any:
    return sys.modules[case.counter]


def check_attention(case: Case, dtype: torch.dtype) -> None:
    """They agree where fresh rows stand behind the base; rows behind them are not seen."""
    g = torch.Generator().manual_seed(3)
    B, H, T, S, rank, C = 3, 2, 4, 128, 16, 24
    q, cache = torch.randn(B, H, T, C, generator=g), torch.randn(B, 1, S, C, generator=g)
    base = torch.tensor([0, 63, 124])
    q, cache = q.to(dtype), cache.to(dtype)
    fresh = torch.stack([cache[b, :, at : at + T] for b, at in enumerate(base.tolist())])
    wanted = mla_attention(q, cache, fresh, base, torch.zeros_like(base), 0.3, rank)
    lengths = (base + T).int()
    got = case.decode(q, cache, lengths, rank)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    for row in (67, 127):
        cache[1, 0, row] = 1e4
    assert torch.equal(got, case.decode(q, cache, lengths, rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_it_is_the_attention_of_the_op(dtype: torch.dtype, case: Case) -> None:
    check_attention(case, dtype)


@torch.no_grad()
@pytest.mark.usefixtures("traced_without_running")
@pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # torch's own, of copied graphs
def test_a_step(case: Case) -> None:
    """The graph that AOTInductor gets, by Triton's interpreter and the stand-in.

    Tokens and state are those of the step without any of the ops. One of two slots idles: what
    is computed for it is another thing here, and nobody reads it. FlashMLA's plan is made once a
    step: the stand-in refuses one of other lengths.
    """
    pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
    torch.set_num_threads(1)
    reference, slots = make_predictable(num_hidden_layers=2, num_nextn_predict_layers=1), 2
    asked = InductorOptions("cuda", "bfloat16", None, case.flag)
    plan = Plan(reference.config, 2, "mtp-eagle", slots, 40, CHUNK, ON_GPU, options=asked)
    program = make_programs(plan, lower(reference))[1]
    ours, traced = counted(trace(program, plan)), TARGET.trace(program, plan)
    counts = counted(traced)
    assert counts.kernels == ours.kernels + case.more_kernels
    assert counts.others == ours.others + 5, "queries by token, results by head; lengths"
    graph = graph_of(traced)
    called = [op_name(node) for node in graph.graph.nodes]
    assert called.count(f"mtpbuild_{case.package}::mla_decode") == 2
    assert called.count("mtpbuild_triton::mla_attention") == 2, "two drafts"
    check_step(graph, lower(reference), plan, 3, idle=False)
    assert counts_of(case).calls == 6
    assert getattr(counts_of(case), "planned", 3) == 3


RUN = """
import sys
import torch
from mtpbuild.runtime.programs.aot_package import Package
from mtpbuild.runtime.programs.attention_backends import module_of

package, flag, own, counter = sys.argv[1:]
decode, own = module_of(flag).mla_decode, own == "True" or int(own)

class Attend(torch.nn.Module):
    def forward(self, query, cache, lengths):
        cache = cache * 2
        return decode(query, cache, lengths, 0.3, own, 16) + 1

g = torch.Generator().manual_seed(3)
given = torch.randn(2, 4, 3, 24, generator=g), torch.randn(2, 1, 128, 24, generator=g)
given = *given, torch.tensor([70, 4], dtype=torch.int32)
exported = torch.export.export(Attend(), given)
path = torch._inductor.aoti_compile_and_package(exported, package_path=package)
runner = torch._inductor.aoti_load_package(path)
torch.testing.assert_close(runner(*given), Attend()(*given))
print(sys.modules[counter].calls)
"""


@pytest.mark.full
@each
def test_a_compiled_program_calls_it(case: Case, tmp_path: Path) -> None:
    """AOTInductor's code calls Python's operator; a CPU's does it as a GPU's."""
    told = str(tmp_path / "attend.pt2"), case.flag, str(case.own), case.counter
    environment = {**os.environ, "PYTHONPATH": str(case.stand_in)}
    command = [sys.executable, "-W", "ignore", "-c", RUN, *told]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "2"  # eagerly, and compiled


def parameters(folder: Path, function: str) -> list[tuple[str, ...]]:
    """The function's parameters, read from its source: the package may need a GPU to import."""
    functions = [
        node
        for file in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    return [tuple(argument.arg for argument in node.args.args) for node in functions]


def installed(library: Library) -> Path:
    """The real package's folder."""
    name, real = library.function.partition(".")[0], [p for p in sys.path if "stand_in" not in p]
    spec = PathFinder.find_spec(name, real)
    if spec is None or spec.origin is None:
        advice = f"pip install --no-deps {library.install.split()[-1]}"
        pytest.skip(f"{library.name} is not installed: {advice}")
    return Path(spec.origin).parent


@each
def test_the_stand_in_takes_what_is_given(case: Case) -> None:
    (taken,) = parameters(case.stand_in, case.library.function.rpartition(".")[2])
    assert set(taken) == set(case.library.given)


@each
def test_the_real_function_takes_what_is_given(case: Case) -> None:
    library = case.library
    found = parameters(installed(library), library.function.rpartition(".")[2])
    assert any(set(library.given) <= set(names) for names in found)


def test_flash_mla_as_it_was_read() -> None:
    """What is called is known, in the order of the wheel that was read."""
    assert set(FLASH_MLA.library.given) <= set(PARAMETERS)
    (taken,) = parameters(FLASH_MLA.stand_in, "dense_decode_fwd")
    schema = torch._C.parse_schema(OPERATOR)
    assert taken == tuple(argument.name for argument in schema.arguments)
    assert len(schema.returns) == 4


@torch.no_grad()
@pytest.mark.parametrize("case", [FLASH_MLA], indirect=True, ids=["flash-mla"])
def test_flash_mlas_own_python(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel's Python takes the call, over the stand-in for its compiled operator."""
    folder = installed(case.library)
    assert parameters(folder, "flash_mla_with_kvcache") == [PARAMETERS]
    assert OPERATOR.encode() in (folder / "_C_legacy.abi3.so").read_bytes()
    interface = runpy.run_path(str(folder / "flash_mla_interface.py"))
    for name in ("flash_mla_with_kvcache", "get_mla_metadata"):
        monkeypatch.setattr(sys.modules["flash_mla"], name, interface[name])
    check_attention(case, torch.bfloat16)
    assert counts_of(case).calls == counts_of(case).planned == 2


R1 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}


@pytest.mark.parametrize(
    ("case", "capability", "shape", "says"),
    [
        (FLASHINFER, "10.0", {}, ""),
        (FLASHINFER, "10.3", {"num_attention_heads": 128}, ""),
        (FLASHINFER, "9.0", {}, "10.0 and 10.3 alone, not 9.0; leave it out"),
        (FLASHINFER, "10.0", {"num_attention_heads": 96}, "64 heads of a rank, or 128, not 96"),
        (FLASHINFER, "10.0", {"qk_rope_head_dim": 32}, "128 or 256, 64, 64, not 512, 32, 128"),
        (FLASH_MLA, "9.0", {"num_attention_heads": 96}, ""),
        (FLASH_MLA, "9.0", {"qk_nope_head_dim": 192}, ""),
        (FLASH_MLA, "10.0", {}, "capability 9.0 alone, not 10.0; leave it out"),
        (FLASH_MLA, "9.0", {"kv_lora_rank": 256}, "of 512, 64, not 256, 64; leave it out"),
    ],
)
def test_what_it_has_kernels_for(
    case: Case, capability: str, shape: dict[str, int], says: str
) -> None:
    config = make_model(num_hidden_layers=1, num_nextn_predict_layers=1).config
    config = replace(config, **R1 | shape)  # type: ignore[arg-type]
    plan = Plan(config, 1, "mtp-eagle", 1, 64, 8, ON_GPU, compute_capabilities=(capability,))
    with pytest.raises(BuildError, match=re.escape(says)) if says else nullcontext():
        check(plan, case.flag)


FOR_GPU = ("--device", "cuda", "--dtype", "bfloat16", "--compute-capability")


@needs_compiler  # these are checked behind it
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("flashinfer",), "is for --device cuda --dtype bfloat16"),
        (("flashinfer", "--device", "cuda"), "is for --device cuda --dtype bfloat16"),
        (("flashinfer", *FOR_GPU, "sm90"), "capability 10.0 and 10.3 alone, not 9.0; leave it out"),
        (("flashinfer", *FOR_GPU, "sm_100"), "256, 64, 64, not "),
        (("flash-mla", "--device", "cuda"), "is for --device cuda --dtype bfloat16"),
        (("flash-mla", *FOR_GPU, "sm100"), "capability 9.0 alone, not 10.0; leave it out"),
        (("flash-mla", *FOR_GPU, "sm90"), "a kv_lora_rank, qk_rope_head_dim of 512, 64, not "),
        (("flashmla",), "flashmla is unknown; supported: triton, flashinfer, flash-mla"),
    ],
)
def test_what_is_refused(flags: tuple[str, ...], says: str, smallest: Path) -> None:
    asked = ("--target", "inductor", "--attention-backend", *flags)
    code, _, said = invoke("build", "--model", smallest, *asked)
    assert code != 0
    assert says in said
    assert len(said.strip().splitlines()) == 1


@each
def test_an_engine_without_the_package(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, case.package, None)
    wanted = f"pip install {case.library.install}, or build without .* {case.flag}"
    with pytest.raises(MissingDependencyError, match=wanted):
        module_of(case.flag).check(tmp_path)


@each
@pytest.mark.parametrize("error", ["OSError('libcuda.so.1')", "RuntimeError('no GPU')"])
def test_a_package_that_fails_to_load(
    case: Case, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"{case.package}.py").write_text(f"raise {error}\n")
    monkeypatch.delitem(sys.modules, case.package, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    wanted = rf"{case.library.name}'s \((libcuda.so.1|no GPU)\): pip"
    with pytest.raises(MissingDependencyError, match=wanted):
        module_of(case.flag).check(Path("engine"))


def test_an_older_package(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    library, check = case.library, module_of(case.flag).check
    check(Path("engine"))

    def older(query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor) -> None: ...

    module, _, name = library.function.rpartition(".")
    monkeypatch.setattr(sys.modules[module], name, older)
    missing = [name for name in library.given if name not in older.__annotations__]
    with pytest.raises(EngineError, match=f"has no {', '.join(missing)}; .*{library.version} has"):
        check(Path("engine"))


@pytest.mark.parametrize("case", [FLASH_MLA], indirect=True, ids=["flash-mla"])
def test_a_package_without_kernels_for_hopper(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[case.package], "has_legacy", lambda: False)
    with pytest.raises(EngineError, match="engine: this FlashMLA has no kernels for sm_90 that"):
        module_of(case.flag).check(Path("engine"))
