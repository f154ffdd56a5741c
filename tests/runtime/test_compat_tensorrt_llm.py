"""TensorRT-LLM's YAML file: what is taken, what is refused and with which words."""

import sys
from pathlib import Path

import pytest

from mtpbuild.runtime.compat.parse import parse_llm_yaml
from mtpbuild.runtime.compat.settings import Settings, require_supported
from mtpbuild.runtime.compat.tensorrt_llm import TRTLLM, TRTLLM_METHODS, TRTLLM_SPECULATIVE
from mtpbuild.runtime.errors import MissingDependencyError, UsageError

MTP = "speculative_config: {decoding_type: MTP, "


def parse_yaml(folder: Path, text: str) -> Settings:
    """Of a file `x.yaml`, which the messages call so too."""
    (folder / "x.yaml").write_text(text, encoding="utf-8")
    return parse_llm_yaml(folder / "x.yaml")


def refused_yaml(folder: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse_yaml(folder, text)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (MTP + "max_draft_len: 3}", Settings(nextn=3)),
        (MTP + "num_nextn_predict_layers: 1}", Settings(nextn=1)),
        (MTP + "num_nextn_predict_layers: 2, max_draft_len: 2}", Settings(nextn=2)),
        ("speculative_config: {decoding_type: mtp}", Settings()),
        ("speculative_config: null", Settings()),
        (MTP + "use_mtp_vanilla: true}", Settings(drafter="mtp-vanilla")),
        (MTP + "use_mtp_vanilla: False}", Settings()),
        (MTP + "use_rejection_sampling: true}", Settings(rejection_sample_method="standard")),
        (
            MTP + "begin_thinking_phase_token: 5, end_thinking_phase_token: 6}",
            Settings(begin_thinking_phase_token=5, end_thinking_phase_token=6),
        ),
        (MTP + "use_dynamic_tree: false, draft_len_schedule: null, relaxed_topk:}", Settings()),
        ("tensor_parallel_size: 1\nmoe_expert_parallel_size: -1\n", Settings()),
    ],
)
def test_tensorrt_llm(text: str, settings: Settings, tmp_path: Path) -> None:
    assert parse_yaml(tmp_path, text) == settings


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be an object of keys and values, not None"),
        ("MTP", "must be an object of keys and values, not 'MTP'"),
        ("1: 2", "a key must be text, not 1"),
        ("a: [1\nb: 2", "not YAML at line 2, column 2 (expected ',' or ']', but got ':')"),
        (
            "a: !!python/name:os.system x",
            "not YAML at line 1, column 4 (could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system')",
        ),
        ("a: !!bool x", "can't be read ('x')"),
        ("a: 2024-13-45", "can't be read (month must be in 1..12)"),
        ("a: [" * 3000, "not YAML (nested too deep)"),
        ("a: \x00", "not YAML (special characters are not allowed)"),
        ("use_cuda_graph: true\nuse_cuda_graph: false", "given twice, again in line 2"),
        (MTP + "relaxed_topk: 1, relaxed_topk: 2}", "'relaxed_topk' is given twice, again in "),
        ("kv_cache_confg: {}", "unknown key 'kv_cache_confg'; did you mean 'kv_cache_config'?"),
        (
            "speculative-config: {}",
            "unknown key 'speculative-config'; did you mean 'speculative_config'?",
        ),
        ("zzz: {}", "unknown key 'zzz'; known: speculative_config"),
        (
            "decoding_type: MTP",
            "unknown key 'decoding_type'; it belongs under speculative_config",
        ),
        (
            "max_draft_len: 3",
            "unknown key 'max_draft_len'; it belongs under speculative_config",
        ),
        ("speculative_config: MTP", ": speculative_config: must be an object of keys and values"),
        (
            "speculative_config: {max_draft_len: 3}",
            ": speculative_config: decoding_type is missing; supported: MTP",
        ),
        (
            MTP + "max_draft_len: 16}",
            "speculative_config: max_draft_len must be a whole number in 0..15, not 16",
        ),
        (
            MTP + "num_nextn_predict_layers: 16}",
            "speculative_config: num_nextn_predict_layers must be a whole number in 0..15, not 16",
        ),
        (
            MTP + "max_draft_len: 3, num_nextn_predict_layers: 2}",
            "nextn: --config x.yaml: speculative_config: max_draft_len says 3, --config x.yaml: "
            "speculative_config: num_nextn_predict_layers says 2; drop one",
        ),
        (
            MTP + "num_speculative_tokens: 3}",
            "unknown key 'num_speculative_tokens'; did you mean 'max_draft_len'?",
        ),
        (MTP + "drafter: x}", "unknown key 'drafter'; did you mean 'use_mtp_vanilla'?"),
        (MTP + "relaxed_top: 3}", "unknown key 'relaxed_top'; did you mean 'relaxed_topk'?"),
        (MTP + "relaxed_topk: 0}", "relaxed_topk must be a whole number from 1, not 0"),
        (MTP + "relaxed_topk: 2.5}", "relaxed_topk must be a whole number from 1, not 2.5"),
        (MTP + "relaxed_delta: -0.1}", "relaxed_delta must be a number in 0..1, not -0.1"),
        (MTP + "relaxed_delta: .inf}", "relaxed_delta must be a number in 0..1, not inf"),
        (MTP + "use_mtp_vanilla: 1}", "use_mtp_vanilla must be true or false, not 1"),
        (
            MTP + "end_thinking_phase_token: -1}",
            "end_thinking_phase_token must be a whole number from 0, not -1",
        ),
    ],
)
def test_tensorrt_llm_refused(text: str, says: str, tmp_path: Path) -> None:
    line = refused_yaml(tmp_path, text)
    assert line.startswith(("--config x.yaml: ", "nextn: "))
    assert says in line


@pytest.mark.parametrize("key", [*TRTLLM.no_effect, *TRTLLM_SPECULATIVE.no_effect])
def test_tensorrt_llm_keys_without_effect(key: str, tmp_path: Path) -> None:
    """One line each; some say what to do instead."""
    where = f"--config {tmp_path}/x.yaml"
    if key in TRTLLM.no_effect:
        [line] = parse_yaml(tmp_path, f"{key}: {{any: [1]}}").notes
        assert line.split("; ")[0] == f"{where}: {key}: no effect"
    if key in TRTLLM_SPECULATIVE.no_effect:
        [line] = parse_yaml(tmp_path, f"{MTP}{key}: 3}}").notes
        assert line.split("; ")[0] == f"{where}: speculative_config: {key}: no effect"


def test_a_line_may_say_what_to_do(tmp_path: Path) -> None:
    assert parse_yaml(tmp_path, "max_seq_len: 100").notes == (
        f"--config {tmp_path}/x.yaml: max_seq_len: no effect; use --max-seq-len",
    )


@pytest.mark.parametrize("key", [*TRTLLM.later, *TRTLLM_SPECULATIVE.later])
def test_what_would_change_a_result_is_refused(key: str, tmp_path: Path) -> None:
    inner = key in TRTLLM_SPECULATIVE.later
    settings = parse_yaml(tmp_path, f"{MTP}{key}: 8}}" if inner else f"{key}: 8")
    with pytest.raises(UsageError, match=rf": {key} 8 is not supported by this version; .*: leave"):
        require_supported(settings)


@pytest.mark.parametrize("name", ["no.yaml", "folder", "latin.yaml"])
def test_files_that_can_not_be_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9")
    with pytest.raises(UsageError, match=f"^--config {tmp_path / name}: can't be read "):
        parse_llm_yaml(tmp_path / name)


def test_yaml_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingDependencyError) as caught:
        parse_yaml(tmp_path, "")
    assert str(caught.value) == (
        f"--config {tmp_path}/x.yaml: needs PyYAML: pip install 'mtpbuild[yaml]'"
    )


@pytest.mark.parametrize("name", TRTLLM_METHODS.others)
def test_other_methods(name: str, tmp_path: Path) -> None:
    line = refused_yaml(tmp_path, f"speculative_config: {{decoding_type: {name}}}")
    assert line == (
        f"--config x.yaml: speculative_config: decoding_type: '{name}' is not supported by "
        "mtpbuild; supported: MTP"
    )


def test_an_unknown_method(tmp_path: Path) -> None:
    assert refused_yaml(tmp_path, "speculative_config: {decoding_type: MPT}") == (
        "--config x.yaml: speculative_config: decoding_type: unknown method 'MPT', known: MTP, "
        "AUTO, DFlash, Draft_Target, Eagle, Eagle3, Lookahead, Medusa, NGram, PARD, SA, SaveState, "
        "User_Provided"
    )
