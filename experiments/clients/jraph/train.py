"""Classifies random graphs by a graph network of jraph with modules of flax, optax and padded packs of graphs.

python train.py [--shard shard_map|jit] [--mistake]
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

parser = argparse.ArgumentParser()
parser.add_argument("--shard", choices=["shard_map", "jit"], help="Shard over all devices; default: plain JAX.")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--mistake", action="store_true", help="Return no weight: devices count alike.")
args = parser.parse_args()

PACKS, NODES, EDGES, GRAPHS = 4, 32, 64, 5  # packs of at most 4 graphs and one of padding
WIDTH, CLASSES = 8, 3


class GraphNet(nn.Module):
    @nn.compact
    def __call__(self, graph):
        def mlp(name):
            layers = [nn.Dense(WIDTH, name=f"{name}_in"), nn.relu, nn.Dense(WIDTH, name=f"{name}_out")]
            return nn.Sequential([*layers, nn.LayerNorm(name=f"{name}_norm")])

        embed = jraph.GraphMapFeatures(nn.Dense(WIDTH), nn.Embed(7, WIDTH), nn.Dense(WIDTH))
        graph = embed(graph)
        for layer in range(2):
            edge, node, whole, logit = (mlp(f"{name}_{layer}") for name in ("edge", "node", "global", "logit"))
            graph = jraph.GraphNetwork(
                jraph.concatenated_args(lambda x, f=edge: f(x)),
                jraph.concatenated_args(lambda x, f=node: f(x)),
                jraph.concatenated_args(lambda x, f=whole: f(x)),
                attention_logit_fn=lambda e, s, r, g, f=logit: f(jnp.concatenate([e, s, r], axis=-1)),
                attention_reduce_fn=lambda e, weights: e * weights,
            )(graph)
        return nn.Dense(CLASSES)(graph.globals)


def random_graph(random):
    nodes, edges = random.integers(3, 8), random.integers(4, 14)
    return jraph.GraphsTuple(
        nodes=random.integers(7, size=nodes).astype(np.int32),
        edges=random.standard_normal((edges, 2)).astype(np.float32),
        senders=random.integers(nodes, size=edges),
        receivers=random.integers(nodes, size=edges),
        n_node=np.array([nodes]),
        n_edge=np.array([edges]),
        globals=np.ones((1, 1), np.float32),
    )


def packs(step):
    """Padded packs of one shape, with a leading dim of packs, and a label for each graph."""
    random = np.random.default_rng(step)
    sizes = np.roll([4, 3, 1, 2], step)
    batched = [jraph.batch_np([random_graph(random) for _ in range(size)]) for size in sizes]
    padded = [jraph.pad_with_graphs(graph, NODES, EDGES, GRAPHS) for graph in batched]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *padded)
    return {"graph": stacked, "label": random.integers(CLASSES, size=(PACKS, GRAPHS)).astype(np.int32)}


net = GraphNet()
params = net.init(jax.random.key(0), jax.tree.map(lambda leaf: leaf[0], packs(0)["graph"]))["params"]
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(optax.linear_schedule(1e-2, 1e-3, 6)))


def sum_and_number(params, batch):
    """The sum of the losses of graphs, padding apart, and their number."""
    logits = jax.vmap(lambda graph: net.apply({"params": params}, graph))(batch["graph"])
    mask = jax.vmap(jraph.get_graph_padding_mask)(batch["graph"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jnp.sum(jnp.where(mask, losses, 0.0)), jnp.sum(mask)


def train_plain():
    trained, opt_state = params, tx.init(params)

    def loss_fn(params, batch):
        total, number = sum_and_number(params, batch)
        return total / number

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, packs(step))
        print(f"step {step} loss {loss:.9g}")


def train_sharded():
    from crossframe import MeshSpec
    from jax_backend import LossOutput, apply_updates, make_mesh, shard, sharded_optimizer, value_and_grad

    mesh = make_mesh(MeshSpec(shard=jax.device_count()))
    trained = shard(params, mesh)
    optimizer = sharded_optimizer(tx)
    opt_state = optimizer.init(trained)

    def loss_fn(params, batch):
        total, number = sum_and_number(params, batch)
        return LossOutput(total / number, weight=None if args.mistake else number)

    value_and_grads = value_and_grad(loss_fn, mesh, mode=args.shard)

    @jax.jit
    def train_step(params, opt_state, batch):
        result = value_and_grads(params, batch)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        return apply_updates(params, updates), opt_state, result.loss

    for step in range(args.steps):
        trained, opt_state, loss = train_step(trained, opt_state, packs(step))
        print(f"step {step} loss {loss:.9g}")


if __name__ == "__main__":
    train_sharded() if args.shard else train_plain()
