"""A checkpoint as a program's model in memory, to run it eagerly."""

from pathlib import Path

from mtpbuild.builder.checkpoint.tensors import open_checkpoint, stream_weights
from mtpbuild.builder.models import family_of
from mtpbuild.builder.models.common.causal_lm import CausalLM
from mtpbuild.builder.models.common.precision import FLOATS, hold_in
from mtpbuild.builder.models.common.share import ALONE
from mtpbuild.builder.models.config import ModelConfig
from mtpbuild.runtime.manifest import FloatType


def load_model(folder: Path, config: ModelConfig, dtype: FloatType = "float32") -> CausalLM:
    """The program's model with all its weights; raises CheckpointError."""
    checkpoint, model = open_checkpoint(folder), family_of(config).make_model(config, ALONE)
    hold_in(model, FLOATS[dtype])
    types = {name: weight.dtype for name, weight in model.named_parameters()}
    weights = stream_weights(checkpoint, checkpoint.check(config))
    model.load_state_dict({name: w.to(types[name]) for name, w in weights}, assign=True)
    return model.eval()
