"""What `mtpbuild serve` says before it listens, and which flags it has."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.sampling.defaults import read_generation_defaults
from mtpbuild.runtime.server.command import make_services, read_engines
from mtpbuild.runtime.server.errors import ApiError
from mtpbuild.runtime.server.options import ReplicaFlags, ServerOptions, read_key
from mtpbuild.runtime.tool_calls.forms import FORMS
from tests.support.engines import write_manifest
from tests.support.fakes import fake_manifest
from tests.support.invoke import invoke


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--port 99999", "--port 99999 is outside 0..65535"),
        ("--max-queue -1", "max_queue must be a whole number in 0..1000000000, not -1"),
        ("--request-timeout -1", "request_timeout must be a number in 0..1000000000, not -1.0"),
        ("--request-timeout nan", "request_timeout must be a number"),
        ("--served-model-name=", "served_model_name must be a text of 1"),
        ("--allow-origin a.example", "allow_origin must be a list such as"),
        ("--tool-call-parser x", "tool_call_parser must be one of deepseek_v3, deepseek_v31, "),
        ("--api-key nowhere", "--api-key nowhere: can't be read"),
        ("--tensor-parallel-size 2", "asks for tp 2, the engine was built with tp 1"),
        ("--config {engine}/nextn.yaml", "asks for nextn 5, the engine was built"),
        ("--host 192.0.2.1", "can't listen on 192.0.2.1:8000"),
        ("--keep soon", "--keep soon is no time: give 90s, 10m, 1h, 0 or -1"),
        ("--engine {engine}", "two engines are called fake: give --engine NAME=FOLDER"),
        ("--engine b={engine} --served-model-name x", "is for one --engine FOLDER: other engines"),
        ("--engine b={engine} --max-seq-len 65", "fake: max_seq_len must be from 7 to 64"),
        ("--keep 1m --max-seq-len 65", "fake: max_seq_len must be from 7 to 64"),
        ("--engine b=nowhere", "nowhere: no such engine directory"),
        ("--engine b={engine} --chat-template x", "--chat-template is for one engine"),
        ("", "not an engine"),
    ],
)
def test_one_line(flags: str, says: str, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    if flags:
        write_manifest(engine, fake_manifest())
        (tmp_path / "engine" / "nextn.yaml").write_text(
            "speculative-config: {method: mtp, num_speculative_tokens: 5}"
        )
    code, out, err = invoke("serve", "--engine", engine, *flags.format(engine=engine).split())
    assert (code != 0, out) == (True, "")
    assert re.fullmatch(r"error: .*\n", err), err
    assert says in err


def test_engines_are_named_and_have_settings_of_their_own(tmp_path: Path) -> None:
    for folder, kept in (("a", 0), ("b", 0.5)):
        (tmp_path / folder).mkdir()
        write_manifest(tmp_path / folder, fake_manifest())
        (tmp_path / folder / "generation_config.json").write_text(f'{{"min_p": {kept}}}')
    given = [f"small={tmp_path}/a", f"large={tmp_path}/b"]
    engines = read_engines(given, None)
    names = {name: folder.name for name, (folder, _) in engines.items()}
    assert names == {"small": "a", "large": "b"}
    assert list(read_engines([f"{tmp_path}/a"], "x")) == ["x"]
    with pytest.raises(UsageError, match="is for one --engine FOLDER"):
        read_engines(given[:1], "x")
    settings = ServerOptions(prefix_cache_dir=tmp_path / "rows", max_seq_len=40)
    loaded: list[Any] = []

    def load(*of: Any) -> Any:
        loaded.append(of)

    small, large = make_services(engines, settings, load, 0.0).all
    assert (small.settings.defaults["min_p"], large.settings.defaults["min_p"]) == (0, 0.5)
    assert large.settings.prefix_cache_dir == tmp_path / "rows" / "large"
    cards = make_services(engines, settings, load, 0.0).cards()
    assert [card["max_model_len"] for card in cards] == [40, 40]
    assert (small.model, small.is_loaded, small.ready) == ("small", False, True)
    (only,) = make_services(read_engines(given[:1], None), settings, load, None).all
    assert only.settings.prefix_cache_dir == tmp_path / "rows"
    with pytest.raises(ApiError, match="being loaded"):
        _ = only.engine
    alike = dict.fromkeys(("x/y", "x_y", "..", "."), engines["small"])
    folders = [s.settings.prefix_cache_dir for s in make_services(alike, settings, load, 0.0).all]
    assert len(set(folders)) == 4
    assert all(f.resolve().parent == tmp_path / "rows" for f in folders if f is not None)


def test_the_flag_names_every_form_of_tool_calls() -> None:
    (flag,) = (field for field in fields(ReplicaFlags) if field.name == "tool_call_parser")
    assert [name for name in FORMS if name not in flag.metadata["help"]] == []


def test_the_key_is_a_files_first_line_or_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MTPBUILD_API_KEY", raising=False)
    assert read_key(None) is None
    monkeypatch.setenv("MTPBUILD_API_KEY", "e")
    assert read_key(None) == "e"
    (tmp_path / "key").write_text("s3cret\nmore\n")
    assert read_key(tmp_path / "key") == "s3cret"
    for text in ("", "\n", "ключ\n"):
        (tmp_path / "key").write_text(text, encoding="utf-8")
        with pytest.raises(Exception, match="the first line is the key"):
            read_key(tmp_path / "key")


def test_what_the_model_says_of_sampling(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == {}
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_p": 0.95, "top_k": true, "do_sample": true}')
    assert read_generation_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.95}
    path.write_text('{"repetition_penalty": 1.05}')
    assert read_generation_defaults(tmp_path) == {"repetition_penalty": 1.05}
    path.write_text("[")
    assert read_generation_defaults(tmp_path) == {}
