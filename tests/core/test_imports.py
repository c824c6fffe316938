"""The import rules: who may import whom, and what importing the core costs."""

import ast
import subprocess
import sys
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
# Scripts of the untouched cases stand for code of users, who train with torch's FSDP.
MAY_YET = {
    "torch.distributed.fsdp": ("experiments/spec/", "experiments/bench/", "experiments/untouched/scripts/"),
}
# JAX's libraries stay at its edges.
EDGES = {
    "flax": {"jax_backend/nnx.py", "jax_backend/linen.py"},
    "optax": {"jax_backend/optim.py", "jax_backend/checkpoint_state.py"},
}


def imported(path: Path) -> set[str]:
    """Every module that a source imports anywhere in it, lazily too; `from a import b` counts as a and as a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
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


def test_flax_and_optax_stay_at_the_edges_of_the_jax_backend():
    for source in (ROOT / "jax_backend").rglob("*.py"):
        where = source.relative_to(ROOT).as_posix()
        for library, edges in EDGES.items():
            assert where in edges or not any(is_of(name, library) for name in imported(source)), (where, library)


def test_collectives_are_called_in_one_file_of_each_backend():
    for package, marks in {
        "torch_backend": ("dist.all_", "dist.reduce", "dist.broadcast", "dist.scatter", "dist._all_gather"),
        "jax_backend": ("lax.psum", "lax.all_gather", "lax.pmean", "lax.all_to_all"),
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
    extra = {name.partition(".")[0] for name in modules_after("import crossframe") - modules_after("import numpy")}
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
