"""What a family declares of its GGUF files, and names of tensors that several families share."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from mtpbuild.builder.checkpoint.config import COUNT_LIMIT
from mtpbuild.builder.gguf.configs import Config
from mtpbuild.builder.gguf.container import GgufFile, RawTensor
from mtpbuild.builder.gguf.mapped import GgufWeight
from mtpbuild.builder.gguf.tokenizer import WordSplit
from mtpbuild.runtime.errors import CheckpointError

BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
STACK = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.weight")
UNUSED = ("rope_freqs.weight", ".input_scale")
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Tensors of a layer: GGUF's names and the checkpoint's, without `.weight` and `.bias` where both
# have the same ending.
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
SHARED_EXPERTS = {f"ffn_{x}_shexp": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")}
MODULE_LAYER = {  # of an MTP module that is a layer after the trunk's
    **{f"nextn.{x}": x for x in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
LayerTensors = dict[str, RawTensor]  # by name in the layer


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files that a family reads.

    Converters join and change some weights. `merge` yields those weights of a layer that are made
    of several tensors, and takes these out. `restore` undoes changes of a weight that is made of
    one, which it gets with its name in the layer.
    """

    name: str  # key general.architecture
    config: Callable[[GgufFile], Config]  # config.json; it may leave out the family's model_type
    tensors: Mapping[str, str]  # of a layer, such as LAYER
    tokenizer: str = ""  # beginning of tokenizer.ggml.pre, if families share an architecture
    splits: Mapping[str, WordSplit] = field(default_factory=dict)  # by tokenizer.ggml.pre
    experts: str = "mlp.experts"  # in a layer
    layers: Callable[[GgufFile], str] = lambda file: "model.layers."  # before a layer's number
    modules: str = ""  # prefix of a module's layer before its number; "": layers after the trunk's
    # Beginning of names of tensors outside layers that are a module's if they are in a head's file.
    module_tops: str = ""
    merge: Callable[[GgufFile, str, LayerTensors], Iterator[GgufWeight]] = (
        lambda file, layer, tensors: iter(())
    )
    restore: Callable[[GgufFile, str, GgufWeight], GgufWeight] = lambda file, name, weight: weight


def list_weights(file: GgufFile, architecture: Architecture) -> Iterator[GgufWeight]:
    """Yield the weights of a file as the checkpoint has them, under its names.

    A tensor that is unknown keeps its name, so that checking the checkpoint refuses it.
    """
    layers: dict[int, LayerTensors] = defaultdict(dict)
    for name, tensor in file.tensors.items():
        if name.endswith(UNUSED):
            continue
        if match := BLOCK.fullmatch(name):
            layers[int(match[1])][match[2]] = tensor
        else:
            weight = GgufWeight(TOP.get(name, name), tensor.shape, (tensor,))
            yield architecture.restore(file, name, weight)
    for number, tensors in layers.items():
        module, layer = number - file.layers, f"{architecture.layers(file)}{number}"
        if module >= 0 and any(name.startswith("nextn.") for name in tensors):
            # A module without a final norm has the trunk's.
            tensors.setdefault("nextn.shared_head_norm.weight", file.tensor("output_norm.weight"))
        if module >= 0 and architecture.modules:
            layer = f"{architecture.modules}{module}"
        yield from _list_layer_weights(file, architecture, layer, tensors)


def _list_layer_weights(
    file: GgufFile, architecture: Architecture, layer: str, tensors: LayerTensors
) -> Iterator[GgufWeight]:
    """Yield the weights of a layer: those made of several tensors, stacks of experts, the rest."""
    yield from architecture.merge(file, layer, tensors)
    names = architecture.tensors
    for name, tensor in tensors.items():
        if match := STACK.fullmatch(name):
            yield from _split_experts(f"{layer}.{architecture.experts}", match[1], tensor)
            continue
        stem, _, ending = name.rpartition(".")
        renamed = names.get(name) or (f"{names[stem]}.{ending}" if stem in names else name)
        # A module's weights beside its layer have names of their own.
        full = renamed if renamed.startswith("mtp.") else f"{layer}.{renamed}"
        router = full.endswith("mlp.gate.weight")  # floats, as engines of quantised files have it
        weight = GgufWeight(full, tensor.shape, (tensor,), as_floats=router)
        yield architecture.restore(file, name, weight)


def _split_experts(at: str, kind: str, stack: RawTensor) -> Iterator[GgufWeight]:
    """Yield each expert's weight of a stack; gate and up may be one tensor, the gate first."""
    kinds = ("gate", "up") if kind == "gate_up" else (kind,)
    check_shape(stack, len(stack.shape) == 3 and stack.shape[0] <= COUNT_LIMIT)
    experts, rows, columns = stack.shape
    rows //= len(kinds)
    for expert in range(experts):
        for i, projection in enumerate(kinds):
            yield GgufWeight(
                f"{at}.{expert}.{projection}_proj.weight",
                (rows, columns),
                (stack,),
                expert=expert,
                part=slice(i * rows, (i + 1) * rows),
            )


def check_shape(tensor: RawTensor, fits: bool) -> None:
    """Raise CheckpointError for a shape from which no weight can be made."""
    if not fits:
        shape = [*tensor.shape]
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} can't have shape {shape}")
