"""A sample of these tests with JAX and XLA as their users have them: no jax_enable_x64, no flags of XLA.

All other tests of this backend run with 64-bit numbers and with flags that compile quickly, unless
CROSSFRAME_TESTS_OF_JAX_DEFAULTS is set.
"""

# pyright: reportAttributeAccessIssue=false

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests.conftest import JAX_DEFAULTS

FOLDER = Path(__file__).parent
SAMPLE = (
    "test_jax_defaults.py",
    "shards/test_padding_mask.py",
    "engine/test_gather.py::test_R26_a_division_is_a_division_in_every_dtype",
)
ASIDE = ("XLA_FLAGS", "JAX_ENABLE_X64", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS")


@pytest.mark.skipif(JAX_DEFAULTS not in os.environ, reason="of a run in JAX's defaults")
def test_jax_and_xla_have_their_defaults():
    assert not jax.config.jax_enable_x64 and "XLA_FLAGS" not in os.environ
    assert jnp.arange(2).dtype == jnp.int32 and jnp.ones(2).dtype == jnp.float32


@pytest.mark.skipif(JAX_DEFAULTS in os.environ, reason="it is such a run")
def test_a_sample_passes_in_jaxs_defaults():
    env = {name: value for name, value in os.environ.items() if name not in ASIDE} | {JAX_DEFAULTS: "1"}
    tests = [str(FOLDER / name) for name in SAMPLE]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *tests,
    ]
    done = subprocess.run(command, env=env, cwd=FOLDER.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
