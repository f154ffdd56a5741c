"""The CPU's operators outside onnxruntime: on processors that are not here, and damaged.

What the other tests of operators ask onnxruntime, and what an engine asks that runs, is asked again
of the library for a processor that qemu plays: results are equal to the bit. Damaged at random it
is asked of a library that looks at each access and each operation of integers.
"""

import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.weights.scheme import build_scheme
from mtpbuild.lab.verify.checks import LACKS_ISA
from tests.support.cpu_fuzz import damaged
from tests.support.cpu_host import RECORD, Case, differences, recorded, replay
from tests.support.cpu_kernels import HOST, LIBRARY, SANITIZED, SOURCE, compiled, load_backend
from tests.support.cpu_nodes import calls
from tests.support.exact_engines import save
from tests.support.isas import isas
from tests.support.requests import build

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(SANITIZED is not None, reason="it runs the library outside onnxruntime"),
    pytest.mark.xdist_group("cpu_elsewhere"),
]
ROOT = SOURCE.parents[2]
CALLS, PART = 100_000, 10_000  # that are damaged, and of them in one process
ARM = "aarch64-linux-gnu-g++"
Command = list[str | Path]


@dataclass
class Machine:
    """How cases run on a processor that qemu plays."""

    qemu: list[str]
    host: Path
    library: Path

    def command(self, *flags: str) -> Command:
        return [*self.qemu, *flags, self.host, self.library]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


def host(folder: Path, compiler: str) -> Path:
    path = folder / f"host-{compiler}"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    command = [compiler, "-std=c++17", "-O2", *warnings, f"-I{SOURCE}", "-o", str(path)]
    subprocess.run([*command, str(HOST), "-ldl"], check=True)
    return path


@pytest.fixture(scope="module")
def own(place: Path) -> Command:
    needs("g++")
    return [host(place, "g++"), str(LIBRARY)]


def needs(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(
                f"{tool} is not installed: apt-get install g++-aarch64-linux-gnu qemu-user-static"
            )


@pytest.fixture(scope="module", params=["g++", "the wheel's compiler"])
def arm(request: pytest.FixtureRequest, place: Path) -> Machine:
    needs(ARM, "qemu-aarch64-static")
    compiler = [ARM]
    if request.param != "g++":
        pytest.importorskip("ziglang", reason="ziglang is not installed: pip install ziglang")
        compiler, _ = load_backend().compiler_for("manylinux_2_28_aarch64")
    (folder := place / request.param).mkdir()
    library = folder / "arm.so"
    load_backend().compile_library(library, compiler, machine="aarch64")
    return Machine(
        ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu"], host(place, ARM), library
    )


@pytest.fixture(scope="module")
def cases(place: Path) -> list[Case]:
    """All that the other tests of operators ask."""
    tests = sorted(set(Path(__file__).parent.glob("test_cpu_*.py")) - {Path(__file__)})
    command = [sys.executable, "-m", "pytest", "-xsq", "-p", "no:cacheprovider", "-m", "not full"]
    environment = os.environ | {RECORD: str(place / "cases")}
    done = subprocess.run(
        [*command, *tests], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # What a test asks of another processor is no case for this one.
    found = [case for case in recorded(place / "cases") if LACKS_ISA not in str(case.outcome)]
    registered = re.compile(r"Registered<([^;]*)>\s+registered;")
    files = [path.read_text() for path in SOURCE.glob("*_ops.cpp")]
    names = [name for text in files for name in registered.findall(text)[0].split(",")]
    # Their tests ask those of bfloat16 inside of a graph, which is not recorded.
    wanted = [name for name in names if "Bf16" not in name]
    assert len({case.op for case in found}) >= len(wanted)
    return found


def test_the_host(own: Command, cases: list[Case]) -> None:
    """It runs operators as onnxruntime does, on each instruction set."""
    for isa in isas():
        found = replay(own, cases, isa)
        good = [not isinstance(case.outcome, str) for case in cases]
        assert good == [not isinstance(outcome, str) for outcome in found]
        wanted = [
            outcome if isinstance(outcome, str) else case.outcome
            for case, outcome in zip(cases, found, strict=True)
        ]
        assert not differences(cases, found, wanted)


def test_the_other_compiler(own: Command, zig_library: Path, cases: list[Case]) -> None:
    """What zig's compiler makes says the same, on each instruction set."""
    for isa in isas():
        found = replay([own[0], str(zig_library)], cases, isa)
        assert not differences(cases, found, replay(own, cases, isa))


@pytest.mark.parametrize(
    ("platform", "begins"),
    [
        ("manylinux_2_28_x86_64", b"\x7fELF"),
        ("macosx_14_0_arm64", b"\xcf\xfa\xed\xfe"),
        ("win_amd64", b"MZ"),
    ],
)
def test_other_systems(platform: str, begins: bytes, tmp_path: Path) -> None:
    """The library for a wheel of each is compiled, and onnxruntime finds its beginning."""
    pytest.importorskip("ziglang", reason="ziglang is not installed: pip install ziglang")
    backend = load_backend()
    compiler, machine = backend.compiler_for(platform)
    library = tmp_path / backend.library_name(platform)
    backend.compile_library(library, compiler, machine=machine)
    found = library.read_bytes()
    assert found.startswith(begins)
    assert b"RegisterCustomOps\0" in found


@pytest.mark.parametrize("isa", ["plain", "neon"])
def test_operators_on_arm(own: Command, arm: Machine, cases: list[Case], isa: str) -> None:
    assert not differences(cases, replay(arm.command(), cases, isa), replay(own, cases))


def test_an_arm_without_the_dot_product(arm: Machine, cases: list[Case]) -> None:
    some = cases[:1]
    old = arm.command("-cpu", "cortex-a53")
    assert replay(old, some, "neon") == ["MTPBUILD_CPU_ISA is neon; this machine has plain"]
    assert not differences(some, replay(old, some), replay(arm.command(), some))


@pytest.mark.parametrize(
    ("weights", "chains"), [("float32", False), ("int8", False), ("int4", False), ("int4", True)]
)
def test_deepseek_tiny_on_arm(
    weights: str, chains: bool, arm: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node of ours of its prompt and its steps, as onnxruntime ran it here."""
    scheme = None if weights == "float32" else build_scheme(weights)
    request = BuildRequest(
        "deepseek-tiny", nextn=(3,), max_seq_len=256, prefill_chunk=16, scheme=scheme
    )
    [built] = build(replace(request, out=tmp_path / "engine"))
    with monkeypatch.context() as patch:
        heard = calls(built.folder, [*range(5, 40)], patch, chains=chains)
    assert ({"Chain"} if chains else {"LatentRows", "Route"}) <= {case.op for case in heard}
    for isa in ("plain", "neon"):
        outcomes = replay(arm.command(), heard, isa)
        assert not differences(heard, outcomes, [case.outcome for case in heard])


@pytest.mark.parametrize(
    ("processor", "sets"),
    [
        ("max", "plain, avx2"),
        ("max,-avx2", "plain"),
        ("max,-fma", "plain"),
        ("max,-xsave", "plain"),  # the system keeps no more than SSE's registers
    ],
)
def test_other_processors_of_this_kind(
    processor: str, sets: str, own: Command, cases: list[Case]
) -> None:
    """A set of instructions is chosen where processor and system have it."""
    needs("qemu-x86_64-static")
    if platform.machine() != "x86_64":
        pytest.skip("this machine is no x86-64")
    qemu = ["qemu-x86_64-static", "-cpu", processor, *own]
    some = [case for case in cases if case.op == "Product"][:5]
    [output, *_] = replay(qemu, some, "neon")
    assert output == f"MTPBUILD_CPU_ISA is neon; this machine has {sets}"
    assert not differences(some, replay(qemu, some), replay(own, some))


@pytest.fixture(scope="module")
def sanitized(place: Path) -> Command:
    needs("g++")
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
    library = compiled(SOURCE, place / "sanitized.so", *flags, level="-O1")
    path = place / "sanitized-host"
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        *flags,
        f"-I{SOURCE}",
        str(HOST),
        "-o",
        str(path),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return [path, library]


@pytest.fixture(scope="module")
def chained(place: Path) -> list[Case]:
    """Return chains of a small engine."""
    model, out = str(save(place / "model", "few")), place / "engine"
    request = BuildRequest(model, max_seq_len=160, scheme=build_scheme("int4"), nextn=(1,), out=out)
    with pytest.MonkeyPatch.context() as patch:
        heard = calls(build(request)[0].folder, [*range(5, 30)], patch, chains=True)
    assert "Chain" in {case.op for case in heard}
    return heard


@pytest.mark.parametrize("isa", isas())
def test_damage(isa: str, sanitized: Command, cases: list[Case], chained: list[Case]) -> None:
    """Shapes, numbers, types and attributes that nobody would write end in one line, or compute.

    Each run draws other calls. MTPBUILD_FUZZ_SEED repeats those of a run, which printed its seed.
    """
    seed = int(os.environ.get("MTPBUILD_FUZZ_SEED") or secrets.randbits(32))
    print(f"MTPBUILD_FUZZ_SEED={seed}")
    errors = 0
    for part in range(seed, seed + CALLS // PART):
        drawn = [*damaged(cases, PART * 2 // 3, part), *damaged(chained, PART // 3, part)]
        output = [each for each in replay(sanitized, drawn, isa) if isinstance(each, str)]
        assert not any("\n" in line for line in output)
        errors += len(output)
    assert 0.2 < errors / CALLS < 0.9
