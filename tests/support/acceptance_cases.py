"""Cases of acceptance: rows of probabilities, drafts and controls, and the tokens to be emitted.

Tokens are letters. docs/acceptance.md states the rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mtpbuild.plugins.control_tensors import Controls
from tests.support.kernels import asked_of

A, B, C, D, BEGIN, END = range(6)
V = 6
# A is sure; A before B before C; A and B tie; END likely; BEGIN likely.
SURE = [0.9, 0.04, 0.03, 0.02, 0.005, 0.005]
CLOSE = [0.4, 0.35, 0.15, 0.06, 0.02, 0.02]
TIE = [0.4, 0.4, 0.1, 0.05, 0.03, 0.02]
ENDING = [0.3, 0.2, 0.05, 0.05, 0.0, 0.4]
BEGINNING = [0.3, 0.2, 0.05, 0.05, 0.4, 0.0]


@dataclass(frozen=True)
class Case:
    drafts: list[int]
    rows: list[list[float]]  # one row more than drafts
    emitted: list[int]
    topk: int = 1
    delta: float = 0.0
    thinking: bool = True
    num_drafts: int | None = None
    active: bool = True
    after: bool | None = None  # the thinking flag afterwards; None: unchanged
    temperature: float = 0.0
    rejection: bool = False
    block: bool = False
    synthetic: list[float] | None = None
    banned: list[int] = field(default_factory=list)
    banned_until: int = 0  # bans hold in so many rows of the window
    draft_probs: list[list[float]] = field(default_factory=list)
    uniforms: Sequence[tuple[float, float, float]] = field(default_factory=list)


def point(token: int) -> list[float]:
    return [float(i == token) for i in range(V)]


RELAXED = {
    "top-1 is always accepted": Case([A], [SURE, SURE], [A, A], 3, 0.6),
    "second, near enough": Case([B], [CLOSE, SURE], [B, A], 3, 0.1),
    "second, too far": Case([B], [CLOSE, SURE], [A], 3, 0.04),
    "the threshold is inclusive": Case([B], [TIE, SURE], [B, A], 3, 0.0),
    "third of the top 3": Case([C], [CLOSE, SURE], [C, A], 3, 0.3),
    "third of the top 2": Case([C], [CLOSE, SURE], [A], 2, 0.3),
    "fourth of the top 3": Case([D], [CLOSE, SURE], [A], 3, 1.0),
    "a wide delta needs the top k too": Case([D], [SURE, SURE], [A], 3, 1.0),
    "a wide top k needs delta too": Case([D], [SURE, SURE], [A], 6, 0.5),
    "delta is a gap of probabilities": Case([B], [SURE, SURE], [A], 6, 0.85),
    "delta 1 and top k V accept all": Case([D, C], [SURE, SURE, SURE], [D, C, A], 6, 1.0),
    "all accepted: the bonus is the top-1": Case([B, B], [CLOSE, CLOSE, CLOSE], [B, B, A], 3, 0.1),
    "a rejection emits that row's top-1": Case([B, D], [CLOSE, CLOSE, SURE], [B, A], 3, 0.1),
    "nothing after a rejection": Case([D, A], [CLOSE, SURE, SURE], [A], 3, 0.1),
    "num_drafts ends it": Case([B, B], [CLOSE, CLOSE, CLOSE], [B, A], 3, 0.1, num_drafts=1),
    "no real drafts": Case([B, B], [CLOSE, CLOSE, CLOSE], [A], 3, 0.1, num_drafts=0),
    "inactive": Case([B], [CLOSE, SURE], [], 3, 0.1, active=False),
    # Corner cases.
    "top k 1 is strict": Case([B], [CLOSE, SURE], [A], 1, 1.0),
    "top k 1 is strict on ties": Case([B], [TIE, SURE], [A], 1, 1.0),
    "delta 0 accepts an exact tie": Case([B], [TIE, SURE], [B, A], 2, 0.0),
    "a tie ranks by id": Case([B], [[0.4, 0.4, 0.2, 0, 0, 0], SURE], [B, A], 2, 0.0),
    "a tie beyond the top k": Case([C], [[0.3, 0.3, 0.3, 0.1, 0, 0], SURE], [A], 2, 0.0),
    "</think> in mid-step: the rest is strict": Case(
        [END, B], [ENDING, CLOSE, SURE], [END, A], 3, 0.6, after=False
    ),
    "</think> then the right token": Case(
        [END, A, B], [ENDING, CLOSE, CLOSE, SURE], [END, A, A], 3, 0.6, after=False
    ),
    "before </think> it is relaxed": Case(
        [B, END, B], [CLOSE, ENDING, CLOSE, SURE], [B, END, A], 3, 0.6, after=False
    ),
    "a draft </think> is relaxed itself": Case(
        [END], [[0.4, 0.1, 0.1, 0.1, 0.0, 0.3], SURE], [END, A], 3, 0.2, after=False
    ),
    "a draft </think> too far": Case([END], [SURE, SURE], [A], 6, 0.5, after=True),
    "a draft <think> is relaxed itself": Case(
        [BEGIN], [[0.4, 0.1, 0.1, 0.1, 0.3, 0.0], SURE], [BEGIN, A], 3, 0.2, after=True
    ),
    "<think> takes effect for the next token": Case(
        [BEGIN, B], [BEGINNING, CLOSE, SURE], [BEGIN, B, A], 3, 0.1, thinking=False, after=True
    ),
    "<think> itself is judged strictly": Case(
        [BEGIN], [[0.4, 0.1, 0.1, 0.1, 0.3, 0.0], SURE], [A], 3, 0.2, thinking=False
    ),
    "</think> and <think> in one step": Case(
        [END, BEGIN, B], [ENDING, BEGINNING, CLOSE, SURE], [END, BEGIN, B, A], 3, 0.1, after=True
    ),
    "outside the phase it is strict": Case([B], [CLOSE, SURE], [A], 3, 1.0, thinking=False),
    "outside the phase ties are strict": Case([B], [TIE, SURE], [A], 3, 1.0, thinking=False),
    "the phase ends with the emitted token": Case([A], [ENDING, SURE], [END], 1, after=False),
    "the phase begins with the emitted token": Case(
        [A], [BEGINNING, SURE], [BEGIN], 1, thinking=False, after=True
    ),
    "the phase ends with the bonus": Case([A], [SURE, ENDING], [A, END], 1, after=False),
    "a rejected </think> leaves the phase": Case([END], [SURE, SURE], [A], 1, after=True),
    "an inactive slot keeps its phase": Case([A], [ENDING, SURE], [], 1, active=False, after=True),
}  # fmt: skip

HALF = (0.5, 0.5, 0.5)

sampled = partial(Case, temperature=1, rejection=True)
blockwise = partial(sampled, block=True)

REJECTION = {
    "accepted below the ratio": sampled(
        [B], [CLOSE, CLOSE], [B, B], draft_probs=[[0.2, 0.7, 0.1, 0, 0, 0]],
        uniforms=[(0.9, 0.49, 0.9), (0, 0, 0.5)],
    ),
    "rejected above the ratio": sampled(
        [B], [CLOSE, CLOSE], [A], draft_probs=[[0.2, 0.7, 0.1, 0, 0, 0]],
        uniforms=[(0.9, 0.51, 0.2), HALF],
    ),
    "the residual has no mass where q is more": sampled(
        [B], [CLOSE, CLOSE], [D], draft_probs=[[0.4, 0.4, 0.2, 0, 0, 0]],
        uniforms=[(0, 0.99, 0.5), HALF],
    ),
    "p = 0 is never accepted, whatever the number": sampled(
        [BEGIN], [ENDING, CLOSE], [A], draft_probs=[point(BEGIN)], uniforms=[(0, 0.0, 0.1), HALF],
    ),
    "argmax drafts: accepted with p(d)": sampled(
        [A], [CLOSE, CLOSE], [A, B], draft_probs=[point(A)], uniforms=[(0, 0.39, 0), (0, 0, 0.5)],
    ),
    "argmax drafts: recovered without d": sampled(
        [A], [CLOSE, CLOSE], [B], draft_probs=[point(A)], uniforms=[(0, 0.41, 0.0), HALF],
    ),
    "p equal to q: recovers from p": sampled(
        [A], [point(A), CLOSE], [A, B], draft_probs=[point(A)],
        uniforms=[(0, 0.999, 0), (0, 0, 0.5)],
    ),
    "the bonus comes from p": sampled(
        [A], [point(A), CLOSE], [A, C], draft_probs=[point(A)], uniforms=[(0, 0.5, 0), (0, 0, 0.8)],
    ),
    "num_drafts 0: from p, not from a residual": sampled(
        [A], [CLOSE, CLOSE], [A], num_drafts=0, draft_probs=[point(A)],
        uniforms=[(0, 0, 0.3), HALF],
    ),
    "greedy requests are strict": sampled(
        [B], [CLOSE, CLOSE], [A], temperature=0, draft_probs=[point(B)], uniforms=[(0, 0, 0), HALF],
    ),
    "-1 is rejected": sampled(
        [-1], [CLOSE, CLOSE], [A], draft_probs=[[0.0] * V], uniforms=[(0, 0.0, 0.1), HALF],
    ),
}  # fmt: skip

SAMPLED = {
    "below the first border": Case([], [CLOSE], [A], temperature=1, uniforms=[(0.39, 0, 0)]),
    "above the first border": Case([], [CLOSE], [B], temperature=1, uniforms=[(0.41, 0, 0)]),
    "the first number": Case([], [CLOSE], [A], temperature=1, uniforms=[(0.0, 0, 0)]),
    "the last number": Case(
        [], [ENDING], [END], temperature=1, uniforms=[(1 - 2**-24, 0, 0)], after=False
    ),
    "a token of no mass is never drawn": Case(
        [], [BEGINNING], [BEGIN], temperature=1, uniforms=[(1 - 2**-24, 0, 0)]
    ),
    "the drawn draft is accepted": Case(
        [B], [CLOSE, CLOSE], [B, A], temperature=1, uniforms=[(0.5, 0, 0), (0.1, 0, 0)]
    ),
    "an argmax draft that is not drawn": Case(
        [A], [CLOSE, CLOSE], [B], temperature=1, uniforms=[(0.5, 0, 0), (0.1, 0, 0)]
    ),
    "relaxed does not apply to sampled text": Case(
        [A], [CLOSE, CLOSE], [B], 3, 1.0, temperature=1, uniforms=[(0.5, 0, 0), (0.1, 0, 0)]
    ),
}  # fmt: skip

BLOCK = {
    # Drafts B, C: p/q = 0.5, then 3 (c = 0.5, 1): both are kept, whatever number is drawn.
    "a late surplus makes up for an early deficit": blockwise(
        [B, C], [CLOSE, [0.1, 0.3, 0.6, 0, 0, 0], SURE], [B, C, A],
        draft_probs=[[0.2, 0.7, 0.1, 0, 0, 0], [0.5, 0.3, 0.2, 0, 0, 0]],
        uniforms=[(0, 0.99, 0), (0, 0.99, 0), (0, 0, 0.5)],
    ),
    "of one draft it is the plain rule": blockwise(
        [B], [CLOSE, CLOSE], [B, B], draft_probs=[[0.2, 0.7, 0.1, 0, 0, 0]],
        uniforms=[(0.9, 0.49, 0.9), (0, 0, 0.5)],
    ),
    "of one draft, above the ratio": blockwise(
        [B], [CLOSE, CLOSE], [A], draft_probs=[[0.2, 0.7, 0.1, 0, 0, 0]],
        uniforms=[(0.9, 0.51, 0.2), HALF],
    ),
    # c = 0.5, 0.25; h_2 = 0.25; after one draft S = 0.05, h_1 = 0.05 / 0.55; P(>= 1) = 0.318.
    "the number falls on two": blockwise(
        [B, B], [CLOSE, CLOSE, SURE], [B, B, A], draft_probs=[[0.2, 0.7, 0.1, 0, 0, 0]] * 2,
        uniforms=[(0, 0.24, 0), HALF, (0, 0, 0.5)],
    ),
    "the number falls on one": blockwise(
        [B, B], [CLOSE, CLOSE, SURE], [B, D], draft_probs=[[0.2, 0.7, 0.1, 0, 0, 0]] * 2,
        uniforms=[(0, 0.30, 0), (0, 0, 0.5), HALF],
    ),
    "the number falls on none": blockwise(
        [B, B], [CLOSE, CLOSE, SURE], [A], draft_probs=[[0.2, 0.7, 0.1, 0, 0, 0]] * 2,
        uniforms=[(0, 0.45, 0.2), HALF, HALF],
    ),
    "only the first number counts": blockwise(
        [B, B], [CLOSE, CLOSE, SURE], [B, B, A], draft_probs=[[0.2, 0.7, 0.1, 0, 0, 0]] * 2,
        uniforms=[(0, 0.24, 0), (0, 0.99, 0.5), (0, 0.99, 0.5)],
    ),
    "num_drafts 1 of 2": blockwise(
        [B, B], [CLOSE, SURE, SURE], [B, A], num_drafts=1,
        draft_probs=[[0.2, 0.7, 0.1, 0, 0, 0]] * 2, uniforms=[(0, 0.49, 0), (0, 0, 0.5), HALF],
    ),
    "num_drafts 0": blockwise(
        [B], [CLOSE, CLOSE], [A], num_drafts=0, draft_probs=[point(B)],
        uniforms=[(0, 0, 0.3), HALF],
    ),
    "-1 is rejected": blockwise(
        [-1, A], [CLOSE, CLOSE, SURE], [A], draft_probs=[[0.0] * V] * 2,
        uniforms=[(0, 0.0, 0.1), HALF, HALF],
    ),
    "greedy requests are strict": blockwise(
        [B], [CLOSE, CLOSE], [A], temperature=0, draft_probs=[point(B)], uniforms=[(0, 0, 0), HALF],
    ),
}  # fmt: skip

NEVER, ALWAYS = [(0, 0.99, 0)] * 3, [(0, 0.0, 0)] * 3

SYNTHETIC = {
    "accepts a wrong draft": Case([D], [SURE, SURE], [D, A], synthetic=[0.5], uniforms=ALWAYS),
    "rejects a right draft": Case([A], [SURE, SURE], [A], synthetic=[0.5], uniforms=NEVER),
    "rate 0 rejects, whatever the number": Case(
        [A], [SURE, SURE], [A], synthetic=[0.0], uniforms=ALWAYS
    ),
    "rate 1 accepts, whatever the number": Case(
        [D], [SURE, SURE], [D, A], synthetic=[1.0], uniforms=NEVER
    ),
    "a rate per position": Case(
        [D, D], [SURE, SURE, SURE], [D, A], synthetic=[1.0, 0.0], uniforms=ALWAYS
    ),
    "num_drafts holds": Case(
        [D, D], [SURE, SURE, SURE], [D, A], synthetic=[1.0, 1.0], num_drafts=1
    ),
    "-1 is never emitted": Case([-1], [SURE, SURE], [A], synthetic=[1.0]),
    "sampled requests too": Case(
        [D], [SURE, SURE], [D, A], temperature=1, synthetic=[1.0], rejection=True,
        draft_probs=[point(D)], uniforms=ALWAYS,
    ),
}  # fmt: skip

BANNED = {
    "the next best": Case([], [ENDING], [A], banned=[END], banned_until=1),
    "two of them": Case([], [ENDING], [B], banned=[END, A], banned_until=1),
    "a draft of it is rejected": Case([END], [ENDING, SURE], [A], banned=[END], banned_until=1),
    "allowed from the position on": Case(
        [A], [SURE, ENDING], [A, END], banned=[END], banned_until=1, after=False
    ),
    "both rows are before it": Case([A], [SURE, ENDING], [A, A], banned=[END], banned_until=2),
    "relaxed does not let it in": Case(
        [END], [ENDING, SURE], [A], 6, 1.0, banned=[END], banned_until=1
    ),
    "drawn from the rest": Case(
        [], [ENDING], [D], temperature=1, banned=[END], banned_until=1, uniforms=[(0.999, 0, 0)]
    ),
    "rejection draws from the rest": Case(
        [END], [ENDING, SURE], [D], temperature=1, rejection=True, banned=[END], banned_until=1,
        draft_probs=[point(END)], uniforms=[(0, 0, 0.999), HALF],
    ),
}  # fmt: skip

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Controls]


def operands(case: Case) -> Operands:
    """Make the operands of `accept_mixed` for one slot."""
    K = len(case.drafts)
    drafts = K if case.num_drafts is None else case.num_drafts
    uniforms = torch.zeros(1, 3, 20)
    for j, numbers in enumerate(case.uniforms):
        uniforms[0, :, 8 + j] = torch.tensor(numbers)  # position lengths + 1 + j
    asked = asked_of(
        1,
        K,
        temperature=torch.tensor([case.temperature]),
        rejection=torch.tensor([case.rejection]),
        block=torch.tensor([case.block]),
        synthetic=torch.tensor([[*(case.synthetic or [-1.0] * K), -1.0]]),
        relaxed_topk=torch.tensor([case.topk]),
        relaxed_delta=torch.tensor([case.delta]),
        thinking_ids=torch.tensor([[BEGIN, END]]),
        banned_ids=torch.tensor([[*case.banned, -1, -1][:2]]),
        banned_until=torch.tensor([8 + case.banned_until]),
        uniforms=uniforms,
    )
    probs = torch.tensor(case.draft_probs) if case.draft_probs else torch.zeros(K, V)
    return (
        torch.tensor(case.rows).log()[None], torch.tensor([[A, *case.drafts]]),
        torch.tensor([drafts]), torch.tensor([7]), torch.tensor([case.active]),
        torch.tensor([case.thinking]), probs.reshape(1, K, V), asked,
    )  # fmt: skip
