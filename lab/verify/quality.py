"""What rounding costs: an engine's distributions and drafts beside those of its checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpbuild.builder.models import find_family_of
from mtpbuild.builder.models.common.plain import PlainLM
from mtpbuild.builder.models.modules import is_module
from mtpbuild.runtime.requests.request import Result, TokenLogprobs
from mtpbuild.runtime.requests.stats import compute_acceptance_length

LEAST = 1e-9  # probability of all tokens that an engine does not name


@dataclass(frozen=True)
class Distance:
    """How far an engine's next tokens are from its checkpoint's."""

    kl: float  # nats a position; of the tokens that the engine names, and the rest as one
    same: float  # share of positions with the same first choice
    positions: int


@torch.no_grad()
def measure_distance(
    model: PlainLM, prompts: Sequence[list[int]], texts: Sequence[Result]
) -> Distance:
    """Compare a checkpoint's plain model with the engine's texts, which have their top tokens."""
    divergences = list[float]()
    same = 0
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = torch.tensor([[*prompt, *text.token_ids[:-1]]])
        logits = model.logits(model.main(tokens))[0, len(prompt) - 1 :]
        for wanted, likeliest in zip(logits.log_softmax(-1), text.logprobs or (), strict=True):
            divergences.append(_compute_divergence(wanted, likeliest))
            same += int(wanted.argmax()) == likeliest.top[0][0]
    count = len(divergences)
    return Distance(sum(divergences) / count, same / count, count)


def _compute_divergence(wanted: Tensor, likeliest: TokenLogprobs) -> float:
    """Return KL(checkpoint || engine) over the engine's top tokens and the rest as one token."""
    ids, logprobs = zip(*likeliest.top, strict=True)
    q = torch.tensor(logprobs).double()
    p = wanted[list(ids)].double()
    rests = [(1 - known.exp().sum()).clamp(min=LEAST) for known in (p, q)]
    return float((p.exp() * (p - q)).sum() + rests[0] * (rests[0] / rests[1]).log())


@torch.no_grad()
def acceptance_length(
    model: PlainLM,
    prompts: Sequence[list[int]],
    texts: Sequence[Sequence[int]],
    nextn: int,
    eagle: bool,
) -> float:
    """Return how many tokens a step emits, if the model drafts for these greedy texts."""
    draft = _draft_as_eagle if eagle else _draft_as_vanilla
    steps = emitted = 0
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = [*prompt, *text]
        hidden = model.main(torch.tensor([tokens]))
        at = len(prompt) + 1
        while at + nextn < len(tokens):
            drafts = draft(model, tokens[:at], hidden[:, : at - 1], nextn)
            right = [d == t for d, t in zip(drafts, tokens[at:], strict=False)]
            accepted = right.index(False) if False in right else nextn
            at, steps, emitted = at + accepted + 1, steps + 1, emitted + accepted + 1
    return compute_acceptance_length(emitted, steps) or 0.0


def _draft_as_eagle(model: PlainLM, tokens: list[int], hidden: Tensor, nextn: int) -> list[int]:
    """Run module 1 over all tokens, then once per further draft on its own result."""
    follow = tokens[1:]
    drafts = list[int]()
    for k in range(nextn):
        g = model.mtp(1, torch.tensor([follow]), hidden, later=k)[:, -1:]
        drafts.append(int(model.draft_logits(1, g).argmax()))
        hidden, follow = torch.cat([hidden, g], dim=1), [*follow, drafts[-1]]
    return drafts


def _draft_as_vanilla(model: PlainLM, tokens: list[int], hidden: Tensor, nextn: int) -> list[int]:
    """Run each module over all tokens, with the drafts so far as the last ones."""
    drafts = list[int]()
    for k in range(1, nextn + 1):
        follow = [*tokens, *drafts][k : k + len(tokens) - 1]
        hidden = model.mtp(k, torch.tensor([follow]), hidden)
        drafts.append(int(model.draft_logits(k, hidden[:, -1:]).argmax()))
    return drafts


def replace_modules(model: PlainLM, other: PlainLM) -> None:
    """Replace a model's MTP modules with those of another model."""
    family = find_family_of(model.config)
    state, theirs = model.state_dict(), other.state_dict()
    state |= {name: theirs[name] for name in state if is_module(family, model.config, name)}
    model.load_state_dict(state, assign=True)
