import ast
import subprocess
import sys
from pathlib import Path

import jax_backend

FOLDER = Path(jax_backend.__file__).parent


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=FOLDER.parent)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


EDGES = {
    "nnx.py": {"flax"},
    "linen.py": {"flax"},
    "equinox.py": {"equinox"},
    "optim.py": {"optax"},
    "checkpoint_state.py": {"optax"},
}


def test_no_file_imports_torch_or_the_other_backend_and_only_the_edges_import_other_libraries():
    for path in FOLDER.rglob("*.py"):
        roots = {name.partition(".")[0] for name in imported(path)}
        assert not roots & {"torch", "torch_backend", "experiments"}, path
        assert roots & {"flax", "optax", "equinox"} <= EDGES.get(path.name, set()), path


def test_only_one_file_calls_jaxs_collectives():
    names = ("lax.all_gather", "lax.psum", "lax.pmean", "lax.all_to_all", "lax.ppermute", "lax.reduce_scatter")
    callers = {path.name for path in FOLDER.rglob("*.py") if any(name in path.read_text() for name in names)}
    assert callers == {"collectives.py"}


def test_without_jax_the_import_says_what_to_install():
    done = run("import sys; sys.modules['jax'] = None; import jax_backend")
    assert done.stderr.strip().endswith("ImportError: jax_backend needs JAX: pip install 'crossframe[jax]'")


def test_importing_starts_no_backend_of_jax():
    done = run(
        "import jax_backend, jax; jax.config.update('jax_num_cpu_devices', 3); print(len(jax.devices('cpu')))",
    )
    assert done.stdout.strip() == "3", done.stderr
