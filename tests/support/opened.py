"""Models of a checkpoint's folder, opened as a build opens them or with all their weights."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from mtpbuild.builder.checkpoint.generation import GenerationIds
from mtpbuild.builder.graph.style import GraphStyle
from mtpbuild.builder.models import ModelConfig, find_family_of, load_config
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.precision import FLOATS, set_dtype
from mtpbuild.builder.models.common.weight import convert_weights, join_slices
from mtpbuild.builder.models.heads import find_head_of
from mtpbuild.builder.plan.recipe import FoundModel
from mtpbuild.builder.program.opened_model import OpenedModel, open_model
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.runtime.contract.manifest import FloatType
from mtpbuild.runtime.ranks import ALONE

NO_IDS = GenerationIds(None, (), None)


def opened(
    folder: Path, config: ModelConfig | None = None, ids: GenerationIds = NO_IDS, **how: Any
) -> OpenedModel:
    """Open a folder; how: fields of GraphStyle, and what else `open_model` takes."""
    style = {f.name: how.pop(f.name) for f in fields(GraphStyle) if f.name in how}
    config = load_config(folder) if config is None else config
    return open_model(FoundModel("x", "x", folder), config, ids, GraphStyle(**style), **how)


def load_model(
    folder: Path, config: ModelConfig, dtype: FloatType = "float32", for_gpu: bool = False
) -> CausalLM:
    """Return the program's model with all its weights; raise CheckpointError."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.settle(config)
    model = find_family_of(config).make_model(config, ALONE)
    if config.head is not None:
        find_head_of(config.head).attach(model)
    set_dtype(model, FLOATS[dtype], for_gpu)
    types = {name: weight.dtype for name, weight in model.named_parameters()}
    weights = join_slices(convert_weights(checkpoint, checkpoint.check(config)))
    model.load_state_dict({name: w.to(types[name]) for name, w in weights}, assign=True)
    return model.eval()
