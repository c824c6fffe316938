"""Scripts that change their parameters themselves, without an optimizer of torch."""

import json

import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.scripts import NOT_RECORDED, run_again_file
from crossframe.verdict import Verdict, compare

LOOP = """
model = net()
for x in tokens:
    loss_of(model, x).backward()
    update(model)
    model.zero_grad()
"""
UPDATE = """
def update(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad, alpha=-RATE)
RATE = 0.1
"""
BY_HAND = UPDATE + LOOP
BY_DATA = BY_HAND.replace("p.add_", "p.data.add_")
BY_OPTIMIZER = LOOP.replace("model = net()", "model = net()\nsgd = torch.optim.SGD(model.parameters(), 0.1)").replace(
    "update(model)", "sgd.step()"
)
RETURNED = """
model = net()
params = list(model.parameters())
for x in tokens:
    grads = torch.autograd.grad(loss_of(model, x), params)
    with torch.no_grad():
        for p, grad in zip(params, grads):
            p.add_(grad, alpha=-0.1)
"""
MICROBATCHES = BY_HAND.replace(
    "    loss_of(model, x).backward()\n", "    for half in x.chunk(2):\n        (loss_of(model, half) / 2).backward()\n"
)
EVALUATIONS = BY_HAND.replace(
    "    model.zero_grad()\n", "    model.zero_grad()\n    with torch.no_grad():\n        loss_of(model, x)\n"
)
KEPT_GRADIENTS = BY_HAND.replace(
    "    model.zero_grad()\n", "    if not x.equal(tokens[1]):\n        model.zero_grad()\n"
)
TENSORS = """
weight, bias = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((8, 3), (3,)))
inputs = torch.randn(4, 8, dtype=torch.float64)
for target in (0, 1, 2, 0):
    loss = nn.functional.cross_entropy(inputs @ weight + bias, torch.full((4,), target))
    loss.backward()
    with torch.no_grad():
        for p in (weight, bias):
            p -= 0.1 * p.grad
            p.grad.zero_()
"""
NORM = """
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
for x in torch.randn(3, 8, 4, dtype=torch.float64):
    model(x).square().mean().backward()
    update(model)
    model.zero_grad()
"""


@pytest.fixture
def recorded(run, tmp_path, capsys):
    """Record all steps of a script that is stated to change parameters by itself."""

    def recorded(name, text, **options):
        given = {"directory": str(tmp_path / name), "every": 1, "dense": 3, "by_hand": True} | options
        assert run(text, **given) == 0, capsys.readouterr().err
        return Recording.open(tmp_path / name)

    return recorded


@pytest.mark.parametrize("text", [BY_HAND, BY_DATA, RETURNED, EVALUATIONS])
def test_values_are_those_of_an_optimizer(recorded, text):
    own, optimizer = recorded("own", text), recorded("optimizer", BY_OPTIMIZER, by_hand=False)
    assert own.num_steps == optimizer.num_steps == 3
    found = compare(own, optimizer)
    assert found.verdict is Verdict.EQUAL, found.reason
    for name in own.manifest.params:
        assert np.array_equal(own.full("reduce", 2, name), optimizer.full("reduce", 2, name)), name


def test_backwards_before_an_update_are_microbatches_of_a_step(recorded):
    found = compare(recorded("whole", BY_HAND), recorded("halves", MICROBATCHES))
    assert (found.verdict, found.steps) == (Verdict.ROUNDING, 3), found.reason


@pytest.mark.parametrize("fault", [False, True])
def test_gradients_may_be_divided_in_the_update(recorded, fault):
    whole = recorded("whole", BY_HAND)
    for number in (1, 2):
        recorded("whole", BY_HAND, perturbed_run=number)
    divided = MICROBATCHES.replace(" / 2).backward()", ").backward()").replace("RATE = 0.1", "RATE = 0.05")
    found = compare(whole, recorded("divided", divided.replace("0.05", "0.051") if fault else divided))
    assert found.verdict is (Verdict.BUG if fault else Verdict.ROUNDING), found.reason
    assert fault or "gradients are recorded before it divides or clips them" in found.notes[-1]


def test_gradients_that_are_not_zeroed_are_found_where_they_are_added(recorded):
    right = recorded("right", BY_HAND)
    for number in (1, 2):
        recorded("right", BY_HAND, perturbed_run=number)
    found = compare(right, recorded("wrong", KEPT_GRADIENTS))
    assert found.verdict is Verdict.BUG
    assert (found.first_divergence.step, found.first_divergence.phase) == (2, "reduce"), found.reason


def test_a_rate_of_zero_ends_a_step(recorded):
    assert recorded("zero", BY_HAND.replace("RATE = 0.1", "RATE = 0.0")).num_steps == 3


def test_tensors_of_no_module_are_recorded_by_their_variables(recorded):
    found = recorded("tensors", TENSORS)
    assert found.num_steps == 4 and set(found.manifest.params) == {"weight", "bias"}


def test_buffers_are_those_after_the_step(recorded):
    own = recorded("own", UPDATE + NORM)
    optimizer = NORM.replace("for x", "sgd = torch.optim.SGD(model.parameters(), 0.1)\nfor x").replace(
        "update(model)", "sgd.step()"
    )
    assert compare(own, recorded("optimizer", optimizer, by_hand=False)).verdict is Verdict.EQUAL


@pytest.mark.parametrize("text", [BY_HAND, RETURNED, TENSORS])
def test_updates_by_hand_are_found_for_the_next_run(run, tmp_path, capsys, text):
    assert run(text) == NOT_RECORDED
    said = "crossframe: the script updates its parameters by itself, which --by-hand states\n"
    assert capsys.readouterr().err == said
    assert json.loads(run_again_file(tmp_path / "out", "0").read_text()) == {"by_hand": True}


def test_gradients_without_updates_are_not_taken_for_updates(run, tmp_path, capsys):
    assert run("model = net()\nfor x in tokens:\n    loss_of(model, x).backward()\n") == NOT_RECORDED
    assert "nothing was trained in this process" in capsys.readouterr().err
    assert not run_again_file(tmp_path / "out", "0").exists()


BESIDE = BY_HAND.replace("model = net()", "model, scale = net(), torch.ones((), requires_grad=True)").replace(
    "loss_of(model, x)", "(scale * loss_of(model, x))"
)


def test_what_is_trained_beside_modules_is_refused(run, recorded, capsys):
    trained = BESIDE.replace("    model.zero_grad()", "    scale.data -= 0.1 * scale.grad\n    model.zero_grad()")
    assert run(trained, by_hand=True) == NOT_RECORDED
    assert "the script trains by itself tensors that are in no module" in capsys.readouterr().err
    assert recorded("input", BESIDE).num_steps == 3  # such as inputs of a loss with derivatives


BEFORE_TRAINING = """
model = net()
for i in range(2):  # as for a choice of initial values, or before pruning
    for p in model.parameters():
        nn.init.normal_(p.data, std=0.1 * (i + 1))
    loss_of(model, tokens[0]).backward()
model.zero_grad()
"""
INPUTS = """
delta = torch.zeros(4, 5, 11, dtype=torch.float64, requires_grad=True)
model = net()
for x in tokens:  # towards a larger loss
    nn.functional.cross_entropy((model(x[:, :-1]) + delta).flatten(0, 1), x[:, 1:].flatten()).backward()
    with torch.no_grad():
        delta += 0.1 * delta.grad
        delta.grad = None
model.zero_grad()
"""


@pytest.mark.parametrize("before", [BEFORE_TRAINING, INPUTS])
def test_changes_before_an_optimizer_trains_are_no_updates(recorded, before):
    found = recorded("out", before + BY_OPTIMIZER.replace("model = net()\n", ""), by_hand=False)
    assert found.num_steps == 3


@pytest.mark.parametrize("text", [BEFORE_TRAINING, INPUTS])
def test_changes_that_are_no_training_are_not_recorded(run, tmp_path, capsys, text):
    assert run(text) == NOT_RECORDED
    assert "nothing was trained in this process" in capsys.readouterr().err
    assert not run_again_file(tmp_path / "out", "0").exists()


PARTS = """
encoder, decoder = nn.Embedding(11, 8).double(), nn.Linear(8, 11).double()
for x in tokens:
    nn.functional.cross_entropy(decoder(encoder(x[:, :-1])).flatten(0, 1), x[:, 1:].flatten()).backward()
    update(nn.ModuleList([encoder, decoder]))
    for each in (encoder, decoder):
        each.zero_grad()
"""


def test_parts_that_are_called_one_by_one_are_one_model(recorded):
    found = recorded("parts", UPDATE + PARTS)
    assert found.num_steps == 3 and set(found.manifest.params) == {"encoder.weight", "decoder.weight", "decoder.bias"}
    for step in range(3):
        assert {(module, use) for _, module, use in found.activations(step)} >= {
            ("encoder", "output"),
            ("decoder", "input"),
        }


def test_an_optimizer_that_steps_is_refused_where_none_is_stated(run, capsys):
    assert run(BY_OPTIMIZER, by_hand=True) == NOT_RECORDED
    assert "SGD has stepped, but --by-hand states that there is no optimizer; leave it out" in capsys.readouterr().err
