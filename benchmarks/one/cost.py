"""Counts a step's bytes of weights and caches and its operations, and bounds its time by both.

A pass reads once every weight outside the routed experts, each routed expert that random tokens
choose, and the caches' rows in use; it reads and writes recurrent states. The head is read once to
verify and once per draft (or the draft head instead). An embedding's rows are left out. A pass can
be no faster than its bytes over the bandwidth, nor than its operations over the rate.
"""

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

import onnx

from mtpbuild.builder.models import ModelConfig, find_family_of
from mtpbuild.builder.models.common.weight import WHOLE, find_weight_of
from mtpbuild.builder.models.costs import Costs
from mtpbuild.builder.plan.weight_classes import find_layout
from mtpbuild.builder.weights.placed import read_places
from mtpbuild.builder.weights.table import list_weights
from mtpbuild.lab.forecast.cpu import make_engine_model
from mtpbuild.lab.forecast.step import CostModel, StepLoad, count_distinct_experts
from mtpbuild.runtime.contract.drafters import ASSISTANT, BLOCK_HEAD, VANILLA
from mtpbuild.runtime.contract.manifest import WEIGHTS, Manifest, read_manifest
from mtpbuild.runtime.contract.programs import host_type
from mtpbuild.runtime.ranks import ALONE
from one.machine import Machine
from one.shapes import Shape

ENDS = ("embedding", "head", "module head", "draft_head")  # groups of weights
CACHED = ("rows", "window")  # roles of caches
LAYERS, PROGRAM = "layers.", "model."  # prefixes: of a layer's weights; in programs, of all
PREFILL = "prefill.onnx"
OUR_STATES, THEIR_STATES = 3, 2  # reads and writes of a recurrent state in a pass


@dataclass(frozen=True)
class Cost:
    """A pass's bytes, its operations with weights, and attention's over cached rows.

    rows: what attention multiplies, "int8" over caches of int8, else "fp32".
    """

    bytes: float
    products: float
    attention: float
    rows: str = "fp32"

    def seconds(self, machine: Machine, weights: str) -> float:
        """Return the least seconds of the pass."""
        work = self.products / machine.rate(weights) + self.attention / machine.rate(self.rows)
        return max(self.bytes / machine.bandwidth(self.bytes), work)


@dataclass(frozen=True)
class Counted:
    """Counts of the bytes and operations of the steps of a model's engines."""

    config: ModelConfig
    model: CostModel

    @property
    def costs(self) -> Costs:
        return find_family_of(self.config).costs(self.config, ALONE)

    def share(self, tokens: int) -> float:
        """Return the share of routed experts that at least one of the tokens chooses."""
        costs = self.costs
        return count_distinct_experts(costs, tokens) / costs.experts if costs.experts else 1.0

    def step(self, engine: Path, context: int, batch: int) -> Cost:
        """Count a step of the engine, drafts included."""
        manifest = read_manifest(engine)
        nextn, passes = manifest.build.nextn, draft_passes(manifest)
        held = sum_weight_bytes(engine, self.config)
        modules = max(1, self.config.num_nextn_predict_layers)
        verified = self.share(batch * (nextn + 1))
        read = held["trunk"] + held["head"] + held["trunk, routed"] * verified
        for tokens in passes:
            routed = held["module, routed"] * self.share(batch * tokens)
            read += (held["module"] + routed) / modules
        head = held["draft_head"] or held["module head"] / modules or held["head"]
        read += len(passes) * head
        cache = next((spec.dtype for spec in manifest.state if spec.role in CACHED), "float32")
        rows, products, attention = self.cached(nextn, StepLoad(batch, context, cache))
        read += rows + batch * OUR_STATES * self.model.state_bytes
        return Cost(read, products, attention, "int8" if cache == "int8" else "fp32")

    def cached(self, nextn: int, load: StepLoad) -> tuple[float, float, float]:
        """Count the bytes of cached rows, the operations of products, and those of attention."""
        parts = self.model.step(nextn, load)
        caches = [part for part in parts if part.name.endswith("caches")]
        attention = sum(part.operations for part in caches)
        products = sum(part.operations for part in parts) - attention
        return sum(part.bytes for part in caches), products, attention

    def prompt(self, engine: Path, length: int) -> Cost:
        """Count a prompt in one pass, without attention, whose operations depend on its form."""
        return self._one_request(self.step(engine, 0, length), engine, length, OUR_STATES)

    def gguf_prompt(self, sizes: Mapping[str, int], engine: Path, length: int) -> Cost:
        """Count a prompt of llama.cpp in the same way; engine: one of the same shape."""
        return self._one_request(self.gguf(sizes, 0, length), engine, length, THEIR_STATES)

    def _one_request(self, cost: Cost, engine: Path, length: int, states: int) -> Cost:
        """Turn `length` requests' cost into a prompt's.

        It has one state. Only its last token goes through the head and the end of the last layer.
        """
        parts = self.model.step(0, StepLoad(length, 0, "float32"))
        heads = sum(part.operations for part in parts if part.name == "head") / length
        products = cost.products - (heads + self._count_last_token(engine)) * (length - 1)
        others = (length - 1) * states * self.model.state_bytes
        return replace(cost, bytes=cost.bytes - others, products=products)

    def _count_last_token(self, engine: Path) -> float:
        """Count the operations of the trunk's weights that a prompt's chunk does not multiply."""
        graph = onnx.load(engine / PREFILL, load_external_data=False).graph
        inputs = {name.removeprefix(PROGRAM) for node in graph.node for name in node.input}
        read = {*map(find_weight_of, inputs)}
        chosen = self.costs.chosen / max(1, self.costs.experts)
        return sum(
            2 * prod(stored.shape) * (chosen if weight.slices > 1 else 1.0)
            for weight in list_weights(self.config, WHOLE)
            if weight.name.startswith(LAYERS) and weight.name not in read
            for stored in weight.stored
        )

    def gguf(self, sizes: Mapping[str, int], context: int, batch: int, window: int = 1) -> Cost:
        """Count a pass of llama.cpp over `window` tokens per sequence; its caches are in fp16."""
        tokens, tied = batch * window, "output.weight" not in sizes
        read = sum(
            size * (self.share(tokens) if "_exps." in name else 1)
            for name, size in sizes.items()
            if tied or not name.startswith("token_embd.")
        )
        read += batch * THEIR_STATES * self.model.state_bytes
        # All tokens of a sequence read the same rows.
        rows, *_ = self.cached(0, StepLoad(batch, context, "bfloat16"))
        _, products, attention = self.cached(0, StepLoad(tokens, context, "bfloat16"))
        return Cost(read + rows, products, attention)


def count(checkpoint: Path, shape: Shape) -> Counted:
    """Count a checkpoint, which may be deleted afterwards, and its head, if the shape has one."""
    layout, scheme = find_layout(str(checkpoint), None), None
    if shape.head is not None:
        layout, scheme = replace(layout, config=shape.joined), shape.scheme
    return Counted(layout.config, make_engine_model(layout, scheme))


def draft_passes(manifest: Manifest) -> list[int]:
    """Return the tokens per request of each pass of an MTP module."""
    nextn = manifest.build.nextn
    if not nextn:
        return []
    if manifest.build.drafter == ASSISTANT:
        return [1] * nextn
    if manifest.build.drafter == BLOCK_HEAD:
        return [nextn]
    vanilla = manifest.build.drafter == VANILLA
    return [nextn + 1] * nextn if vanilla else [nextn + 1, *[1] * (nextn - 1)]


def sum_weight_bytes(engine: Path, config: ModelConfig) -> Counter[str]:
    """Sum the bytes in the weights file by their use in a step."""
    table = list_weights(config, WHOLE)
    routed = {weight.name for weight in table if weight.slices > 1}
    found: Counter[str] = Counter()
    for name, place in read_places(engine / WEIGHTS).items():
        stored = name.removesuffix(".rows")  # unquantised experts for a CPU are stored by outputs
        found[group(find_weight_of(stored), routed)] += place.size
    return found


def group(name: str, routed: Container[str] = ()) -> str:
    """Return the group of a weight, from its name in the program; routed: the experts' names."""
    leaf, module = name.rpartition(".")[2], name.startswith("mtp.")
    if leaf == "embed_tokens":
        return "embedding"
    if leaf == "lm_head":
        return "module head" if module else "head"
    if leaf == "draft_head":
        return "draft_head"
    kind = "module" if module else "trunk"
    return f"{kind}, routed" if name in routed else kind


def count_row_bytes(manifest: Manifest) -> Counter[str]:
    """Return a cached token's bytes in all main layers (`kv`) and modules in use (`mtp_kv`)."""
    found: Counter[str] = Counter()
    for spec in manifest.state:
        if spec.role == "rows":
            kind = "kv" if spec.owner.startswith("layers.") else "mtp_kv"
            found[kind] += spec.sizes["width"] * host_type(spec.dtype).itemsize
    return found


def as_json(costs: Mapping[str, Cost]) -> dict[str, dict[str, float]]:
    return {name: asdict(cost) for name, cost in costs.items()}
