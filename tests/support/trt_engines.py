"""Makes a small checkpoint like DeepSeek-R1's in nvfp4; helpers for engines of its ranks."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import load_file

from mtpbuild.builder.compiler.manifest_of import describe_files
from mtpbuild.builder.compiler.plans import plan_engines
from mtpbuild.builder.compiler.quantize import QuantizeRequest
from mtpbuild.builder.program.engine_weights import EngineWeights
from mtpbuild.builder.weights.scheme import make_scheme
from mtpbuild.runtime.contract.manifest import MANIFEST, WEIGHTS, name_rank, read_manifest
from mtpbuild.runtime.contract.programs import Programs
from tests.reference.eager import EagerPrograms
from tests.support.checkpoints import make_predictable, save_checkpoint
from tests.support.fake_tensorrt import ILayer, LayerType, Network
from tests.support.requests import build_request, quantize

Alteration: TypeAlias = Callable[[ILayer, ILayer], None]  # of a program's first two collectives
SMALL_STEPS: dict[str, Any] = {"prefill_chunk": 4, "max_seq_len": 100}

# A layer with too many experts to compute all, and one module.
R1_LIKE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 256, "moe_intermediate_size": 128,
    "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1,
    "first_k_dense_replace": 0, "num_nextn_predict_layers": 1, "n_routed_experts": 32, "n_group": 4,
}  # fmt: skip


def r1_like(folder: Path) -> Path:
    """Save a checkpoint like `deepseek-r1-fp4`: MLPs and experts in nvfp4, the module in bf16."""
    plain = save_checkpoint(folder / "plain", make_predictable(**R1_LIKE), **R1_LIKE)
    scheme = make_scheme("nvfp4", None, None)
    quantize(QuantizeRequest(str(plain), scheme, folder / "r1"))
    return folder / "r1"


def one_rank(checkpoint: Path, nextn: int, folder: Path) -> EagerPrograms:
    """Return the programs of one rank's engine, which run eagerly with that engine's weights."""
    request = build_request(checkpoint, (nextn,), target="tensorrt", **SMALL_STEPS)
    plans = plan_engines(replace(request, dry_run=True))
    (plan,) = plans.engines.values()
    source = plans.open_model()
    EngineWeights(source).write(folder, None)
    source.model.load_state_dict(load_file(folder / WEIGHTS), strict=False, assign=True)
    return EagerPrograms(plan, source.model)


def greedy_text(programs: Programs, prompt: list[int], count: int) -> list[int]:
    """Return the next tokens of a prompt, asking programs for them as the loop does."""
    known = np.array([*prompt, *[0] * programs.lookahead])
    chunk, last = SMALL_STEPS["prefill_chunk"], len(prompt) - 1
    for start in range(0, last, chunk):
        programs.prefill(0, start, known[start : min(start + chunk, last) + programs.lookahead])
    programs.begin(0, last, prompt[-1])
    output = list[int]()
    while len(output) < count:
        step = programs.step(np.array([True]), last + len(output) + 16)
        output += step.tokens[0, : step.num_tokens[0]].tolist()
    return output[:count]


def altered_engine(engine: Path, to: Path, rank: int, program: str, alter: Alteration) -> Path:
    """Copy an engine with other collectives in one rank's program, and update its manifest."""
    copy = shutil.copytree(engine, to)
    folder = copy / name_rank(rank)
    path = folder / f"{program}.engine"
    network: Network = torch.load(path, weights_only=False)
    first, second, *_ = (x for x in network.layers if x.type is LayerType.DIST_COLLECTIVE)
    alter(first, second)
    path.write_bytes(network.to_bytes())
    manifest = read_manifest(folder)
    files = describe_files(folder, {})
    text = manifest.model_copy(update={"files": files}).to_json()
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    return copy


def exchanged(first: ILayer, second: ILayer) -> None:
    """Let two collectives happen in the other order."""
    first.name, second.name = second.name, first.name


def left_out(first: ILayer, second: ILayer) -> None:
    """Leave the second collective out, whose own term takes its place."""
    second.type, second.function = LayerType.OTHER, "aten::clone.default"
