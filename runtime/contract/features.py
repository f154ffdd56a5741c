"""The optional features of engines, which decide what a request or a flag may ask for."""

from enum import StrEnum


class Feature(StrEnum):
    """An optional feature; programs that declare it implement the protocol named beside it."""

    PREFIX_CACHE = "prefix_cache"  # prompts reuse the rows of earlier prompts: `PrefixCaching`
    OVERLAP = "overlap"  # a step is launched before the last step is read: `Overlapping`
    ADAPT = "adapt"  # a step may draft fewer than nextn tokens: `Adaptive`
    CONSTRAIN = "constrain"  # a grammar limits the tokens that steps emit: `Constraining`
    PENALISE = "penalise"  # requests may have penalties and logit biases
    SCORE = "score"  # prompts may have log-probabilities: `Scoring`
    SHARE = "share"  # other processes run the same programs and may fail: `Shared`


Features = frozenset[Feature]
