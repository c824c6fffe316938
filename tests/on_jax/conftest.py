"""Eight CPU devices, and float64 unless CROSSFRAME_TESTS_OF_JAX_DEFAULTS is set, before any test first uses JAX.

On a machine with GPUs, tests run on these, and those that need more devices than there are GPUs are skipped.
"""

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import jax
import pytest

from crossframe.errors import UsageError
from tests.conftest import JAX_DEFAULTS

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", JAX_DEFAULTS not in os.environ)


@contextmanager
def _skipped_without_devices() -> Iterator[None]:
    try:
        yield
    except (
        UsageError,
        AssertionError,
        ValueError,
    ) as error:  # an AssertionError is that of another error than was expected
        text = str(error)
        if jax.default_backend() == "cpu" or not any(
            each in text for each in ("devices for a mesh", "Number of devices")
        ):
            raise
        pytest.skip(f"{jax.device_count()} of these devices: {text}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with _skipped_without_devices():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with _skipped_without_devices():
        return (yield)
