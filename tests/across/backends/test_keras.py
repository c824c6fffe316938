"""One script of Keras on its torch and its JAX backend."""

import os
import subprocess
import sys

import pytest

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare

SCRIPT = """
import sys
import keras, numpy as np
from keras import layers

accumulate, norm = int(sys.argv[1]), getattr(layers, sys.argv[2])
random = np.random.default_rng(1)
x, y = random.standard_normal((16, 6, 6, 3)).astype("float32"), random.integers(5, size=16)

class Images(keras.Model):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = layers.Conv2D(4, 3, activation="relu"), norm()
        self.tail = [layers.Flatten(), layers.Dense(8, "tanh"), layers.Dense(5)]

    def call(self, x, training=False):
        x = self.norm(self.conv(x), **({'training': training} if norm is layers.BatchNormalization else {}))
        for each in self.tail:
            x = each(x)
        return x

model = Images()
model(x[:1])
model.set_weights([random.normal(0, 0.3, each.shape) if each.ndim > 1 else each for each in model.get_weights()])
optimizer = keras.optimizers.AdamW(
    0.01, weight_decay=0.1, gradient_accumulation_steps=accumulate if accumulate > 1 else None
)
optimizer.exclude_from_weight_decay(var_names=["bias"])
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=8 // accumulate, epochs=2, shuffle=False, verbose=0)
"""
TURNS = """
import keras, numpy as np
from keras import layers

random = np.random.default_rng(1)
critic = keras.Sequential([layers.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)])
maker = keras.Sequential([layers.Input((2,)), layers.Dense(4)])
for model in (critic, maker):
    model.set_weights([random.normal(0, 0.3, each.shape) for each in model.get_weights()])
of_critic, of_maker = keras.optimizers.Adam(0.01), keras.optimizers.AdamW(0.02, weight_decay=0.1)
batches = [random.standard_normal((2, 8, 4), dtype="float32") for _ in range(3)]

if keras.backend.backend() == "torch":
    import torch

    def update(model, optimizer, loss):
        critic.zero_grad(), maker.zero_grad()
        loss.backward()
        with torch.no_grad():
            optimizer.apply([each.value.grad for each in model.trainable_weights], model.trainable_weights)

    for real, noise in map(torch.from_numpy, batches):
        update(critic, of_critic, critic(maker(noise[:, :2])).mean() - critic(real).mean())
        update(maker, of_maker, -critic(maker(noise[:, :2])).mean())
else:
    import jax

    call = lambda model, params, x: model.stateless_call(params, [], x)[0]

    @jax.jit
    def train(params, states, real, noise):
        def gain(critic_params, maker_params):
            made = call(maker, maker_params, noise[:, :2])
            return call(critic, critic_params, made).mean() - call(critic, critic_params, real).mean()

        def cost(maker_params, critic_params):
            return -call(critic, critic_params, call(maker, maker_params, noise[:, :2])).mean()

        first, second = params
        own, other = states
        first, own = of_critic.stateless_apply(own, jax.grad(gain)(first, second), first)
        second, other = of_maker.stateless_apply(other, jax.grad(cost)(second, first), second)
        return (first, second), (own, other)

    values = lambda variables: [variable.value for variable in variables]
    of_critic.build(critic.trainable_variables), of_maker.build(maker.trainable_variables)
    params = values(critic.trainable_variables), values(maker.trainable_variables)
    states = values(of_critic.variables), values(of_maker.variables)
    for real, noise in batches:
        params, states = train(params, states, real, noise)
"""
PARAMS = [
    *("conv.kernel", "conv.bias", "norm.gamma", "norm.beta"),
    *("dense.kernel", "dense.bias", "dense_1.kernel", "dense_1.bias"),
]


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "both.py"

    def run(framework, norm, accumulate=1, script=SCRIPT):
        path.write_text(script)
        folder = tmp_path / f"{framework} {accumulate}"
        command = [sys.executable, "-m", "crossframe", "record", path, "--framework", framework, "--output", folder]
        environment = {"KERAS_BACKEND": framework, "KERAS_HOME": str(tmp_path / "keras"), "JAX_PLATFORMS": "cpu"}
        ended = subprocess.run(
            [*command, "--every", "1", "--", str(accumulate), norm],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        return Recording.open(folder)

    return run


def test_both_backends_agree_by_rounding_and_by_name(record):
    torch, jax = record("torch", "BatchNormalization"), record("jax", "BatchNormalization")
    found = compare(torch, jax)
    assert found.verdict is Verdict.ROUNDING, found.reason
    for run in (torch, jax):
        settings, steps = run.manifest.settings, range(run.num_steps)
        assert sorted(run.manifest.params) == sorted(PARAMS) and len(steps) == 4
        assert (settings["optimizer"], settings["weight_decay"], settings["eps_hat"]) == ("AdamW", 0.1, 1e-7)
        [group] = settings["param_groups"]
        assert group["weight_decay"] == 0 and sorted(group["params"]) == [
            name for name in sorted(PARAMS) if "bias" in name
        ]
        assert [run.count(step, "conv.kernel") for step in steps] == [1, 2, 3, 4]
        assert [run.learning_rates(step)[0] for step in steps] == pytest.approx([0.01] * 4)
        assert sorted(run.buffers(2)) == ["norm.moving_mean", "norm.moving_variance"]
        assert {name for _, name, _ in run.activations(0)} >= {"", "conv", "norm", "dense", "dense_1"}


def test_averaged_gradients_in_jax_are_those_of_a_step(record):
    whole, halves = record("jax", "LayerNormalization"), record("jax", "LayerNormalization", 2)
    found = compare(whole, halves)
    assert found.verdict is Verdict.ROUNDING and halves.num_steps == 4, found.reason


def test_models_that_take_turns_agree_on_both_backends(record):
    torch, jax = (record(framework, "", script=TURNS) for framework in ("torch", "jax"))
    assert torch.num_steps == jax.num_steps == 3
    found = compare(torch, jax)
    assert found.verdict is Verdict.ROUNDING, found.reason
