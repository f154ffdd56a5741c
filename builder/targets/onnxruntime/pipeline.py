"""The graphs of target onnxruntime, and of tensorrt-rtx, which compiles the portable ones."""

from mtpbuild.builder.graph.pipeline import Pass, Pipeline

FOLDER = "mtpbuild.builder.targets.onnxruntime"

# With --portable: standard operators of ONNX.
PORTABLE = Pipeline(
    ops=dict.fromkeys(
        (
            *("accept_rewind", "causal_conv", "choose_rows", "delta_advance", "delta_rule"),
            *("experts", "grouped_attention", "index_keys", "kv_write", "last_inputs"),
            *("mla_attention", "rope", "take_rows"),
        ),
        "onnx",
    ),
    passes=(Pass(f"{FOLDER}.torch_passes", "write_plainly"),),
    lowered_passes=(
        Pass(f"{FOLDER}.onnx_passes", "inline_functions"),
        Pass(f"{FOLDER}.onnx_passes", "fold_constants"),
        Pass(f"{FOLDER}.onnx_passes", "share_sizes"),
        Pass(f"{FOLDER}.onnx_passes", "merge_equal_nodes"),
        Pass(f"{FOLDER}.onnx_passes", "tidy"),
    ),
)

# Operators of the CPU's library, and standard ones between them.
CPU = Pipeline(
    ops=dict.fromkeys(("experts", "kv_write", "rope"), "onnx"),
    passes=PORTABLE.passes,
    lowered_passes=(
        *PORTABLE.lowered_passes,
        Pass(f"{FOLDER}.fuse", "fuse_neighbours"),
        Pass(f"{FOLDER}.chains", "join_chains"),
    ),
    cpu_library=True,
    expands_prompts=False,
)
