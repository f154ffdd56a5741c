"""A DFlash or DSpark head over any plain trunk, from whole sequences and by the published names."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpbuild.builder.models.common.plain import PlainCausalLM, PlainLM
from tests.reference.eagle3 import normalise, rotate

SIZES: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 5000, "vocab_size": 61,
    "model_type": "qwen3", "max_position_embeddings": 256, "hidden_act": "silu",
    "num_hidden_layers": 2,
}  # fmt: skip
SLIDING = "sliding_attention"
MASK = 3  # the id of the mask


class PlainBlockHead(PlainLM):
    """A trunk whose drafts are the head's; hidden states are the trunk's, then the context.

    config: the trunk's. raw: the head's own config.json. weights: its tensors.
    """

    def __init__(
        self, trunk: PlainCausalLM, config: Any, raw: dict[str, Any], weights: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.config, self.raw, self.weights = config, raw, weights
        self.trunk = (trunk,)
        nested = raw["dflash_config"]
        self.taps, self.mask = nested["target_layer_ids"], nested["mask_token_id"]
        self.anchored = "markov_head.markov_w1.weight" in weights

    def main(self, tokens: Tensor) -> Tensor:
        trunk, width = self.trunk[0], tokens.shape[1]
        outputs = list[Tensor]()
        x = trunk.model.embed_tokens(tokens)
        for layer in list(trunk.model.layers)[: self.config.num_hidden_layers]:
            x = layer(x, trunk.cos[:width], trunk.sin[:width])
            outputs.append(x)
        last = trunk.model.norm(x) if self.config.mtp.trunk_normed else x
        joined = self.product(torch.cat([outputs[i] for i in self.taps], dim=-1), "fc")
        return torch.cat([last, self.norm(joined, "hidden_norm")], dim=-1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return normalise(x, self.weights[f"{name}.weight"], self.raw["rms_norm_eps"])

    def product(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.trunk[0].logits(hidden[..., : self.config.hidden_size])

    def heads(self, x: Tensor, name: str) -> Tensor:
        return self.product(x, name).unflatten(-1, (-1, self.raw["head_dim"]))

    def attend(self, x: Tensor, context: Tensor, i: int) -> Tensor:
        """Attend from the block x [1, k, h] to the context's rows [1, p, h] and to the block."""
        at = f"layers.{i}.self_attn"
        both = torch.cat([context, x], dim=1)
        k, v = self.heads(both, f"{at}.k_proj"), self.heads(both, f"{at}.v_proj")
        # Queries are turned by their positions, which are those of the block's own keys.
        q = F.pad(self.heads(x, f"{at}.q_proj"), (0, 0, 0, 0, context.shape[1], 0))
        theta = self.raw["rope_theta"]
        q = rotate(self.norm(q, f"{at}.q_norm"), theta)[:, context.shape[1] :]
        k = rotate(self.norm(k, f"{at}.k_norm"), theta)
        place = torch.arange(both.shape[1])
        ahead = place[context.shape[1] :, None] - place
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if self.raw.get("layer_types", [""] * (i + 1))[i] == SLIDING:
            seen = (ahead >= 0) & (ahead < self.raw["sliding_window"])
        groups = q.shape[2] // k.shape[2]
        k, v = (part.repeat_interleave(groups, dim=2).transpose(1, 2) for part in (k, v))
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=seen)
        return self.product(o.transpose(1, 2).flatten(2), f"{at}.o_proj")

    @torch.no_grad()
    def draft_block(
        self, tokens: list[int], nextn: int, drafts: Sequence[int] = ()
    ) -> list[Tensor]:
        """Compute the logits [V] of each draft after the known `tokens`.

        drafts: those that were drawn from them; without them a draft is their argmax.
        """
        context = self.main(torch.tensor([tokens[:-1]]))[..., self.config.hidden_size :]
        masks = nextn - 1 if self.anchored else nextn
        block = torch.tensor([[tokens[-1], *[self.mask] * masks]])
        x = self.trunk[0].model.embed_tokens(block)
        for i in range(self.raw["num_hidden_layers"]):
            at = f"layers.{i}"
            x = x + self.attend(self.norm(x, f"{at}.input_layernorm"), context, i)
            y = self.norm(x, f"{at}.post_attention_layernorm")
            gate, up = (self.product(y, f"{at}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self.product(F.silu(gate) * up, f"{at}.mlp.down_proj")
        every = self.trunk[0].lm_head(self.norm(x, "norm"))[0, x.shape[1] - nextn :]
        if not self.anchored:
            return [*every]
        last, biased = tokens[-1], list[Tensor]()
        for k, logits in enumerate(every):
            before = self.weights["markov_head.markov_w1.weight"][last]
            biased.append(logits + self.product(before, "markov_head.markov_w2"))
            last = drafts[k] if drafts else int(biased[-1].argmax())
        return biased


def make_head(trunk: PlainCausalLM, raw: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return the weights of a head for a trunk of `make_family`."""
    torch.manual_seed(seed)
    c, h, D = trunk.config, raw["hidden_size"], raw["head_dim"]
    queries, keys = raw["num_attention_heads"] * D, raw["num_key_value_heads"] * D
    n = raw["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (queries, h), "self_attn.k_proj": (keys, h),
        "self_attn.v_proj": (keys, h), "self_attn.o_proj": (h, queries),
        "mlp.gate_proj": (n, h), "mlp.up_proj": (n, h), "mlp.down_proj": (h, n),
    }  # fmt: skip
    inputs = len(raw["dflash_config"]["target_layer_ids"]) * c.hidden_size
    weights = {"fc.weight": torch.randn(h, inputs) / inputs**0.5}
    norms = {"hidden_norm": h, "norm": h}
    for i in range(raw["num_hidden_layers"]):
        at = f"layers.{i}"
        for name, shape in shapes.items():
            scale = 4 if name == "self_attn.o_proj" else 1  # drafts depend on what is seen
            weights[f"{at}.{name}.weight"] = scale * torch.randn(shape) / shape[1] ** 0.5
        norms |= {f"{at}.{name}": h for name in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"{at}.self_attn.{name}_norm": D for name in "qk"}
    weights |= {f"{name}.weight": torch.rand(size) + 0.5 for name, size in norms.items()}
    if rank := raw.get("markov_rank"):
        for name in ("w1", "w2"):
            weights[f"markov_head.markov_{name}.weight"] = torch.randn(c.vocab_size, rank)
        weights["confidence_head.proj.weight"] = torch.randn(1, h + rank)
    return weights
