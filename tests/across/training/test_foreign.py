"""The foreign pairs are whole, and a map is judged by the elements of every parameter."""

import json
import re
import subprocess
import sys
from argparse import Namespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from safetensors.numpy import load_file, save_file

from crossframe.param_map import MapEntry, ParamMap
from experiments.foreign.run import HERE, TORCH, judge_map, pairs_of
from experiments.foreign.shared import linen_modules, write_converted
from jax_backend.activations import listening


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_foreign_pairs_are_whole(number):
    pairs = pairs_of(number=number)
    assert len(pairs) >= 8
    for pair in pairs:
        expected = json.loads((HERE / pair.name / "expected.json").read_text())
        assert all(expected["parameters"].values())
        assert all(pair.script(side).is_file() for side in "ab")
        files = {name: HERE / "environments" / f"{name}.txt" for name in pair.environments}
        assert all((name in TORCH) == ("\ntorch==" in path.read_text()) for name, path in files.items())
        assert "given.fault" in pair.script(pair.side).read_text()
        assert "given.fault" not in pair.script("ba"["ab".index(pair.side)]).read_text()


IMPORTED = """
import sys
from importlib.metadata import packages_distributions
import jax_backend
known = packages_distributions()
# Without namespaces such as "nvidia", whose distributions share a name.
packages = {name for name, module in sys.modules.items() if "." not in name and getattr(module, "__file__", None)}
print(*(known[name][0] for name in packages if name in known))
"""


def test_environments_with_jax_have_what_jax_backend_imports():
    """pip installs there what a file lists, and nothing else."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    imported = {name.lower().replace("-", "_") for name in done.stdout.split()} - {"crossframe", "setuptools"}
    assert "jaxtyping" in imported
    stated = [path.read_text().lower().replace("-", "_") for path in (HERE / "environments").glob("*.txt")]
    for text in (text for text in stated if "\njax==" in text):
        assert not imported - set(re.findall(r"^(\w+)==", text, re.MULTILINE))


def test_a_map_is_judged_by_elements(tmp_path):
    numbers = {
        "fc.weight": np.arange(1.0, 5).reshape(2, 2),
        "fc.bias": np.array([5.0, 6.0]),
        "norm.weight": np.array([7.0]),
    }
    expected = {
        "fc.kernel": numbers["fc.weight"].T,
        "fc.bias": numbers["fc.bias"],
        "norm.scale": numbers["norm.weight"],
    }
    entries = (MapEntry("fc.weight", "fc.kernel"), MapEntry("fc.bias", "fc.bias"))  # the weight is not transposed
    ParamMap(entries).save(tmp_path / "map.json")
    assert judge_map(tmp_path / "map.json", numbers, expected) == {
        "matched": ["fc.bias"],
        "undecided": ["norm.scale"],
        "wrong": ["fc.kernel"],
    }
    assert judge_map(tmp_path / "none.json", numbers, expected)["undecided"] == list(expected)
    back = (
        MapEntry("fc.kernel", "fc.weight", "o i -> i o"),
        MapEntry("fc.bias", "fc.bias"),
    )  # the names are those of side b
    ParamMap(back).save(tmp_path / "back.json")
    assert judge_map(tmp_path / "back.json", numbers, expected)["matched"] == ["fc.kernel", "fc.bias"]


def test_converted_arrays_are_written_in_the_order_of_their_dims(tmp_path):
    weight = np.arange(6.0).reshape(2, 3)
    save_file({"fc.weight": weight}, tmp_path / "numbers.safetensors")
    given = Namespace(convert=tmp_path / "numbers.safetensors", values=tmp_path)
    write_converted(given, lambda arrays: {"fc.kernel": arrays["fc.weight"].T})
    assert np.array_equal(load_file(tmp_path / "b.safetensors")["fc.kernel"], weight.T)


class Tied(nn.Module):
    """A model that applies its head by itself, with the kernel of its embedding."""

    def setup(self):
        self.embed, self.head = nn.Embed(7, 5), nn.Dense(7, use_bias=False)
        self.bias = self.param("bias", nn.initializers.ones, (7,))

    def __call__(self, tokens):
        hidden, embedding = self.embed(tokens), self.variables["params"]["embed"]["embedding"]
        logits: Any = self.head.apply({"params": {"kernel": embedding.T}}, hidden)
        return logits + self.bias


def test_the_output_of_a_model_is_not_that_of_a_tied_head():
    model, tokens = Tied(), np.arange(6).reshape(2, 3)
    variables = model.init(jax.random.key(0), tokens)
    with listening() as told:
        output = linen_modules(lambda: model.apply(variables, tokens))()
    assert {module for module, _ in told} == {"", "embed", "head"}
    assert np.array_equal(told["", "output"], output)
    assert np.array_equal(told["head", "output"] + variables["params"]["bias"], output)
