"""`mtpbuild list` and `rm`: engines under engines/, whole and broken ones, by name and by path."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from mtpbuild.builder.cli import app
from mtpbuild.runtime import Engine
from mtpbuild.runtime.cli.engines import describe_time, find_engine
from tests.support.invoke import invoke, refusal
from tests.support.run_command import TerminalRunner


@pytest.fixture
def engines(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """engines/ with a whole engine, one in a folder of its own, and two that are broken."""
    monkeypatch.chdir(engine_dir.parent)
    folder = Path("engines")
    for name in ("tiny_n3", "more/tiny_n1", "cut_n3"):
        shutil.copytree(engine_dir, folder / name)
    (folder / "cut_n3" / "weights.safetensors").write_bytes(b"")
    (folder / "empty").mkdir()
    (folder / ".tiny_n0.building").mkdir()
    (folder / "README.md").touch()
    return folder


def test_a_line_per_engine(engines: Path) -> None:
    os.utime(engines / "tiny_n3", (0, 0))
    code, out, err = invoke("list", "--json")
    assert (code, err) == (0, "")
    found = {line["name"]: line for line in map(json.loads, out.splitlines())}
    assert list(found) == ["cut_n3", "empty", "more/tiny_n1", "tiny_n3"]
    size = sum(path.stat().st_size for path in (engines / "tiny_n3").iterdir())
    size -= (engines / "tiny_n3" / "engine.json").stat().st_size
    assert found["tiny_n3"] == {
        "name": "tiny_n3", "model": "fake", "nextn": "3", "weights": "float32", "size": size,
        "context": 64, "last_use": 0, "fault": None,
    }  # fmt: skip
    assert found["cut_n3"]["fault"] == ("weights.safetensors is missing or not whole")
    assert found["empty"]["fault"].startswith("not an engine (no engine.json)")
    code, out, _ = invoke("list")
    assert code == 0
    assert len([line for line in out.splitlines() if "tiny_n" in line]) == 2
    assert "cut_n3: broken: " in out


def test_no_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = invoke("list")
    assert (code, out, "`mtpbuild run MODEL` makes one" in err) == (0, "", True)


def test_a_load_is_a_use(engines: Path) -> None:
    os.utime(engines / "tiny_n3", (0, 0))
    Engine.load(engines / "tiny_n3").close()
    assert (engines / "tiny_n3").stat().st_mtime > 1e9


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(5, "now"), (60, "1 minute ago"), (3 * 3600, "3 hours ago"), (200_000, "2 days ago")],
)
def test_how_long_ago(seconds: int, expected: str) -> None:
    assert describe_time(1000, now=1000 + seconds) == expected


def test_a_name_is_looked_up(engines: Path) -> None:
    assert find_engine(Path("tiny_n3")) == engines / "tiny_n3"
    assert find_engine(Path("more/tiny_n1")) == engines / "more" / "tiny_n1"
    assert find_engine(engines / "tiny_n3") == engines / "tiny_n3"
    assert find_engine(Path("nothing")) == Path("nothing")


@pytest.mark.parametrize("name", ["tiny_n3", "engines/tiny_n3", "more/tiny_n1", "cut_n3"])
def test_removal(name: str, engines: Path) -> None:
    before = {path for path in engines.rglob("*") if path.is_file()}
    code, out, err = invoke("rm", name, "--yes")
    folder = engines / name.removeprefix("engines/")
    assert (code, out, err) == (0, "", f"removed {folder}\n")
    after = {path for path in engines.rglob("*") if path.is_file()}
    assert after == {path for path in before if folder not in path.parents}
    assert not folder.exists()


def test_a_removal_is_asked_for_once(engines: Path) -> None:
    says = refusal("rm", "tiny_n3")
    assert says == "remove engines/tiny_n3? There is no terminal to ask on: add --yes"
    for answer in ("n\n", "\n"):
        assert TerminalRunner().invoke(app, ["rm", "tiny_n3"], input=answer).exit_code == 0
        assert (engines / "tiny_n3").is_dir()
    assert TerminalRunner().invoke(app, ["rm", "tiny_n3"], input="y\n").exit_code == 0
    assert not (engines / "tiny_n3").exists()


def test_a_removal_leaves_what_is_not_the_engines(engines: Path) -> None:
    folder = engines / "tiny_n3"
    (folder / "notes.txt").touch()
    (folder / "mine").mkdir()
    (folder / "mine" / "weights.safetensors").touch()
    (folder / "link").symlink_to(engines.resolve() / "more")
    manifest = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
    manifest["files"]["link/tiny_n1/engine.json"] = {"size": 0, "sha256": ""}
    (folder / "engine.json").write_text(json.dumps(manifest), encoding="utf-8")
    (folder / "rank0").mkdir()
    shutil.copytree(engines / "more" / "tiny_n1", folder / "rank1")
    code, _, err = invoke("rm", "tiny_n3", "--yes")
    says = "what is not the engine's stays there: link, mine, notes.txt, rank0, rank1"
    assert (code, err) == (0, f"removed {folder}; {says}\n")
    assert (folder / "mine" / "weights.safetensors").is_file()
    assert (folder / "rank1" / "engine.json").is_file(), "an engine of its own"
    assert (engines / "more" / "tiny_n1" / "engine.json").is_file()


def test_a_removal_takes_ranks_and_engines_of_other_versions(engines: Path) -> None:
    folder = engines / "tiny_n3"
    shutil.copytree(folder, folder / "rank0")
    for place, change in ((folder, {"format_version": 3}), (folder / "rank0", {"rank": 0})):
        manifest = json.loads((place / "engine.json").read_text(encoding="utf-8"))
        (place / "engine.json").write_text(json.dumps(manifest | change), encoding="utf-8")
    assert invoke("rm", "tiny_n3", "--yes")[::2] == (0, f"removed {folder}\n")
    assert not folder.exists()


@pytest.mark.parametrize("names", [["../tiny_n1/engine.json"], ["/tmp/x"], 5, None])
def test_a_removal_stays_in_the_folder(names: object, engines: Path) -> None:
    path = engines / "more" / "tiny_n1" / "engine.json"
    shutil.copytree(path.parent, engines / "more" / "other")
    (engines / "more" / "other" / "engine.json").write_text(json.dumps({"files": names}))
    code, _, err = invoke("rm", "more/other", "--yes")
    assert (code == 0) is isinstance(names, list)
    assert re.fullmatch(r"(removed|error: engines/more/other/engine.json does not say).*\n", err)
    assert path.is_file()


def test_an_interrupted_removal_goes_on(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, removed = Path.unlink, list[Path]()

    def interrupted(path: Path, missing_ok: bool = False) -> None:
        if removed:
            raise KeyboardInterrupt
        removed.append(path)
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", interrupted)
        assert invoke("rm", "tiny_n3", "--yes") == (130, "", "\ninterrupted\n")
    assert removed[0].name != "engine.json"
    assert "tiny_n3: broken: " in invoke("list")[1]
    (engines / ".tiny_n3.removed").mkdir()
    assert invoke("rm", "tiny_n3", "--yes")[::2] == (0, f"removed {engines / 'tiny_n3'}\n")


def test_the_current_folder_is_removed(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = (engines / "tiny_n3").resolve()
    monkeypatch.chdir(folder)
    assert invoke("rm", ".", "--yes")[::2] == (0, f"removed {folder}\n")
    assert not folder.exists()


def test_what_can_not_be_removed(engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    says = refusal("rm", "tiny_n3", "--yes", code=1)
    assert says.endswith("can't be removed (Permission denied)")


def test_a_link_is_removed_and_not_what_it_leads_to(engines: Path, engine_dir: Path) -> None:
    (engines / "link").symlink_to(engine_dir)
    assert invoke("rm", "link", "--yes")[0] == 0
    assert (engine_dir / "engine.json").is_file()
    assert not (engines / "link").is_symlink()


@pytest.mark.parametrize(
    "name", ["tiny_n2", "..", ".", "engines", "more", "README.md", "empty", ".tiny_n0.building"]
)
def test_what_is_no_engine_stays(name: str, engines: Path) -> None:
    before = sorted(Path.cwd().rglob("*"))
    assert re.match(rf"(engines/)?{name}: no", refusal("rm", name, "--yes", code=1))
    assert sorted(Path.cwd().rglob("*")) == before


def test_a_name_that_is_spelled_alike(engines: Path) -> None:
    assert refusal("rm", "tiny_n2", code=1).endswith("; did you mean engines/tiny_n3?")


@pytest.mark.parametrize(
    "named",
    [("tiny_n3",), ("engines/tiny_n3",), ("--engine", "tiny_n3"), ("--engine", "engines/tiny_n3")],
)
def test_run_takes_names_and_folders(named: tuple[str, ...], engines: Path) -> None:
    code, out, _ = invoke("run", *named, "--prompt-ids", "5,6", "--max-tokens", 3, "--json")
    assert (code, json.loads(out)["finish_reason"]) == (0, "length")


def test_run_names_what_is_spelled_alike(engines: Path) -> None:
    says = "name one engine or model: mtpbuild run MODEL, or --engine FOLDER"
    assert refusal("run") == refusal("run", "tiny_n3", "--engine", "tiny_n3") == says
    says = "tiny_n2: neither an engine nor a model; did you mean tiny_n3?"
    assert refusal("run", "tiny_n2") == says
    for named in (("engines/tiny_n2",), ("--engine", "tiny_n2")):
        assert refusal("run", *named, code=1).endswith("; did you mean engines/tiny_n3?")
