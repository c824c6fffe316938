"""The wheel, installed where nothing else of this repository is, and used in a folder with packages of the same names as ours."""

import json
import zipfile

import pytest

import crossframe
from tests.core.helpers import synthetic
from tests.installed.environments import Environment, build_wheel

TRAINS_IN_TORCH = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(2):
    model(torch.ones(3, 4, dtype=torch.float64) * step).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINS_IN_JAX = """
import sys
import jax.numpy as jnp
from jax_backend import Recorder

params = {"w": jnp.ones(3)}
with Recorder(sys.argv[1], params) as recorder:
    recorder.step(params=params, loss=1.0)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def install(tmp_path, wheel):
    return lambda *extras: Environment(tmp_path / "environment", wheel, extras)


@pytest.fixture
def folder(tmp_path):
    """A user's folder, whose packages have names that this repository uses too."""
    folder = tmp_path / "research"
    for name in ("experiments", "tests"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise ImportError('a package of the user')")
    return folder


def test_the_wheel_has_the_three_typed_packages_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "crossframe",
        "torch_backend",
        "jax_backend",
    }
    (listed,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    points = zipfile.ZipFile(wheel).read(listed).decode()
    assert "[pytest11]\ncrossframe = crossframe.pytest_plugin" in points
    assert {f"{package}/py.typed" for package in ("crossframe", "torch_backend", "jax_backend")} <= set(names)
    assert {"crossframe/report/report.html.j2", "crossframe/report/report.css"} <= set(names)
    assert {f"crossframe/explorer/explorer.{kind}" for kind in ("html", "css", "js")} <= set(names)


def test_the_base_install_compares_and_lays_out_without_frameworks(install, folder, tmp_path):
    installed = install()
    for name in ("a", "b"):
        synthetic.record(tmp_path / name)
    compared = installed.run("crossframe", "compare", tmp_path / "a", tmp_path / "b", folder=folder)
    assert compared.returncode == 0 and "all compared values are bitwise equal" in compared.stdout, compared
    as_json = installed.run("crossframe", "compare", tmp_path / "a", tmp_path / "b", "--json", folder=folder)
    assert json.loads(as_json.stdout)["verdict"] == "equal"
    for command, expected in (("layout", "blocks.1"), ("plan", "the step of rank 0")):
        shown = installed.run("crossframe", command, "gpt-tiny", "--world-size", 2, folder=folder)
        assert shown.returncode == 0 and expected in shown.stdout, shown
        as_json = installed.run("crossframe", command, "gpt-tiny", "--world-size", 2, "--json", folder=folder)
        assert json.loads(as_json.stdout)
    page = installed.run("crossframe", "layout", "gpt-tiny", "--world-size", 2, "--html", "page.html", folder=folder)
    assert page.returncode == 0 and (folder / "page.html").exists(), page
    assert installed.run("crossframe", "--version", folder=folder).stdout == f"crossframe {crossframe.__version__}\n"
    typed = {"_CROSSFRAME_COMPLETE": "complete_bash", "COMP_WORDS": "crossframe co", "COMP_CWORD": "1"}
    assert "compare" in installed.run("crossframe", folder=folder, environment=typed).stdout.split()
    report = installed.run("crossframe", "compare", tmp_path / "a", tmp_path / "b", "--output", "out", folder=folder)
    assert (report.returncode, report.stderr) == (2, "crossframe: needs jinja2: pip install 'crossframe[report]'\n")
    (folder / "train.py").touch()
    recorded = installed.run("crossframe", "record", "train.py", folder=folder)
    assert (recorded.returncode, recorded.stderr) == (2, "crossframe: needs torch: pip install 'crossframe[torch]'\n")
    assert not (folder / "out").exists() and not (folder / "runs").exists()


def test_with_torch_alone_a_script_is_recorded_and_compared(install, folder):
    installed = install("torch", "report")
    (folder / "train.py").write_text(TRAINS_IN_TORCH)
    recorded = installed.run("crossframe", "record", "train.py", folder=folder)
    assert recorded.returncode == 0, recorded
    compared = installed.run("crossframe", "compare", "runs/train", "runs/train", "--output", "report", folder=folder)
    assert compared.returncode == 0 and "all compared values are bitwise equal" in compared.stdout, compared
    assert (folder / "report" / "report.html").exists()


def test_with_jax_alone_a_loop_is_recorded_and_compared(install, folder):
    installed = install("jax")
    (folder / "train.py").write_text(TRAINS_IN_JAX)
    recorded = installed.run("python", "train.py", "run", folder=folder)
    assert recorded.returncode == 0, recorded
    compared = installed.run("crossframe", "compare", "run", "run", folder=folder)
    assert compared.returncode == 0 and "all compared values are bitwise equal" in compared.stdout, compared
