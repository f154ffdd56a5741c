"""What a process may take of a machine of files: of memory and of processors, in containers too."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from mtpbuild.builder.plan.machine import measure_machine
from mtpbuild.runtime.limits import UNKNOWN, Limits, measure_limits

MEMINFO = "MemTotal:  90 kB\nMemFree: 9 kB\nMemAvailable:    70 kB\n"
FREE = {"proc/meminfo": MEMINFO}
TOP = "sys/fs/cgroup"
NO_LIMIT = f"{(1 << 63) - 4096}\n"  # version 1 has a number for it


def system(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def memory(group: str, limit: str, used: int = 2000, cached: int = 0) -> dict[str, str]:
    """Return the files of a group of version 2."""
    stat = f"anon 5\ninactive_file {cached}\nactive_file 7\n"
    files = {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}
    return {f"{group}/{name}": text for name, text in files.items()}


def old_memory(group: str, limit: str, used: int = 2000, cached: int = 0) -> dict[str, str]:
    """Return the files of a group of version 1."""
    stat = f"inactive_file 0\ntotal_inactive_file {cached}\n"
    files = {"limit_in_bytes": limit, "usage_in_bytes": str(used)}
    named = {f"{group}/memory.{name}": text for name, text in files.items()}
    return named | {f"{group}/memory.stat": stat}


SERVICE = f"{TOP}/system.slice/chat.service"


@pytest.mark.parametrize(
    ("files", "in_all", "free"),
    [
        ({}, None, UNKNOWN),  # a system that does not say
        (FREE, 90 << 10, 70 << 10),
        (FREE | memory(TOP, "9000"), 9000, 7000),  # a container sees its group at the top
        (FREE | memory(TOP, "9000", cached=1500), 9000, 8500),  # read files can be dropped
        (FREE | memory(TOP, "max"), 90 << 10, 70 << 10),
        (memory(TOP, "1000"), 1000, 0),
        # systemd's MemoryMax= of a service, and of the slice around it
        (FREE | {"proc/self/cgroup": "0::/system.slice/chat.service\n"}
         | memory(SERVICE, "9000") | memory(f"{TOP}/system.slice", "max"), 9000, 7000),
        (FREE | {"proc/self/cgroup": "0::/system.slice/chat.service\n"}
         | memory(SERVICE, "9000") | memory(f"{TOP}/system.slice", "8000", 7500), 8000, 500),
        (FREE | {"proc/self/cgroup": "0::/user.slice\n"} | memory(SERVICE, "9000"),
         90 << 10, 70 << 10),  # another service's
        # version 1, seen from outside and from inside of the container
        (FREE | {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/ab\n0::/\n"}
         | old_memory(f"{TOP}/memory/docker/ab", "9000", cached=1500), 9000, 8500),
        (FREE | {"proc/self/cgroup": "4:memory:/docker/ab\n"}
         | old_memory(f"{TOP}/memory", "9000"), 9000, 7000),
        (FREE | {"proc/self/cgroup": "4:memory:/\n"}
         | old_memory(f"{TOP}/memory", NO_LIMIT), 90 << 10, 70 << 10),
    ],
)  # fmt: skip
def test_memory(files: dict[str, str], in_all: int | None, free: int, tmp_path: Path) -> None:
    """The system's or a group's, whichever is less."""
    found = measure_limits(system(tmp_path, files), range(3))
    assert found == Limits(in_all, free, 3)


@pytest.mark.parametrize(
    ("files", "processors"),
    [
        ({}, 8),
        ({f"{TOP}/cpu.max": "max 100000\n"}, 8),
        ({f"{TOP}/cpu.max": "250000 100000\n"}, 3),  # two and a half processors' time
        ({f"{TOP}/cpu.max": "20000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/system.slice/chat.service\n", f"{SERVICE}/cpu.max": "200000 1000"
          "00\n", f"{TOP}/system.slice/cpu.max": "max 100000\n"}, 2),
        ({"proc/self/cgroup": "3:cpu,cpuacct:/docker/ab\n",
          f"{TOP}/cpu/docker/ab/cpu.cfs_quota_us": "400000\n",
          f"{TOP}/cpu/docker/ab/cpu.cfs_period_us": "100000\n"}, 4),
        ({f"{TOP}/cpu/cpu.cfs_quota_us": "-1\n", f"{TOP}/cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)  # fmt: skip
def test_processors(files: dict[str, str], processors: int, tmp_path: Path) -> None:
    assert measure_limits(system(tmp_path, files), range(8)).processors == processors


def test_a_plan_has_the_memory_of_its_container(tmp_path: Path) -> None:
    found = measure_machine(system(tmp_path, FREE | memory(TOP, "9000")))
    assert (found.memory, found.available) == (9000, 7000)
