"""A graph attention network of jraphx in flax.nnx. Fault: negative scores have a slope of 0.01 instead of 0.2."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jraphx.nn.models import GAT

from experiments.foreign.shared import STEPS, graph_of, options, start_jax, watch_all
from jax_backend import Recorder, apply_updates, sharded_optimizer
from jax_backend.nnx import split, with_params

given = options()
slope = 0.01 if given.fault else 0.2
model = GAT(
    6, 12, num_layers=3, out_features=4, heads=3, act=nnx.elu, norm="layer_norm", negative_slope=slope, rngs=nnx.Rngs(0)
)
model.norms = nnx.List(model.norms[:2])  # nothing uses the third
graphdef, params, state = split(model)


def convert(arrays):
    """By hand: jraphx has no converter."""
    found = {}
    for i in range(3):
        found[f"convs.{i}.lin.kernel"] = arrays[f"convs.{i}.lin.weight"].T
        found[f"convs.{i}.bias"] = arrays[f"convs.{i}.bias"]
        for name in ("att_src", "att_dst"):
            found[f"convs.{i}.{name}"] = arrays[f"convs.{i}.{name}"][0]
    return found | {f"norms.{i}.{kind}": arrays[f"norms.{i}.{kind}"] for i in range(2) for kind in ("weight", "bias")}


def loss_fn(params, graph):
    model = with_params(graphdef, params, state)
    watch_all(model)
    losses = optax.softmax_cross_entropy_with_integer_labels(model(graph["nodes"], graph["edges"]), graph["labels"])
    return jnp.mean(losses, where=graph["is_train"])


sharded = start_jax(given, params, convert)
rate = optax.exponential_decay(1e-2, 2, 0.5, staircase=True)
optimizer = sharded_optimizer(optax.chain(optax.add_decayed_weights(5e-4), optax.adam(rate)))
opt_state, update = optimizer.init(sharded), jax.jit(optimizer.update)
with Recorder(
    given.record,
    sharded,
    name="GAT",
    samples=lambda graph: [graph["nodes"], graph["edges"]],
    settings={"optimizer": "Adam", "weight_decay": 5e-4},
) as recorder:
    value_and_grad = recorder.value_and_grad(loss_fn)
    for step in range(STEPS):
        graph = graph_of(step)
        result = value_and_grad(sharded, graph)
        updates, opt_state = update(result.grads, opt_state, sharded)
        sharded = apply_updates(sharded, updates)
        recorder.step(
            loss=result.loss,
            params=sharded,
            grads=result.grads,
            opt_state=opt_state,
            batch=graph,
            learning_rate=rate(step),
        )
        print(f"step {step} loss {float(result.loss):.12f}")
