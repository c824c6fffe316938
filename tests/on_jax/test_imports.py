import subprocess
import sys
from pathlib import Path

import jax_backend


def test_importing_starts_no_backend_of_jax():
    code = "import jax_backend, jax; jax.config.update('jax_num_cpu_devices', 3); print(len(jax.devices('cpu')))"
    folder = Path(jax_backend.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.stdout.strip() == "3", done.stderr
