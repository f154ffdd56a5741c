"""Random damage to a checkpoint folder: the checking stages pass or raise a typed error."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtpbuild.builder.checkpoint.generation import read_generation_ids
from mtpbuild.builder.checkpoint.shards import INDEX, SINGLE
from mtpbuild.builder.compiler.fingerprint import fingerprint, hash_files
from mtpbuild.builder.models.common.weight import WHOLE, convert_weights, join_slices
from mtpbuild.builder.models.deepseek_v3.weights import weight_table
from mtpbuild.builder.plan.plan import Plan
from mtpbuild.builder.targets import load_target
from mtpbuild.builder.weights.files import open_checkpoint
from mtpbuild.runtime.errors import CheckpointError
from tests.support.checkpoints import SMALL, load_config, random_checkpoint, shard

Damage = Callable[[Path], None]
TINY = SMALL | {"vocab_size": 11, "hidden_size": 8, "n_routed_experts": 4, "n_group": 2}
FILES = ("config.json", "generation_config.json", SINGLE, INDEX, "model-00002-of-00003.safetensors")
HEADER = 6000  # bytes; about the header of model.safetensors


@pytest.fixture(scope="module", params=["one file", pytest.param("shards", marks=pytest.mark.full)])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = random_checkpoint(tmp_path_factory.mktemp("sound") / "model", **TINY)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "bos_token_id": 0}')
    if request.param == "shards":
        shard(folder)
    return folder


def check(folder: Path) -> int:
    """All that a build does before it writes; returns how many weights there are."""
    config = load_config(folder)
    read_generation_ids(folder, config)
    fingerprint(hash_files(folder), Plan(config, 0, None, 1, 64, 16), load_target("onnxruntime"))
    checkpoint = open_checkpoint(folder)
    return sum(1 for _ in join_slices(convert_weights(checkpoint, checkpoint.check(config))))


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def flip(name: str, at: int, mask: int) -> Damage:
    def flipped(raw: bytes) -> bytes:
        return raw[: at % len(raw)] + bytes([raw[at % len(raw)] ^ mask]) + raw[at % len(raw) + 1 :]

    return rewrite(name, flipped)


def cut(name: str, at: int) -> Damage:
    return rewrite(name, lambda raw: raw[: at % len(raw)])


def replace(name: str, new: bytes) -> Damage:
    return rewrite(name, lambda raw: new)


def delete(name: str, directory: bool) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        if directory:
            (folder / name).mkdir()

    return damage


def edit_json(name: str, key: int, value: Any) -> Damage:
    """Set one value of a JSON file, or of the header of a safetensors file."""

    def edited(raw: bytes) -> bytes:
        header, size = name.endswith(".safetensors"), int.from_bytes(raw[:8], "little")
        tree = json.loads(raw[8 : 8 + size] if header else raw)
        places = list(walk(tree))
        node, place = places[key % len(places)]
        node[place] = value
        text = json.dumps(tree).encode()
        return len(text).to_bytes(8, "little") + text + raw[8 + size :] if header else text

    return rewrite(name, edited)


def walk(tree: Any) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, dict | list):
            yield from walk(value)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([2**31, 2**63, 2**64, 10**30, 4095]),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["BF16", "F8_E4M3", "I64", "F4", "../x", "yarn", "default", "\0"]),
    st.lists(st.integers(-1, 40), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
NAMES, PLACES = st.sampled_from(FILES), st.integers(0, HEADER) | st.integers(0, 10**6)
DAMAGES = st.one_of(
    st.builds(flip, NAMES, PLACES, st.integers(1, 255)),
    st.builds(cut, NAMES, PLACES),
    st.builds(replace, NAMES, st.binary(max_size=40)),
    st.builds(delete, NAMES, st.booleans()),
    st.builds(edit_json, NAMES, PLACES, VALUES),
    st.builds(edit_json, st.just("config.json"), PLACES, VALUES),
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(damages=st.lists(DAMAGES, min_size=1, max_size=2))
def test_damage_is_seen_or_harmless(sound: Path, damages: list[Damage]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = shutil.copytree(sound, Path(temporary) / "model")
        for damage in damages:
            try:
                damage(folder)
            except (OSError, ValueError, IndexError, ZeroDivisionError, TypeError, AttributeError):
                continue  # a file that this folder lacks, or that the first damage has spoilt
        says = ""
        try:
            assert check(folder) == len(weight_table(load_config(folder), WHOLE))
        except CheckpointError as error:
            says = str(error)
        assert "\n" not in says


def test_the_folder_is_sound_without_damage(sound: Path) -> None:
    assert check(sound) == len(weight_table(load_config(sound), WHOLE))
