"""A toy language behind the programs' protocol: the next token's law depends on the last one.

Acceptance is plain NumPy, one slot after the other. Each bug that `mtpbuild verify` must find is a
class of its own.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtpbuild.runtime import Engine, Manifest
from mtpbuild.runtime.contract.controls import GREEDY, StepControls
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.programs import Bools, Ints, StepOutput
from tests.reference.sampling import distribution
from tests.support.fakes import FakePrograms, fake_manifest

V = 12
DRAFT, ACCEPT, RECOVER = range(3)
Law = NDArray[np.float64]


class Toy(FakePrograms):
    """Accepts correctly: strictly, by rejection and relaxed."""

    wrong_at = -1

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        rng = np.random.default_rng(3)
        self.features -= {Feature.PREFIX_CACHE}
        self.logits = 1.5 * rng.normal(size=(V, V))
        self.drafter = self.logits + 1.2 * rng.normal(size=(V, V))
        B = manifest.build.max_batch
        self.laws: list[list[Law]] = [[] for _ in range(B)]  # of the drafts
        self.numbers: list[NDArray[Any]] = [np.zeros((3, 0))] * B
        self.parts = [0] * B  # chunks of each slot's prompt
        self.running = 0

    def prefill(self, slot: int, start: int, tokens: Ints) -> None:
        self.parts[slot] = self.parts[slot] + 1 if start else 1
        super().prefill(slot, start, tokens)

    def begin(self, slot: int, length: int, newest: int, controls: StepControls = GREEDY) -> None:
        super().begin(slot, length, newest, controls)
        self.laws[slot], self.numbers[slot] = [], controls.uniforms(128)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        own: tuple[list[Any], ...] = (self.laws, self.numbers, self.parts)
        for values in own:
            values[target] = values[source]

    def step(self, active: Bools, rows: int) -> StepOutput:
        self.running = int(active.sum())
        return super().step(active, rows)

    def _accept(self, b: int) -> list[tuple[int, float, float]]:
        emitted = self.judged(b)
        self.make_drafts(b)
        return emitted

    def judged(self, b: int) -> list[tuple[int, float, float]]:
        """Judge a slot's drafts; return emitted tokens with log-probabilities and margins."""
        emitted = []
        drafts = zip(self.pending[b], self.laws[b], strict=True)
        for draft in [*drafts, None]:
            logits = self.said(b, self.history[b][-1])
            token, margin = self.judge(b, logits, draft)
            if len(self.history[b]) == self.wrong_at:
                token = (token + 1) % V
            self.history[b].append(token)
            logprobs = logits - np.log(np.exp(logits).sum())
            emitted.append((token, float(logprobs[token]), margin))
            if draft is None or token != draft[0]:
                break
        return emitted

    def judge(self, b: int, logits: Law, draft: tuple[int, Law] | None) -> tuple[int, float]:
        controls = self.controls[b]
        if controls.temperature == 0:
            top = np.sort(logits)[::-1]
            token = int(logits.argmax())
            if draft is not None and self.near(controls, logits, draft[0]):
                token = draft[0]
            return token, float(top[0] - top[1])
        p = distribution(logits, controls)
        if not controls.rejection:
            return self.drawn(p, self.number(b, DRAFT)), 1.0
        if draft is None:
            return self.drawn(p, self.number(b, RECOVER)), 1.0
        token, q = draft
        if self.number(b, ACCEPT) * q[token] < p[token]:
            return token, 1.0
        return self.drawn(self.residual(p, q), self.number(b, RECOVER)), 1.0

    def make_drafts(self, b: int) -> None:
        controls, history = self.controls[b], list(self.history[b])
        self.pending[b], self.laws[b] = [], []
        for _ in range(self.window - 1):
            logits = self.drafter[history[-1]]
            token, law = int(logits.argmax()), np.zeros(V)
            law[token] = 1
            if controls.temperature > 0 and controls.sampled_drafts:
                law = distribution(logits, controls)
                token = self.drawn(law, self.numbers[b][DRAFT][len(history)])
            self.pending[b].append(token)
            self.laws[b].append(law)
            history.append(token)

    def said(self, b: int, last: int) -> Law:
        return self.logits[last]

    def near(self, controls: StepControls, logits: Law, token: int) -> bool:
        p = np.exp(logits - logits.max())
        p /= p.sum()
        close = bool((p > p[token]).sum() < controls.relaxed_topk)
        return controls.relaxed_topk > 1 and close and p.max() - p[token] <= controls.relaxed_delta

    def number(self, b: int, purpose: int) -> float:
        return float(self.numbers[b][purpose][len(self.history[b])])

    def residual(self, p: Law, q: Law) -> Law:
        rest = np.maximum(p - q, 0)
        return rest if rest.sum() else p

    def drawn(self, law: Law, number: float) -> int:
        return min(int((np.cumsum(law) <= number * law.sum()).sum()), int(np.flatnonzero(law)[-1]))


class WrongOnce(Toy):
    wrong_at = 20


class ReusesANumber(Toy):
    """Accepts with the random number that drew the draft."""

    def number(self, b: int, purpose: int) -> float:
        return super().number(b, DRAFT if purpose == ACCEPT else purpose)


class Biased(Toy):
    """Resamples from p after a rejection, so that the rejected draft's mass counts twice."""

    def residual(self, p: Law, q: Law) -> Law:
        return p


class OtherSeeds(Toy):
    """A strict rule with random numbers of its own: the right distribution, and another text."""

    def number(self, b: int, purpose: int) -> float:
        return super().number(b, ACCEPT if purpose == DRAFT else purpose)


class Chunky(Toy):
    """Loses track of prompts that come in chunks."""

    def said(self, b: int, last: int) -> Law:
        return self.logits[last] if self.parts[b] < 2 else np.roll(self.logits[last], 1)


class Crowded(Toy):
    """Confuses slots that run at once."""

    def said(self, b: int, last: int) -> Law:
        return self.logits[last] if self.running < 2 else np.roll(self.logits[last], 1)


class Loose(Toy):
    """Relaxes where only the most probable token is near enough."""

    def near(self, controls: StepControls, logits: Law, token: int) -> bool:
        return controls.relaxed_delta > 0


class OtherWeights(Toy):
    """Emits the same tokens with other log-probabilities."""

    def said(self, b: int, last: int) -> Law:
        return 1.1 * self.logits[last]


class Rounded(Toy):
    """Rounds every logit to 5 bits, the precision of bfloat16's 8 bits after some layers."""

    def said(self, b: int, last: int) -> Law:
        step = np.exp2(np.floor(np.log2(np.abs(self.logits[last]))) - 4)
        return np.round(self.logits[last] / step) * step


class Damaged(Toy):
    """Drafts tokens that are never right, as damaged modules do."""

    def make_drafts(self, b: int) -> None:
        self.pending[b], last = [], self.history[b][-1]
        for _ in range(self.window - 1):
            last = int(self.logits[last].argmin())
            self.pending[b].append(last)
        self.laws[b] = [np.eye(V)[token] for token in self.pending[b]]


def toy_engine(kind: type[Toy], nextn: int = 2, **build: Any) -> Engine:
    build = {"prefill_chunk": 64, **build}
    manifest = fake_manifest(nextn=nextn, vocab_size=V, max_seq_len=80, **build)
    return Engine(kind(manifest), manifest)
