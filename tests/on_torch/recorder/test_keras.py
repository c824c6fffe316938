"""Scripts that train with Keras on its torch backend, whose optimizers are none of torch.optim and whose layers are not all
registered as modules."""

import sys

import pytest

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from torch_backend.recorder import script

_DATA = """
import numpy as np, torch, keras
from keras import layers
keras.utils.clear_session()
keras.utils.set_random_seed(0)
random = np.random.default_rng(1)
y = random.integers(5, size=16)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
batch, accumulate, scale = {batch}, {accumulate}, {scale}
"""
_IMAGES = (
    _DATA
    + """
x = random.standard_normal((16, 6, 6, 3)).astype("float32")
inputs = keras.Input((6, 6, 3))
hidden = layers.Conv2D(4, 3, name="conv")(inputs)
hidden = layers.BatchNormalization(name="norm")(hidden)
hidden = layers.Flatten()(hidden)
model = keras.Model(inputs, keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(5)], name="head")(hidden))
optimizer = keras.optimizers.AdamW({rate}, weight_decay=0.1, global_clipnorm=1.0)
optimizer.exclude_from_weight_decay(var_names=["bias"])
model.compile(optimizer, loss_of)
"""
)
_WORDS = (
    _DATA
    + """
x = random.integers(9, size=(16, 4))
class Words(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = layers.Embedding(9, 6), [layers.Dense(6, "relu") for _ in range(2)]
        self.wrapped, self.head = layers.TorchModuleWrapper(torch.nn.Linear(6, 6)), layers.Dense(5)
    def call(self, x):
        x = self.embedding(x)
        for each in self.hidden:
            x = each(x)
        return self.head(self.wrapped(x)[:, 0])
torch.manual_seed(0)
model = Words()
optimizer = keras.optimizers.Adam({rate}, gradient_accumulation_steps=accumulate, loss_scale_factor=scale)
model.compile(optimizer, loss_of)
"""
)
_TURNS = (
    _DATA
    + """
critic = keras.Sequential([layers.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)])
maker = keras.Sequential([layers.Input((2,)), layers.Dense(4)])
options = {{"gradient_accumulation_steps": accumulate}}
optimizers = {{
    critic: keras.optimizers.Adam(0.01, loss_scale_factor=scale, **options),
    maker: keras.optimizers.Adam({rate}, loss_scale_factor=scale and scale / 2, **options),
}}
def update(model, loss):
    critic.zero_grad(), maker.zero_grad()
    optimizers[model].scale_loss(loss).backward()
    with torch.no_grad():
        optimizers[model].apply([each.value.grad for each in model.trainable_weights], model.trainable_weights)
for _ in range(3):
    parts = [torch.from_numpy(random.standard_normal((8, size), dtype="float32")).split(batch) for size in (4, 2)]
    for real, noise in zip(*parts):
        update(critic, critic(maker(noise)).mean() - critic(real).mean())
    for _, noise in zip(*parts):
        update(maker, -critic(maker(noise)).mean())
"""
)
_INSIDE = (
    _DATA
    + """
class Turns(keras.Model):
    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential([layers.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)])
        self.maker = keras.Sequential([layers.Input((2,)), layers.Dense(4)])
    def call(self, x):
        return self.critic(x)
    def train_step(self, real):
        noise = torch.ones((8, 2))
        for model, optimizer, other in ((self.critic, self.first, real), (self.maker, self.second, 0 * real)):
            self.zero_grad()
            (self.critic(self.maker(noise)).mean() - self.critic(other).mean()).backward()
            with torch.no_grad():
                optimizer.apply([each.value.grad for each in model.trainable_weights], model.trainable_weights)
        return {{}}
model = Turns()
model.first, model.second = keras.optimizers.Adam(0.01), keras.optimizers.Adam({rate})
model.compile()
model.fit(random.standard_normal((32, 4), dtype="float32"), batch_size=8, verbose=0)
"""
)
_LOOPS = {
    "own": "",
    "fit": "model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0, validation_data=(x, y))",
    "batches": """
for _ in range(2):
    for i in range(0, 16, batch):
        model.train_on_batch(x[i : i + batch], y[i : i + batch])
""",
    "guide": """
for _ in range(2):
    for i in range(0, 16, batch):
        loss = loss_of(torch.from_numpy(y[i : i + batch]), model(torch.from_numpy(x[i : i + batch]), training=True))
        model.zero_grad()
        optimizer.scale_loss(loss).backward()
        weights = model.trainable_weights
        with torch.no_grad():
            optimizer.apply([each.value.grad for each in weights], weights)
""",
}


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Record a script with this model and loop in this process."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    numbers = iter(range(10))

    def record(text, loop="fit", *, batch=8, accumulate=None, scale=None, rate=0.01):
        monkeypatch.setattr(sys, "argv", sys.argv)
        name = str(next(numbers))
        path = tmp_path / f"{name}.py"
        path.write_text(text.format(batch=batch, accumulate=accumulate, scale=scale, rate=rate) + _LOOPS[loop])
        assert script.run([str(path)], directory=str(tmp_path / name), every=1, dense=4) == 0
        return Recording.open(tmp_path / name)

    return record


def test_loops_of_keras_are_recorded_alike(recorded):
    fit, *others = (recorded(_IMAGES, loop) for loop in ("fit", "batches", "guide"))
    assert [*fit.manifest.params] == [
        *("conv.kernel", "conv.bias", "norm.gamma", "norm.beta"),
        *("head.dense.kernel", "head.dense.bias", "head.dense_1.kernel", "head.dense_1.bias"),
    ]
    assert fit.num_steps == 4 and fit.learning_rates(0) == (0.01, 0.01)
    assert fit.state_slots(0, "conv.kernel") == ("exp_avg", "exp_avg_sq")
    settings = fit.manifest.settings
    assert settings["optimizer"] == "AdamW" and (settings["weight_decay"], settings["eps_hat"]) == (0.1, 1e-7)
    assert [group["weight_decay"] for group in settings["param_groups"]] == [0.0]
    for other in others:
        found = compare(fit, other)
        assert found.verdict is Verdict.EQUAL, found.reason


def test_layers_are_named_after_attributes(recorded):
    first, second = recorded(_WORDS), recorded(_WORDS, "guide", rate=0.02)
    assert [*first.manifest.params] == [
        *("embedding.embeddings", "dense.kernel", "dense.bias", "dense_1.kernel", "dense_1.bias"),
        *("wrapped.module.weight", "wrapped.module.bias", "head.kernel", "head.bias"),
    ]
    found = compare(first, second)
    assert found.diagnosis is not None and "a learning rate of 0.02 instead of 0.01" in found.diagnosis.evidence


def test_a_step_has_unscaled_averaged_gradients(recorded):
    whole, scaled, halves = recorded(_WORDS), recorded(_WORDS, scale=1024.0), recorded(_WORDS, batch=4, accumulate=2)
    assert compare(whole, scaled).verdict is Verdict.EQUAL
    found = compare(whole, halves)
    assert found.verdict is Verdict.ROUNDING, found.reason


def test_models_that_take_turns_are_recorded_together(recorded):
    first, second = recorded(_TURNS, "own"), recorded(_TURNS, "own", rate=0.02)
    assert [*first.manifest.params] == [
        *("critic.dense.kernel", "critic.dense.bias", "critic.dense_1.kernel", "critic.dense_1.bias"),
        *("maker.dense_2.kernel", "maker.dense_2.bias"),
    ]
    found = compare(first, second)
    assert first.num_steps == 3 and found.first_divergence is not None
    assert (found.first_divergence.phase, found.first_divergence.parameter) == ("update", "maker.dense_2.kernel")


def test_each_loss_is_divided_by_its_own_scale(recorded):
    plain, scaled = recorded(_TURNS, "own"), recorded(_TURNS, "own", scale=1024.0)
    found = compare(plain, scaled)
    assert found.verdict is Verdict.EQUAL, found.reason


def test_an_unused_optimizer_of_compile_is_not_stated(recorded):
    first, second = recorded(_INSIDE, "own"), recorded(_INSIDE, "own", rate=0.02)
    assert first.num_steps == 4 and "optimizer" not in first.manifest.settings
    found = compare(first, second)
    assert found.first_divergence is not None and found.first_divergence.parameter == "maker.dense_2.kernel"


def test_turns_may_accumulate_gradients(recorded):
    whole, halves = recorded(_TURNS, "own"), recorded(_TURNS, "own", batch=4, accumulate=2)
    found = compare(whole, halves)
    assert found.verdict is Verdict.ROUNDING, found.reason
