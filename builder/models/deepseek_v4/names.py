"""DeepSeek's own names of V4's weights, and those of transformers, which are ours."""

from mtpbuild.builder.checkpoint.text_model import find_text_name

CONFIDENCE = ".confidence_head."  # a part of names that no step reads
RENAMES = (
    (r"\.attn_norm\.", ".input_layernorm."), (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"hc_head_(fn|base|scale)$", r"hc_head.hc_\1"),
    (r"\.attn\.", ".self_attn."), (r"\.ffn\.", ".mlp."),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.attn_sink$", ".sinks"), (r"\.ape$", ".position_bias"),
    (r"\.indexer\.weights_proj\.", ".compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"(self_attn|compressor|indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.q_norm\.", ".q_a_norm."), (r"\.wq_a\.", ".q_a_proj."), (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."), (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_a\.", ".o_a_proj."), (r"\.wo_b\.", ".o_b_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."), (r"\.w2\.", ".down_proj."), (r"\.w3\.", ".up_proj."),
    (r"^(model\.)?embed\.", "model.embed_tokens."), (r"^(model\.)?head\.", "lm_head."),
    (r"^(layers|norm|hc_head)\.", r"model.\1."),
)  # fmt: skip


def rename_dspark_tensor(name: str) -> str | None:
    """Return the name of a DSpark head's tensor; None for the trunk's, and for confidences."""
    ours = find_text_name(name, RENAMES) or ""
    return ours if ours.startswith("mtp.") and CONFIDENCE not in ours else None
