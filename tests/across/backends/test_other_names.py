"""A transformer in torch and one in flax with other names and other groupings, compared without a map."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportCallIssue=false
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch import nn

from crossframe import MeshSpec
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from jax_backend import Recorder, apply_updates, make_mesh, shard, sharded_optimizer
from jax_backend.nnx import split, watch, with_params
from jax_backend.tree import leaves_by_path
from torch_backend.recorder import Recorder as TorchRecorder

WIDTH, HEADS, HIDDEN, VOCAB, LAYERS, STEPS = 8, 2, 12, 11, 2, 2
HEAD = WIDTH // HEADS
MODULES = ("ln_1", "attn.out", "ln_2", "up", "down")
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (STEPS, 2, 5))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / HEAD**0.5, -1) @ v
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.down(self.act(self.up(self.ln_2(x))))


class Torch(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.ln_f, self.head = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
        self.h = nn.ModuleList([Block() for _ in range(LAYERS)])

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


class Gelu(nnx.Module):
    def __init__(self, approximate):
        self.approximate = approximate

    def __call__(self, x):
        return nnx.gelu(x, approximate=self.approximate)


class Mixer(nnx.Module):
    def __init__(self, rngs):
        def heads():
            return nnx.LinearGeneral(WIDTH, (HEADS, HEAD), use_bias=False, rngs=rngs)

        self.query, self.key, self.value = heads(), heads(), heads()
        self.merge = nnx.LinearGeneral((HEADS, HEAD), WIDTH, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        scores = jnp.einsum("bqhd,bkhd->bhqk", self.query(x), self.key(x)) / HEAD**0.5
        return self.merge(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), self.value(x)))


class Layer(nnx.Module):
    def __init__(self, rngs, approximate):
        self.before, self.after = (nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs) for _ in range(2))
        self.mixer, self.gelu = Mixer(rngs), Gelu(approximate)
        self.wide, self.narrow = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.mixer(self.before(x))
        return x + self.narrow(self.gelu(self.wide(self.after(x))))


class Flax(nnx.Module):
    def __init__(self, rngs, approximate=()):
        self.tokens = nnx.Embed(VOCAB, WIDTH, dtype=jnp.float64, rngs=rngs)
        self.stack = nnx.List([Layer(rngs, i in approximate) for i in range(LAYERS)])
        self.final, self.logits = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens)
        for layer in self.stack:
            x = layer(x)
        return self.logits(self.final(x))


def in_torch(folder):
    torch.manual_seed(0)
    model = Torch().double()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.01)
    initial = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    with TorchRecorder(folder, model=model, optimizer=optimizer, name="T", dense=STEPS) as recorder:
        for tokens in torch.from_numpy(TOKENS):
            loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss=loss)
    return Recording.open(folder), initial


def converted(initial, params):
    """The parameters of the flax model, written out by hand."""
    at = {"tokens": "wte", "final": "ln_f", "logits": "head"}
    inside = {"before": "ln_1", "after": "ln_2", "wide": "up", "narrow": "down", "mixer.merge": "attn.out"}
    at |= {f"stack.{i}.{ours}": f"h.{i}.{theirs}" for i in range(LAYERS) for ours, theirs in inside.items()}
    kinds = {"embedding": "weight", "scale": "weight", "kernel": "weight", "bias": "bias"}
    found = {}
    for path, leaf in leaves_by_path(params).items():
        module, _, kind = path.rpartition(".")
        owner, _, part = module.rpartition(".")
        if part in ("query", "key", "value"):
            index = ("query", "key", "value").index(part)
            name = owner.replace("stack", "h").replace("mixer", "attn.qkv")
            value = np.split(initial[f"{name}.{kinds[kind]}"], 3)[index]
        else:
            value = initial[f"{at[module]}.{kinds[kind]}"]
        found[path] = (value.T if kind == "kernel" else value).reshape(leaf.shape)
    return jax.tree.map_with_path(lambda path, _: found[jax.tree_util.keystr(path, simple=True, separator=".")], params)


def in_flax(folder, initial, *, approximate=(), change=lambda params: None):
    graphdef, params, state = split(Flax(nnx.Rngs(0), approximate))
    params = converted(initial, params)
    change(params)
    sharded = shard(params, make_mesh(MeshSpec(shard=1)))

    def loss_fn(params, batch):
        model = with_params(graphdef, params, state)
        watch(model)
        logits = model(batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch[:, 1:]).mean()

    optimizer = sharded_optimizer(optax.adamw(1e-2, weight_decay=0.01))
    opt_state = optimizer.init(sharded)
    with Recorder(folder, sharded, name="F", dense=STEPS, learning_rate=1e-2) as recorder:
        step = recorder.value_and_grad(loss_fn)
        for tokens in TOKENS:
            result = step(sharded, jnp.asarray(tokens))
            updates, opt_state = optimizer.update(result.grads, opt_state, sharded)
            sharded = apply_updates(sharded, updates)
            recorder.step(loss=result.loss, params=sharded, grads=result.grads, opt_state=opt_state, batch=tokens)
    return Recording.open(folder)


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory):
    return in_torch(tmp_path_factory.mktemp("runs") / "torch")


def test_two_models_agree_without_a_map(torch_run, tmp_path):
    run, initial = torch_run
    found = compare(run, in_flax(tmp_path / "flax", initial))
    assert found.verdict is Verdict.ROUNDING, found.reason
    assert "parameters with other names were matched by their values" in found.notes[0]
    # Two implementations have names of their own.
    assert not [each for each in found.settings if each.startswith("model ")], found.settings
    names = {each.name for each in found.judged}
    assert {f"{use} of h.{i}.{name}" for i in range(LAYERS) for use in ("input", "output") for name in MODULES} <= names
    assert {"h.1.attn.qkv.weight", "exp_avg of h.0.ln_1.bias", "input of head", "output of the model"} <= names
    assert "input of h.1.attn.qkv" in names  # is that of three projections


@pytest.mark.parametrize("layer", range(LAYERS))
def test_another_gelu_is_located_in_its_layer(torch_run, tmp_path, layer):
    run, initial = torch_run
    found = compare(run, in_flax(tmp_path / "flax", initial, approximate=(layer,)))
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and (where.event, where.module) == ("input", f"h.{layer}.down"), found.reason
