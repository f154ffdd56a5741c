"""accept_mixed: acceptance of a window's drafts where each slot has its own mode.

The modes are strict (greedy or sampled), rejection, block and relaxed; docs/acceptance.md defines
them. The reference is plain PyTorch that every target can trace. `accept_rewind` is the special
case in which all slots are strict and greedy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtpbuild.plugins.accept_rewind.op import empty_verdict
from mtpbuild.plugins.block_verification import verify_block
from mtpbuild.plugins.branch import Branch, when
from mtpbuild.plugins.control_tensors import Controls, name_controls
from mtpbuild.plugins.definition import define
from mtpbuild.plugins.draw.op import draw
from mtpbuild.plugins.logit_edits import edit_logits
from mtpbuild.plugins.shaped_probs.op import list_shaping, shaped_probs
from mtpbuild.runtime.contract.controls import (
    ACCEPT,
    BLOCK_DRAFT,
    DRAFT,
    MAX_LOGPROBS,
    RECOVER,
)
from mtpbuild.runtime.contract.rules import Rule


@dataclass(frozen=True)
class Verdict:
    """The decisions about T = K + 1 rows per slot."""

    tokens: Tensor  # [B, T] emitted, -1 beyond n
    n: Tensor  # [B] 1 .. num_drafts + 1; 0 if inactive
    lengths: Tensor  # [B] advanced by n
    logprobs: Tensor  # [B, T] of the emitted tokens, under the plain softmax
    margins: Tensor  # [B, T] between the best two logits if greedy, else that of `draw`
    thinking: Tensor  # [B] bool, after the emitted tokens
    top_ids: Tensor | None = None  # [B, T, MAX_LOGPROBS] most probable tokens of each row
    top_logprobs: Tensor | None = None  # [B, T, MAX_LOGPROBS] under the plain softmax
    # Of each row's draft; the last row has none. `score_drafts` makes them.
    draft_logprobs: Tensor | None = None  # [B, T] under the plain softmax
    draft_ranks: Tensor | None = None  # [B, T] 1 for the most probable token
    draft_q: Tensor | None = None  # [B, T] probability with which it was drawn, if it was drawn


class Judged(NamedTuple):
    """What is decided of each row, before it is known where the step ends: three [B, T]."""

    keep: Tensor  # bool: whether the row's draft is kept, if all before it are
    token: Tensor  # the row's token if the step ends there
    margin: Tensor  # of that token


@dataclass(frozen=True)
class RuleInputs:
    """The inputs of a rule from another package; row j judges draft j (from 0) of the window."""

    p: Tensor  # [B, T, V] the model's distribution as the request shapes it; unshaped if greedy
    p_draft: Tensor  # [B, T] p of the row's draft; the last row has no draft
    drafts: Tensor  # [B, T]
    draft_probs: Tensor  # [B, K, V] the distributions that the drafts were drawn from
    numbers: Tensor  # [B, T] uniform in [0, 1), drawn for acceptance alone
    thinking: Tensor  # [B, T] bool: the row is in the thinking phase
    controls: Controls  # controls by name, including the rule's own: [B, *shape]


def accept_mixed(
    logits: Tensor,
    window: Tensor,
    num_drafts: Tensor,
    lengths: Tensor,
    active: Tensor,
    thinking: Tensor,
    draft_probs: Tensor,
    controls: Controls,
    history: Tensor | None = None,
    grammar: Mapping[str, Tensor] | None = None,
    rules: Sequence[Rule] = (),
) -> Verdict:
    """Judge a window [B, T], the newest token and then drafts, by its logits [B, T, V] fp32.

    draft_probs [B, K, V]: the distribution that each draft was drawn from; a point mass for an
    argmax draft, so that one rule covers both. The other tensors are [B]. history [B, S]: the
    tokens before the window; without it there are no penalties. grammar: the inputs `CONSTRAINTS`
    by name, with `allowed` [B, T, words]; None if the program has no grammars. rules: the program's
    rules from other packages.
    """
    _, T, V = logits.shape
    row = torch.arange(T, device=window.device)
    at = lengths[:, None] + 1 + row  # the position that row j decides
    logprobs = logits.log_softmax(-1)  # of the model's own logits, before bans and penalties
    logits = edit_logits(logits, at, window, controls, history, grammar)
    p = shaped_probs(logits, *list_shaping(controls))  # [B, T, V]
    numbers = controls["uniforms"][:, :3].gather(2, at[:, None].expand(-1, 3, -1))  # [B, 3, T]
    real = row < num_drafts[:, None]  # [B, T]; the last row has no draft
    operands = (p, window, draft_probs, real, numbers)
    target, margins, kept = _choose_targets(logits, operands, controls)
    inputs = gather_rule_inputs(p, window, draft_probs, at, thinking, controls, numbers[:, ACCEPT])
    n = torch.ones_like(lengths)
    if T > 1:
        good = _accept(inputs, window, target, kept)
        for rule in rules:
            judged = Judged(good, target, margins)
            good, target, margins = _apply_rule(rule, inputs, numbers[:, RECOVER], real, judged)
        good = good & real
        n = torch.where(good[:, :-1], T - 1, row[:-1]).amin(-1) + 1
    n = torch.where(active, n, 0)

    final = (n - 1).clamp(min=0)[:, None]
    tokens = torch.where(row < n[:, None] - 1, _drafts_of(window), target)
    phase = inputs.thinking.gather(1, final)[:, 0]
    after = _next_phase(phase, tokens.gather(1, final)[:, 0], controls["thinking_ids"])
    best = logprobs.topk(min(MAX_LOGPROBS, V), dim=-1)
    return Verdict(
        tokens=torch.where(row < n[:, None], tokens, -1),
        n=n,
        lengths=lengths + n,
        logprobs=logprobs.gather(-1, tokens.clamp(0, V - 1)[..., None])[..., 0],
        margins=margins,
        thinking=(active & after) | (~active & thinking),
        top_ids=best.indices,
        top_logprobs=best.values,
        **score_drafts(logprobs, window, draft_probs),
    )


def _choose_targets(
    logits: Tensor, operands: tuple[Tensor, ...], controls: Controls
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_draw_targets` does of its operands, and in greedy slots each row's argmax."""
    sampled = controls["temperature"] > 0
    asked = {name: controls[name] for name in ("rejection", "block")}
    drawn = when(sampled.any(), _draw_targets, _draw_nothing, (*operands, asked))
    top = logits.topk(2, dim=-1).values
    target = torch.where(sampled[:, None], drawn[0], logits.argmax(-1))
    margins = torch.where(sampled[:, None], drawn[1], top[..., 0] - top[..., 1])
    return target, margins, drawn[2]


def score_drafts(logprobs: Tensor, window: Tensor, draft_probs: Tensor) -> dict[str, Tensor]:
    """Return what `Verdict` has of each row's draft, by name; logprobs [B, T, V]."""
    drafts = _drafts_of(window).clamp(0, logprobs.shape[-1] - 1)[..., None]
    draft_logprobs = logprobs.gather(-1, drafts)
    q = torch.zeros_like(draft_logprobs[..., 0])
    if (K := window.shape[1] - 1) > 0:
        drawn = draft_probs[:, :K].gather(-1, drafts[:, :K])[..., 0]
        q = torch.cat([drawn, torch.zeros_like(drawn[:, :1])], dim=1)
    # In floats, which all targets add up; exact for any vocabulary.
    ranks = (logprobs > draft_logprobs).to(torch.float32).sum(-1).to(torch.int64) + 1
    return {"draft_logprobs": draft_logprobs[..., 0], "draft_ranks": ranks, "draft_q": q}


def empty_mixed_verdict(logits: Tensor, window: Tensor, lengths: Tensor, active: Tensor) -> Any:
    """Return empty tensors like the op's results."""
    *others, margins = empty_verdict(logits, window, lengths)
    return *others, torch.empty_like(active), margins


@define(empty_mixed_verdict)
def accept_mixed_op(
    logits: Tensor,
    window: Tensor,
    num_drafts: Tensor,
    lengths: Tensor,
    active: Tensor,
    thinking: Tensor,
    draft_probs: Tensor,
    controls: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Do `accept_mixed` as an op: return tokens, n, lengths, logprobs, thinking and margins.

    Targets that have kernels keep the op; others trace the reference. If a window has no drafts,
    draft_probs is not read and may be any tensor [B, .., V].
    """
    slots = (window, num_drafts, lengths, active, thinking, draft_probs[:, : window.shape[1] - 1])
    v = accept_mixed(logits, *slots, name_controls(controls))
    return v.tokens, v.n, v.lengths, v.logprobs, v.thinking, v.margins


def _draw_targets(*operands: Any) -> tuple[Tensor, ...]:
    """Sample each row; return three tensors [B, T].

    The first is the token that the row emits if the step ends there, the second its margin (see
    `draw`), the third whether rejection or block mode keeps the row's draft.
    """
    rejects = operands[-1]["rejection"].any()
    return when(rejects, _draw_after_rejection, _draw_strictly, operands)


def _draw_strictly(
    p: Tensor, window: Tensor, draft_probs: Tensor, real: Tensor, numbers: Tensor, asked: Controls
) -> tuple[Tensor, ...]:
    return *draw(p, numbers[:, DRAFT]), torch.zeros_like(real)


def _draw_after_rejection(
    p: Tensor, window: Tensor, draft_probs: Tensor, real: Tensor, numbers: Tensor, asked: Controls
) -> tuple[Tensor, ...]:
    K, V = draft_probs.shape[1:]
    rejection, block = asked["rejection"][:, None], asked["block"][:, None]
    weights, kept = p, torch.zeros_like(real)
    if K:
        drafts = window[:, 1:].clamp(0, V - 1)[..., None]
        p_draft, q_draft = (x.gather(-1, drafts)[..., 0] for x in (p[:, :K], draft_probs))
        at_least, block_rest = verify_block(p, window, draft_probs, real[:, :K])
        chance = numbers[:, ACCEPT, :K]
        # The first number decides how many drafts of a block are kept; later steps use the others.
        in_block = chance[:, :1] < at_least
        passed = (block & in_block) | (~block & (chance * q_draft < p_draft))
        kept = torch.cat([passed, kept[:, K:]], dim=1)
        # After a rejection, sample from max(p - q, 0), normalised.
        rest = torch.where(block[..., None], block_rest, p[:, :K] - draft_probs).clamp(min=0)
        rejected = (rejection & real[:, :K])[..., None] & (rest.sum(-1, keepdim=True) > 0)
        weights = torch.cat([torch.where(rejected, rest, p[:, :K]), p[:, K:]], dim=1)
    number = torch.where(rejection, numbers[:, RECOVER], numbers[:, DRAFT])
    drawn, margins = draw(weights, number)
    return drawn, margins, kept


def _draw_nothing(
    p: Tensor, window: Tensor, draft_probs: Tensor, real: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    # torch.cond gives the batch of each operand a symbol of its own. So the results take their
    # sizes from `p`, as in `_draw_targets`; otherwise their batch would be unknown and checked to
    # be at least 2.
    rows = p.shape[:2]
    return window.new_zeros(rows), p.new_zeros(rows), torch.zeros_like(real)


def _accept(inputs: RuleInputs, window: Tensor, target: Tensor, kept: Tensor) -> Tensor:
    """Return whether each row's draft is kept [B, T] if all before it are; kept: by chance."""
    controls = inputs.controls
    sampled = controls["temperature"][:, None] > 0
    forced = controls["synthetic"] >= 0
    by_chance = controls["rejection"][:, None] & sampled & ~forced
    relaxed = {name: controls[name] for name in ("relaxed_topk", "relaxed_delta")}
    operands = (inputs.p, inputs.p_draft, inputs.drafts, relaxed)
    near = when((relaxed["relaxed_topk"] > 1).any(), _find_near, _find_none, operands)[0]
    near = near & inputs.thinking & ~sampled
    # No torch.where: ONNX Runtime has no Where for bool. Ids outside the vocabulary are not kept.
    good = (by_chance & kept) | (~by_chance & ~forced & ((inputs.drafts == target) | near))
    good = good | (forced & (inputs.numbers < controls["synthetic"]))
    return good & (inputs.drafts == _drafts_of(window))


def _drafts_of(window: Tensor) -> Tensor:
    """Return each row's draft [B, T]; the last row has none."""
    return torch.cat([window[:, 1:], window[:, :1]], dim=1)


def gather_rule_inputs(
    p: Tensor,
    window: Tensor,
    draft_probs: Tensor,
    at: Tensor,
    thinking: Tensor,
    controls: Controls,
    numbers: Tensor | None = None,
) -> RuleInputs:
    """Gather the inputs of rules; at [B, T]: the positions that the rows decide.

    numbers [B, T]: those that accept drafts, if they have been gathered.
    """
    drafts = _drafts_of(window).clamp(0, p.shape[-1] - 1)
    p_draft = p.gather(-1, drafts[..., None])[..., 0]
    if numbers is None:
        numbers = controls["uniforms"][:, ACCEPT].gather(1, at)
    phases = _find_phases(window, thinking, controls["thinking_ids"])
    return RuleInputs(p, p_draft, drafts, draft_probs, numbers, phases, controls)


def _apply_rule(
    rule: Rule,
    inputs: RuleInputs,
    numbers: Tensor,
    real: Tensor,
    judged: Judged,
) -> Judged:
    """Let a rule decide in the slots that asked for it; it is skipped if no slot did.

    numbers [B, T]: for its choices. real [B, T] bool: the rows with a draft. judged: the decisions
    in the other slots.
    """
    good, target, margins = judged
    asked = inputs.controls[rule.name]
    # A copy, as torch.cond wants operands that share no memory, and both numbers are views of one.
    operands = (*vars(inputs).values(), numbers.clone())
    kept, *choice = when(asked.any(), _decide_by(rule), _decide_nothing(rule), operands)
    asked = asked[:, None]
    good = (asked & kept & (inputs.p_draft > 0)) | (~asked & good)
    if choice:
        token, margin = choice
        known = token.clamp(0, inputs.p.shape[-1] - 1)
        possible = (known == token) & (inputs.p.gather(-1, known[..., None])[..., 0] > 0)
        chosen = asked & real & possible
        target = torch.where(chosen, token, target)
        margins = torch.where(chosen, margin, margins)
    return Judged(good, target, margins)


def _decide_by(rule: Rule) -> Branch:
    def decide(*operands: Any) -> tuple[Tensor, ...]:
        inputs = RuleInputs(*operands[:-1])
        choice = () if rule.chooses is None else rule.chooses(inputs, operands[-1])
        return tuple(part.clone() for part in (rule.keeps(inputs), *choice))

    return decide


def _decide_nothing(rule: Rule) -> Branch:
    def decide(p: Tensor, *others: Any) -> tuple[Tensor, ...]:
        rows = p.shape[:2]
        nothing = p.new_zeros(rows, dtype=torch.bool), p.new_zeros(rows, dtype=torch.int64)
        return (*nothing, p.new_zeros(rows))[: 1 if rule.chooses is None else 3]

    return decide


def _find_near(p: Tensor, p_draft: Tensor, drafts: Tensor, relaxed: Controls) -> tuple[Tensor, ...]:
    """Return [B, T]: whether relaxed mode keeps the draft, by its rank and distance in p."""
    ids = torch.arange(p.shape[-1], device=p.device)
    least = p_draft[..., None]
    rank = ((p > least) | ((p == least) & (ids < drafts[..., None]))).sum(-1)
    wanted, delta = (control[:, None] for control in relaxed.values())
    possible = p_draft > 0  # not banned
    return (possible & (wanted > 1) & (rank < wanted) & (p.amax(-1) - p_draft <= delta),)


def _find_none(p: Tensor, p_draft: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return (torch.zeros_like(p_draft, dtype=torch.bool),)


def _find_phases(window: Tensor, thinking: Tensor, marks: Tensor) -> Tensor:
    """Return whether each row [B, T] is in the thinking phase, by the window's tokens up to it."""
    phases = [thinking]
    for j in range(1, window.shape[1]):
        phases.append(_next_phase(phases[-1], window[:, j], marks))
    return torch.stack(phases, dim=1)


def _next_phase(phase: Tensor, token: Tensor, marks: Tensor) -> Tensor:
    return (phase | (token == marks[:, 0])) & (token != marks[:, 1])


def draft_number(controls: Controls, lengths: Tensor, k: int) -> Tensor:
    """Return the uniform number [B, 1] for drawing draft k (from 1) after `lengths` rows."""
    shared = controls["uniforms"][:, DRAFT].gather(1, lengths[:, None] + k)
    if k == 1:
        return shared
    in_block = controls["uniforms"][:, BLOCK_DRAFT + k - 2].gather(1, lengths[:, None] + 1)
    return torch.where(controls["block"][:, None], in_block, shared)
