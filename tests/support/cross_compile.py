"""Compiles programs for a GPU that is not here, and describes each in a line of JSON.

    python -m tests.support.cross_compile FOLDER [--kernels-only] small/head/sm90/bfloat16

It runs in a process of its own, because Triton's interpreter must be off. A case has four parts, or
five with what ranks sum by (`/one-shot`). The first part names the model: `small`, `r1` (one rank
of eight) or `r1-alone` (a single rank); `small-sparse`, `v3.2` and `glm-5` are the like with
attention to chosen rows; `v4` and `small-v4` a step of DeepSeek-V4's (its second part may be any
word); `rank` for the step of one rank of two; or a model that is built as an engine. The second
part is a part of a step that `benchmarks/gpu.py` measures, or a whole step with nextn 3 of some
layers (`step of 1+2`: a dense one and two with experts; `mixed step of ..`). The programs have no
weights, as nothing runs them.
With --kernels-only the C++ is written, but not compiled.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAYERS = {"dense layer": 0, "MoE layer": 1}
TOKENS, SEQUENCE, CHUNK = 4, 4096 + 256, 8
# The ranks and the recipe of each model that is a share of one.
SHARES = {
    "r1": (8, "deepseek_v3"),
    "r1-alone": (1, "deepseek_v3"),
    "v3.2": (8, "deepseek_v32"),
    "glm-5": (8, "glm5"),
}
ALL_REDUCE = "_c10d_functional_all_reduce_"


@dataclass
class Compiled:
    """Describes one compiled program."""

    case: str
    program: str
    kernels: dict[str, int] = field(default_factory=dict)  # launches per call of the program
    operators: dict[str, int] = field(default_factory=dict)  # PyTorch's own, such as cuBLAS
    architectures: dict[str, int] = field(default_factory=dict)  # number of cubins for each
    needed: list[str] = field(default_factory=list)  # libraries that the program names
    unresolved: list[str] = field(default_factory=list)  # symbols that this PyTorch does not have
    isa: str = ""  # instruction set of the host's code
    fresh: list[str] = field(default_factory=list)  # kernels that Triton compiled
    known: list[str] = field(default_factory=list)  # kernels that it found compiled

    @property
    def collectives(self) -> int:
        return sum(n for name, n in self.operators.items() if name == ALL_REDUCE)

    @property
    def calls(self) -> int:
        """Count the launches of a call of the program, without collectives."""
        calls = Counter(self.kernels) + Counter(self.operators)
        return sum(n for name, n in calls.items() if not name.startswith("_c10d_functional"))


def count_calls(wrapper: str, into: Compiled) -> None:
    """Count launches and operators in a program's C++, which has no branches and no loops."""
    body = wrapper[wrapper.index("::run_impl(") :]
    kernels = re.findall(r"^\s*call_(\w+)\(", body, re.M)
    into.kernels = dict(Counter(re.sub(r"_\d+$", "", kernel) for kernel in kernels))
    found = re.findall(r"\baoti_torch_(?:(?:cpu|cuda)_(\w+)|(proxy_executor)_call_\w+)\(", body)
    into.operators = dict(Counter(name or proxy for name, proxy in found))


def read_package(path: Path, into: Compiled, scratch: Path) -> None:
    """Read a .pt2 file: its kernels' architectures, and its library's dependencies."""
    with zipfile.ZipFile(path) as package:
        names = package.namelist()
        cubins = [package.read(name) for name in names if name.endswith(".cubin")]
        (library,) = (name for name in names if name.endswith(".so"))
        (metadata,) = (name for name in names if name.endswith("wrapper_metadata.json"))
        into.isa = json.loads(package.read(metadata))["AOTI_CPU_ISA"]
        extracted = Path(package.extract(library, scratch))
    into.architectures = dict(Counter(map(architecture, cubins)))
    dynamic = subprocess.check_output(["readelf", "-d", extracted], text=True)
    into.needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    symbols = subprocess.check_output(["nm", "-D", "--undefined-only", extracted], text=True)
    wanted = (line.split()[-1].partition("@")[0] for line in symbols.splitlines() if " U " in line)
    here = ctypes.CDLL("libtorch_cpu.so")  # symbols that it needs
    into.unresolved = [name for name in wanted if not hasattr(here, name)]


def architecture(cubin: bytes) -> str:
    assert cubin[:4] == b"\x7fELF"
    assert int.from_bytes(cubin[18:20], "little") == 190, "NVIDIA CUDA"
    shift = 8 if cubin[8] >= 8 else 0  # the ABI's version
    return f"sm_{int.from_bytes(cubin[48:52], 'little') >> shift & 0xFF}"


def programs(model: str, parts: str, target: Any) -> Iterator[tuple[Any, Any]]:
    """Yield programs with their plans."""

    from mtpbuild.builder.models.common.precision import FLOATS, set_dtype
    from mtpbuild.builder.models.common.weight import Share
    from mtpbuild.builder.plan.plan import Plan
    from mtpbuild.builder.program.programs import make_programs
    from mtpbuild.builder.weights.scheme import UNQUANTISED
    from mtpbuild.runtime.ranks import Ranks
    from tests.support.checkpoints import lower, make_model

    def plan_of(config: Any, ranks: Ranks) -> Plan:
        sizes = 3, "mtp-eagle", 1, SEQUENCE, CHUNK
        return Plan(config, *sizes, target.style, ranks, target.compute_capabilities(None))

    if model == "rank":
        whole = make_model(vocab_size=64, num_hidden_layers=1, num_nextn_predict_layers=1)
        ranks = Ranks(2, 2)
        lowered = lower(whole, Share(ranks, 1))
        set_dtype(lowered, FLOATS[target.dtype], for_gpu=True)
        plan = plan_of(whole.config, ranks)
        yield from ((program, plan) for program in make_programs(plan, lowered)[1:2])
        return
    sys.path.insert(0, str(ROOT / "benchmarks"))
    names = "parts", "random_model", "slices"
    on_gpu, random_model, slices = (import_module(f"on_gpu.{name}") for name in names)
    if model in ("v4", "small-v4"):
        case = slices.small_v4((3,)) if model != "v4" else slices.v4_slice((3,))
        config = replace(case.config, n_routed_experts=24)  # an empty model has memory all the same
        case = replace(case, config=config, dtype=target.dtype)
        plan = plan_of(config, case.ranks)
        yield make_programs(plan, random_model.empty_model(case, "cpu"))[1], plan
        return
    parts, _, format = parts.partition(" in ")
    if model in SHARES:
        tp, recipe = SHARES[model]
        whole = slices.r1_share(tp, (3,), format or UNQUANTISED, recipe)
    else:
        whole = slices.small((3,))
        if model == "small-sparse":
            whole = replace(whole, config=choosing(whole.config))

    def with_layers(dense: int, moe: int) -> Any:
        """Keep so many layers, and the module behind them."""
        kinds = (False,) * dense + (True,) * (moe + 1)
        counts = {"num_hidden_layers": dense + moe, "moe_layers": kinds}
        if hasattr(whole.config, "indexers"):
            counts["indexers"] = (True,) * (dense + moe)
        return replace(whole, config=replace(whole.config, **counts), dtype=target.dtype)

    for name in parts.split(","):
        kind, steps, layers = name.partition("step of ")
        if steps:
            case = with_layers(*map(int, layers.split("+")))
            plan = plan_of(case.config, case.ranks)
            lowered = random_model.empty_model(case, "cpu")
            yield make_programs(plan, lowered)[2 if kind else 1], plan
            continue
        case = with_layers(1, 1)
        plan = plan_of(case.config, case.ranks)
        made = on_gpu.Parts(random_model.empty_model(case, "cpu"), case.context)
        if name in LAYERS:
            part = made.layer(name, LAYERS[name], TOKENS)
        else:
            part = getattr(made, name.replace(" ", "_"))(TOKENS)
        yield part.program, plan


def choosing(c: Any) -> Any:
    """Return DeepSeek-V3's configuration as V3.2's, with few rows for each token."""
    from mtpbuild.builder.checkpoint.config import ModuleInputs
    from mtpbuild.builder.models.deepseek_v32.config import DeepseekV32Config

    values = {field.name: getattr(c, field.name) for field in fields(c)}
    values |= {"mtp": ModuleInputs(), "indexers": (True,) * c.num_hidden_layers}
    return DeepseekV32Config(**values, index_topk=32, index_n_heads=4, index_head_dim=16)


def engine(model: str, folder: Path, target: Any) -> list[Path]:
    """Build an engine of nextn 3; return its programs."""
    from mtpbuild.builder.plan.request import BuildRequest
    from tests.support.requests import build

    flags = {name: value for name, value in asdict(target).items() if value is not None}
    request = BuildRequest(model, (3,), target="inductor", out=folder / model, options=flags)
    (built,) = build(request)
    return [built.folder / program.file for program in built.manifest.programs.values()]


class EnoughError(Exception):
    """Stops a compilation once kernels are compiled and the host's code is written."""


def main(folder: Path, *cases: str) -> None:
    import torch
    from torch._inductor.codecache import AotCodeCompiler
    from triton import knobs

    from mtpbuild.builder.targets.inductor import Inductor, lowering
    from mtpbuild.builder.weights.placed import ByteRange

    torch.set_num_threads(1)
    lowering.OPTIONS["aot_inductor.compile_wrapper_opt_level"] = "O0"  # compiles faster
    wrappers, triton = list[str](), list[tuple[str, bool]]()
    whole: Any = torch._inductor.aot_compile

    def keep(*given: Any, **more: Any) -> Any:
        files = whole(*given, **more)
        wrappers.extend(Path(f).read_text() for f in files if str(f).endswith(".wrapper.cpp"))
        return files

    def listen(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        triton.append((src.name, cache_hit))

    def write(graph: Any, wrapper: Any, *rest: Any, **more: Any) -> None:
        wrappers.append(getattr(wrapper, "value", wrapper))
        raise EnoughError

    if kernels_only := "--kernels-only" in cases:
        AotCodeCompiler.compile = write  # type: ignore[method-assign, assignment]
        os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")  # to read the cubins
    torch._inductor.aot_compile = keep
    knobs.compilation.listener = listen

    def tell(case: str, path: Path) -> None:
        found = Compiled(case, path.stem)
        count_calls(wrappers.pop(0), found)
        found.fresh = sorted(name for name, hit in triton if not hit)
        found.known = sorted(name for name, hit in triton if hit)
        if path.exists():
            read_package(path, found, folder / "extracted")
        else:
            cubins = (folder / "triton").rglob("*.cubin")
            found.architectures = dict(Counter(architecture(f.read_bytes()) for f in cubins))
        print(json.dumps(asdict(found)), flush=True)

    for case in cases:
        if case == "--kernels-only":
            continue
        model, parts, gpu, dtype, *sums = case.split("/")
        target = Inductor("cuda", dtype, gpu, *sums)
        if model not in ("small", "small-sparse", "rank", "v4", "small-v4", *SHARES):
            for path in engine(model, folder, target):
                tell(case, path)  # with the kernels of all its programs
            continue
        place = folder / case.replace("/", "_").replace(" ", "_")
        place.mkdir()
        with target.compiling():
            for program, plan in programs(model, parts, target):
                names = (name for name, _ in program.module.named_parameters())
                weights = {name.removeprefix("model."): ByteRange(0, 0) for name in names}
                triton.clear()
                traced, path = target.trace(program, plan), place / f"{program.name}.pt2"
                try:
                    target.lower(traced, weights, place)
                except Exception:
                    if not kernels_only or not wrappers:
                        raise
                tell(case, path)
    assert not torch.cuda.is_available(), "what was pretended is undone"


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(Path(sys.argv[1]), *sys.argv[2:])
