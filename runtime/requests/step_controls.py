"""Conversion of a request's settings to controls, the inputs of an engine's steps."""

import contextlib
import operator
import secrets
from dataclasses import replace

import numpy as np

from mtpbuild.runtime.contract.controls import (
    CONTROLS,
    FIELDS,
    MAX_BANNED,
    Control,
    StepControls,
    list_control_shapes,
)
from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.contract.manifest import Manifest
from mtpbuild.runtime.contract.programs import MIXED
from mtpbuild.runtime.contract.rules import BUILT_IN, find_rule
from mtpbuild.runtime.contract.settings import list_settings_controls
from mtpbuild.runtime.contract.targets import list_targets_with
from mtpbuild.runtime.errors import RequestError
from mtpbuild.runtime.sampling.params import SETTINGS, SamplingParams
from mtpbuild.runtime.sampling.synthetic import choose_synthetic_rates, compute_conditional_rates
from mtpbuild.runtime.text.reasoning import opens_thought
from mtpbuild.runtime.text.tokenizer import Tokenizer


def make_step_controls(
    prompt: list[int],
    params: SamplingParams,
    manifest: Manifest,
    tokenizer: Tokenizer | None = None,
) -> StepControls:
    """Return the controls of a request; raise RequestError if the engine lacks one of them."""
    check_tokens(params, manifest)
    marks = thinking_ids(params, manifest)
    if marks != manifest.model.thinking_token_ids:  # the template uses the model's own tokens
        tokenizer = None
    banned = (
        tuple(sorted(params.end_ids(manifest.model.eos_token_ids))) if params.min_tokens else ()
    )
    if len(banned) > MAX_BANNED:
        wrong = (
            f"min_tokens: at most {MAX_BANNED} tokens may end texts beside it, not {len(banned)}"
        )
        raise RequestError(wrong, "min_tokens")
    bias = params.logit_bias or {}
    controls = StepControls(
        **{name: getattr(params, name) for name in FIELDS if name in SETTINGS},
        rejection=params.acceptance == "rejection",
        block=params.rejection_sample_method == "block",
        synthetic=compute_conditional_rates(find_acceptance_rates(params, manifest.build.nextn)),
        sampled_drafts=params.draft_sample_method == "probabilistic",
        thinking_ids=marks,
        thinking=opens_thought(prompt, marks, tokenizer),
        banned_ids=banned,
        banned_until=len(prompt) + params.min_tokens if banned else 0,
        bias_ids=tuple(bias),
        bias_values=tuple(bias.values()),
        history=tuple(prompt) if params.repetition_penalty != 1 else (),
        rule=find_rule_values(params, manifest),
        alternatives=params.logprobs is not None,
        constrained=bool(params.constraint),
        seed=secrets.randbits(32) if params.seed is None else params.seed,
    )
    if controls.penalised:
        controls = replace(controls, prompt_length=len(prompt))
    check_logprobs(params, manifest)
    for control in CONTROLS:
        if control.setting and controls.counts(control.name):
            check_control(manifest, control)
    return controls


def check_tokens(params: SamplingParams, manifest: Manifest) -> None:
    """Raise RequestError for a setting with a token id outside the vocabulary."""
    last = manifest.model.vocab_size - 1
    for name, setting in SETTINGS.items():
        value = getattr(params, name) if setting.tokens else None
        ids = (value,) if isinstance(value, int) else value or ()
        if (id := max(ids, default=0)) > last:
            raise RequestError(f"{name}: token id {id} is outside the vocabulary 0..{last}", name)


def check_logprobs(params: SamplingParams, manifest: Manifest) -> None:
    """Raise RequestError for prompt log-probabilities if the engine has no program for them."""
    if params.prompt_logprobs is not None and Feature.SCORE not in manifest.features:
        raise RequestError(
            "prompt_logprobs: this engine scores no prompts; build it anew with `--score` for "
            f"target {list_targets_with(Feature.SCORE)}",
            "prompt_logprobs",
        )


def check_control(manifest: Manifest, control: Control) -> None:
    """Raise RequestError if the engine lacks a control, by its features or its age."""
    name = control.setting
    refused = f"{name} is not supported by this engine: leave it out, or build the engine anew"
    if not control.core and Feature.PENALISE not in manifest.features:
        targets = list_targets_with(Feature.PENALISE)
        raise RequestError(f"{refused} for target {targets}", name)
    mixed = manifest.programs.get(MIXED)  # the manifest of a fake engine has no programs
    if mixed is not None and all(control.name != tensor.name for tensor in mixed.inputs):
        raise RequestError(f"{refused}: it is older than {name}", name)


def thinking_ids(params: SamplingParams, manifest: Manifest) -> tuple[int, int]:
    """Return the tokens that begin and end the thinking phase; -1 if unknown.

    Raises RequestError if relaxed acceptance is on and a token is unknown.
    """
    asked = params.begin_thinking_phase_token, params.end_thinking_phase_token
    known = manifest.model.thinking_token_ids or (-1, -1)
    begin, end = (o if g is None else g for g, o in zip(asked, known, strict=True))
    if params.relaxed_topk > 1 and -1 in (begin, end):
        raise RequestError(
            "relaxed_topk: relaxed acceptance needs the tokens of the thinking phase, which this "
            "engine does not know: give begin_thinking_phase_token and end_thinking_phase_token",
            "relaxed_topk",
        )
    return begin, end


def find_rule_values(params: SamplingParams, manifest: Manifest) -> dict[str, object]:
    """Return the values of the controls of another package's rule; {} for a built-in rule."""
    if params.acceptance in BUILT_IN:
        return {}
    rule, known = find_rule(params.acceptance), manifest.capabilities.get("acceptance", [])
    if rule.name not in known:
        raise RequestError(
            f"acceptance {rule.name!r} is not in this engine, which has {', '.join(known)}: "
            f"build it with `--acceptance-rule` {rule.name}",
            "acceptance",
        )
    settings = dict(params.acceptance_settings or {})
    controls = list_settings_controls(rule.settings)
    build = manifest.build
    sizes = build.nextn, build.capacity + manifest.window, manifest.model.vocab_size
    places = list_control_shapes(*sizes, controls)
    for control in controls:
        name, place = control.name, places[control.name]
        if not fits(settings[name], place, control.dtype):
            raise RequestError(f"{name} must fit {control.dtype}{[*place]}", name)
    return {rule.name: True, **settings}


def fits(value: object, place: tuple[int, ...], dtype: str) -> bool:
    """Tell whether a value, which passed its rule's own check, fits a control's shape and dtype."""
    with contextlib.suppress(ValueError), np.errstate(all="ignore"):
        array = np.asarray(value)
        inside = array.ndim == len(place) and all(map(operator.le, array.shape, place))
        if array.dtype.kind in "biuf" and inside:
            stored = array.astype(dtype)
            return bool(np.isfinite(stored).all() and np.allclose(array, stored, 1e-6, 1e-30))
    return False


def find_acceptance_rates(params: SamplingParams, nextn: int) -> tuple[float, ...]:
    """Return the rates of synthetic acceptance per draft position; () if acceptance is real."""
    return choose_synthetic_rates(
        params.synthetic_acceptance_rates, params.synthetic_acceptance_length, nextn
    )
