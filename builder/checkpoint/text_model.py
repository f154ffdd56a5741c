"""Find a text model's tensors in checkpoints with a vision tower, or with stacked weights."""

import re
from collections.abc import Collection, Iterator, Sequence

WRAPPED = "model.language_model."  # a text model beside a vision tower
OUTSIDE = "language_model."  # the same, as MLX has it
MODULES = "mtp."  # prefix of MTP modules, which some write inside the model
TOWERS = (
    *("model.visual.", "vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
    *("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    *("model.vision_embedder.", "model.audio_embedder."),
)
STACK = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")  # all experts: [X, out, in]
# MLX's stacks, of experts and of kv_b_proj's heads, and a part of their numbers.
MLX_STACK = re.compile(
    r"(.*\.)(?:(?:switch_mlp|experts\.switch_glu)\.(\w+)|(embed_q|unembed_out))\.(weight\w*)"
)
# DeepSeek's own names of V4's weights, and those of transformers, which are ours.
NATIVE = re.compile(
    r"(?:model\.)?((?:layers|mtp)\.\d+\.(?:attn|ffn|hc_\w+|norm|[eh]_proj|[eh]norm)\b.*"
    r"|(?:layers|mtp)\.\d+\.(?:attn|ffn)_norm\..*|hc_head\w*.*|embed\.weight|head\.weight)"
)
RENAMED = (
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
    (r"^embed\.", "embed_tokens."),
)  # fmt: skip
Part = tuple[int, int, int]  # expert, its first row, number of rows


def find_text_name(name: str) -> str | None:
    """Return a tensor's name in the text model; None if it belongs to the vision tower."""
    if name.startswith(TOWERS):
        return None
    if match := NATIVE.fullmatch(name):
        return rename_native(match[1])
    name = name.removeprefix(OUTSIDE)
    name = f"model.{name.removeprefix(WRAPPED)}" if name.startswith(WRAPPED) else name
    return name.removeprefix("model.") if name.startswith(f"model.{MODULES}") else name


def name_last_norm(names: Collection[str]) -> str | None:
    """Return our name of `norm.weight`, which is the trunk's norm in V4's files alone."""
    native = {"norm.weight", "model.hc_head.hc_fn"} <= {*names}
    return "model.norm.weight" if native else None


def rename_native(name: str) -> str:
    """Return our name of a weight of DeepSeek-V4 that has DeepSeek's name."""
    if name == "head.weight":
        return "lm_head.weight"
    for pattern, ours in RENAMED:
        name = re.sub(pattern, ours, name)
    return name if name.startswith(MODULES) else f"model.{name}"


def unstack(name: str, shape: Sequence[int]) -> Iterator[tuple[str, Part]]:
    """Yield the name and the part of each expert's weight in a stack; nothing for other tensors."""
    if match := MLX_STACK.fullmatch(name):
        at, projection, heads, leaf = match.groups()
        rows = shape[1] if len(shape) == 3 else 0  # 0: a number for each expert
        numbers = len(shape) == 1 and leaf.endswith("global_scale")
        for e in range(shape[0] if rows or numbers else 0):
            part = f"experts.{e}.{projection}" if projection else f"{heads}.{e}"
            yield f"{at}{part}.{leaf}", (e, 0, rows)
        return
    match = STACK.fullmatch(name)
    if match is None or len(shape) != 3:
        return
    experts, rows, _ = shape
    kinds = ("gate", "up") if match[2] == "gate_up" else ("down",)
    rows_each = rows // len(kinds)
    for e in range(experts):
        for i, kind in enumerate(kinds):
            yield f"{match[1]}.{e}.{kind}_proj.weight", (e, i * rows_each, rows_each)
