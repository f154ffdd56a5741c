"""The one-shot sum of ranks: processes that share memory, and what the compiled kernel does.

What GPUs make of it nobody has seen: `tests/gpu/test_ranks.py`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild.plugins import sum_of_ranks
from mtpbuild.runtime.contract import sums
from tests.support.compiling import run
from tests.support.one_shot_ranks import MISTAKES, SIZES

pytest.importorskip("triton", reason="triton is not installed: mtpbuild[dev] has it")
pytestmark = pytest.mark.xdist_group("ptx")
ROOT = Path(__file__).parents[2]
LAST = (1 << 31) - 8  # calls after which 32 bits are full


def wrong_calls(*cases: dict[str, Any]) -> list[Any]:
    """Return how many calls each rank of each case got wrong.

    Without `ranks`: whether one that waits for a rank that is gone can be released.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.one_shot_ranks"]
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command.append(json.dumps(cases))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


@pytest.mark.full
def test_ranks_get_the_same_bits() -> None:
    """Blocks are used again many times, in calls of other sizes and types; counts go around.

    The mistake that shows least: a rank that is ahead overwrites what another one still reads. The
    host can free a kernel that waits for a rank that is gone.
    """
    assert len({size % 1024 for size in SIZES}) > 3, "blocks that are not full"
    cases = {"ranks": 2, "calls": 24}, {"ranks": 3, "calls": 18, "begin": LAST}
    mistaken = {"ranks": 2, "calls": 12, "mistake": "has one block"}
    *right, wrong, freed = wrong_calls(*cases, mistaken, {"begin": LAST + 7})
    assert right == [[0, 0], [0, 0, 0]]
    assert any(wrong)
    assert freed


@pytest.mark.full
def test_many_ranks_and_calls() -> None:
    assert wrong_calls({"ranks": 8, "calls": 24}, {"ranks": 2, "calls": 300}) == [[0] * 8, [0, 0]]


@pytest.mark.full
def test_all_mistakes_are_caught() -> None:
    base = {"ranks": 3, "calls": 12, "begin": LAST}
    found = wrong_calls(*(base | {"mistake": mistake} for mistake in MISTAKES))
    assert len(found) == 6
    assert all(map(any, found)), dict(zip(MISTAKES, found, strict=True))


def test_what_the_op_takes() -> None:
    from mtpbuild.plugins.sum_of_ranks.triton import sum_of_ranks_launches

    peers = torch.zeros(9, dtype=torch.int64)
    x = torch.zeros(2, 4, 7168, dtype=torch.bfloat16)
    (launch,) = sum_of_ranks_launches(x, peers).each
    assert launch.grid == (28,), "each program has a block"
    assert launch.outputs[0].shape == x.shape
    most = torch.zeros(sums.MOST // 4)
    (launch,) = sum_of_ranks_launches(most, peers).each
    assert launch.grid == (sums.PROGRAMS,)
    with pytest.raises(NotImplementedError, match="takes up to 262144 bytes, not 262148"):
        sum_of_ranks_launches(torch.zeros(len(most) + 1), peers)
    assert sum_of_ranks._opoverload(x.to("meta"), peers.to("meta")).shape == x.shape


READS = """
import json, re, subprocess, sys, tempfile
import torch
from tests.support.specialised import compile_specialised
from mtpbuild.plugins.sum_of_ranks.triton import sum_of_ranks_launches
from tests.support.kernel_launches import empty
from tests.support.kernel_resources import resources
from triton import knobs

for ranks in (2, 8, 16):
    for dtype in (torch.bfloat16, torch.float32):
        given = empty(4, 7168, dtype=dtype), empty(ranks + 1, dtype=torch.int64)
        (launch,) = sum_of_ranks_launches(*given).each
        built = compile_specialised(launch, int(sys.argv[1]))
        found = resources("", launch, int(sys.argv[1]))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
            code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        lines = re.findall(r"/\\*[0-9a-f]{4}\\*/\\s+([^;]*);", code)
        needs = found.registers, found.stack, found.spills, found.programs
        print(json.dumps([ranks, needs, built.asm["ptx"], lines]))
"""


@pytest.mark.full
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiled_for_a_gpu(architecture: int, tmp_path: Path) -> None:
    check_compiled(architecture, tmp_path)


def check_compiled(architecture: int, cache: Path) -> None:
    """Write, a barrier, a release; an acquire, a barrier, and all reads before the first sum."""
    for line in run("-W", "ignore", "-c", READS, str(architecture), cache=cache).splitlines():
        ranks, (registers, stack, spills, programs), ptx, sass = json.loads(line)
        assert (stack, spills) == (0, 0)
        assert registers <= 128, "a multiprocessor has room for 256 threads, and for more"
        assert programs <= 108, "of an A100's multiprocessors: all run at once"
        order = [
            *("st.global", "bar.sync", "atom.global.sys.release.exch"),
            *("atom.global.sys.acquire.add", "bar.sync", "ld.global.v4"),
        ]
        at = 0
        for each in order:
            at = ptx.index(each, at) + 1
        assert ptx.count("atom.") == 2
        waits = max(i for i, text in enumerate(sass) if "ATOM" in text)
        reads = [i for i, text in enumerate(sass) if "LDG.E.128" in text and i > waits]
        sums = [i for i, text in enumerate(sass) if text.split()[0].startswith("FADD")]
        assert len(reads) == ranks, "16 bytes of each rank's block for each thread"
        assert max(reads) < min(sums), "all are on their way before one is waited for"
