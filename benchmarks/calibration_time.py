"""Measures the time of a calibration's layer: random weights of a recipe's shape, random tokens.

    python benchmarks/calibration_time.py --model qwen3.5-4b --tokens 12288

It prints each step's seconds and the process's largest memory so far. Layers take the same time
whatever their weights are. The vocabulary is cut, as embedding and head are not measured; nor are
the texts, which the model writes before.
"""

import json
import resource
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from script import parse_flags, run

from mtpbuild.builder.models import find_family_of, load_config
from mtpbuild.builder.models.common.weight import WHOLE
from mtpbuild.builder.plan.recipe import find_recipe
from mtpbuild.builder.weights.calibration import Calibration
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.requantised import requantise
from mtpbuild.builder.weights.scheme import SCHEMES
from mtpbuild.builder.weights.streamed import BATCH
from mtpbuild.runtime.errors import UsageError

VOCABULARY, LENGTH = 4096, 512


def save_random(model: str, layers: int, folder: Path) -> None:
    """Save a checkpoint with a recipe's shape but for the number of layers and the vocabulary."""
    recipe = find_recipe(model)
    if recipe is None:
        raise UsageError(f"{model}: no recipe")
    raw = json.loads((recipe.config_folder / "config.json").read_text(encoding="utf-8"))
    text = raw.get("text_config", raw)
    text |= {"num_hidden_layers": layers, "vocab_size": VOCABULARY}
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config, tensors = load_config(folder), {}
    for weight in find_family_of(config).weight_table(config, WHOLE):
        for stored in weight.stored:
            value = torch.ones(stored.shape)
            if len(stored.shape) > 1:
                value = torch.randn(stored.shape) * stored.shape[-1] ** -0.5
            tensors[stored.name] = value.bfloat16()
    save_file(tensors, folder / "model.safetensors")


def main() -> None:
    flags = parse_flags(__doc__, model="qwen3.5-4b", layers=4, tokens=12288, threads=2)
    torch.set_num_threads(flags.threads)
    with tempfile.TemporaryDirectory() as place:
        folder, state = Path(place, "model"), Path(place, "state")
        folder.mkdir()
        state.mkdir()
        save_random(flags.model, flags.layers, folder)
        source = open_checkpoint(folder)
        config = source.settle(load_config(folder))
        weights = source.check(config).stored.values()
        view = requantise(source, config, SCHEMES["int4"], weights)
        shape = (BATCH // LENGTH, LENGTH)
        batches = [torch.randint(VOCABULARY, shape) for _ in range(flags.tokens // BATCH)]
        last = time.monotonic()

        def watch(step: str) -> None:
            nonlocal last
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(f"{time.monotonic() - last:6.1f} s  {peak:.1f} GiB  {step}", flush=True)
            last = time.monotonic()

        Calibration(view, config, batches, state, watch).run()
        watch("end")


run(main)
