"""Reading a checkpoint: what is accepted, in every storage; what is refused, by name."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE
from mtpbuild.builder.formats import Entry
from mtpbuild.builder.models.common.weight import WHOLE, convert_weights, join_slices
from mtpbuild.builder.models.deepseek_v3.model import DeepseekV3
from mtpbuild.builder.models.deepseek_v3.weights import weight_table
from mtpbuild.builder.weights import checkpoint as checkpoint_module
from mtpbuild.builder.weights import files
from mtpbuild.builder.weights.checkpoint import Checkpoint
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.builder.weights.placed import write_weights
from mtpbuild.runtime.errors import CheckpointError
from tests.support.checkpoints import (
    SHAPES,
    SMALL,
    load_config,
    made_of,
    make_model,
    random_checkpoint,
    save_checkpoint,
    shard,
)
from tests.support.opened import load_model

NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
MTP_EMBEDDING = "model.layers.1.embed_tokens.weight"
MTP_HEAD = "model.layers.1.shared_head.head.weight"

Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return random_checkpoint(tmp_path / "model", **SMALL)


def check(folder: Path) -> Tensors:
    """Return the stages that read a checkpoint, without torch.export."""
    config = load_config(folder)
    checkpoint = open_checkpoint(folder)
    table = checkpoint.check(checkpoint.settle(config))
    return dict(join_slices(convert_weights(checkpoint, table)))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check(folder)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(folder))
    return str(caught.value)


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def assert_equal(a: Tensors, b: Tensors) -> None:
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_table_covers_exactly_the_models_parameters(shape: str) -> None:
    reference = make_model(**SHAPES[shape])
    wanted = {name: tuple(p.shape) for name, p in DeepseekV3(reference.config).named_parameters()}
    tensors, used, shapes = reference.state_dict(), set(), {}
    for weight in weight_table(reference.config, WHOLE):
        sources = [tensors[source.name] for source in weight.stored]
        assert [tuple(t.shape) for t in sources] == [s.shape for s in weight.stored]
        assert weight.name not in shapes
        shapes[weight.name] = tuple(made_of(weight, tensors).shape)
        used |= {source.name for source in weight.stored}
    assert shapes == wanted
    assert used == set(tensors)


@pytest.mark.parametrize("modules", [0, 1, 3])
@pytest.mark.parametrize("q_lora_rank", [None, 12])
def test_modules_and_query_ranks(modules: int, q_lora_rank: int | None, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"num_nextn_predict_layers": modules, "q_lora_rank": q_lora_rank}
    model = load_model(random_checkpoint(tmp_path, **shape), config := load_config(tmp_path))
    assert len(model.mtp) == modules
    assert config.q_lora_rank == q_lora_rank
    assert any("q_b_proj" in name for name, _ in model.named_parameters()) == bool(q_lora_rank)


def test_shards_give_the_same_weights(folder: Path) -> None:
    one = check(folder)
    shard(folder)
    assert not (folder / SINGLE).exists()
    assert_equal(check(folder), one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_number_formats(dtype: torch.dtype, folder: Path) -> None:
    """Also a mixture of them."""
    edit(folder, lambda t: t.update({k: w.to(dtype) for k, w in t.items() if k != NORM}))
    stored = load_file(folder / SINGLE)
    weights = check(folder)
    assert {t.dtype for t in weights.values()} == {torch.float32}
    assert torch.equal(weights["embed_tokens"], stored[EMBEDDING].float())
    assert torch.equal(weights["lm_head"], stored[HEAD].float().T)


def test_weights_are_read_one_by_one(folder: Path, tmp_path: Path) -> None:
    """When a weight is read, all weights before it are in the file already."""
    config = load_config(folder)
    checkpoint = open_checkpoint(folder)
    table = checkpoint.check(config)
    parameters = dict(DeepseekV3(config).named_parameters())
    shapes = {w.name: Entry("F32", tuple(parameters[w.name].shape)) for w in table}
    places = write_weights(
        tmp_path / "all", shapes, join_slices(convert_weights(checkpoint, table))
    )
    first = {source.name: weight.name for weight in reversed([*table]) for source in weight.stored}
    written = dict[str, int]()

    class Watched(Checkpoint):
        def read(self, name: str) -> Tensor:
            written.setdefault(name, (tmp_path / "again").stat().st_size)
            return super().read(name)

    watched = Watched(**{each.name: getattr(checkpoint, each.name) for each in fields(checkpoint)})
    write_weights(tmp_path / "again", shapes, convert_weights(watched, table))
    assert set(written) == set(checkpoint.tensors)
    for name, size in written.items():  # buffered writing may hold back at most one buffer
        assert size <= places[first[name]].offset <= size + 8192, name
    assert (tmp_path / "again").read_bytes() == (tmp_path / "all").read_bytes()


def test_one_file_is_open_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(folder)
    opened, most = 0, 0
    safe_open: Any = checkpoint_module.safe_open  # type: ignore[attr-defined]

    class Counted:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> Any:
            nonlocal opened, most
            opened += 1
            most = max(most, opened)
            return self.file.__enter__()

        def __exit__(self, *args: Any) -> None:
            nonlocal opened
            opened -= 1
            self.file.__exit__(*args)

    for module in (files, checkpoint_module):
        monkeypatch.setattr(module, "safe_open", Counted)
    check(folder)
    assert (opened, most) == (0, 1)


def test_the_weights_file_is_safetensors(folder: Path, tmp_path: Path) -> None:
    weights = check(folder)
    shapes = {name: Entry("F32", tuple(tensor.shape)) for name, tensor in weights.items()}
    places = write_weights(tmp_path / "w.safetensors", shapes, iter(weights.items()))
    stored = load_file(tmp_path / "w.safetensors")
    assert stored.keys() == weights.keys()
    raw = (tmp_path / "w.safetensors").read_bytes()
    for name, tensor in weights.items():
        assert torch.equal(stored[name], tensor)
        place = places[name]
        assert raw[place.offset : place.offset + place.size] == tensor.numpy().tobytes()
    assert min(place.offset for place in places.values()) % 64 == 0


Change = Callable[[Tensors], Any]
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def spoil(value: float, dtype: torch.dtype) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[EXPERT] = tensors[EXPERT].to(dtype)
        tensors[EXPERT][-1, -1] = value

    return change


DAMAGED: dict[str, tuple[Change, str]] = {
    "no norm": (lambda t: t.pop(NORM), f": missing tensor {NORM}"),
    "no head": (lambda t: t.pop(HEAD), f": missing tensor {HEAD}"),
    "no layer": (
        lambda t: [t.pop(n) for n in [*t] if ".layers.0." in n],
        "missing tensor model.layers.0.input_layernorm.weight (and ",
    ),
    "more": (
        lambda t: t.update({"model.layers.7.mlp.x": torch.zeros(1)}),
        "does not have: model.layers.7.mlp.x",
    ),
    "a longer norm": (
        lambda t: t.update({NORM: torch.ones(33)}),
        f"tensor {NORM} has shape [33], config.json makes it [32]",
    ),
    **{
        f"{value} in {dtype}": (spoil(value, dtype), f": tensor {EXPERT} holds NaN or Inf")
        for value in (float("nan"), float("inf"), float("-inf"))
        for dtype in (torch.bfloat16, torch.float32)
    },
    "another rank": (lambda t: t.update({NORM: torch.ones(1, 32)}), "has shape [1, 32]"),
}


def converted(dtype: torch.dtype) -> Change:
    return lambda tensors: tensors.update({NORM: tensors[NORM].to(dtype)})


for dtype, name in ((torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.bool, "BOOL")):
    DAMAGED[name] = converted(dtype), f"tensor {NORM} is {name}; supported: BF16, F16, F32"


@pytest.mark.parametrize("damage", DAMAGED)
def test_tensors_that_do_not_fit(damage: str, folder: Path) -> None:
    change, says = DAMAGED[damage]
    edit(folder, change)
    assert says in refused(folder)


def test_modules_count_by_their_tensors_whatever_config_json_says(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    assert load_config(folder).num_nextn_predict_layers == 1
    assert any(name.startswith("mtp.0.") for name in check(folder))


def test_repeated_embedding_and_head_are_accepted_if_equal(folder: Path) -> None:
    plain, copies = check(folder), {MTP_EMBEDDING: EMBEDDING, MTP_HEAD: HEAD}
    edit(folder, lambda t: t.update({copy: t[name].clone() for copy, name in copies.items()}))
    assert_equal(check(folder), plain)


@pytest.mark.parametrize(("name", "of"), [(MTP_EMBEDDING, EMBEDDING), (MTP_HEAD, HEAD)])
def test_repeated_tensors_that_differ_are_the_modules_own(name: str, of: str, folder: Path) -> None:
    def repeat(tensors: Tensors) -> None:
        tensors[name] = tensors[of].clone()
        tensors[name][0, 0] += 1

    edit(folder, repeat)
    leaf = "lm_head" if of == HEAD else "embed_tokens"
    own, trunk = check(folder)[f"mtp.0.{leaf}"], check(folder)[leaf]
    own = own.T if of == HEAD else own
    trunk = trunk.T if of == HEAD else trunk
    assert own[0, 0] == trunk[0, 0] + 1
    assert torch.equal(own[1:], trunk[1:])
    edit(folder, lambda tensors: tensors.update({name: tensors[of][:-1].clone()}))
    assert f"tensor {name} has shape" in refused(folder)


def test_tied_embeddings(tmp_path: Path) -> None:
    model = make_model(**SMALL)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    folder = save_checkpoint(tmp_path, model, **SMALL, tie_word_embeddings=True)
    both = check(folder)
    assert torch.equal(both["lm_head"], both["embed_tokens"].T)
    edit(folder, lambda tensors: tensors.pop(HEAD))
    assert_equal(check(folder), both)
    edit(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    assert f"{HEAD} differs from {EMBEDDING}" in refused(folder)


FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda raw: b"", f"{SINGLE}: not a readable safetensors file"),
    "half a size": (lambda raw: raw[:4], f"{SINGLE}: not a readable safetensors file"),
    "half a header": (lambda raw: raw[:100], f"{SINGLE}: not a readable safetensors file"),
    "cut": (lambda raw: raw[:-1234], f": {SINGLE} is 1,234 bytes short; resume the download"),
    "a pointer": (
        lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "a Git LFS pointer, not the weights: run `git lfs pull`",
    ),
}


@pytest.mark.parametrize("damage", FILES)
def test_files_that_are_no_checkpoint(damage: str, folder: Path) -> None:
    change, says = FILES[damage]
    (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes()))
    assert says in refused(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / SINGLE).unlink()
    assert refused(folder) == f"{folder}: neither {SINGLE} nor {INDEX}"


def test_half_downloaded(folder: Path) -> None:
    """A shard has come in part; then two have not come at all."""
    shard(folder)
    files = sorted(folder.glob("model-*"))
    files[2].write_bytes(files[2].read_bytes()[:-10])
    assert refused(folder) == f"{folder}: {files[2].name} is 10 bytes short; resume the download"
    files[0].unlink()
    files[1].unlink()
    missing = f"shard {files[0].name} named by {INDEX} is missing (and 2 more)"
    assert refused(folder) == f"{folder}: {missing}; resume the download"


def test_a_tensor_in_two_shards(folder: Path) -> None:
    """Which one is meant can't be known."""
    shard(folder)
    third = folder / "model-00003-of-00003.safetensors"
    save_file(load_file(third) | {EMBEDDING: torch.zeros(61, 32)}, third)
    assert f"{third}: tensor {EMBEDDING} is in " in refused(folder)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("../model.safetensors", "is not a file name"),
        ("a/b", "is not a file name"),
        ("/etc/passwd", "is not a file name"),
        ("..", "is missing"),
        ("", "is missing"),
        ("x" * 300, "is missing"),
        ("a\0b", "is missing"),
    ],
)
def test_shards_outside_the_folder(name: str, says: str, folder: Path) -> None:
    save_file({"x": torch.zeros(1)}, folder.parent / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": {EMBEDDING: name}}))
    assert says in refused(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[" * 99999],
    ids=["empty", "cut", "list", "number", "no map", "list map", "no name", "deep"],
)
def test_damaged_index(text: str, folder: Path) -> None:
    (folder / INDEX).write_text(text)
    assert f"{folder / INDEX}: no usable weight_map" in refused(folder)


def test_what_the_index_promises(folder: Path) -> None:
    """A tensor that no weight needs may be missing; one that is needed is named."""
    shard(folder)
    raw = json.loads((folder / INDEX).read_text())
    raw["weight_map"] |= {"model.layers.0.self_attn.sinks": min(raw["weight_map"].values())}
    (folder / INDEX).write_text(json.dumps(raw))
    whole = check(folder)
    file = folder / "model-00001-of-00003.safetensors"
    tensors = load_file(file)
    name = min(tensors)
    unused = ("q_scale", "attn.prob_output_scale", "k_proj.v_scale", "rotary_emb.inv_freq")
    extra = {f"model.layers.0.self_attn.{each}": torch.ones(1) for each in unused}
    save_file(tensors | extra, file)
    assert_equal(check(folder), whole)
    tensors.pop(name)
    save_file(tensors, file)
    assert refused(folder) == f"{folder}: missing tensor {name}"
