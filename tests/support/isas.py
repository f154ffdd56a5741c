"""The instruction sets of the CPU's kernels."""

from pathlib import Path


def isas() -> list[str]:
    """Those that this machine has."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    known = {
        "plain": True, "avx2": " avx2 " in flags, "avxvnni": " avx_vnni " in flags,
        "avx512": " avx512_vnni " in flags, "neon": " asimddp " in flags,
    }  # fmt: skip
    return [isa for isa, there in known.items() if there]
