"""The graphs of target tensorrt: our kernels as plugins between TensorRT's layers."""

from mtpbuild.builder.graph.pipeline import Pass, Pipeline

TENSORRT = Pipeline(
    ops={
        **dict.fromkeys(("kv_write", "matmul_scaled"), "tensorrt"),
        **dict.fromkeys(("matmul_wide", "moe"), "plugins"),
    },
    step_ops=dict.fromkeys(
        (
            *("accept_best", "accept_mixed", "accept_rewind", "best_of_blocks", "gated_product"),
            *("mla_attention", "mla_queries", "mla_rows", "mla_values", "moe_route"),
            *("rotary_rows", "shaped_probs"),
        ),
        "plugins",
    ),
    lowered_passes=(Pass("mtpbuild.builder.targets.tensorrt.lowering", "decompose"),),
    padded_tokens=64,
)
