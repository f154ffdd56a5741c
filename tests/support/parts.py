"""The named parts of `make test-full`, each of at most an hour of two cores.

`suite` is `make test`; the others have the tests that are marked `full`, by file.
"""

from fnmatch import fnmatch

# Groups of tests that take longest. They begin first, so that no worker has one left in the end.
FIRST = (
    "tiny",
    "predictable",
    "inductor",
    "qwen_tiny",
    "exact",
    "score",
    "test_families",
    "test_toy_target",
    "test_zero_points",
    "test_integer_weights",
    "test_bench",
    "test_share",
    "test_step",
)
SUITE = "suite"
PARTS: dict[str, tuple[str, ...]] = {
    SUITE: (),
    "install": ("test_*", "benchmarks/*"),
    "servers": ("runtime/*", "server/*"),
    "cpu-kernels": ("plugins/test_cpu_*", "*/test_hostile_engine.py"),
    "models": ("*/test_drawn_models.py",),
    "exact": ("*/test_exact_*", "*/test_pool_conversations.py"),
    "ptx": ("plugins/test_ptx*",),
    "gpu-kernels": ("plugins/test_[!c]*", "*/test_gpu_graph.py"),
    "cross-cuda": ("*/test_cross_cuda.py",),
    "tensorrt": ("*/test_*tensorrt*",),
    "ranks": (
        "*/test_ranks.py",
        "*/test_ranks_c*",
        "*/test_hybrid_ranks.py",
        "*/*attention_dp.py",
        "*/test_coll*",
    ),
    "inductor": ("builder/test_*inductor*", "*/test_bfloat16.py", "*/test_scaled_weights.py"),
    "families": ("*/test_families.py", "*/test_recurrent.py", "*/test_toy_*", "*/test_fused_*"),
    "prefixes": ("*/test_prefix_*rows.py", "*/test_compiled_prefixes.py", "*/test_batches.py"),
    "engines": (
        "builder/test_*_engine.py",
        "*/test_pipeline.py",
        "*/test_integer_weights.py",
        "*/test_hybrid_eng*",
    ),
    "real": ("*/test_real_models.py",),
    "builds": ("builder/test_*", "lab/test_*"),
}


def part_of(file: str, full: bool) -> str:
    """Return the part of a test of this file, a path in tests/: the first whose pattern matches."""
    if not full:
        return SUITE
    for part, patterns in PARTS.items():
        if any(fnmatch(file, pattern) for pattern in patterns):
            return part
    raise LookupError(f"tests/{file}: no part of tests/support/parts.py has its full tests")
