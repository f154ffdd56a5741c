"""The project as a package: what it ships, and which part may import which."""

import ast
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import cache
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest

import mtpbuild
import mtpbuild.recipes
from mtpbuild.builder.plan.recipe import load_recipes
from mtpbuild.runtime.errors import advise_install
from tests.support import parts

ROOT = Path(__file__).parents[1]
PACKAGES = ("builder", "lab", "plugins", "recipes", "runtime")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]

# Import order, top to bottom.
MAY_IMPORT = {
    "builder": {"builder", "plugins", "recipes", "runtime"},
    "lab": {"builder", "lab", "plugins", "recipes", "runtime"},
    "plugins": {"plugins", "runtime"},
    "recipes": {"recipes"},
    "runtime": {"runtime"},
}
LAB = {"lab"}
USE_THE_LAB = "mtpbuild.builder.cli"
# All that plugins may import of the run time.
SHARED = tuple(
    f"mtpbuild.runtime.contract.{name}" for name in ("controls", "programs", "rules", "sums")
)
# Files of a plugin that need more than torch.
FACETS = {"onnx", "tensorrt", "triton"}
OF_FACETS = {"codes", "tiles", "onnx_attention"}  # what facets of several ops share
STDLIB = set(sys.stdlib_module_names)
# At module level; in functions anything of the part's dependency group.
OUTSIDE = {
    "builder": {"onnx_ir", "onnxscript", "pydantic", "rich", "safetensors", "torch", "typer"},
    "lab": {"numpy", "pydantic", "rich", "safetensors", "torch", "typer"},
    "plugins": {"numpy", "onnx", "onnxscript", "torch", "triton"},
    "recipes": set[str](),
    "runtime": {"jinja2", "numpy", "onnxruntime", "pydantic", "rich", "tokenizers", "typer"},
}
# Loaded for engines of its target alone, or to download a model.
ONLY_HERE = {
    "mtpbuild.builder.gguf.tokenizer": {"tokenizers"},
    **{f"mtpbuild.builder.gguf.{n}": {"numpy"} for n in ("container", "mapped")},
    **{
        f"mtpbuild.builder.models.{n}.gguf": {"numpy"}
        for n in ("deepseek_v3", "dense", "gemma4", "qwen3_5")
    },
    "mtpbuild.builder.compiler.prefixes": {"numpy"},
    "mtpbuild.builder.targets.onnxruntime.exact": {"numpy"},
    "mtpbuild.runtime.engine.metrics": {"prometheus_client"},
    "mtpbuild.runtime.programs.mapped_weights": {"safetensors"},
    "mtpbuild.runtime.cli.chat_terminal": {"prompt_toolkit"},
    "mtpbuild.runtime.programs.aot_package": {"safetensors", "torch"},
    "mtpbuild.builder.compiler.hub": {"filelock", "httpx2", "huggingface_hub"},
} | {
    f"mtpbuild.runtime.{name}": {"torch"}
    for name in (
        "group.channel",
        "group.nccl",
        "programs.inductor_cpu",
        "programs.inductor_cuda",
        "gpu.torch_cuda",
    )
}
SERVER = "mtpbuild.runtime.server"
OPTIONS = {f"{SERVER}.options{n}" for n in ("", ".ReplicaFlags", ".ServerOptions", ".read_key")}
IN_THE_SERVER = {"fastapi", "h11", "markdown_it", "prometheus_client", "starlette", "uvicorn"}
ONLY_HERE[f"{SERVER}.ray"] = {"fastapi", "ray", "starlette"}
TARGETS = ("onnxruntime", "inductor", "tensorrt", "tensorrt-rtx")


def sources() -> Iterator[tuple[str, Path]]:
    """Return (module, path) of every file of the five packages."""
    for part in PACKAGES:
        for path in sorted((ROOT / part).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = parts[:-1] if parts[-1] == "__init__" else parts
            yield "mtpbuild." + ".".join(name), path


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path, module_level: bool) -> tuple[str, ...]:
    """Absolute names that a file imports: `from a import b` gives a and a.b."""
    found = list[str]()
    for node in walk(parse(path), module_level):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(found)


def walk(node: ast.AST, module_level: bool) -> Iterator[ast.AST]:
    """All statements; at module level only those that run on import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # holds no import, and is most of a tree
            continue
        if module_level and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if module_level and for_types:
            continue
        yield child
        yield from walk(child, module_level)


def data_folders() -> set[Path]:
    """Return checkpoints and data sets: shipped as packages without code."""
    return {p for p in (ROOT / "recipes").iterdir() if p.is_dir() and p.name != "__pycache__"}


def part_of(module: str) -> str:
    return module.split(".")[1]


def test_the_packages_are_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict[str, Any]()
    monkeypatch.setattr("setuptools.setup", given.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    code = {path.parent for part in PACKAGES for path in (ROOT / part).rglob("*.py")}
    data = data_folders()
    assert {ROOT / "recipes" / recipe.config for recipe in load_recipes()} <= data
    assert {f"mtpbuild.recipes.{folder.name}" for folder in data} <= SETUPTOOLS[
        "package-data"
    ].keys()
    found = ["mtpbuild." + ".".join(f.relative_to(ROOT).parts) for f in code | data]
    assert sorted(given["packages"]) == ["mtpbuild", *sorted(found)]
    own = {f"mtpbuild.{part}": part for part in PACKAGES}
    assert SETUPTOOLS["package-dir"] == {"mtpbuild": "mtpbuild"} | own


@pytest.mark.parametrize("part", PACKAGES)
def test_every_package_is_typed(part: str) -> None:
    assert (ROOT / part / "py.typed").is_file()
    assert "py.typed" in SETUPTOOLS["package-data"][f"mtpbuild.{part}"]
    link = ROOT / ".typing" / "mtpbuild" / part
    assert link.is_symlink()
    assert link.resolve() == ROOT / part


def test_the_version() -> None:
    assert mtpbuild.__version__ == version("mtpbuild") == PYPROJECT["project"]["version"]
    assert not hasattr(mtpbuild, "version")


def test_a_clone_hides_no_installed_package(tmp_path: Path) -> None:
    """Its folder `mtpbuild` has no `builder`, which lies beside it and is installed elsewhere."""
    assert not (ROOT / "__init__.py").exists()
    paths = [Path(path).resolve() for path in mtpbuild.recipes.__path__]
    assert paths == [ROOT / "recipes"]
    for package in ("clone/mtpbuild", "site/mtpbuild", "site/mtpbuild/builder"):
        (tmp_path / package).mkdir(parents=True)
        shutil.copy(ROOT / "mtpbuild" / "__init__.py", tmp_path / package)
    places = [str(tmp_path / name) for name in ("clone", "site")]
    code = f"import sys; sys.path[:0] = {places}; import mtpbuild.builder as b; print(b.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "site" / "mtpbuild" / "builder" / "__init__.py")


def test_imports_go_down() -> None:
    """An import inside a function counts: it is still a dependency."""
    for module, path in sources():
        for name in imports(path, module_level=False):
            top, *rest = name.split(".")
            assert top not in (*PACKAGES, "tests"), f"{path}: import mtpbuild.{name}"
            allowed = MAY_IMPORT[part_of(module)] | (
                LAB if module.startswith(USE_THE_LAB) else set()
            )
            own = top != "mtpbuild" or not rest or rest[0] in allowed
            foreign = part_of(module) == "plugins" and name.startswith("mtpbuild.runtime")
            rule = "is not below it (docs/architecture.md): move what both need to a lower folder"
            assert own, f"{path} imports {name}, which {rule}"
            assert not foreign or name.startswith(SHARED), f"{path} imports {name}, which {rule}"


COMMAND_LINES = re.compile(
    r"mtpbuild\.((builder|runtime)\.cli\b|runtime\.server\.command$|__main__)"
)


def test_only_command_lines_import_command_lines() -> None:
    for module, path in sources():
        wrong = [name for name in imports(path, module_level=False) if ".cli." in f"{name}."]
        assert COMMAND_LINES.match(module) or not wrong, (
            f"{path} imports {wrong}: move what it needs out of cli/ (such as runtime/tables.py)"
        )


def test_what_comes_from_outside() -> None:
    needed = dict[str, set[str]]()
    for module, path in sources():
        names = {name.split(".")[0] for name in imports(path, module_level=True)}
        needed[module] = more = names - STDLIB - OUTSIDE[part_of(module)] - {"mtpbuild"}
        own = ONLY_HERE.get(module, IN_THE_SERVER if module.startswith(SERVER) else set())
        assert more <= own, f"{path} imports {more} at module level"
    assert {module: needed[module] for module in ONLY_HERE} == ONLY_HERE


def test_what_only_some_systems_have_is_imported_in_two_places() -> None:
    """And there Windows does without it: for a build's peak, and a template's limit."""
    some = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
    users = {module for module, path in sources() if some & set(imports(path, module_level=False))}
    names = ("builder.cli.tables", "runtime.text.template_process")
    assert users == {f"mtpbuild.{name}" for name in names}


def test_the_image_is_built_of_all_that_a_wheel_needs() -> None:
    """examples/serve/Dockerfile copies what setup.py and pyproject.toml speak of."""
    text = (ROOT / "examples" / "serve" / "Dockerfile").read_text(encoding="utf-8")
    copied = {word for line in re.findall("(?m)^COPY (.*) [^ ]+$", text) for word in line.split()}
    folders = {path.split("/")[0] for path in SETUPTOOLS["package-dir"].values()}
    assert copied >= folders | {"pyproject.toml", "setup.py", "README.md", "LICENSE", "tools"}


def test_only_a_download_imports_the_hubs_client() -> None:
    """`hub` alone names it, and `source` alone names `hub`, when it runs."""
    users = {
        "huggingface_hub": {"compiler.hub"},
        "httpx2": {"compiler.hub"},
        "mtpbuild.builder.compiler.hub": {"compiler.source"},
    }
    for module, path in sources():
        everywhere, at_once = (imports(path, module_level=level) for level in (False, True))
        for name in set(everywhere) & users.keys():
            assert module.removeprefix("mtpbuild.builder.") in users[name], f"{path}: {name}"
        late = set(at_once) & {"mtpbuild.builder.compiler.hub"}
        assert not late, f"{path} imports {late} at module level"


def test_nothing_imports_the_server_but_its_command() -> None:
    """And the command line names the command alone, which imports the rest when it runs."""
    command = f"{SERVER}.command"
    for module, path in sources():
        found = {name for name in imports(path, module_level=False) if name.startswith(SERVER)}
        allowed = {command, f"{command}.serve"} if module == "mtpbuild.builder.cli" else set()
        own = module.startswith(SERVER)
        assert own or found <= allowed, f"{path} imports {found - allowed}"
    for file in ("command", "options"):
        at_once = imports(ROOT / "runtime" / "server" / f"{file}.py", module_level=True)
        assert not {name.split(".")[0] for name in at_once} & IN_THE_SERVER
        assert {n for n in at_once if n.startswith(SERVER)} <= OPTIONS


def test_ops_need_torch_alone() -> None:
    """Only a target's facet needs the target's packages, and nothing imports it at module level."""
    for module, path in sources():
        if part_of(module) != "plugins" or path.stem in FACETS | OF_FACETS:
            continue
        for name in imports(path, module_level=True):
            assert name.split(".")[0] in STDLIB | {"torch", "mtpbuild"}, f"{path}: {name}"
            leaf = name.split(".")[-1]
            assert leaf not in FACETS | OF_FACETS, f"{path} imports {name} at module level"


# What each module of a kind has by the same name: a family's `costs`, a lowering's `lower`.
# Others still stand in three modules: whoever renames one removes it.
OF_A_KIND = "cache_widths costs info load lower split_sizes weight_table"
SAME_FUNCTIONS = f"{OF_A_KIND} cache_sections list_architectures find_format refit visible_gpus"


def test_names_stand_for_one_thing() -> None:
    """A class name stands in one module, a public function's in two at most."""
    classes, functions = Counter[str](), Counter[str]()
    for _, path in sources():
        tree = parse(path)
        classes.update({n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)})
        found = (n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        functions.update({name for name in found if not name.startswith("_")})
    assert not {name for name, modules in classes.items() if modules > 1}
    thrice = {name for name, modules in functions.items() if modules > 2}
    assert thrice == {*SAME_FUNCTIONS.split()}, "rename one of them, or keep the list as short"


def import_cycles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the groups of files that import each other, directly or through others."""
    reach = {name: set(graph[name]) for name in graph}
    for via in graph:
        for name in graph:
            if via in reach[name]:
                reach[name] |= reach[via]
    same = {name: frozenset(n for n in reach[name] if name in reach[n]) for name in graph}
    return {group for group in same.values() if group}


def test_circles_are_found() -> None:
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert import_cycles(graph) == {frozenset("abc"), frozenset("de")}


@cache
def import_graph() -> dict[str, set[str]]:
    """Return the files that each file imports anywhere: in functions and for types alone, too."""
    files, graph = dict(sources()), dict[str, set[str]]()
    for module, path in files.items():
        found = set[str]()
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = ((f"{node.module}.{alias.name}", node.module) for alias in node.names)
                found |= {full if full in files else str(package) for full, package in names}
        graph[module] = found & files.keys() - {module}
    return graph


def test_imports_have_no_circle() -> None:
    """An import inside a function, or for types alone, makes two files one just as well."""
    graph = import_graph()
    assert not [sorted(group) for group in import_cycles(graph)]
    step, draft = (f"mtpbuild.builder.program.{name}" for name in ("step", "draft"))
    assert draft in graph[step], "edges are seen"
    assert f"{step[:-4]}trace" in graph["mtpbuild.builder.targets.target"], "those of types, too"


@pytest.mark.parametrize("part", ["builder", "lab", "runtime"])
def test_folders_import_lower_ones(part: str) -> None:
    """docs/architecture.md gives the order of the folders; files beside them are the lowest."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    order = re.findall(rf"(?m)^\| `{part}/([a-z_]+)/` \|", text)
    folders = {p.name for p in (ROOT / part).iterdir() if [*p.glob("*.py")]}
    assert {*order} == folders, "a folder has its line in docs/architecture.md, in order"
    rank = {f"mtpbuild.{part}.{folder}": place for place, folder in enumerate(order, start=1)}

    def place(module: str) -> int:
        return rank.get(".".join(module.split(".")[:3]), 0)

    graph = import_graph()
    below = {m: found for m, found in graph.items() if m.startswith(f"mtpbuild.{part}.")}
    arrows = [(m, n) for m, found in below.items() for n in found & below.keys()]
    assert not [f"{m} imports {n}" for m, n in arrows if place(n) > place(m)]


def test_folders_stay_within_their_lines() -> None:
    """docs/architecture.md gives each folder its most lines of code."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    budgets = dict(re.findall(r"(?m)^\| `([a-z]+/(?:[a-z_]+/)?)` \| ([\d,]+) \|", text))
    assert len(budgets) > 30
    count_lines = runpy.run_path(str(ROOT / "tools" / "code_lines.py"))["code_lines"]
    for folder, budget in budgets.items():
        files = (ROOT / folder).rglob("*.py")
        lines = sum(count_lines(path.read_text(encoding="utf-8")) for path in files)
        allowed = int(budget.replace(",", ""))
        assert lines <= allowed, f"{folder}: make it smaller, or raise its lines and say why"
        assert lines > allowed - 60, f"{folder}: lower its lines in docs/architecture.md"


# Names of locals that say nothing, and how often the product may have each.
VAGUE = {"found": 5, "given": 25, "own": 5, "each": 85, "most": 20}


def test_names_of_locals_say_what_is_in_them() -> None:
    """A list is named by what is in it, a measured figure `measured`, a limit `max_` and what."""
    names = Counter[str]()
    for _, path in sources():
        nodes = list(ast.walk(parse(path)))
        names.update(node.id for node in nodes if isinstance(node, ast.Name))
        names.update(node.arg for node in nodes if isinstance(node, ast.arg))
    too_often = {name: names[name] for name, most in VAGUE.items() if names[name] > most}
    assert not too_often, "name them by what they hold"


def test_docstrings_of_properties_are_nouns() -> None:
    """A property reads as an attribute: "The bytes of ..", where a function has "Return ..".."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for _, path in sources()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef)
        and {"property", "cached_property"} & {*map(ast.unparse, node.decorator_list)}
        and (ast.get_docstring(node) or "").startswith("Return")
    ]
    assert not wrong, "say what it is"


def test_nothing_compares_a_targets_name() -> None:
    """A target owns its words: a value of it answers, not an `if` on what it is called."""
    found = {
        f"{path.relative_to(ROOT)}: {line}"
        for part in ("builder", "lab", "runtime")
        for path in sorted((ROOT / part).rglob("*.py"))
        for line in comparisons_of_a_target(parse(path))
    }
    assert not found


def comparisons_of_a_target(tree: ast.AST) -> Iterator[str]:
    """Every comparison or `match` with a target's name, or of what is called `target`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Match):
            patterns = [case.pattern for case in node.cases]
            if any(
                is_a_target(each) for part in (node.subject, *patterns) for each in ast.walk(part)
            ):
                yield f"match {ast.unparse(node.subject)}"
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            sides += [each for side in sides for each in getattr(side, "elts", ())]
            is_none = any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
            if not is_none and any(is_a_target(side) for side in sides):
                yield ast.unparse(node)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("startswith", "endswith")
            and is_a_target(node.func.value)
        ):
            yield ast.unparse(node)


def is_a_target(node: ast.AST) -> bool:
    """Return whether it is a literal name, or a `target`; a graph node's is what it calls."""
    if isinstance(node, ast.Attribute):
        if node.attr == "name":
            return is_a_target(node.value)
        return node.attr == "target" and ast.unparse(node.value) != "node"
    if isinstance(node, ast.Constant):
        return node.value in TARGETS
    return isinstance(node, ast.Name) and node.id == "target"


@pytest.mark.parametrize(
    ("code", "seen"),
    [("x = 1 if plan.target == 'other' else 2", 1), ("if request.target.name != name: pass", 1),
     ("if kind in ('tensorrt', 'x'): pass", 1), ("if 'inductor' in names: pass", 1),
     ("while target not in names: pass", 1),
     ("def f(): return manifest.target.name.startswith('tensorrt')", 1),
     ("match name:\n    case 'onnxruntime': pass", 1), ("match plan.target:\n    case _: pass", 1),
     ("if target is None: pass", 0), ("if node.target in PLAIN: pass", 0),
     ("use('tensorrt', target.options)", 0), ("table = {'inductor': 1}[request.target]", 0)],
)  # fmt: skip
def test_comparisons_of_a_target_are_found(code: str, seen: int) -> None:
    assert len(list(comparisons_of_a_target(ast.parse(code)))) == seen


def test_helpers_live_in_support() -> None:
    """A test file or a conftest is nobody's library: what tests share is in tests/support/."""
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for name in imports(path, module_level=False):
            parts = name.split(".")
            of = [part for part in parts if part.startswith("test_") or part == "conftest"]
            assert not (name.startswith("tests.") and of), f"{path} imports {name}"


def test_no_assert_hangs_on_an_if() -> None:
    """A condition that never holds would make such an assert say nothing: assert the condition."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        tests = [node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef)]
        for test in tests:
            branches = [node for node in ast.walk(test) if isinstance(node, ast.If)]
            hang = [each for node in branches for each in ast.walk(node) if is_an_assert(each)]
            assert not (test.name.startswith("test_") and hang), f"{path}: {test.name}"


def is_an_assert(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) or (
        isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.raises"
    )


def test_dependencies_are_declared() -> None:
    """The run time needs no extra but its target's: one of onnxruntime's, or torch."""
    names = {"onnx-ir": "onnx_ir"}
    base = {dependency.partition(">")[0] for dependency in PYPROJECT["project"]["dependencies"]}
    assert OUTSIDE["runtime"] - {"onnxruntime"} | {"prompt_toolkit", "safetensors"} == base
    groups = PYPROJECT["project"]["optional-dependencies"]
    onnxruntimes = [*groups["cpu"], *groups["onnxruntime-gpu"]]
    packages = {dependency.split("==")[0] for dependency in onnxruntimes}
    assert packages == {"onnxruntime", "onnxruntime-gpu"}
    (torch,) = groups["inductor"]
    assert torch in groups["build"]  # an engine runs with the torch that built it
    server = {dependency.partition(">")[0].replace("-", "_") for dependency in groups["serve"]}
    server = {name.removesuffix("_py") for name in server}  # of markdown-it
    server -= {"filelock", "llguidance"}  # the run time's, imported for who asks for what they do
    assert server == IN_THE_SERVER - {"h11"}  # uvicorn's own
    assert groups["ray"][0].startswith("ray[serve]")
    build = {dependency.partition(">")[0].partition("=")[0] for dependency in groups["build"]}
    extra = (OUTSIDE["builder"] | OUTSIDE["lab"] | OUTSIDE["plugins"]) - base
    build |= {dependency.partition(">")[0] for dependency in groups["triton"]}
    assert extra - {names.get(name, name) for name in build} <= {"onnx_ir"}  # of onnxscript


def test_extras_that_are_named_exist() -> None:
    """No package index has mtpbuild: what is said to install is a clone or a file of one's own."""
    texts = [path.read_text(encoding="utf-8") for _, path in sources()]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    texts.append((ROOT / "README.md").read_text(encoding="utf-8"))
    extras = PYPROJECT["project"]["optional-dependencies"]
    output = re.compile(r"""(?:install\(["']|'\.\[)([a-z,-]+)["'\]]""")
    named = {extra for text in texts for each in output.findall(text) for extra in each.split(",")}
    assert {"cpu", "serve", "tensorrt-build", "onnxruntime-gpu"} <= named <= set(extras)
    assert not [text for text in texts if "install 'mtpbuild" in text]
    assert advise_install("cpu") == "pip install '.[cpu]' (in a clone) or pip install 'WHEEL[cpu]'"


def test_wheels_for_a_machine_without_a_network() -> None:
    """They are all that building, running and serving need there, but for PyTorch's own."""
    run: list[str | Path] = [ROOT / "tools/gpu_wheels.sh", "--list"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    groups = PYPROJECT["project"]["optional-dependencies"]
    needed = [*PYPROJECT["project"]["dependencies"], *groups["build"], *groups["serve"]]
    needed = [*needed, *groups["cpu"], *PYPROJECT["build-system"]["requires"]]
    ours = {name for name in needed if not name.startswith(("torch", "numpy"))}
    assert ours <= set(done.stdout.splitlines())


def test_the_module_is_the_command() -> None:
    run = [sys.executable, "-m", "mtpbuild", "recipes"]
    done = subprocess.run(run, cwd="/", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "deepseek-tiny" in done.stdout


def test_the_command_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="mtpbuild")
    assert script.value == PYPROJECT["project"]["scripts"]["mtpbuild"]


@pytest.mark.full
def test_a_wheel_holds_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built by the declared backend, offline: modules, recipes, typing marks, kernels, no more."""
    pytest.importorskip("setuptools.build_meta")
    copy = tmp_path / "source"  # setuptools writes build/ and *.egg-info beside pyproject.toml
    copy.mkdir()
    for name in {"pyproject.toml", "setup.py", "README.md", "LICENSE", "mtpbuild", *PACKAGES}:
        (copy / name).symlink_to(ROOT / name)
    for name in ("tools", "plugins"):  # an archive has no files behind links
        (copy / name).unlink(missing_ok=True)
        shutil.copytree(ROOT / name, copy / name)
    code = "import sys; sys.path.insert(0, 'tools'); import compile_kernels as backend; "
    code += "backend.build_sdist('..'); backend.build_wheel('..')"
    run = [sys.executable, "-c", code]
    touch = "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w')"  # in place of a compiler
    monkeypatch.setenv("CXX", shlex.join([sys.executable, "-c", touch]))
    done = subprocess.run(run, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "absent from the `packages` configuration" not in done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*-py3-none-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    recipes = ROOT / "recipes"
    shipped = [path for _, path in sources()] + list(recipes.glob("*.toml"))
    shipped += [p for p in (ROOT / "runtime").rglob("*") if p.suffix in {".css", ".html", ".js"}]
    for folder in data_folders():
        shipped += folder.iterdir()
    shipped += [ROOT / part / "py.typed" for part in PACKAGES]
    wanted = {f"mtpbuild/{path.relative_to(ROOT).as_posix()}" for path in shipped}
    wanted |= {f"mtpbuild/{name}" for name in ("__init__.py", "__main__.py")}
    assert names == wanted | {"mtpbuild/runtime/libmtpbuild_cpu.so"}
    assert "mtpbuild/recipes/deepseek_tiny/tokenizer.json" in names
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as sdist:
        files = {name.partition("/")[2] for name in sdist.getnames()}
    compiled = ["setup.py", "tools/compile_kernels.py"]
    compiled += [str(p.relative_to(ROOT)) for p in ROOT.glob("plugins/cpu/source/*.[ch]*")]
    assert files >= set(compiled)


def wheel_for(platform: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build a wheel for a platform, with a stand-in for zig that tells its arguments."""
    (zig := folder / "zig" / "ziglang").mkdir(parents=True)
    (zig / "__init__.py").touch()  # so that an installed one is not preferred
    code = "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write(' '.join(sys.argv))"
    (zig / "__main__.py").write_text(code, encoding="utf-8")
    (copy := folder / "source").mkdir()  # setuptools writes build/ and *.egg-info there
    files = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
    for name in (*files, "tools", "mtpbuild", *PACKAGES):
        (copy / name).symlink_to(ROOT / name)
    code = "import sys; sys.path.insert(0, 'tools'); import compile_kernels as backend; "
    code += f"how = {{'--build-option': ['--plat-name={platform}']}}; "
    code += "print(backend.get_requires_for_build_wheel(how)); backend.build_wheel('..', how)"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(zig.parent), "CXX": "not-this-one"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("platform", "library", "target"),
    [
        ("manylinux_2_28_x86_64", "libmtpbuild_cpu.so", "x86_64-linux-gnu.2.28"),
        ("manylinux_2_28_aarch64", "libmtpbuild_cpu.so", "aarch64-linux-gnu.2.28"),
        ("macosx_14_0_arm64", "libmtpbuild_cpu.dylib", "aarch64-macos.14.0"),
        ("win_amd64", "libmtpbuild_cpu.dll", "x86_64-windows-gnu"),
    ],
)
def test_a_wheel_for_another_platform(
    platform: str, library: str, target: str, tmp_path: Path
) -> None:
    """It is compiled by zig for that platform, for any Python 3, as `make dist-all` asks."""
    done = wheel_for(platform, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'ziglang==" in done.stdout
    (wheel,) = tmp_path.glob(f"mtpbuild-*-py3-none-{platform}.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert [n for n in archive.namelist() if "mtpbuild_cpu." in n] == [
            f"mtpbuild/runtime/{library}"
        ]
        told = archive.read(f"mtpbuild/runtime/{library}").decode()
    assert f" -target {target} " in told
    assert ("neon.cpp.o" in told) is target.startswith("aarch64")


@pytest.mark.full
def test_a_wheel_for_a_platform_that_nobody_knows(tmp_path: Path) -> None:
    done = wheel_for("win_arm64", tmp_path)
    assert done.returncode == 1
    assert "--plat-name win_arm64 is none of manylinux_2_28_x86_64, " in done.stderr


@pytest.mark.full
@pytest.mark.xdist_group("tiny")
def test_an_installed_wheel_runs_an_engine(
    tiny_engine: Callable[[int], Path], tmp_path: Path
) -> None:
    """Without the repository and torch: what `pip install 'WHEEL[cpu]'` brings is enough."""
    source, site = tmp_path / "source", tmp_path / "site"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", *offline, "--target", site, wheel], check=True)
    shutil.rmtree(source)
    code = f"""
import sys
sys.path.insert(0, {str(site)!r})
sys.modules.update(dict.fromkeys(("torch", "onnx", "onnxscript", "onnx_ir", "huggingface_hub")))
from mtpbuild.builder.cli import app
import mtpbuild.runtime
assert mtpbuild.runtime.__file__.startswith({str(site)!r})
app()
"""
    flags = ["run", "--engine", str(tiny_engine(3)), "--chat", "What is 47 + 85?"]
    run = [sys.executable, "-c", code, *flags]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "132" in done.stdout, done.stderr


def test_documents_name_files_that_exist() -> None:
    """Paths in `code` from the root of the repository, and links from where the document is."""
    named = re.compile(r"`((?:builder|runtime|plugins|tests|tools|benchmarks|examples)/[\w./*-]*)")
    linked = re.compile(r"\]\((?!https?:)([^)#]+)")
    seen = 0
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = document.read_text(encoding="utf-8")
        for base, found in (ROOT, named.findall(text)), (document.parent, linked.findall(text)):
            for path in found:
                there = (base / path).exists() or list(base.glob(path.rstrip("/.")))
                assert there, f"{document.name}: {path}"
            seen += len(found)
    assert seen > 200


def test_documents_name_headings_that_exist() -> None:
    """Anchors of links, as GitHub makes them of headings."""
    linked = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
    seen = 0
    documents = [*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks/results").glob("*.md")]
    for document in (ROOT / "README.md", *documents):
        for path, anchor in linked.findall(document.read_text(encoding="utf-8")):
            target = document.parent / path if path else document
            assert anchor in anchors(target), f"{document.name}: {path}#{anchor}"
            seen += 1
    assert seen > 40


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def test_every_full_test_has_its_part() -> None:
    """And every pattern of a part is of use."""
    folder = ROOT / "tests"
    marked = [path for path in folder.rglob("test_*.py") if "mark.full" in path.read_text()]
    files = [path.relative_to(folder).as_posix() for path in marked]
    assert {parts.part_of(file, full=True) for file in files} == set(parts.PARTS) - {parts.SUITE}
    for pattern in itertools.chain(*parts.PARTS.values()):
        assert any(fnmatch(file, pattern) for file in files), pattern
    assert parts.part_of("builder/test_step.py", full=False) == parts.SUITE
    text = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    table = text.partition("## Parts of")[2].partition("\n## ")[0]
    assert re.findall(r"(?m)^\| `(.*?)` \|", table) == list(parts.PARTS)
    with pytest.raises(LookupError, match=r"^tests/gpu/test_new.py: no part of "):
        parts.part_of("gpu/test_new.py", full=True)


@pytest.mark.parametrize(("target", "error"), [("inside", ""), ("/usr", "bad: a committed link")])
def test_links_that_point_outside(target: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    script = shutil.copy2(ROOT / "tools/check_links.sh", tmp_path / "tools")
    (tmp_path / "bad").symlink_to(target)
    for command in (["init", "--quiet"], ["add", "--all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[: len(error) or 99]) == (bool(error), error)
