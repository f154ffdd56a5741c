"""Features are what some engines can do and others can't: one list, by which all of them refuse."""

from enum import StrEnum


class Feature(StrEnum):
    """Is one feature. Programs that declare it have the methods of the protocol named here."""

    KEEP = "keep"  # slots keep what they hold for later prompts: `Keeping`
    POOL = "pool"  # copies of what slots hold are kept beside them: `Pooling`
    OVERLAP = "overlap"  # a step is launched before the last one's tokens are read: `Overlapping`
    ADAPT = "adapt"  # steps may draft fewer tokens than there are places for: `Adaptive`
    CONSTRAIN = "constrain"  # a grammar decides what steps may emit: `Constraining`
    PENALISE = "penalise"  # requests may have penalties and biases
    SCORE = "score"  # prompts may have log-probabilities: `Scoring`
    SHARE = "share"  # other processes run the same programs and may fail: `Shared`


Features = frozenset[Feature]
