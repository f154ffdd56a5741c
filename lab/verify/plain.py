"""Judgement of texts by the plain PyTorch model: whole sequences, no caches, no drafts."""

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice
from mtpbuild.builder.models import ModelConfig, find_family_of, load_config
from mtpbuild.builder.models.common.copies import HEAD
from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.stages import Watch, ignore
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.head import open_slice, read_head_config
from mtpbuild.builder.weights.layer_passes import StreamedModel
from mtpbuild.builder.weights.quantised_view import QuantisedView, requantise
from mtpbuild.builder.weights.scheme import IN_FLOATS, Scheme, read_scheme
from mtpbuild.lab.measure.checks import ROUNDED, rounds_inputs
from mtpbuild.lab.measure.compare import (
    LARGEST_DIFFERENCE,
    LEAST_NOISE,
    TIE_FACTOR,
    Finding,
    NotChecked,
    find_largest_without_jumps,
)
from mtpbuild.lab.measure.runs import TimedAnswer
from mtpbuild.runtime import Manifest

PLAIN_LIMIT = 2 * 10**9  # most parameters of a model that is loaded whole, in fp32


def load_plain(
    folder: Path, layers: LayersSlice | None = None, scheme: Scheme | None = None
) -> PlainLM:
    """Load all weights of a checkpoint in fp32; raise CheckpointError.

    layers: the main layers to keep. scheme: how to quantise the weights before dequantising them.
    """
    config, view = open_view(folder, layers, scheme)
    family = find_family_of(config)
    model, same = family.reference(config), family.duplicates(config)
    weights = {name: view.read(same.get(name, name)) for name in model.state_dict()}
    model.load_state_dict(weights, assign=True)
    return model.eval()


def open_view(
    folder: Path,
    layers: LayersSlice | None = None,
    scheme: Scheme | None = None,
    mtp: Path | None = None,
) -> tuple[ModelConfig, Checkpoint | QuantisedView]:
    """Open a checkpoint, and the head that is joined from `mtp`; see `load_plain`."""
    config = load_config(folder)
    if mtp is not None:
        config = read_head_config(mtp, folder, config)
    if layers is not None:
        config = layers.of(config)
    stored = open_slice(folder, layers, mtp)
    config = stored.settle(config)
    table = stored.check(config)
    if scheme is None or scheme == IN_FLOATS:
        return config, stored
    return config, requantise(stored, config, scheme, table.stored.values())


@torch.no_grad()
def run_by_layers(
    config: ModelConfig,
    view: Checkpoint | QuantisedView,
    texts: Sequence[list[int]],
    *,
    drafts: bool = False,
    watch: Watch = ignore,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield each text's logits [T, V] and, with `drafts`, what MTP module 1 drafts at [T - 1].

    All texts run through each layer once, and only that layer is in memory; in the end the head.
    """
    batches = [torch.tensor([text]) for text in texts]
    model, L = StreamedModel(view, config, batches), config.num_hidden_layers
    plain, hidden = model.plain, list[Tensor]()
    for i, layer in enumerate(plain.model.layers[:L]):
        watch(f"plain model, layer {i + 1} of {L}")
        with model.loaded(layer):
            hidden = [model.run_layer(i, x) for x in model.inputs(i, hidden)]
    hidden, predicted = [*model.run_norm(hidden)], list[Tensor]()
    with ExitStack() as stack:
        stack.enter_context(model.loaded(plain.model.norm))
        if drafts:
            stack.enter_context(model.loaded(plain.module(1)))
            pairs = zip(batches, hidden, strict=True)
            predicted = [plain.mtp(1, tokens[:, 1:], x[:, :-1]) for tokens, x in pairs]
        same = model.family.duplicates(config)
        plain.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
        weight = {"weight": view.read(same.get(HEAD, HEAD))}
        plain.lm_head.load_state_dict(weight, assign=True)
        for number, x in enumerate(hidden):
            drafted = plain.draft_logits(1, predicted[number])[0].argmax(-1) if drafts else None
            yield plain.logits(x)[0], drafted


def check_size(manifest: Manifest) -> None:
    """Raise NotChecked if a whole model in fp32 is too large."""
    if (count := manifest.model.parameters) > PLAIN_LIMIT:
        raise NotChecked(f"{count:,} parameters are too many for the plain model")


def compare_with_checkpoint(
    manifest: Manifest,
    folder: Path,
    prompts: Sequence[list[int]],
    played: Sequence[TimedAnswer],
    *,
    layers: LayersSlice | None = None,
    mtp: Path | None = None,
    watch: Watch = ignore,
) -> Finding:
    """Judge an engine's greedy texts by its checkpoint; raise NotChecked if that can't be done.

    The figure `plain_first_drafts` is how often MTP module 1 of the plain model predicts the text,
    at each position.
    """
    build = manifest.build
    if build.calibrated is not None:
        raise NotChecked("its weights were calibrated: the checkpoint alone does not give them")
    limit, scheme = ROUNDED if rounds_inputs(manifest) else LARGEST_DIFFERENCE, read_scheme(build)
    config, view = open_view(folder, layers, scheme, mtp)
    if not find_family_of(config).runs_by_layer(config):
        check_size(manifest)
        model = load_plain(folder, layers, scheme)
        with rounded_inputs(build.block_size):
            return judge_texts(model, prompts, played, limit)
    pairs = [*zip(prompts, played, strict=True)]
    texts = [prompt + text.token_ids[:-1] for prompt, text in pairs]
    drafts = bool(config.num_nextn_predict_layers) and config.head is None and build.nextn > 0
    right = list[bool]()

    def run() -> Iterator[Tensor]:
        runs = run_by_layers(config, view, texts, drafts=drafts, watch=watch)
        for (prompt, text), (logits, drafted) in zip(pairs, runs, strict=True):
            if drafted is not None:  # at p it predicts t_{p+2}, from t_{p+1}
                guesses = drafted[len(prompt) - 1 :].tolist()
                right.extend(map(operator.eq, guesses, text.token_ids[1:]))
            yield logits

    with rounded_inputs(build.block_size):
        finding = judge_logits(run(), prompts, played, limit)
    share = {"plain_first_drafts": sum(right) / len(right)} if right else {}
    return replace(finding, figures={**finding.figures, **share})


@contextmanager
def rounded_inputs(block: int | None) -> Iterator[None]:
    """Round the inputs of products to int8 in blocks, as the CPU kernels do; None: don't.

    Models with large activations would make large differences of what is rounded.
    """

    def round_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not block or not isinstance(module, nn.Linear) or inputs[0].shape[-1] % block:
            return None
        blocks = inputs[0].unflatten(-1, (-1, block))
        scales = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return (((blocks / scales).round() * scales).flatten(-2),)

    hook = register_module_forward_pre_hook(round_input)  # type: ignore[arg-type]  # it may return
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def judge_texts(
    model: PlainLM,
    prompts: Sequence[list[int]],
    played: Sequence[TimedAnswer],
    max_difference: float = LARGEST_DIFFERENCE,
) -> Finding:
    """Check texts by a model that is in memory (`judge_logits`)."""
    pairs = zip(prompts, played, strict=True)
    texts = (torch.tensor([prompt + text.token_ids[:-1]]) for prompt, text in pairs)
    logits = (model.logits(model.main(tokens))[0] for tokens in texts)
    return judge_logits(logits, prompts, played, max_difference)


@torch.no_grad()
def judge_logits(
    logits_of_texts: Iterable[Tensor],
    prompts: Sequence[list[int]],
    played: Sequence[TimedAnswer],
    max_difference: float = LARGEST_DIFFERENCE,
) -> Finding:
    """Check that every greedy token is the model's argmax after the same tokens, or nearly.

    logits_of_texts: [T, V] of each prompt and its text but for the last token. max_difference: how
    far log-probabilities may differ.
    """
    differences = list[float]()
    gaps = []
    triples = zip(prompts, played, logits_of_texts, strict=True)
    for number, (prompt, text, whole) in enumerate(triples):
        logits = whole[len(prompt) - 1 :]  # [tokens, V]
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
