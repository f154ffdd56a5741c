"""Engines whose main model is a program of its own, which prompts and all steps run."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from mtpbuild.builder.models import load_config
from mtpbuild.builder.models.deepseek_v3.config import DeepseekV3Config
from mtpbuild.builder.models.deepseek_v3.reference import Transformer
from mtpbuild.builder.plan import DrafterName
from mtpbuild.builder.recipe import find_recipe
from mtpbuild.builder.targets import load_target
from mtpbuild.runtime import Engine, SamplingParams
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.contract.programs import MIXED, is_trunk
from mtpbuild.runtime.programs import load_programs
from mtpbuild.runtime.programs.onnxruntime import OnnxPrograms
from tests.reference.recompute import greedy
from tests.support.checkpoints import QUANTIZABLE, make_predictable, save_checkpoint
from tests.support.constrained import check_masks
from tests.support.engines import EngineBuilder
from tests.support.forced import Run, Seen
from tests.support.inductor_engines import check_texts
from tests.support.invoke import invoke

pytestmark = pytest.mark.xdist_group("predictable")
CHUNK = 4
NEXTN = 1  # of the engine that `make test` builds; a layer of a program is compiled as any other
SHARED: dict[str, Any] = {"trunk": "shared", "prefill_chunk": CHUNK}
PRODUCTS = {"MatMul", "MatMulNBits", "QMoE", "Gemm"}


@pytest.mark.parametrize(
    ("nextn", "drafter"),
    [
        (NEXTN, "mtp-vanilla"),
        pytest.param(0, None, marks=pytest.mark.full),
        pytest.param(3, "mtp-vanilla", marks=pytest.mark.full),
        pytest.param(3, "mtp-eagle", marks=pytest.mark.full),
    ],
)
def test_every_step_equals_recomputation(
    nextn: int,
    drafter: DrafterName | None,
    predictable_folder: Path,
    predictable: Transformer,
    build_engine: EngineBuilder,
) -> None:
    """Drafts and tokens, of one request after the other, and of a batch in any mode."""
    slots = {"max_batch": 3} if nextn != NEXTN else {}
    engine = build_engine(predictable_folder, nextn, drafter, **slots, **SHARED)
    manifest = read_manifest(engine)
    assert trunk_of(engine)
    assert ("prefill" in manifest.programs) == bool(nextn)  # nothing else is filled
    programs = load_programs(engine, manifest, threads=1)
    assert isinstance(programs, OnnxPrograms)
    rng, seen = np.random.default_rng(nextn), Seen()
    for length in (11, 1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 20):
        prompt = rng.integers(0, 61, length).tolist()
        _, saw = Run(programs, predictable, nextn, drafter, CHUNK, rng).steps(prompt, 10)
        seen.accepted |= saw.accepted
    assert seen.accepted == set(range(1, nextn + 2))
    check_masks(programs, manifest)
    check_texts(engine, predictable)


@pytest.mark.full
def test_an_adaptive_engine(
    predictable_folder: Path, predictable: Transformer, build_engine: EngineBuilder
) -> None:
    """Steps of every number of drafts run one trunk, whose tokens are as many as they judge."""
    engine = build_engine(predictable_folder, "auto", **SHARED)
    programs = load_programs(engine, read_manifest(engine), threads=1)
    assert isinstance(programs, OnnxPrograms)
    rng = np.random.default_rng(1)
    run = Run(programs, predictable, 4, "mtp-eagle", CHUNK, rng, adaptive=True)
    run.steps(rng.integers(0, 61, 9).tolist(), 30)
    for nextn in (4, 2, 0):
        programs.draft(nextn)
        check_masks(programs, read_manifest(engine), nextn)
    prompt = rng.integers(0, 61, 7).tolist()
    with Engine.load(engine, threads=1) as loaded:
        result = loaded.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    assert list(result.token_ids) == greedy(predictable, prompt, 40)


def trunk_of(engine: Path) -> list[str]:
    """The main model's programs, in the order in which they run."""
    return [name for name in read_manifest(engine).programs if is_trunk(name)]


def products(engine: Path, program: str) -> Iterator[tuple[int, str]]:
    """List where each product's weight lies, and the product's type; branches count too."""
    graph = onnx.load(engine / f"{program}.onnx", load_external_data=False).graph
    places = {}
    for tensor in graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if "offset" in entries:
            places[tensor.name] = int(entries["offset"])
    for node in graph.node:
        if node.op_type in PRODUCTS:
            yield from ((places[i], node.op_type) for i in node.input if i in places)


def copies(engine: Path) -> Counter[int]:
    """Count the programs of a greedy run that pack each product's weight."""
    names = [name for name in read_manifest(engine).programs if not name.startswith(MIXED)]
    return Counter(
        place for name in names for place in {place for place, _ in products(engine, name)}
    )


def test_layers_of_the_programs(predictable_folder: Path, build_engine: EngineBuilder) -> None:
    """Each layer is in one program, in order; hidden states go from one to the next."""
    engine = build_engine(predictable_folder, NEXTN, "mtp-vanilla", **SHARED)
    programs = read_manifest(engine).programs
    given = [[t.name for t in programs[name].inputs] for name in trunk_of(engine)]
    layers = load_config(predictable_folder).num_hidden_layers
    assert trunk_of(engine) == ["trunk", *(f"trunk_{i}" for i in range(1, layers))]
    assert given[0] == ["kv.0", "tokens", "start"]
    assert given[1:] == [[f"kv.{i}", "hidden", "start"] for i in range(1, layers)]


def test_one_copy_of_the_weights(predictable_folder: Path, build_engine: EngineBuilder) -> None:
    """Each session packs what its products read: of the main model's weights there is one copy."""
    shared = build_engine(predictable_folder, NEXTN, "mtp-vanilla", **SHARED)
    inline = build_engine(predictable_folder, 3, "mtp-vanilla", prefill_chunk=CHUNK)
    trunk = {place for name in trunk_of(shared) for place, _ in products(shared, name)}
    assert len(trunk) > 10
    assert all(copies(shared)[place] == 1 for place in trunk)
    assert max(copies(inline).values()) == 2  # prompts and steps
    assert sum(count == 2 for count in copies(inline).values()) >= len(trunk) - 3


def test_heads_are_loaded_before_the_main_model(
    predictable_folder: Path, build_engine: EngineBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What packs most for a moment does it while little else is in memory."""
    engine = build_engine(predictable_folder, NEXTN, "mtp-vanilla", **SHARED)
    begun, load = list[str](), OnnxPrograms._session

    def noted(programs: OnnxPrograms, program: str) -> object:
        begun.append(program)
        return load(programs, program)

    monkeypatch.setattr(OnnxPrograms, "_session", noted)
    Engine.load(engine).close()
    trunk = trunk_of(engine)
    assert len(trunk) > 1
    assert set(begun[: -len(trunk)]) == {"prefill", "decode"}
    assert set(begun[-len(trunk) :]) == set(trunk)


@pytest.fixture(scope="module")
def quantizable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    shape = QUANTIZABLE | {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    shape |= {"num_hidden_layers": 1}
    model = make_predictable(0, **shape)
    return save_checkpoint(tmp_path_factory.mktemp("trunk") / "model", model, **shape)


def test_projections_by_head(quantizable: Path, build_engine: EngineBuilder) -> None:
    """Where products are integer, `kv_b_proj` is int8 too, in blocks along what each head reads."""
    engine = build_engine(quantizable, 0, weights="int4", **SHARED)
    assert read_manifest(engine).build.block_size == 32
    config = load_config(quantizable)
    assert isinstance(config, DeepseekV3Config)
    found = list[str]()
    for name in trunk_of(engine):
        graph = onnx.load(engine / f"{name}.onnx", load_external_data=False).graph
        found += [i.name for i in graph.initializer if ".w_uk." in i.name and "values" in i.name]
        assert not any(node.op_type == "If" for node in graph.node)
    assert len(found) == config.num_attention_heads * config.num_hidden_layers
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, 7).tolist() for _ in range(20)]
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    inline = build_engine(quantizable, 0, weights="int4", trunk="inline", prefill_chunk=CHUNK)
    texts = []
    for folder in (engine, inline):  # there they are in fp32
        with Engine.load(folder, threads=1) as loaded:
            texts.append([result.token_ids for result in loaded.generate(prompts, params)])
    assert sum(a == b for a, b in zip(*texts, strict=True)) >= 18  # of a random model's tokens


def test_when_it_is_shared() -> None:
    """Small models' steps are too short for one program more."""
    target = load_target("onnxruntime")
    shared = {}
    for name in ("deepseek-tiny", "gigachat3-10b-a1.8b", "mimo-7b-rl"):
        recipe = find_recipe(name)
        assert recipe is not None
        config = load_config(recipe.config_folder)
        for trunk in ("auto", "shared", "inline"):
            style = target.style(target.Options(trunk=trunk), config)
            shared[name, trunk] = style.shared_trunk
    assert {name for (name, trunk), on in shared.items() if on and trunk == "auto"} == {
        "gigachat3-10b-a1.8b",
        "mimo-7b-rl",
    }
    assert all(on for (_, trunk), on in shared.items() if trunk == "shared")
    assert not any(on for (_, trunk), on in shared.items() if trunk == "inline")


def test_a_wrong_flag(tmp_path: Path) -> None:
    code, _, said = invoke(
        "build", "--model", "deepseek-tiny", "--trunk", "none", "--out", tmp_path
    )
    assert code
    assert "--trunk none is unknown; supported: auto, shared, inline" in said
