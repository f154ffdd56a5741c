"""A request's sampling by default: the model's own, else vLLM's."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mtpbuild.runtime.contract.features import Feature
from mtpbuild.runtime.files import read_json

if TYPE_CHECKING:
    from mtpbuild.runtime.contract.manifest import Manifest

VLLM_DEFAULTS: dict[str, float | int] = {"temperature": 1.0, "top_p": 1.0}


def choose_sampling_defaults(folder: Path, manifest: "Manifest") -> dict[str, float | int]:
    """Return the defaults that the engine can apply; warn of a penalty that it can't."""
    defaults = VLLM_DEFAULTS | read_generation_defaults(folder)
    repetition = defaults.get("repetition_penalty", 1)
    if repetition != 1 and Feature.PENALISE not in manifest.features:
        del defaults["repetition_penalty"]
        what = "generation_config.json's repetition_penalty is not applied"
        print(f"warning: {what}, as this engine has no penalties", file=sys.stderr, flush=True)
    return defaults


def read_generation_defaults(folder: Path) -> dict[str, float | int]:
    """Read sampling defaults from the model's generation_config.json, as vLLM does."""
    try:
        config = read_json(folder / "generation_config.json")
    except (OSError, ValueError):
        return {}
    defaults: dict[str, float | int] = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = config.get(name) if isinstance(config, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[name] = value
    return defaults
