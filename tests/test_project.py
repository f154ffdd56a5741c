"""The project as a package: what it ships, and which part may import which."""

import ast
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import mtpbuild.recipes
from mtpbuild.builder.recipe import load_recipes

ROOT = Path(__file__).parents[1]
PARTS = ("builder", "plugins", "recipes", "runtime")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]

# Import order, top to bottom (STYLE.md, "Folders and import names").
MAY_IMPORT = {
    "builder": {"builder", "plugins", "recipes", "runtime"},
    "plugins": {"plugins"},
    "recipes": {"recipes"},
    "runtime": {"runtime"},
}
# Files of a plugin that need more than torch.
FACETS = {"onnx", "tensorrt", "triton", "triton_law", "triton_mixed"}
STDLIB = set(sys.stdlib_module_names)
# At module level; in functions anything of the part's dependency group.
OUTSIDE = {
    "builder": {"onnx_ir", "onnxscript", "pydantic", "safetensors", "torch", "typer"},
    "plugins": {"numpy", "onnx", "onnxscript", "torch", "triton"},
    "recipes": set[str](),
    "runtime": {
        "jinja2",
        "numpy",
        "onnxruntime",
        "pydantic",
        "rich",
        "tokenizers",
        "typer",
    },
}
# Loaded for engines of its target alone.
ONLY_HERE = {
    f"mtpbuild.runtime.{name}": {"safetensors", "torch"}
    for name in (
        "group.channel",
        "group.gpus",
        "group.nccl",
        "programs.aot_package",
        "programs.inductor",
        "programs.inductor_cpu",
        "programs.inductor_cuda",
        "programs.inductor_ranks",
        "programs.torch_cuda",
    )
}


def sources() -> Iterator[tuple[str, Path]]:
    """(module, path) of every file of the four packages."""
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = parts[:-1] if parts[-1] == "__init__" else parts
            yield "mtpbuild." + ".".join(name), path


def imports(path: Path, module_level: bool) -> Iterator[str]:
    """Absolute names that a file imports: `from a import b` gives a and a.b."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in walk(tree, module_level):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def walk(node: ast.AST, module_level: bool) -> Iterator[ast.AST]:
    """All nodes; at module level only those that run on import."""
    for child in ast.iter_child_nodes(node):
        if module_level and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (
            module_level
            and isinstance(child, ast.If)
            and "TYPE_CHECKING" in ast.unparse(child.test)
        ):
            continue
        yield child
        yield from walk(child, module_level)


def data_folders() -> set[Path]:
    """Checkpoints and data sets: shipped as packages without code."""
    return {p for p in (ROOT / "recipes").iterdir() if p.is_dir() and p.name != "__pycache__"}


def part_of(module: str) -> str:
    return module.split(".")[1]


def test_the_packages_are_the_tree() -> None:
    code = {path.parent for part in PARTS for path in (ROOT / part).rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in code)
    data = data_folders()
    assert {ROOT / "recipes" / recipe.config for recipe in load_recipes()} <= data
    found = ["mtpbuild." + ".".join(f.relative_to(ROOT).parts) for f in code | data]
    assert SETUPTOOLS["packages"] == sorted(found)
    assert SETUPTOOLS["package-dir"] == {f"mtpbuild.{part}": part for part in PARTS}


@pytest.mark.parametrize("part", PARTS)
def test_every_package_is_typed(part: str) -> None:
    assert (ROOT / part / "py.typed").is_file()
    assert "py.typed" in SETUPTOOLS["package-data"][f"mtpbuild.{part}"]
    link = ROOT / ".typing" / "mtpbuild" / part
    assert link.is_symlink()
    assert link.resolve() == ROOT / part


def test_mtpbuild_is_a_namespace() -> None:
    assert not (ROOT / "__init__.py").exists()
    paths = [Path(path).resolve() for path in mtpbuild.recipes.__path__]
    assert paths == [ROOT / "recipes"]


def test_imports_go_down() -> None:
    """Also inside functions: a lazy import is still a dependency."""
    for module, path in sources():
        for name in imports(path, module_level=False):
            top, *rest = name.split(".")
            assert top not in (*PARTS, "tests"), f"{path}: import mtpbuild.{name}"
            if top == "mtpbuild" and rest:
                assert rest[0] in MAY_IMPORT[part_of(module)], f"{path} imports {name}"


def test_what_comes_from_outside() -> None:
    for module, path in sources():
        own = ONLY_HERE.get(module, set())
        allowed = STDLIB | OUTSIDE[part_of(module)] | own | {"mtpbuild"}
        for name in imports(path, module_level=True):
            assert name.split(".")[0] in allowed, f"{path} imports {name} at module level"


def test_ops_need_torch_alone() -> None:
    """Only a target's facet needs the target's packages, and nothing imports it at module level."""
    for module, path in sources():
        if part_of(module) != "plugins" or path.stem in FACETS:
            continue
        for name in imports(path, module_level=True):
            assert name.split(".")[0] in STDLIB | {"torch", "mtpbuild"}, f"{path}: {name}"
            assert name.split(".")[-1] not in FACETS, f"{path} imports {name} at module level"


def test_imports_have_no_circle() -> None:
    files = dict(sources())
    graph = {
        module: {n for n in imports(path, module_level=True) if n in files and n != module}
        for module, path in files.items()
    }
    done = set[str]()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*trail, module))
            done.add(module)

    for module in files:
        visit(module, ())
    assert done == set(files)
    assert (
        "mtpbuild.builder.program.draft" in graph["mtpbuild.builder.program.step"]
    )  # edges are seen


def test_dependencies_are_declared() -> None:
    """The run time needs no extra but its target's: one of onnxruntime's, or torch."""
    names = {"onnx-ir": "onnx_ir"}
    base = {dependency.partition(">")[0] for dependency in PYPROJECT["project"]["dependencies"]}
    assert OUTSIDE["runtime"] - {"onnxruntime"} | {"safetensors"} == base
    groups = PYPROJECT["project"]["optional-dependencies"]
    assert {dependency.split("==")[0] for dependency in groups["cpu"] + groups["cuda"]} == {
        "onnxruntime",
        "onnxruntime-gpu",
    }
    (torch,) = groups["inductor"]
    assert torch in groups["build"]  # an engine runs with the torch that built it
    build = {dependency.partition(">")[0].partition("=")[0] for dependency in groups["build"]}
    extra = (OUTSIDE["builder"] | OUTSIDE["plugins"]) - base
    build |= {dependency.partition(">")[0] for dependency in groups["triton"]}
    assert extra - {names.get(name, name) for name in build} <= {"onnx_ir"}  # of onnxscript


def test_the_command_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="mtpbuild")
    assert script.value == PYPROJECT["project"]["scripts"]["mtpbuild"]


def test_a_wheel_holds_everything(tmp_path: Path) -> None:
    """Built by the declared backend, offline: all modules, recipes and typing marks, no more."""
    pytest.importorskip("setuptools.build_meta")
    copy = tmp_path / "source"  # setuptools writes build/ and *.egg-info beside pyproject.toml
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *PARTS):
        (copy / name).symlink_to(ROOT / name)
    code = "from setuptools import build_meta; build_meta.build_wheel('..')"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "absent from the `packages` configuration" not in done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    recipes = ROOT / "recipes"
    shipped = [path for _, path in sources()] + list(recipes.glob("*.toml"))
    shipped += (ROOT / "runtime").rglob("*.html")
    for folder in data_folders():
        shipped += folder.iterdir()
    shipped += [ROOT / part / "py.typed" for part in PARTS]
    assert names == {f"mtpbuild/{path.relative_to(ROOT).as_posix()}" for path in shipped}
    assert "mtpbuild/recipes/deepseek_tiny/tokenizer.json" in names
