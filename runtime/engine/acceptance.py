"""How likely drafts are accepted: a belief about each request, updated by its steps.

A request has a level, the probability that its first draft is accepted. It is unknown and may
change with the text, so a request has a belief: the probability of each level in LEVELS. Position
i's draft is accepted with level * factor[i] if those before it were. The factors are the model's
and are learnt from all requests.
"""

from typing import TypeAlias

import numpy as np

from mtpbuild.runtime.contract.programs import Floats

Belief: TypeAlias = Floats  # [levels] their probabilities, whose sum is 1

LEVELS = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97], np.float32)
_weights = (LEVELS + 0.1) ** 2
PRIOR: Belief = _weights / _weights.sum()  # the first request's; most MTP modules have 0.7 to 0.9
# A new request's belief is the mean of those of ended ones and of PRIOR, which has the weight of so
# many requests; an older one keeps this share of its weight at the end of each later one.
PRIOR_WEIGHT, REQUEST_DECAY = 4.0, 0.9
# The probability that a level changes in a step. Then the prior holds again.
CHANGE = 0.005  # in a step with drafts
IDLE_CHANGE = 0.002  # in a step without drafts; lower, as a doubtful belief leads to costly trials
FACTOR_WEIGHT = 40.0  # a position's factor starts as 1, with the weight of this many drafts
FACTOR_INTERVAL = 16  # steps after which the factors are learnt anew
FACTOR_DECAY = 0.98  # older drafts keep this share of their weight then
MAX_FACTOR, MAX_RATE = 1.2, 0.99


class AcceptanceModel:
    """The engine's part of acceptance: the factor of each of `nextn` positions."""

    def __init__(self, nextn: int) -> None:
        self.prior = PRIOR
        self._ended, self._count = np.zeros_like(PRIOR), 0.0
        self._judged, self._accepted = np.zeros((2, nextn), np.float32)
        self._steps = 0
        self._set_factors(np.ones(nextn, np.float32))

    def end_request(self, belief: Belief) -> None:
        """Learn from a request's last belief what to expect of new ones."""
        self._ended = REQUEST_DECAY * self._ended + belief
        self._count = REQUEST_DECAY * self._count + 1
        self.prior = (PRIOR_WEIGHT * PRIOR + self._ended) / (PRIOR_WEIGHT + self._count)

    def update(self, belief: Belief, accepted: int, drafted: int) -> Belief:
        """Return a request's belief after a step that accepted `accepted` of `drafted` drafts."""
        change = IDLE_CHANGE
        if drafted:
            tried = min(accepted + 1, drafted)
            self._judged[:tried] += belief @ LEVELS
            self._accepted[:accepted] += 1
            belief = belief * self._compute_likelihood(accepted, drafted)
            belief /= belief.sum()
            change = CHANGE
        self._steps += 1
        if self._steps % FACTOR_INTERVAL == 0:
            self._judged *= FACTOR_DECAY
            self._accepted *= FACTOR_DECAY
            learnt = (self._accepted + FACTOR_WEIGHT) / (self._judged + FACTOR_WEIGHT)
            self._set_factors(np.minimum(learnt, MAX_FACTOR) / learnt[0])
        return belief + change * (PRIOR - belief)

    def _compute_likelihood(self, accepted: int, drafted: int) -> Floats:
        """Return the probability [levels] of a step's result; none is 0."""
        if (likelihood := self._likelihoods.get((accepted, drafted))) is None:
            likelihood = self._reached[:, accepted] + np.float32(1e-9)
            if accepted < drafted:
                likelihood *= 1 - self._rates[:, accepted]
            self._likelihoods[accepted, drafted] = likelihood
        return likelihood

    def _set_factors(self, factors: Floats) -> None:
        self._rates = np.minimum(LEVELS[:, None] * factors, MAX_RATE)  # [levels, nextn]
        ones = np.ones((len(LEVELS), 1), np.float32)
        # [levels, nextn + 1]: the probability that the first k drafts are accepted
        self._reached = np.concatenate([ones, np.cumprod(self._rates, 1)], 1)
        self._likelihoods: dict[tuple[int, int], Floats] = {}
        self.tokens: Floats = np.cumsum(self._reached, 1)  # a step's, by level and nextn
