"""`--weight-bits`: which weights of an int4 trunk are int8."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpbuild.builder.compiler.dry_run import dry_run
from mtpbuild.builder.compiler.refit import refit
from mtpbuild.builder.formats import FORMATS
from mtpbuild.builder.models import load_config
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.builder.weights.bit_budget import list_products, spend_bits
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.scheme import Scheme, build_scheme, read_scheme
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime.contract.manifest import WEIGHTS
from mtpbuild.runtime.safetensors_header import read_header
from tests.support.families import make_family, save_family
from tests.support.invoke import refusal
from tests.support.requests import build

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
STRONG = 2  # the layer with a massive unit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_family("llama", **SIZES)
    mlp: Any = model.model.layers[STRONG].mlp
    with torch.no_grad():
        for weight in (mlp.gate_proj.weight[5], mlp.up_proj.weight[5], mlp.down_proj.weight[:, 5]):
            weight *= 8
    return save_family(tmp_path_factory.mktemp("budget") / "llama", "llama", model, **SIZES)


def choose(folder: Path, bits: float) -> Scheme:
    scheme = spend_bits(
        build_scheme("int4", None, bits), load_config(folder), open_checkpoint(folder)
    )
    assert scheme is not None
    return scheme


def count_mean_bits(folder: Path, scheme: Scheme) -> float:
    config, total, count = load_config(folder), 0, 0
    for stored in list_products(scheme, config):
        format = FORMATS[scheme.wanted(config, stored.name) or ""]
        total += 8 * sum(entry.nbytes for entry in format.parts(stored.shape).values())
        count += prod(stored.shape)
    return total / count


def test_the_strongest_unit_is_first(folder: Path) -> None:
    assert choose(folder, 5.25).int8_modules == (f"model.layers.{STRONG}.*down_proj",)
    unknown = spend_bits(build_scheme("int4", None, 5.3), load_config(folder))
    assert unknown is not None
    assert unknown.int8_modules == ("model.layers.0.*attn.*",)


def test_the_budget_is_spent_and_kept(folder: Path) -> None:
    chosen = [choose(folder, bits) for bits in (5.1, 5.4, 5.8, 7.0, 8.4)]
    means = [count_mean_bits(folder, scheme) for scheme in chosen]
    largest = 4 * 2 * 96 * 64 / (4 * (3 * 96 * 64 + 3 * 64 * 64))  # gate and up of a layer
    for scheme, mean in zip(chosen, means, strict=True):
        assert scheme.bits is not None
        assert scheme.bits - largest < mean <= scheme.bits
    assert means == sorted(set(means))


REFUSALS = [
    (("--weight-bits", "5"), "--weight-bits 5 goes with --weights int4"),
    (("--weights", "int8", "--weight-bits", "5"), "--weight-bits 5 goes with --weights int4"),
    (
        ("--weights", "int4", "--weight-bits", "4.5"),
        "--weight-bits 4.5: this model's int4 weights take 5.03 bits on average and int8 8.50: "
        "give a number between them",
    ),
    (("--weights", "int4", "--weight-bits", "8.5"), "--weight-bits 8.5: this model's int4 weights"),
]


@pytest.mark.parametrize(("flags", "why"), REFUSALS)
def test_refusals(flags: tuple[str, ...], why: str, folder: Path) -> None:
    assert refusal("build", "--model", folder, "--nextn", 0, "--dry-run", *flags).startswith(why)


@pytest.mark.usefixtures("quick")
def test_a_build_and_what_reads_its_manifest(folder: Path, tmp_path: Path) -> None:
    request = BuildRequest(
        str(folder), (0,), out=tmp_path / "e", scheme=build_scheme("int4", None, 5.25)
    )
    (foreseen,) = dry_run(request, Stages()).engines
    (built,) = build(request)
    _, _, start = read_header(built.folder / WEIGHTS)
    assert foreseen.weight_file_bytes == built.manifest.files[WEIGHTS].size - start
    assert built.manifest.build.weight_bits == 5.25
    assert built.manifest.build.int8_modules == (f"model.layers.{STRONG}.*down_proj",)
    assert build(request)[0].unchanged
    before = (built.folder / WEIGHTS).read_bytes()
    refit(built.folder, str(folder))
    assert (built.folder / WEIGHTS).read_bytes() == before
    scheme = read_scheme(built.manifest.build)
    name = f"model.layers.{STRONG}.mlp.down_proj.weight"
    finer, coarse, exact = (
        load_plain(folder, scheme=each).state_dict()[name]
        for each in (scheme, build_scheme("int4"), None)
    )
    assert (finer - exact).norm() < (coarse - exact).norm() / 8
