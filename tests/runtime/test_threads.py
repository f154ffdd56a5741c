"""How many threads are taken where nobody says it, on machines of files."""

from pathlib import Path

import pytest

from mtpbuild.runtime.threads import choose_default_threads, count_physical_cores, parse_threads


def machine(root: Path, siblings: dict[int, str], quota: str | None = None) -> Path:
    """Write the files in which Linux says which processors share a core, and a group's quota."""
    for cpu, others in siblings.items():
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{others}\n", encoding="utf-8")
    if quota is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/cpu.max").write_text(f"{quota}\n", encoding="utf-8")
    return root


# Four cores of two threads each: Linux numbers the second threads last.
PAIRED = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}


@pytest.mark.parametrize(
    ("siblings", "usable", "quota", "threads"),
    [
        (PAIRED, range(8), None, 4),
        (PAIRED, (0, 4), None, 1),  # both threads of one core
        (PAIRED, (0, 1, 5), None, 2),
        (PAIRED, range(8), "max 100000", 4),
        (PAIRED, range(8), "250000 100000", 3),  # two and a half processors' time
        (PAIRED, range(8), "20000 100000", 1),
        ({0: "0-1", 1: "0-1", 2: "2"}, range(3), None, 2),  # cores of two kinds
        ({}, range(6), None, 6),  # a system that does not say
    ],
)
def test_a_thread_for_each_core(
    tmp_path: Path,
    siblings: dict[int, str],
    usable: tuple[int, ...],
    quota: str | None,
    threads: int,
) -> None:
    assert count_physical_cores(machine(tmp_path, siblings, quota), usable) == threads


@pytest.mark.parametrize(
    ("setting", "limit"), [("1", 1), ("1000", 1000), ("many", 1000), ("", 1000)]
)
def test_a_limit_that_others_obey(
    monkeypatch: pytest.MonkeyPatch, setting: str, limit: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert choose_default_threads() == min(count_physical_cores(), limit)


def test_what_users_say() -> None:
    assert (parse_threads("auto"), parse_threads("7")) == (None, 7)
    with pytest.raises(ValueError, match="expected a number or auto, got 'all'"):
        parse_threads("all")
