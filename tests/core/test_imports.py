"""The import rules: who may import whom, and what importing the core costs."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "optax")
MAY_NOT = {
    "crossframe": (*FRAMEWORKS, "torch_backend", "jax_backend", "experiments", "tests"),
    "torch_backend": (
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "jax_backend",
        "experiments",
        "tests",
        "torch.distributed.fsdp",
        "torch.distributed._composable",
    ),
    "jax_backend": ("torch", "torch_backend", "experiments", "tests"),
    "experiments": ("torch.distributed.fsdp", "tests"),
}
# What compares with torch's own FSDP imports it, and nothing else does.
# Scripts of the untouched cases, of the clients and of fsdp_scripts stand for code of users, who train with torch's FSDP.
MAY_YET = {
    "torch.distributed.fsdp": (
        *("experiments/spec/", "experiments/bench/", "experiments/parallelism/", "experiments/untouched/scripts/"),
        *("experiments/clients/", "experiments/fsdp_scripts/"),
    ),
}
# JAX's libraries stay at its edges.
EDGES = {
    "flax": {"jax_backend/nnx.py", "jax_backend/linen.py"},
    "equinox": {"jax_backend/equinox.py"},
    "optax": {
        "jax_backend/optimizer/_known_transformations.py",
        "jax_backend/optimizer/_sharded_optimizer.py",
        "jax_backend/state/_optimizer_state.py",
        "jax_backend/recorder/_optimizer_settings.py",
        "jax_backend/recorder/_keras.py",
        "jax_backend/recorder/_optimizer_updates.py",
    },
}
# What each library of the command and of the report is imported by.
LIBRARIES = {
    "typer": "crossframe/cli/",
    "rich": ("crossframe/cli/", "crossframe/report/terminal.py"),
    "jinja2": "crossframe/report/page.py",
    "matplotlib": "crossframe/report/line_chart.py",
}
PACKAGES = ("crossframe", "torch_backend", "jax_backend", "experiments", "tests")
# The files at the top of these packages are imported by name, be they vocabulary for everything (crossframe.errors,
# torch_backend.api) or entry points to everything: each counts by itself, not as part of one folder.
ONE_BY_ONE = ("crossframe", "torch_backend", "jax_backend")


@cache
def statements(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """The import statements of a source, in functions too, and whether each runs: those under `if TYPE_CHECKING:` do not."""
    found: list[tuple[ast.Import | ast.ImportFrom, bool]] = []
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), True)]
    while nodes:
        node, runs = nodes.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append((node, runs))
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            nodes += [(each, False) for each in node.body] + [(each, runs) for each in node.orelse]
        elif not isinstance(node, ast.expr):
            nodes += [(each, runs) for each in ast.iter_child_nodes(node)]
    return found


def imported(path: Path) -> set[str]:
    """Every module that a source imports anywhere in it, lazily too; `from a import b` counts as a and as a.b."""
    names: set[str] = set()
    for node, _ in statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", MAY_NOT)
def test_packages_import_only_what_they_may(package):
    sources = sorted((ROOT / package).rglob("*.py"))
    assert sources
    wrong = [
        f"{where} imports {name}"
        for source in sources
        if (where := source.relative_to(ROOT).as_posix())
        for name in sorted(imported(source))
        for forbidden in MAY_NOT[package]
        if is_of(name, forbidden) and not where.startswith(MAY_YET.get(forbidden, ()))
    ]
    assert wrong == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_of_commands_and_reports_stay_in_their_folders(library):
    users = {
        source.relative_to(ROOT).as_posix()
        for package in ("crossframe", "torch_backend", "jax_backend")
        for source in (ROOT / package).rglob("*.py")
        if any(is_of(name, library) for name in imported(source))
    }
    assert users and all(user.startswith(LIBRARIES[library]) for user in users), users


@cache
def graph() -> dict[str, set[str]]:
    """Each module of the repository and the modules of the repository that it imports anywhere in its source.

    `from a import b` counts as an import of module a.b if there is one, otherwise of a. It does not count that an import of a.b
    runs a/__init__.py first, nor what an `__init__` shows to type checkers and loads lazily.
    """
    paths = {
        source.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): source
        for package in PACKAGES
        for source in (ROOT / package).rglob("*.py")
    }
    edges: dict[str, set[str]] = {}
    for module, path in paths.items():
        names: set[str] = set()
        for node in (node for node, runs in statements(path) if runs or path.name != "__init__.py"):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            else:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names |= {name if name in paths else str(node.module) for name in inner}
        edges[module] = names & paths.keys() - {module}
    return edges


def folder_of(module: str) -> str:
    """The folder that a module counts as; an `__init__` is above the others of its folder, since it exports what they define."""
    if (ROOT / module.replace(".", "/")).is_dir():
        return f"{module}.__init__"
    folder = module.rpartition(".")[0]
    return module if folder in ONE_BY_ONE else folder


@pytest.mark.parametrize("part", [pytest.param(str, id="modules"), pytest.param(folder_of, id="folders")])
def test_imports_have_no_cycles(part):
    edges: dict[str, dict[str, str]] = {}
    for module, names in graph().items():
        for name in names:
            if part(module) != part(name):
                edges.setdefault(part(module), {})[part(name)] = f"{module} imports {name}"
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        pytest.fail("a cycle: " + ", ".join(edges[a][b] for a, b in pairwise(reversed(error.args[1]))))


@pytest.mark.parametrize("package", ["torch_backend", "jax_backend"])
def test_no_private_module_is_unused(package):
    edges = {module: names for module, names in graph().items() if is_of(module, package)}
    reached: set[str] = set()
    # torch has a folder _fully_shard, from which scripts import.
    public = ("torch_backend._fully_shard", "torch_backend.__main__")
    new = {module for module in edges if "._" not in module or any(is_of(module, each) for each in public)}
    while new:
        reached |= new
        new = {name for module in new for name in edges[module] & edges.keys()} - reached
    assert sorted(edges.keys() - reached) == []


def test_flax_equinox_and_optax_stay_at_the_edges():
    for source in (ROOT / "jax_backend").rglob("*.py"):
        where = source.relative_to(ROOT).as_posix()
        for library, edges in EDGES.items():
            assert where in edges or not any(is_of(name, library) for name in imported(source)), (where, library)


def test_collectives_are_called_in_one_file_of_each_backend():
    for package, marks in {
        "torch_backend": ("dist.all_", "dist.reduce", "dist.broadcast", "dist.scatter", "dist._all_gather"),
        "jax_backend": (
            *("lax.psum", "lax.all_gather", "lax.pmean", "lax.all_to_all", "lax.ppermute", "lax.reduce_scatter"),
        ),
    }.items():
        for source in (ROOT / package).rglob("*.py"):
            if source.name.lstrip("_") != "collectives.py":
                text = source.read_text()
                assert not [mark for mark in marks if mark in text], source


def modules_after(statement: str) -> set[str]:
    """The names in sys.modules of a fresh interpreter after a statement."""
    code = f"{statement}; import sys; print('\\n'.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_core_runs_without_any_framework():
    core = sorted(
        source.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for source in (ROOT / "crossframe").rglob("*.py")
    )
    loaded = modules_after("import " + ", ".join(core))
    assert not [name for name in loaded for framework in FRAMEWORKS if is_of(name, framework)]


def test_importing_the_core_loads_numpy_and_little_else():
    extra = {
        name.partition(".")[0]
        for name in modules_after("from crossframe import Sharding") - modules_after("import numpy")
    }
    assert extra <= {
        "crossframe",
        "ml_dtypes",
        "dataclasses",
        "copy",
        "fractions",
        "numpy",
        *sys.stdlib_module_names,
        "_crossframe",
    }, extra


@pytest.mark.parametrize(
    ("package", "framework", "extra"), [("torch_backend", "torch", "torch"), ("jax_backend", "jax", "jax")]
)
def test_a_missing_extra_gives_one_line_with_the_install_to_run(package, framework, extra):
    code = f"""
import sys
sys.modules[{framework!r}] = None
try:
    import {package}
except ImportError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"{package} needs {'JAX' if extra == 'jax' else extra}: pip install 'crossframe[{extra}]'\n"
