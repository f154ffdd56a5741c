"""Judgement of texts by the plain PyTorch model: whole sequences, no caches, no drafts."""

from collections.abc import Sequence
from pathlib import Path

import torch

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.models import find_family_of, load_config
from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.weights.head import open_slice
from mtpbuild.builder.weights.quantised_view import requantise
from mtpbuild.builder.weights.scheme import IN_FLOATS, Scheme
from mtpbuild.lab.measure.compare import (
    LARGEST_DIFFERENCE,
    LEAST_NOISE,
    TIE_FACTOR,
    Finding,
    find_largest_without_jumps,
)
from mtpbuild.lab.measure.runs import TimedAnswer


def load_plain(
    folder: Path, layers: LayersSlice | None = None, scheme: Scheme | None = None
) -> PlainLM:
    """Load all weights of a checkpoint in fp32; raise CheckpointError.

    layers: the main layers to keep. scheme: how to quantise the weights before dequantising them.
    """
    config = load_config(folder)
    if layers is not None:
        config = layers.of(config)
    stored = open_slice(folder, layers)
    family = find_family_of(config)
    config = stored.settle(config)
    table, read = stored.check(config), stored.read
    if scheme is not None and scheme != IN_FLOATS:
        read = requantise(stored, config, scheme, table.stored.values()).read
    model, same = family.reference(config), family.duplicates(config)
    weights = {name: read(same.get(name, name)) for name in model.state_dict()}
    model.load_state_dict(weights, assign=True)
    return model.eval()


@torch.no_grad()
def judge_texts(
    model: PlainLM,
    prompts: Sequence[list[int]],
    played: Sequence[TimedAnswer],
    max_difference: float = LARGEST_DIFFERENCE,
) -> Finding:
    """Check that every greedy token is the model's argmax after the same tokens, or nearly.

    max_difference: how far log-probabilities may differ.
    """
    differences = list[float]()
    gaps = []
    for number, (prompt, text) in enumerate(zip(prompts, played, strict=True)):
        known = torch.tensor([prompt + text.token_ids[:-1]])
        logits = model.logits(model.main(known))[0, len(prompt) - 1 :]  # [tokens, V]
        chosen = torch.tensor(text.token_ids)[:, None]
        logprobs = logits.log_softmax(-1).gather(-1, chosen)[:, 0]
        differences += (logprobs - torch.tensor(text.logprobs)).abs().tolist()
        gap = logits.amax(-1) - logits.gather(-1, chosen)[:, 0]
        best = logits.argmax(-1)
        gaps += [(float(g), number, i, int(chosen[i]), int(best[i])) for i, g in enumerate(gap)]
    noise = find_largest_without_jumps(differences)
    largest, number, place, token, wanted = max(gaps)
    figures = {"tokens": len(gaps), "noise": noise, "largest_gap": largest}
    if not noise <= max_difference:
        detail = f"log-probabilities are up to {noise:.2g} off: other weights, or a wrong cache"
        return Finding(False, detail, figures)
    if largest > (limit := TIE_FACTOR * max(noise, LEAST_NOISE)):
        detail = f"text {number}, token {place}: says {token}, the model {wanted} (its logit is "
        detail += f"{largest:.2g} larger, a near-tie is below {limit:.1g})"
        return Finding(False, detail, figures)
    ties = sum(gap > 0 for gap, *_ in gaps)
    equal = f"{len(gaps) - ties} of {len(gaps)} tokens are its argmax"
    return Finding(True, equal + (", the others nearly" if ties else ""), figures)
