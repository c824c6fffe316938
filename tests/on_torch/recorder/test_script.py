"""Scripts that know nothing of the recorder, recorded."""

import json
import os
import resource
import subprocess
import sys
from datetime import timedelta
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from crossframe.cli.record import record_script, script_command
from crossframe.cli.training_command import TrainingCommand
from crossframe.errors import UsageError
from crossframe.inspection import inspect
from crossframe.recording import Recording
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.scripts import NOT_RECORDED, run_again_file
from crossframe.verdict import Verdict, compare
from tests.commands import status_of
from tests.core.helpers import synthetic
from tests.on_torch.helpers.recorded_scripts import HEAD
from torch_backend.recorder import script

PLAIN = """
rank, world = 0, 1
model = net()
if "--ddp" in sys.argv:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
with torch.no_grad():
    loss_of(model, tokens[0])
for x in tokens:
    optimizer.zero_grad()
    model.train()
    loss_of(model, x.chunk(world)[rank]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    schedule.step()
    loss_of(model.eval(), x)
"""
LOOP = """
for x in tokens:
    for model, optimizer in pairs:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
"""
PAIRS = "pairs = [(m, torch.optim.SGD(m.parameters(), 0.1)) for m in (net(), net())]"
LATER_MODEL = """
pairs = []
for model in (net(), net()):
    pairs.append((model, torch.optim.SGD(model.parameters(), 0.1)))
""" + LOOP.replace("\n", "\n    ")
ONE_AFTER_ANOTHER = (
    PAIRS
    + """
for model, optimizer in pairs:
    for x in tokens:
        loss_of(model, x).backward()
        optimizer.step()
"""
)
# As in most scripts of generative adversarial networks; with --critic as in those of Wasserstein ones.
ADVERSARIAL = """
generator = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
critic = nn.Sequential(nn.Linear(3, 6), nn.LeakyReLU(0.25 if "--slope" in sys.argv else 0.2), nn.Linear(6, 1)).double()
optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (generator, critic)]
def step(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
for i in range(4):
    real, noise = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    fake = generator(noise)
    if "--critic" not in sys.argv or i % 2:
        step(optimizers[0], -critic(fake).mean())
    step(optimizers[1], critic(fake.detach()).mean() - critic(real).mean())
"""
CYCLE = """
class Cycle:
    def __init__(self):
        self.there, self.back = nn.Linear(4, 3).double(), nn.Linear(3, 4).double()
        self.judge = nn.Linear(3, 1).double().requires_grad_(False)
        self.optimizers = [
            torch.optim.SGD([*self.there.parameters(), *self.back.parameters()], 0.1),
            torch.optim.SGD(self.judge.parameters(), 0.1),
        ]

    def train(self, x):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        (self.back(self.there(x)) - x).square().mean().backward()
        self.optimizers[0].step()
        self.judge.requires_grad_()
        self.judge(self.there(x).detach()).mean().backward()
        self.optimizers[1].step()
        self.judge.requires_grad_(False)

cycle = Cycle()
for _ in range(3):
    cycle.train(torch.randn(5, 4).double())
"""
DECODING = """
model = net().eval()
if "--scaled" in sys.argv:
    model[2].register_forward_hook(lambda module, args, output: output * 1.001)
def decode(x):
    for _ in range(3):
        x = torch.cat([x, model(x)[:, -1:].argmax(-1)], 1)
    return x
with torch.inference_mode():
    decoded = decode(tokens[0])
"""
TWO_OPTIMIZERS = """
model = net()
halves = [torch.optim.SGD(part.parameters(), 0.1) for part in (model[:2], model[2])]
for x in tokens:
    loss_of(model, x).backward()
    for optimizer in halves:
        optimizer.step()
        optimizer.zero_grad()
"""
ONE_AFTER_THE_OTHER = """
model = net()
def closure():
    optimizer.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    return loss
for make in (lambda params: torch.optim.Adam(params, 1e-2), lambda params: torch.optim.LBFGS(params, max_iter=2)):
    optimizer = make(model.parameters())
    for x in tokens:
        optimizer.step(closure)
"""
IN_FABRIC = """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
model = net()
halves = [torch.optim.SGD(part.parameters(), 0.1) for part in (model[:2], model[2])]
model, *halves = fabric.setup(model, *halves)
for x in tokens:
    fabric.backward(loss_of(model, x))
    for optimizer in halves:
        optimizer.step()
        optimizer.zero_grad()
"""
# The body of the first model is neither frozen nor updated.
PARTLY_TRAINED = """
first, second = net(), net()
optimizers = [torch.optim.SGD(params, 0.1) for params in (first[2].parameters(), second.parameters())]
for model, optimizer in zip((first, second), optimizers):
    loss_of(model, tokens[0]).backward()
    optimizer.step()
"""
LATE_OPTIMIZER = """
model = net()
model(tokens[0]).sum().backward()
torch.optim.SGD(model.parameters(), 0.1).step()
"""
IN_PARTS = """
model = net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in tokens:
    optimizer.zero_grad()
    loss_of(model if "--whole" in sys.argv else lambda x: model[2](model[1](model[0](x))), x).backward()
    optimizer.step()
"""


# As scripts of reinforcement learning have it: a rollout without gradients, and two parts that one optimizer trains.
AGENT = """
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def act(self, x):
        return self.actor(x), self.critic(x)

agent = Agent()
optimizer = torch.optim.SGD(agent.parameters(), 0.1)
for step in range(3):
    x = torch.full((2, 4), 1.0 + step)
    with torch.no_grad():
        agent.act(-x)
    logits, value = agent.act(x)
    loss = logits.square().mean() + value.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def record(folder: Path, *, nproc_per_node: int | None = None, **options):
    """Record a script by the command's function."""
    training = TrainingCommand(folder / "script.py", nproc_per_node=nproc_per_node)
    given = {
        "output": folder / "out",
        "perturbed_runs": 0,
        "every": 2,
        "dense": 1,
        "windows": (),
        "overwrite": False,
    }
    return record_script(training, console=Console(file=StringIO()), **(given | options))


@pytest.mark.exhaustive
def test_a_script_is_recorded_as_it_is_on_one_device_and_under_torchrun_with_perturbed_runs(run, tmp_path):
    for perturbed_run in range(3):
        assert run(PLAIN, perturbed_run=perturbed_run, windows=[(2, 3)]) == 0
    command = [
        sys.executable,
        "-m",
        "crossframe",
        "record",
        str(tmp_path / "script.py"),
        "--nproc-per-node",
        "2",
    ]
    command += ["--output", str(tmp_path / "two"), "--every", "3", "--window", "2:3", "--", "--ddp"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    one, two = Recording.open(tmp_path / "out"), Recording.open(tmp_path / "two")
    assert len(one.perturbed_runs()) == 2
    assert (one.num_steps, one.recorded_steps(), two.recorded_steps()) == (3, (0, 2), (0, 1, 2))
    assert two.manifest.mesh.replicate == 2
    assert one.grad_norm(2, 0) == pytest.approx(two.grad_norm(2, 1), rel=1e-12)
    again = f"crossframe record {tmp_path}/script.py --nproc-per-node 2 --every 3 --dense 2 --window 2:3 -- --ddp"
    assert two.manifest.settings["command"] == again
    # The evaluation behind each step, which has gradients enabled, is no part of it.
    assert len(one.batch(1, 0).sample_ids) == 4
    assert compare(one, two).verdict is Verdict.ROUNDING


LEAVES = """
import atexit, threading, time
class Last:
    def __del__(self):
        print("finalized")
torch.last = Last()  # is there until the interpreter is finalized
atexit.register(print, "at exit")
threading.Timer(0.1, print, ["a thread"]).start()
left = open(sys.argv[-1], "w")
left.write("closed")
dist.destroy_process_group()
"""


def test_a_recorded_process_ends_without_finalizing_the_interpreter(tmp_path):
    """See [Note: threads of gloo]."""
    (tmp_path / "script.py").write_text(HEAD + PLAIN + LEAVES)
    options = {"directory": str(tmp_path / "out"), "every": 2, "dense": 1, "windows": []}
    arguments = ("--ddp", str(tmp_path / "text"))
    ended = subprocess.run(
        script_command("torch", TrainingCommand(tmp_path / "script.py", arguments), options),
        env=os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split("\n") == ["a thread", "at exit", ""]
    assert (tmp_path / "text").read_text() == "closed"
    assert Recording.open(tmp_path / "out").num_steps == 3


OWN_EXPERIMENTS = """
import multiprocessing
def send(sender):
    import experiments.rows
    sender.send([experiments.rows.row(i) for i in range(2)])
def loaded():
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send, args=(sender,))
    process.start()
    sender.close()
    rows = receiver.recv()
    process.join()
    return rows
"""
USES_OWN_EXPERIMENTS = """
import atexit
from experiments.data import loaded
if __name__ == "__main__":
    import torch  # not in the workers, for which it takes seconds
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x in loaded():
        net(torch.tensor(x)).mean().backward()
        optimizer.step()
    atexit.register(lambda: print("at exit", len(loaded())))
"""


def test_spawned_workers_import_the_packages_of_the_script(tmp_path):
    """Also those that the script starts after its last line."""
    own = tmp_path / "experiments"
    own.mkdir()
    (own / "__init__.py").touch()
    (own / "data.py").write_text(OWN_EXPERIMENTS)
    (own / "rows.py").write_text("row = lambda i: [float(i)] * 4\n")
    (tmp_path / "script.py").write_text(USES_OWN_EXPERIMENTS)
    options = {"directory": str(tmp_path / "out"), "every": 2, "dense": 1, "windows": []}
    command = script_command("torch", TrainingCommand(tmp_path / "script.py"), options)
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "at exit 2\n"), ended.stderr
    assert Recording.open(tmp_path / "out").num_steps == 2


def test_several_optimizers_of_one_model_make_one_step(run, tmp_path):
    before = nn.Module.__call__, Optimizer.__init__
    assert run(TWO_OPTIMIZERS) == 0
    assert (nn.Module.__call__, Optimizer.__init__) == before
    recording = Recording.open(tmp_path / "out")
    assert recording.num_steps == 3
    assert all(recording.has("reduce", 0, name) for name in recording.manifest.params)


def test_an_optimizer_may_follow_another_one(run, tmp_path):
    assert run(ONE_AFTER_THE_OTHER, every=1) == 0
    recording = Recording.open(tmp_path / "out")
    assert recording.num_steps == 6
    slots = [set(recording.state_slots(step, "0.weight")) for step in range(6)]
    assert slots == [{"exp_avg", "exp_avg_sq"}] * 3 + [set()] * 3
    assert not inspect(recording).departures


def test_a_moment_of_the_opposite_sign_is_examined(run, tmp_path):
    text = """
model = nn.Linear(1, 1, bias=False)
optimizer = torch.optim.Adam(model.parameters(), 0.1)
optimizer.register_step_post_hook(lambda *_: optimizer.state[model.weight]["exp_avg"].neg_())
for x in (1.0, 2.0):
    optimizer.zero_grad()
    model(torch.tensor([[x]])).square().sum().backward()
    optimizer.step()
"""
    assert run(text, every=1) == 0
    notes = inspect(Recording.open(tmp_path / "out")).notes
    assert any(note.startswith("step 0: gradients were multiplied by -1 ") for note in notes)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("loss_of(model, tokens[0])", id="forward"),
        pytest.param("loss_of(model, tokens[0]).backward()", id="backward"),
        pytest.param("loss_of(model, tokens[0]).backward(); halves[0].step()", id="half of the parameters updated"),
    ],
)
def test_a_step_that_does_not_end_is_left_out(run, tmp_path, end):
    assert run(TWO_OPTIMIZERS + end, dense=9, every=1) == 0
    recording = Recording.open(tmp_path / "out")
    assert recording.num_steps == 3
    assert recording.recorded_steps() == (0, 1, 2)


def test_fabric_changes_no_names(run, tmp_path):
    pytest.importorskip("lightning.fabric")
    for name, text in (("plain", TWO_OPTIMIZERS), ("fabric", IN_FABRIC)):
        # In float32, to which Fabric converts outputs.
        assert run(text.replace("net()", "net().float()"), directory=str(tmp_path / name)) == 0
    plain, fabric = Recording.open(tmp_path / "plain"), Recording.open(tmp_path / "fabric")
    assert fabric.manifest.model == "Sequential"
    assert compare(plain, fabric).verdict is Verdict.EQUAL


def test_forward_alone_is_recorded_call_by_call(run, tmp_path):
    for name, arguments in (("a", ()), ("b", ()), ("c", ("--scaled",))):
        assert run(DECODING, *arguments, directory=str(tmp_path / name), forward_only=True, dense=3) == 0
    a, b, c = (Recording.open(tmp_path / name) for name in "abc")
    assert a.num_steps == 3 and [len(a.batch(step, 0).inputs) for step in range(3)] == [1, 1, 1]
    outputs = [a.activation(step, 0, 0, "", "output") for step in range(3)]
    assert [output.shape for output in outputs] == [(4, 6 + i, 11) for i in range(3)]
    np.testing.assert_allclose(a.losses()[:, 0], [np.sqrt(np.mean(output**2)) for output in outputs], rtol=1e-14)
    assert not any(a.has("reduce", 0, name) or a.has("update", 0, name) for name in a.manifest.params)
    assert compare(a, b).verdict is Verdict.EQUAL
    found = compare(a, c)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.module) == (0, "2")


def test_forward_alone_is_not_compared_with_training(run, tmp_path):
    assert run(DECODING, forward_only=True) == 0
    assert run(PLAIN, directory=str(tmp_path / "trained")) == 0
    found = compare(Recording.open(tmp_path / "out"), Recording.open(tmp_path / "trained"))
    assert found.verdict is Verdict.INCOMPARABLE and "out has forward alone" in found.reason


def test_a_perturbed_forward_rounds_otherwise(run, tmp_path):
    for number in (0, 1):
        assert run(DECODING, forward_only=True, perturbed_run=number) == 0
    found = Recording.open(tmp_path / "out")
    pair = [each.activation(0, 0, 0, "", "output") for each in (found, *found.perturbed_runs())]
    assert not np.array_equal(*pair)
    np.testing.assert_allclose(*pair, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LATER_MODEL, "trains more than one model"),
        (PARTLY_TRAINED, "trains more than one model"),
        (ONE_AFTER_ANOTHER, "trains models one after another"),
        (
            ONE_AFTER_ANOTHER.replace("in tokens", "in tokens.repeat(40, 1, 1)"),
            "no step of training ended: of 2 optimizers, 1 never stepped (1 of SGD)",
        ),
        (LATE_OPTIMIZER, "no module that the script calls by itself has all of its parameters"),
        ("print('hello')", "nothing was trained in this process"),
    ],
)
def test_what_is_not_recorded_says_why(run, text, said, capsys):
    assert run(text) == NOT_RECORDED
    assert said in capsys.readouterr().err


IDLE = (
    PAIRS
    + """
temperature = nn.Parameter(torch.zeros(()).double())
idle = torch.optim.Adam([temperature])
"""
    + LOOP
)


def test_an_optimizer_that_never_steps_is_left_out(run, tmp_path, capsys):
    assert run(IDLE, every=1) == NOT_RECORDED
    assert "of 3 optimizers, 1 never stepped (1 of Adam)" in capsys.readouterr().err
    listed = run_again_file(tmp_path / "out", "0")
    assert json.loads(listed.read_text()) == {"idle_optimizers": [2]}
    listed.unlink()
    assert run(IDLE, every=1, overwrite=True, idle_optimizers=[2]) == 0
    assert run(PAIRS + LOOP, every=1, directory=str(tmp_path / "without")) == 0
    found = compare(*(Recording.open(tmp_path / name) for name in ("out", "without")))
    assert (found.verdict, found.steps) == (Verdict.EQUAL, 3), found.reason


def test_an_optimizer_that_steps_late_is_no_idle_one(run, capsys):
    late = """
model = net()
optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model[:2], model[2])]
for i, x in enumerate(tokens):
    loss_of(model, x).backward()
    for optimizer in optimizers[: 1 + i // 2]:
        optimizer.step()
"""
    assert run(late, every=1, idle_optimizers=[1]) == NOT_RECORDED
    assert "an optimizer steps that had not at first, or that --idle-optimizer states: SGD" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "num_steps"), [((), 4), (("--critic",), 2)], ids=["in turn", "more steps of a critic"]
)
def test_models_that_are_trained_together_are_recorded_as_one(run, tmp_path, arguments, num_steps):
    found = {}
    for name, further in (("out", ()), ("again", ()), ("wrong", ("--slope",))):
        assert run(ADVERSARIAL, *arguments, *further, directory=str(tmp_path / name), every=1, dense=2) == 0
        found[name] = Recording.open(tmp_path / name)
    assert found["out"].num_steps == num_steps
    assert found["out"].manifest.params.keys() == {
        f"{layer}.{kind}"
        for layer in ("critic.0", "critic.2", "generator.0", "generator.1", "generator.2")
        for kind in ("weight", "bias")
    }
    assert compare(found["out"], found["again"]).verdict is Verdict.EQUAL
    wrong = compare(found["out"], found["wrong"])
    assert wrong.verdict is Verdict.BUG and wrong.first_divergence is not None
    assert (wrong.first_divergence.step, wrong.first_divergence.module) == (0, "critic.2")


def test_what_a_model_computed_for_another_one_is_no_sample(run, tmp_path):
    """Else perturbed runs, and runs on other ranks, would have other samples: those of a generator differ by rounding."""
    for number in (0, 1):
        assert run(ADVERSARIAL, every=1, dense=1, perturbed_run=number) == 0
    found = Recording.open(tmp_path / "out")
    assert not np.array_equal(
        *(each.full("update", 3, "generator.0.weight") for each in (found, *found.perturbed_runs()))
    )
    assert all(found.batch(step, 0).has_samples_of(found.perturbed_runs()[0].batch(step, 0)) for step in range(4))


def test_models_that_share_an_optimizer_and_a_frozen_one_are_recorded_as_one(run, tmp_path):
    assert run(CYCLE, every=1, dense=1) == 0
    recording = Recording.open(tmp_path / "out")
    assert recording.num_steps == 3
    assert recording.manifest.params.keys() == {
        f"{name}.{kind}" for name in ("there", "back", "judge") for kind in ("weight", "bias")
    }


# An agent whose temperature is a tensor; an image that a frozen network looks at, with two calls of a closure in a step; tensors
# that nothing but arithmetic uses.
WITH_TENSORS = {
    "agent": """
class Agent:
    def __init__(self):
        self.actor, self.critic = nn.Linear(4, 2).double(), nn.Linear(6, 1).double()
        self.log_alpha = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        self.optimizers = [
            torch.optim.SGD(each, 0.1)
            for each in (self.actor.parameters(), self.critic.parameters(), [self.log_alpha])
        ]

    def train(self, x):
        act = self.actor(x)
        size = act.square().sum(1)
        for i, loss in enumerate((
            lambda: self.log_alpha.exp().detach() * size.mean() - self.critic(torch.cat([x, act], 1)).mean(),
            lambda: (self.critic(torch.cat([x, self.actor(x).detach()], 1)) - 1).square().mean(),
            lambda: -(self.log_alpha * (size.detach() - (1.5 if "--fault" in sys.argv else 1))).mean(),
        )):
            self.optimizers[i].zero_grad()
            loss().backward()
            self.optimizers[i].step()

agent = Agent()
for _ in range(3):
    agent.train(torch.randn(5, 4).double())
""",
    "image": """
network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double().requires_grad_(False)
aim = network(torch.rand(1, 3, 8, 8).double())
image = torch.rand(1, 3, 8, 8).double().requires_grad_()
optimizer = torch.optim.LBFGS([image], max_iter=2)
def loss():
    optimizer.zero_grad()
    value = (network((image - 0.5) / (0.3 if "--fault" in sys.argv else 0.25)) - aim).square().mean()
    value.backward()
    return value
for _ in range(3):
    optimizer.step(loss)
""",
    "tensors": """
x = torch.randn(20, 3).double()
w, more = torch.zeros(3).double().requires_grad_(), {"offset": torch.ones(()).double().requires_grad_()}
optimizer = torch.optim.Adam([w, *more.values()], 0.1)
for _ in range(3):
    optimizer.zero_grad()
    (x @ w + more["offset"] ** (3 if "--fault" in sys.argv else 2) - 2).square().mean().backward()
    optimizer.step()
""",
}


@pytest.mark.parametrize(
    ("script", "names", "batch", "place"),
    [
        (
            "agent",
            {"actor.weight", "actor.bias", "critic.weight", "critic.bias", "log_alpha"},
            5,
            ("backward", "log_alpha"),
        ),
        (
            "image",
            {"image", *(f"network.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias"))},
            0,
            ("input", "network.0"),
        ),
        ("tensors", {"w", "offset"}, 0, ("backward", "offset")),
    ],
)
def test_tensors_that_no_module_has_are_recorded_with_the_model(run, tmp_path, script, names, batch, place):
    found = {}
    runs = [("out", number, ()) for number in range(3)] + [("again", 0, ()), ("fault", 0, ("--fault",))]
    for name, number, arguments in runs:
        directory = str(tmp_path / name)
        assert run(WITH_TENSORS[script], *arguments, directory=directory, every=1, perturbed_run=number) == 0
        found[name] = Recording.open(tmp_path / name)
    out = found["out"]
    assert out.num_steps == 3 and out.manifest.params.keys() == names
    # Samples, without those that were computed from parameters, which differ by rounding.
    perturbed = out.perturbed_runs()[0]
    assert [len(set(out.batch(step, 0).sample_ids)) for step in range(3)] == [batch] * 3
    assert all(out.batch(step, 0).has_samples_of(perturbed.batch(step, 0)) for step in range(3))
    for name in names - {each for each in names if each.startswith("network")}:
        assert not np.array_equal(*(each.full("update", 2, name) for each in (out, perturbed)))
    assert compare(out, found["again"]).verdict is Verdict.EQUAL
    fault = compare(out, found["fault"])
    assert fault.verdict is Verdict.BUG and fault.first_divergence is not None
    assert (fault.first_divergence.step, fault.first_divergence.event) == (0, place[0])
    assert fault.first_divergence.parameter == place[1] or fault.first_divergence.module == place[1]


# The critic first, or the generator, whose backward leaves gradients in the critic. Edits of the critic's turn.
TURNS = """
generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()
critic = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (critic, generator)]
if "gradient" in sys.argv:
    critic[0].weight.register_hook(lambda grad: grad * 1.01)
if "state" in sys.argv:
    optimizers[0].param_groups[0]["betas"] = 0.8, 0.999
def judge(noise, real):
    return critic(generator(noise).detach()).mean() * (1.01 if "loss" in sys.argv else 1) - critic(real).mean()
def generate(noise, real):
    return -critic(generator(noise)).mean()
turns = list(zip(optimizers, (judge, generate)))
for i in range(3):
    noise, real = torch.randn(5, 2).double(), torch.randn(5, 3).double()
    if "edit" in sys.argv and i:
        with torch.no_grad():
            generator[0].weight.mul_(1.01)
    for optimizer, loss_of in turns[::-1] if "generator" in sys.argv else turns:
        optimizer.zero_grad()
        loss_of(noise, real).backward()
        optimizer.step()
"""


@pytest.mark.parametrize("first", ["critic", "generator"])
@pytest.mark.parametrize(
    ("fault", "step", "phase", "names"),
    [
        ("edit", 1, "unsharded", {"generator.0.weight"}),
        ("loss", 0, "forward", {None}),
        ("gradient", 0, "backward", {"critic.0.weight"}),
        ("state", 0, "state", {f"critic.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}),
    ],
)
def test_a_fault_in_the_turn_of_one_optimizer_is_not_found_in_that_of_another(
    run, tmp_path, first, fault, step, phase, names
):
    found = {}
    for name in ("right", fault):
        assert run(TURNS, first, name, directory=str(tmp_path / name), every=1, dense=2) == 0
        found[name] = Recording.open(tmp_path / name)
    result = compare(found["right"], found[fault])
    assert result.verdict is Verdict.BUG and result.first_divergence is not None
    where = result.first_divergence
    assert (where.step, where.phase) == (step, phase) and where.parameter in names
    if fault == "loss":
        assert f"the loss of backward {1 if first == 'critic' else 2} of rank 0" in result.reason


@pytest.mark.parametrize("first", ["critic", "generator"])
def test_local_gradients_are_those_of_the_turn_in_which_they_are_used(run, tmp_path, first):
    assert run(TURNS, first, every=1, dense=2) == 0
    out = Recording.open(tmp_path / "out")
    for name in out.manifest.params:
        np.testing.assert_array_equal(out.local(1, 0, name), out.full("reduce", 1, name), err_msg=name)


def test_local_gradients_of_microbatches_that_a_script_adds_up_by_itself_are_their_sum(run, tmp_path):
    text = """
model = nn.Linear(4, 2).double()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(2, 2, 3, 4).double():
    sums = [torch.zeros_like(param) for param in model.parameters()]
    for part in x:
        model(part).square().mean().backward()
        for param, total in zip(model.parameters(), sums):
            total += param.grad
            param.grad = None
    for param, total in zip(model.parameters(), sums):
        param.grad = total
    optimizer.step()
    optimizer.zero_grad()
"""
    assert run(text, every=1, dense=2) == 0
    out = Recording.open(tmp_path / "out")
    np.testing.assert_allclose(out.local(1, 0, "weight"), out.full("reduce", 1, "weight"), rtol=1e-14)


# As in Fourier neural operators.
COMPLEX = """
class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(4, 4, 5, dtype=torch.complex128))

    def forward(self, x):
        return torch.fft.irfft(torch.einsum("bik,iok->bok", torch.fft.rfft(x), self.weight), n=x.shape[-1])

model = nn.Sequential(nn.Conv1d(1, 4, 1).double(), Spectral())
if "--fault" in sys.argv:
    model[1].weight.register_hook(torch.conj)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(3, 1, 8).double()).square().mean().backward()
    optimizer.step()
"""


def test_complex_parameters_are_recorded_as_pairs_of_real_numbers(run, tmp_path):
    for name, number, arguments in (("out", 0, ()), ("out", 1, ()), ("out", 2, ()), ("fault", 0, ("--fault",))):
        assert run(COMPLEX, *arguments, directory=str(tmp_path / name), every=1, perturbed_run=number) == 0
    out, name = Recording.open(tmp_path / "out"), "1.weight"
    spec = out.manifest.params[name]
    assert (spec.shape, spec.dtype) == ((4, 4, 5, 2), "float64")
    assert all(out.has(phase, 0, name) for phase in ("parameters", "unsharded", "backward", "reduce", "update"))
    assert set(out.state_slots(0, name)) == {"exp_avg", "exp_avg_sq"}
    for perturbed in out.perturbed_runs():
        assert not np.array_equal(*(each.full("parameters", 0, name) for each in (out, perturbed)))
    assert not inspect(out).departures
    fault = compare(out, Recording.open(tmp_path / "fault")).first_divergence
    assert fault is not None and (fault.step, fault.phase, fault.parameter) == (0, "backward", name)


def _record_sharded_complex(folder, fsdp, options=""):
    """An uneven number of rows on two ranks."""
    shard = f"fully_shard(model[1]{options})\nfully_shard(model)\noptimizer ="
    folder.mkdir()
    (folder / "script.py").write_text(
        "import sys, torch\nfrom torch import nn, distributed as dist\n"
        f"from {fsdp} import fully_shard\ndist.init_process_group('gloo')\ntorch.manual_seed(0)\n"
        f"{COMPLEX.replace('optimizer =', shard).replace('4', '3')}dist.destroy_process_group()\n"
    )
    return record(folder, nproc_per_node=2, every=1)


def test_sharded_complex_parameters_are_recorded_as_under_torch(tmp_path):
    recordings = []
    for fsdp in ("torch.distributed.fsdp", "torch_backend"):
        folder = tmp_path / fsdp
        _record_sharded_complex(folder, fsdp)
        recordings.append(Recording.open(folder / "out"))
    found = compare(*recordings)
    assert found.verdict is Verdict.EQUAL, found.reason
    assert recordings[1].manifest.params["1.weight"].shape == (3, 3, 5, 2)


def test_complex_parameters_in_a_flat_buffer_are_refused(tmp_path, capfd):
    with pytest.raises(UsageError):
        _record_sharded_complex(tmp_path / "flat", "torch_backend", ", layout='flat'")
    assert "1.weight: complex128; shard them with layout='per_param'" in capfd.readouterr().err


# Modules of gpytorch have a __call__ of their own, which runs no hooks.
WITHOUT_HOOKS = """
class Kernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.length = nn.Parameter(torch.ones(()).double())

    def __call__(self, x):
        return torch.exp(-((x - x.T) ** 2) / self.length.exp()) + 0.1 * torch.eye(len(x)).double()

kernel = Kernel()
optimizer = torch.optim.Adam(kernel.parameters(), 0.1)
x = torch.rand(8, 1).double()
y = x[:, 0].sin() * (1.01 if "--fault" in sys.argv else 1)
for _ in range(3):
    optimizer.zero_grad()
    (-torch.distributions.MultivariateNormal(0 * y, kernel(x)).log_prob(y)).backward()
    optimizer.step()
"""


def test_modules_whose_calls_run_no_hooks_are_recorded_without_a_batch(run, tmp_path):
    for name, arguments in (("out", ()), ("again", ()), ("fault", ("--fault",))):
        assert run(WITHOUT_HOOKS, *arguments, directory=str(tmp_path / name), every=1) == 0
    out, again, fault = (Recording.open(tmp_path / name) for name in ("out", "again", "fault"))
    assert out.num_steps == 3 and out.has("backward", 0, "length") and out.batch(0, 0).sample_ids == ()
    assert compare(out, again).verdict is Verdict.EQUAL
    found = compare(out, fault)
    assert (
        found.verdict is Verdict.BUG and found.first_divergence is not None and found.first_divergence.event == "loss"
    )


STEPS = """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
def loss_of(x):
    return model(x).square().mean()
def step(x):
    loss_of(x).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
IN_OTHER_WAYS = {
    "a compiled step": 'step = torch.compile(step, backend="aot_eager")',
    "a compiled loss": '@torch.compile(backend="aot_eager")\ndef loss_of(x):\n    return model(x).square().mean()',
    "a TorchScript model": "model = torch.jit.script(model)\noptimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)",
    "returned gradients": """
from torch.autograd import grad
def step(x):
    params = list(model.parameters())
    grad(loss_of(x), params, retain_graph=True)  # to look at
    for param, each in zip(params, grad(loss_of(x), params), strict=True):
        param.grad = each
    optimizer.step()
""",
}


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # which torch.compile reads, and hides the warning
@pytest.mark.parametrize("way", IN_OTHER_WAYS)
def test_a_step_is_recorded_whatever_computes_its_gradients(run, tmp_path, way):
    torch._dynamo.reset()
    batches = "\nfor x in torch.randn(3, 6, 4).double():\n    step(x)\n"
    for name, text in (("plain", ""), ("other", IN_OTHER_WAYS[way])):
        assert run(STEPS + text + batches, every=1, dense=3, directory=str(tmp_path / name)) == 0
    plain, other = (Recording.open(tmp_path / name) for name in ("plain", "other"))
    inside = {} if "TorchScript" in way else plain.activations(0)
    assert {(0, "", "output"), *inside} <= {*other.activations(0)} and other.has("backward", 0, "2.weight")
    assert other.manifest.model == plain.manifest.model
    assert other.batch(0, 0).sample_ids[-6:] == plain.batch(0, 0).sample_ids
    np.testing.assert_allclose(other.losses(), plain.losses(), rtol=1e-13)
    for step in range(3):
        for name in plain.manifest.params:
            np.testing.assert_allclose(other.full("update", step, name), plain.full("update", step, name), atol=1e-13)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_block_that_is_compiled_without_graph_breaks_is_recorded(run, tmp_path):
    """A module that dynamo skips is compiled by the __call__ that it has when the script compiles it."""
    compiled = """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
model[1] = torch.compile(checkpoint_wrapper(model[1]), fullgraph=True, backend="aot_eager")
"""
    torch._dynamo.reset()
    batches = "\nfor x in torch.randn(3, 6, 4).double():\n    step(x)\n"
    for name, text in (("plain", ""), ("compiled", compiled)):
        assert run(STEPS + text + batches, every=1, directory=str(tmp_path / name)) == 0
    found = compare(Recording.open(tmp_path / "plain"), Recording.open(tmp_path / "compiled"))
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason


# An evaluation leaves the root of the critic unsharded, whose parameters are then not those of the optimizer.
EVALUATED_BEFORE = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    models = {name: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)) for name in ("actor", "critic")}
    for name in models:
        fully_shard(models[name][0])
        fully_shard(models[name])
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in models.values()]
    for x in torch.randn(3, 6, 4):
        with torch.no_grad():
            target = models["critic"](x)
        models["actor"](x).square().mean().backward()
        (models["critic"](x) - target + 1).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    dist.destroy_process_group()

main()
"""


def test_a_model_that_an_evaluation_has_left_unsharded_is_recorded_with_the_others(run, tmp_path):
    assert run(EVALUATED_BEFORE, every=1) == 0
    recording = Recording.open(tmp_path / "out")
    names = {
        f"{model}.{layer}.{kind}" for model in ("actor", "critic") for layer in "02" for kind in ("weight", "bias")
    }
    assert recording.num_steps == 3 and set(recording.manifest.params) == names
    assert set(recording.manifest.unit_of.values()) == {"actor", "actor.0", "critic", "critic.0"}


# An optimizer for each parameter, made after its first gradient, and parts of parts that are called, as in pyro's examples.
MADE_LATE = """
class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(2))

    def loss(self, x):
        return (self.decoder.forward(self.encoder.forward(x)) - x).square().mean()

model, optimizers = Autoencoder(), {}
for _ in range(4):
    model.loss(torch.randn(6, 4).double()).backward()
    for param in model.parameters():
        optimizers.setdefault(param, torch.optim.SGD([param], 0.1)).step()
        param.grad = None
"""


def test_optimizers_that_are_made_after_the_first_gradient_are_followed_from_the_second_step(run, tmp_path, capsys):
    assert run(MADE_LATE, every=1, dense=2) == 0
    out = Recording.open(tmp_path / "out")
    assert out.num_steps == 3 and len(set(out.batch(0, 0).sample_ids)) == 6
    assert {(0, "encoder.0", "input"), (0, "decoder.0", "output")} <= set(out.activations(0))
    assert out.manifest.settings["earlier_updates"] == 1
    assert "4 updates before the recording began are not in it" in capsys.readouterr().err


SPARSE = """
model = nn.Sequential(nn.Embedding(11, 4, sparse="--sparse" in sys.argv), nn.Flatten(), nn.Linear(24, 1)).double()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in tokens:
    optimizer.zero_grad()
    for part in x.chunk(2):
        model(part).square().mean().backward()
    optimizer.step()
"""


def test_sparse_gradients_are_recorded_with_their_zeros(run, tmp_path):
    found = []
    for arguments in ((), ("--sparse",)):
        assert run(SPARSE, *arguments, directory=str(tmp_path / str(len(found))), every=1, dense=2) == 0
        found.append(Recording.open(tmp_path / str(len(found))))
    for step in range(3):
        dense, sparse = (recording.full("reduce", step, "0.weight") for recording in found)
        np.testing.assert_allclose(sparse, dense, rtol=1e-12)
        if step < 2:
            np.testing.assert_allclose(found[1].local(step, 0, "0.weight"), dense, rtol=1e-12)


def test_what_no_module_computes_is_not_recorded_as_forward(run, capsys):
    assert run("print('hello')", forward_only=True) == NOT_RECORDED
    assert "no module of torch with parameters was called" in capsys.readouterr().err


def test_a_part_of_which_modules_are_called_too_has_its_output(tmp_path, run):
    text = """
class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(super().forward(x)) + 1
"""
    assert run(text + AGENT.replace("nn.Linear(4, 3)", "Scaled()"), every=1, dense=2) == 0
    recording = Recording.open(tmp_path / "out")
    inner, outer = (recording.activation(0, 0, 0, name, "output") for name in ("actor.inner", "actor"))
    np.testing.assert_array_equal(outer, inner + 1)


def test_parts_of_a_model_with_a_forward_are_recorded_as_the_whole_is(tmp_path, run):
    for name, arguments in (("parts", ()), ("whole", ("--whole",))):
        assert run(IN_PARTS, *arguments, directory=str(tmp_path / name)) == 0
    found = [Recording.open(tmp_path / name) for name in ("parts", "whole")]
    assert compare(*found).verdict is Verdict.EQUAL and found[0].num_steps == 3


TEMPORARY = """
class _Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)

class Strange(nn.Module):
    def __hash__(self):
        return hash(self.name)

    def __init__(self):
        super().__init__()
        self.name = "its hash needs it"

_Wrapper.__module__ = Strange.__module__ = "library"
model = net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
kept, strange = _Wrapper(model), Strange()
ways = {"plain": model, "kept": kept, "wrapped": lambda x: _Wrapper(_Wrapper(model))(x)}
for x in tokens:
    optimizer.zero_grad()
    loss_of(ways[sys.argv[1]], x).backward()
    optimizer.step()
"""


def test_private_wrappers_of_a_library_are_no_part_of_the_model(tmp_path, run):
    found = []
    for name in ("plain", "wrapped", "kept"):
        assert run(TEMPORARY, name, directory=str(tmp_path / name)) == 0
        found.append(Recording.open(tmp_path / name))
    plain, *others = found
    for other in others:
        assert other.num_steps == 3 and compare(plain, other).verdict is Verdict.EQUAL
        assert list(other.manifest.params) == list(plain.manifest.params)


CRITERION = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def loss(self, x):
        return loss_of(self.inner, x)

class Criterion(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model.loss(x)

def main():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    def train(criterion):
        for x in tokens:
            optimizer.zero_grad()
            criterion(x).backward()
            optimizer.step()
    train(Criterion(model))
main()
"""


def test_a_criterion_around_the_model_is_recorded(tmp_path, run):
    assert run(CRITERION) == 0
    assert Recording.open(tmp_path / "out").num_steps == 3


SIZED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.features(x))

model = Net().double()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if "--once" in sys.argv:
    print(model.features(torch.zeros(1, 4).double()).shape)
for step in range(3):
    x = torch.full((5, 4), 1.0 + step).double()
    if "--each" in sys.argv:
        print(model.features(x[:2]).norm())
    loss = model(x).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("calls", ["--once", "--each"])
def test_calls_of_parts_before_the_model_are_no_part_of_a_step(tmp_path, run, calls):
    for name, arguments in (("plain", ()), ("calls", (calls,))):
        assert run(SIZED, *arguments, directory=str(tmp_path / name), dense=2) == 0
    plain, found = (Recording.open(tmp_path / name) for name in ("plain", "calls"))
    assert [found.activations(step) for step in (0, 1)] == [plain.activations(step) for step in (0, 1)]
    assert found.batch(1, 0) == plain.batch(1, 0) and len(found.batch(0, 0).sample_ids) == 5
    assert compare(plain, found).verdict is Verdict.EQUAL


def test_a_model_whose_parts_are_called_one_by_one_is_recorded(tmp_path, run):
    assert run(AGENT, every=1, dense=2) == 0
    recording = Recording.open(tmp_path / "out")
    assert recording.manifest.model == "Agent" and recording.num_steps == 3
    assert list(recording.manifest.params) == [
        f"{each}.{kind}" for each in ("actor", "critic.0", "critic.2") for kind in ("weight", "bias")
    ]
    for step in (0, 1):
        modules = ("actor", "critic.0", "critic.2")  # those with parameters of their own
        assert recording.activations(step) == [(0, name, use) for name in modules for use in ("input", "output")]
        assert recording.activation(step, 0, 0, "critic.0", "input").tolist() == [[1.0 + step] * 4] * 2
        for name in recording.manifest.params:
            assert recording.has("unsharded", step, name), name
            assert np.array_equal(recording.local(step, 0, name), recording.full("reduce", step, name)), name
    assert len({recording.batch(step, 0).digest for step in range(3)}) == 3


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("model.head(model.forward(x))", id="forward"),
        pytest.param("model.head(model.decoder(model.encode(x)))", id="encode"),
    ],
)
def test_a_model_that_its_own_methods_call_is_recorded(tmp_path, run, call):
    text = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4), nn.Linear(4, 4)

    def encode(self, x):
        return self.encoder(x)

    def forward(self, x):
        return self.decoder(self.encode(x))

model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
for step in range(3):
    x = torch.full((2, 4), 1.0 + step)
    loss = {call}.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    with torch.no_grad():
        model(x)
torch.save(losses, {str(tmp_path / "losses")!r})
"""
    assert run(text, every=1) == 0
    recording = Recording.open(tmp_path / "out")
    assert [float(recording.losses()[step][0]) for step in range(3)] == torch.load(tmp_path / "losses")
    assert {module for _, module, _ in recording.activations(0)} == {"encoder.0", "decoder", "head"}
    assert all(recording.has("reduce", 2, name) for name in recording.manifest.params)
    assert len(recording.batch(1, 0).sample_ids) == 2


def test_a_model_with_two_optimizers_that_its_own_methods_call_is_recorded(tmp_path, run):
    text = """
class Adversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.judge = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.encoder(x)

    def encode(self, x):
        return self.encoder(x)

    def judged(self, z):
        return self.judge(z).mean()

model = Adversarial()
optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (model.judge, model.encoder)]
for step in range(3):
    z = model.encode(torch.full((2, 4), 1.0 + step))
    for loss, optimizer in ((lambda: model.judged(z.detach()), optimizers[0]), (lambda: -model.judged(z), optimizers[1])):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
"""
    assert run(text, every=1) == 0
    recording = Recording.open(tmp_path / "out")
    assert recording.num_steps == 3
    assert list(recording.manifest.params) == ["encoder.weight", "encoder.bias", "judge.weight", "judge.bias"]
    assert all(recording.has("reduce", 2, name) for name in recording.manifest.params)


def test_a_compiled_model_has_its_output_recorded(tmp_path, run):
    text = """
model = torch.compile(net(), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
outputs = []
for x in tokens:
    optimizer.zero_grad()
    outputs.append(model(x))
    outputs[-1].square().mean().backward()
    optimizer.step()
torch.save(outputs[0].detach(), sys.argv[1])
"""
    assert run(text, str(tmp_path / "first")) == 0
    recording = Recording.open(tmp_path / "out")
    assert recording.activations(0) == [(0, "", "output")]
    np.testing.assert_array_equal(recording.activation(0, 0, 0, "", "output"), torch.load(tmp_path / "first"))


def test_a_script_that_fails_fails_as_without_the_recorder(run, tmp_path):
    with pytest.raises(KeyError, match="mine"):
        run(PLAIN + "\nraise KeyError('mine')")
    assert Recording.open(tmp_path / "out", partial=True).num_steps == 3
    with pytest.raises(SystemExit) as ended:
        run(PLAIN + "\nsys.exit(7)", overwrite=True)
    assert ended.value.code == 7
    assert run(PLAIN + "\nsys.exit(0)", overwrite=True) == 0


def test_a_full_disk_is_named(run, capsys):
    # A limit on the size of files fails as a full disk does. Python ignores the signal that comes with it.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    try:
        assert run(TWO_OPTIMIZERS) == NOT_RECORDED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large); make space" in capsys.readouterr().err


def test_wrong_use_of_the_command_is_refused(tmp_path):
    with pytest.raises(UsageError, match="expected the path of a training script"):
        record(tmp_path)
    (tmp_path / "script.py").write_text("print('hello')")
    for options in ({"perturbed_runs": 1}, {"every": 0}, {"dense": -1}, {"nproc_per_node": 0}):
        with pytest.raises(UsageError, match="expected"):
            record(tmp_path, **options)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match="holds a recording already"):
        record(tmp_path)


@pytest.mark.exhaustive
def test_topping_up_needs_the_same_command_and_more_runs(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit(1)")
    command = f"crossframe record {tmp_path}/script.py --every 2 --dense 1"
    for said, perturbed_runs, message in (
        ("another", 4, "expected a recording made by"),
        (command, 2, "has 2 perturbed runs already"),
        (command, 3, "perturbed run 3 of .* was not recorded"),  # the first that is missing
    ):
        made = synthetic.manifest(settings={"command": said})
        for folder in (tmp_path / "out", *(tmp_path / "out" / perturbed_run_folder(i) for i in (1, 2))):
            synthetic.record(folder, made, overwrite=True)
        with pytest.raises(UsageError, match=message):
            record(tmp_path, perturbed_runs=perturbed_runs, top_up=True)


def test_a_scripts_own_options_stand_behind_two_dashes(monkeypatch):
    called = []
    monkeypatch.setattr("crossframe.cli.record.record_script", lambda *args, **options: called.append(args))
    assert status_of("record", "train.py", "--every", "3", "--", "--epochs", "3", "more") == 0
    assert called == [(TrainingCommand(Path("train.py"), ("--epochs", "3", "more")),)]
    assert status_of("record", "train.py", "--steps", "3") == 2
    assert len(called) == 1


def test_a_perturbed_run_does_not_read_what_the_run_before_left_in_the_store_of_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents.set("address of rank 0", "of a process that has ended")
    for number in (0, 1):
        with script.ScriptRecorder(tmp_path, perturbed_run=number).watching():
            store = script._rendezvous._create_c10d_store("127.0.0.1", agents.port, 1, 2, timedelta(seconds=60), True)
            assert store.check(["address of rank 0"]) is (number == 0)
