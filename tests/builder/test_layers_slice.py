"""A slice of a checkpoint is the model whose layers these are."""

import json
import re
from pathlib import Path

import pytest
import torch

from mtpbuild.builder.checkpoint.layers_slice import LayersSlice, parse_layers
from mtpbuild.builder.compiler.dry_run import dry_run
from mtpbuild.builder.models.common.weight import convert_weights, join_slices
from mtpbuild.builder.models.deepseek_v3.reference import PlainDeepseek
from mtpbuild.builder.plan.request import BuildRequest
from mtpbuild.builder.stages import Stages
from mtpbuild.lab.verify.plain import load_plain
from mtpbuild.runtime.errors import BuildError, UsageError
from tests.support.checkpoints import load_config, lower, make_model, save_checkpoint
from tests.support.invoke import invoke
from tests.support.opened import opened
from tests.support.requests import build

SHAPE = {"num_hidden_layers": 5, "first_k_dense_replace": 2, "num_nextn_predict_layers": 2}


@pytest.fixture(scope="module")
def whole() -> PlainDeepseek:
    return make_model(**SHAPE)


@pytest.fixture(scope="module")
def folder(whole: PlainDeepseek, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("slices") / "five", whole, **SHAPE)


@pytest.mark.parametrize(
    ("first", "last", "dense"), [(0, 0, 2), (0, 4, 2), (1, 3, 1), (2, 2, 0), (4, 4, 0)]
)
def test_its_weights_are_those_layers(
    first: int, last: int, dense: int, whole: PlainDeepseek, folder: Path
) -> None:
    count = last - first + 1
    types = (["dense"] * dense + ["sparse"] * count)[:count]
    sparse = {"mlp_layer_types": types, "mtp_mlp_layer_types": ["sparse"] * 2}
    own = make_model(1, **SHAPE | {"num_hidden_layers": count} | sparse)
    order = [*range(first, last + 1), 5, 6]  # main layers, then the modules
    tensors = whole.state_dict()
    own.load_state_dict(
        {
            name: tensors[re.sub(r"layers\.(\d+)", lambda m: f"layers.{order[int(m[1])]}", name)]
            for name in own.state_dict()
        }
    )
    cut, config = LayersSlice(first, last), load_config(folder)
    source = opened(folder, cut.of(config), layers=cut)
    wanted = lower(own).state_dict()
    found = dict(join_slices(convert_weights(source.checkpoint, source.table)))
    assert list(found) == [weight.name for weight in source.table]
    assert set(found) <= set(wanted)
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
    plain = load_plain(folder, cut).state_dict()
    assert plain.keys() == own.state_dict().keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in own.state_dict().items())


@pytest.mark.full
def test_it_is_verified(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It equals its nextn 0 engine, which is built, and the plain model of these layers."""
    monkeypatch.chdir(tmp_path)
    build(BuildRequest(str(folder), (2,), layers=parse_layers("1-2"), max_batch=2))
    (tmp_path / "prompts.jsonl").write_text('{"input_ids": [9, 10, 11, 12]}\n')
    engine = ("--engine", "engines/five-layers1-2_n2", "--model", folder)
    flags = ("--prompts", "prompts.jsonl", "--output-len", "16", "--seeds", "20", "--threads", "1")
    code, out, err = invoke("verify", *engine, *flags, "--json")
    verdicts = {c["check"]: c["verdict"] for c in json.loads(out)["checks"]}
    greedy, plain, sampled, *_ = verdicts
    assert (code, err) == (0, "")
    assert [verdicts[name] for name in (greedy, plain, sampled)] == ["passed"] * 3
    assert Path("engines/five-layers1-2_n0").is_dir()


@pytest.mark.usefixtures("quick")
def test_it_is_an_engine_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = BuildRequest(str(folder), (1,), layers=parse_layers("1-2"))
    (built,) = build(request)
    assert built.folder == Path("engines/five-layers1-2_n1")
    assert built.manifest.model.name == "five-layers1-2"
    assert built.manifest.model.num_hidden_layers == 2
    assert (built.manifest.build.layers, built.manifest.whole_model) == ("1-2", "five")
    assert build(request)[0].unchanged
    foreseen = dry_run(request, Stages())
    assert foreseen.model.table.parameters == built.manifest.model.parameters
    assert not foreseen.engines[0].new
    with pytest.raises(BuildError, match=r"holds an engine of five-layers1-2"):
        build(BuildRequest(str(folder), (1,), out=built.folder))


@pytest.mark.parametrize("text", ["", "3", "0-", "-1-2", "a-b", "0-3,5", "1-9999999"])
def test_what_is_not_a_range(text: str) -> None:
    with pytest.raises(UsageError, match="is not a range such as 0-3"):
        parse_layers(text)


@pytest.mark.parametrize("text", ["0-5", "3-2", "7-9"])
def test_layers_that_are_not_there(text: str, folder: Path) -> None:
    with pytest.raises(UsageError, match=f"--layers {text} is outside 0-4"):
        build(BuildRequest(str(folder), (1,), layers=parse_layers(text)))
