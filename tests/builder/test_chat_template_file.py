"""`--chat-template`: a file in place of the checkpoint's templates, at build and at load."""

import shutil
from pathlib import Path

import pytest

from mtpbuild.builder.plan.recipe import find_shipped_template
from mtpbuild.runtime import Engine
from mtpbuild.runtime.contract.manifest import read_manifest
from mtpbuild.runtime.errors import UsageError
from mtpbuild.runtime.text.tokenizer import load_tokenizer
from mtpbuild.runtime.text.tokenizer_files import read_template
from tests.support.checkpoints import write_tokenizer
from tests.support.invoke import invoke, refusal

QUESTION = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def checkpoint(smallest: Path, tmp_path: Path) -> Path:
    """Return a checkpoint with a template, and another one for tools."""
    folder = shutil.copytree(smallest, tmp_path / "checkpoint")
    write_tokenizer(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text("its own")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("its own, with tools")
    return folder


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "given.jinja"
    path.write_text("{{ bos_token + 'given: ' + messages[0]['content'] }}")
    return path


def rendered(engine: Path, given: Path | None = None) -> set[str]:
    """Render a question without and with tools."""
    tokenizer = load_tokenizer(engine, read_manifest(engine), given)
    assert tokenizer is not None
    assert tokenizer.chat_template is not None
    return {tokenizer.chat_template.render(QUESTION, tools=tools) for tools in (None, TOOLS)}


@pytest.mark.usefixtures("quick")
def test_an_engine_has_it(checkpoint: Path, template: Path, tmp_path: Path) -> None:
    """It replaces all templates, and is among what an engine is made of; a file wins at load."""
    flags = ("build", "--model", checkpoint, "--nextn", "0", "--out", out := tmp_path / "engine")
    assert invoke(*flags)[0] == 0
    assert rendered(out) == {"its own", "its own, with tools"}
    given = (*flags, "--chat-template", template)
    code, told, err = invoke(*given)
    assert (code, err) == (0, "")
    assert "unchanged" not in told
    assert rendered(out) == {"t0given: hi"}
    assert "unchanged" in invoke(*given)[1]
    template.write_text("other: {{ messages[0].content }}")
    assert "unchanged" not in invoke(*given)[1]
    assert rendered(out) == {"other: hi"}
    (later := tmp_path / "later.jinja").write_text("later")
    assert rendered(out, later) == {"later"}


@pytest.mark.usefixtures("quick")
def test_refit_takes_it_again(checkpoint: Path, template: Path, tmp_path: Path) -> None:
    """It comes with new weights, as an engine does not say whose its template is."""
    flags = ("build", "--model", checkpoint, "--nextn", "0", "--out", out := tmp_path / "engine")
    assert invoke(*flags, "--chat-template", template)[0] == 0
    refitted = ("refit", "--engine", out, "--checkpoint", checkpoint)
    assert invoke(*refitted, "--chat-template", template)[0] == 0
    assert rendered(out) == {"t0given: hi"}
    assert invoke(*refitted)[0] == 0
    assert rendered(out) == {"its own", "its own, with tools"}


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_without_one_gets_a_shipped_one(
    checkpoint: Path, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is chosen by model_type, is among what an engine is made of, and a file replaces it."""
    shipped = {"deepseek_v3": template}.get
    monkeypatch.setattr("mtpbuild.builder.compiler.source.find_shipped_template", shipped)
    flags = ("build", "--model", checkpoint, "--nextn", "0", "--out", out := tmp_path / "engine")
    assert invoke(*flags)[0] == 0
    assert rendered(out) == {"its own", "its own, with tools"}
    (checkpoint / "chat_template.jinja").unlink()
    shutil.rmtree(checkpoint / "additional_chat_templates")
    assert "unchanged" not in invoke(*flags)[1]
    assert rendered(out) == {"t0given: hi"}
    assert "unchanged" in invoke(*flags)[1]
    template.write_text("newer: {{ messages[0].content }}")
    assert "unchanged" not in invoke(*flags)[1]
    assert rendered(out) == {"newer: hi"}
    template.write_text("newest: {{ messages[0].content }}")
    assert invoke("refit", "--engine", out, "--checkpoint", checkpoint)[0] == 0
    assert rendered(out) == {"newest: hi"}
    (other := tmp_path / "other.jinja").write_text("other")
    assert invoke(*flags, "--chat-template", other)[0] == 0
    assert rendered(out) == {"other"}


def test_which_models_have_a_shipped_one() -> None:
    """A path is looked up by name, so the name is the family's and not any config.json's."""
    assert find_shipped_template("deepseek_v3") is None
    path = find_shipped_template("deepseek_v4")
    assert path is not None
    assert read_template(path).startswith("{#- DeepSeek-V4")


BAD = {
    "absent": (None, "No such file or directory"),
    "syntax": ("{% if %}", "does not render a question: "),
    "refuses": ("{{ raise_exception('no') }}", "does not render a question: no"),
    "bytes": ("\udcff", "not text in UTF-8"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.usefixtures("quick")
def test_a_bad_file(what: str, checkpoint: Path, tmp_path: Path) -> None:
    """It is refused before a model is looked for, and before an engine's programs are loaded."""
    text, says = BAD[what]
    path, out = tmp_path / "bad.jinja", tmp_path / "engine"
    if text is not None:
        path.write_text(text, errors="surrogateescape")
    line = refusal("build", "--model", "nobody/Nothing", "--chat-template", path, code=2)
    assert line.startswith(f"chat_template {path}: ")
    assert says in line
    assert invoke("build", "--model", checkpoint, "--nextn", "0", "--out", out)[0] == 0
    assert refusal("run", "--engine", out, "--chat", "a", "--chat-template", path, code=2) == line
    with pytest.raises(UsageError, match=r"chat_template .*bad\.jinja: "):
        Engine.load(out, chat_template=path)


@pytest.mark.usefixtures("quick")
def test_an_engine_without_a_tokenizer(smallest: Path, template: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    assert invoke("build", "--model", smallest, "--nextn", "0", "--out", out)[0] == 0
    with pytest.raises(UsageError, match=r"this engine has no tokenizer\.json"):
        Engine.load(out, chat_template=template)


SPOILT = {
    "a cut configuration": ("tokenizer_config.json", b'{"eos_token": "t1"', "not JSON"),
    "a list as configuration": ("tokenizer_config.json", b"[]", "not a JSON object"),
    "Latin-1": ("tokenizer_config.json", b'{"eos_token": "\xe9"}', "not UTF-8"),
    "a token without text": (
        "tokenizer_config.json", b'{"added_tokens_decoder": {"1": {}}}', "is not a token",
    ),
    "a template without text": (
        "tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "without name or te",
    ),
    "a map of tokens": ("special_tokens_map.json", b"{", "not JSON"),
    "bytes": ("chat_template.jinja", b"\xff\xfe", "not UTF-8"),
    "syntax": ("chat_template.jinja", b"{% if %}", "line 1: Expected an expression"),
    "syntax of another": ("additional_chat_templates/tool_use.jinja", b"{{ a", "1: unexpected"),
}  # fmt: skip


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("what", SPOILT)
def test_what_load_refuses_build_refuses(
    what: str, dry: bool, checkpoint: Path, tmp_path: Path
) -> None:
    """Nothing is written; the line names the file, and no engine to rebuild."""
    name, raw, says = SPOILT[what]
    if name.endswith(".json"):  # templates in files of their own would win
        (checkpoint / "chat_template.jinja").unlink()
        (checkpoint / "additional_chat_templates" / "tool_use.jinja").unlink()
    (checkpoint / name).write_bytes(raw)
    flags = ("build", "--model", checkpoint, "--nextn", "0", "--out", out := tmp_path / "engine")
    line = refusal(*flags, *(("--dry-run",) * dry), code=1)
    assert str(checkpoint / name) in line or line.startswith(f"{checkpoint}/{name}: ")
    assert says in line
    assert "rebuild" not in line
    assert not out.exists()


@pytest.mark.usefixtures("quick")
def test_a_byte_order_mark_is_read(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text(
        '\ufeff{"bos_token": "t1", "chat_template": "unused"}', encoding="utf-8"
    )
    template = "\ufeff{{ bos_token }} {{ tools is none }}"
    (checkpoint / "chat_template.jinja").write_text(template, encoding="utf-8")
    (checkpoint / "additional_chat_templates" / "tool_use.jinja").unlink()
    flags = ("build", "--model", checkpoint, "--nextn", "0", "--out", out := tmp_path / "engine")
    assert invoke(*flags)[0] == 0
    assert rendered(out) == {"t1 True", "t1 False"}
