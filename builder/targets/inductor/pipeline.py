"""The graphs of target inductor, for CPUs and for GPUs."""

from dataclasses import replace

from mtpbuild.builder.graph.pipeline import Pass, Pipeline

FOLDER = "mtpbuild.builder.targets.inductor"

# On a CPU: PyTorch's operators.
INDUCTOR = Pipeline(
    ops=dict.fromkeys(
        ("balance_streams", "delta_rule", "grouped_attention", "mla_attention"), "inductor"
    ),
    lowered_passes=(Pass(f"{FOLDER}.in_place", "update_in_place"),),
)

# On a GPU: launches of our Triton kernels between PyTorch's operators. A kernel's operands are
# copied, so PyTorch's operators write caches; `in_place` exempts mla_rows_write.
INDUCTOR_CUDA = Pipeline(
    ops=dict.fromkeys(
        (
            *("accept_best", "accept_mixed", "accept_rewind", "balance_streams"),
            *("best_of_blocks", "choose_compressed", "choose_rows", "compressed_attention"),
            *("gated_product", "matmul_scaled", "matmul_wide"),
            *("mla_attention", "mla_queries", "mla_rows", "mla_rows_write", "mla_values"),
            *("moe", "moe_route", "root_route", "rotary_rows", "shaped_probs", "sum_of_ranks"),
        ),
        "triton",
    ),
    lowered_passes=(
        Pass(f"{FOLDER}.gpu_passes", "compute_both_branches"),
        Pass(f"{FOLDER}.gpu_passes", "move_to_gpu"),
        Pass(f"{FOLDER}.gpu_passes", "launch_kernels"),
        Pass(f"{FOLDER}.gpu_passes", "sum_parts_in_readers"),
        *INDUCTOR.lowered_passes,
    ),
)

# With --allreduce-strategy one-shot.
ONE_SHOT = replace(INDUCTOR_CUDA, passes=(Pass(f"{FOLDER}.one_shot", "sum_through_shared_memory"),))
