"""Models of torch and of flax whose activations have other orders of dims, or only seem to, recorded and compared."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from crossframe.mesh import MeshSpec
from crossframe.param_map import ParamMap, conv, linear, norm
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from jax_backend import Recorder, make_mesh, shard
from jax_backend.nnx import split, watch, with_params
from jax_backend.recorder import module_paths
from torch_backend.recorder import Recorder as TorchRecorder

ABOUT = {"steps": 1, "dense": 1, "name": "model"}
EPSILON = 1e-6


class TorchNorm(nn.Module):
    """RMSNorm over the last dim, with the formula of flax's."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * self.weight


class TorchHeads(nn.Module):
    """Queries, normed head by head."""

    def __init__(self, heads, width):
        super().__init__()
        self.heads, self.q, self.q_norm = heads, nn.Linear(3, heads * width), TorchNorm(width)

    def forward(self, x):
        return self.q_norm(self.q(x).unflatten(-1, (self.heads, -1)))


class Heads(nnx.Module):
    """The same in flax."""

    def __init__(self, heads, width, rngs):
        self.heads, self.q = heads, nnx.Linear(3, heads * width, param_dtype=jnp.float64, rngs=rngs)
        self.q_norm = nnx.RMSNorm(width, epsilon=EPSILON, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        x = self.q(x)
        return self.q_norm(x.reshape(*x.shape[:-1], self.heads, -1))


class Scale(nnx.Module):
    """By channel, the last dim."""

    def __init__(self, width):
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x):
        return x * self.scale[...]


class TorchScale(nn.Module):
    """By channel, dim 1."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight.view(-1, *(1,) * (x.ndim - 2))


class TorchImages(nn.Module):
    """Two convolutions, with a module of another kind between them."""

    def __init__(self, channels, dims):
        super().__init__()
        kind = nn.Conv2d if dims == 2 else nn.Conv1d
        self.stem, self.scale = kind(3, channels, 3, padding=1), TorchScale(channels)
        self.last = kind(channels, 2, 3, padding=1)

    def forward(self, x):
        return self.last(self.scale(self.stem(x)))


class Images(nnx.Module):
    """The same in flax."""

    def __init__(self, channels, dims, rngs):
        size = (3,) * dims
        self.stem = nnx.Conv(3, channels, size, param_dtype=jnp.float64, rngs=rngs)
        self.scale, self.last = Scale(channels), nnx.Conv(channels, 2, size, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        return self.last(self.scale(self.stem(x)))


@dataclasses.dataclass
class Case:
    """A model in both frameworks.

    Attributes:
        shape: of a batch in torch; in flax channels are last, if there are any.
    """

    torch: nn.Module
    flax: nnx.Module
    param_map: ParamMap
    shape: tuple[int, ...]
    channels: bool = True

    def batch(self):
        x = np.random.default_rng(1).normal(size=self.shape)
        return x, np.moveaxis(x, 1, -1) if self.channels else x


def heads(heads, width, time):
    table = ParamMap.of(linear("q", "q"), norm("q_norm", "q_norm", bias=False))
    return Case(TorchHeads(heads, width), Heads(heads, width, nnx.Rngs(0)), table, (2, time, 3), channels=False)


def images(channels, *sizes):
    dims = len(sizes)
    table = ParamMap.of(
        conv("stem", "stem", dims=dims), norm("scale", "scale", bias=False), conv("last", "last", dims=dims)
    )
    entries = (dataclasses.replace(e, path="scale.scale") if e.name == "scale.weight" else e for e in table.entries)
    return Case(
        TorchImages(channels, dims), Images(channels, dims, nnx.Rngs(0)), ParamMap(tuple(entries)), (2, 3, *sizes)
    )


CASES = {
    "heads": lambda: heads(4, 8, 16),
    "as many heads as steps and as wide": lambda: heads(4, 4, 4),
    "images": lambda: images(5, 6, 7),
    "images as wide as channels": lambda: images(4, 4, 4),
    "sequences": lambda: images(5, 7),
    "sequences as long as channels": lambda: images(6, 6),
}
# Without --exhaustive.
SAMPLE = (("heads", "full"), ("images as wide as channels", "sketch"))


def in_jax(folder, case, detail, scale=1.0):
    graphdef, params, state = split(case.flax)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    mesh = make_mesh(MeshSpec(1))
    sharded, batch = shard(params, mesh, param_map=case.param_map), case.batch()[1]

    def loss(params, batch):
        model = with_params(graphdef, params, state)
        watch(model, module_paths(case.param_map))
        return scale * (model(batch) ** 2).mean()

    with Recorder(folder, sharded, detail=detail, **ABOUT) as recorder:
        result = recorder.value_and_grad(loss)(sharded, batch)
        recorder.step(params=sharded, grads=result.grads, loss=result.losses, batch=case.batch()[0])
    return Recording.open(folder), params


def in_torch(folder, case, params, detail):
    model = case.torch.double()
    with torch.no_grad():
        for entry in case.param_map.entries:
            leaf = params
            for key in entry.path.split("."):
                leaf = leaf[key]
            model.get_parameter(entry.name).copy_(torch.from_numpy(entry.to_canonical(leaf).copy()))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with TorchRecorder(folder, model=model, optimizer=optimizer, detail=detail, **ABOUT) as recorder:
        loss = (model(torch.from_numpy(case.batch()[0])) ** 2).mean()
        loss.backward()
        optimizer.step()
        recorder.step(loss=loss)
    return Recording.open(folder)


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        pytest.param(name, detail, marks=() if (name, detail) in SAMPLE else pytest.mark.exhaustive)
        for name in CASES
        for detail in ("full", "sketch")
    ],
)
def test_any_order_of_dims_is_rounding_apart(tmp_path, name, detail):
    case = CASES[name]()
    b, params = in_jax(tmp_path / "jax", case, detail)
    a = in_torch(tmp_path / "torch", case, params, detail)
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict in (Verdict.ROUNDING, Verdict.EQUAL), found.reason
        modules = [judged for judged in found.judged if judged.event in ("input", "output")]
        assert (
            len(modules)
            == len(a.activations(0))
            >= 2 * len({e.name.rpartition(".")[0] for e in case.param_map.entries})
        )
