"""Trains LoRA adapters of a small decoder in plain JAX: dicts of arrays, optax, bfloat16 with float32 master weights, a mesh.

python train.py [--freeze masked [--mistake]] [--differentiate trained] [--accumulate 1] [--dtype float32] [--fsdp]

Batches are sharded over all devices. The base is frozen, adapters have AdamW, which decays matrices alone, and gains of norms
have Adam. A step adds the gradients of its microbatches by lax.scan. With --mistake the frozen leaves lack their set_to_zero:
optax.masked returns updates of other leaves as they are, so that the base receives its gradients as updates.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--batch", type=int, default=8, help="Texts of all devices and microbatches.")
parser.add_argument("--accumulate", type=int, default=2, help="Microbatches of a step.")
parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="Type of the computation.")
parser.add_argument("--freeze", choices=["multi", "masked"], default="multi", help="optax.multi_transform or masked.")
parser.add_argument(
    "--differentiate",
    choices=["all", "trained"],
    default="all",
    help="Take gradients of all leaves, or of those trained.",
)
parser.add_argument("--fsdp", action="store_true", help="Shard matrices over the devices too.")
parser.add_argument("--mistake", action="store_true", help="No set_to_zero for frozen leaves; --freeze masked.")
args = parser.parse_args()

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, RANK, ALPHA = 64, 16, 32, 4, 2, 4, 8.0
mesh = Mesh(np.array(jax.devices()), ("data",))


def init():
    random = np.random.default_rng(0)

    def matrix(rows, columns, scale=1.0):
        return (scale * random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)

    params = {
        "embed": {"tokens": matrix(VOCABULARY, WIDTH, 4.0), "places": matrix(LENGTH, WIDTH)},
        "head": {"gain": np.ones(WIDTH, np.float32), "w": matrix(WIDTH, VOCABULARY)},
    }
    for i in range(LAYERS):
        params[f"layer{i}"] = {
            "gain0": np.ones(WIDTH, np.float32),
            "gain1": np.ones(WIDTH, np.float32),
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "qkv_lora": {"a": matrix(WIDTH, RANK), "b": np.zeros((RANK, 3 * WIDTH), np.float32)},
            "out": matrix(WIDTH, WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
            "down_lora": {
                "a": matrix(4 * WIDTH, RANK),
                "b": np.zeros((RANK, WIDTH), np.float32),
                "bias": np.zeros(WIDTH, np.float32),
            },
        }
    return params


def group_of(path, _):
    names = jax.tree_util.keystr(path)
    return "lora" if "_lora" in names else "gain" if "gain" in names else "frozen"


def groups_of(params):
    return jax.tree_util.tree_map_with_path(group_of, params)


def norm(x, gain):
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain).astype(args.dtype)


def adapted(x, w, lora):
    return x @ w + ALPHA / RANK * (x @ lora["a"] @ lora["b"])


def apply(params, tokens):
    """Logits in float32. Weights are cast to the type of the computation, gains stay in float32."""

    def cast(path, leaf):
        return leaf if group_of(path, leaf) == "gain" else leaf.astype(args.dtype)

    params = jax.tree_util.tree_map_with_path(cast, params)
    x = params["embed"]["tokens"][tokens] + params["embed"]["places"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for i in range(LAYERS):
        layer = params[f"layer{i}"]
        qkv = adapted(norm(x, layer["gain0"]), layer["qkv"], layer["qkv_lora"])
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(WIDTH // HEADS)
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)).astype(args.dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["out"]
        hidden = jax.nn.gelu(norm(x, layer["gain1"]) @ layer["up"])
        x = x + adapted(hidden, layer["down"], layer["down_lora"]) + layer["down_lora"]["bias"]
    return (norm(x, params["head"]["gain"]) @ params["head"]["w"]).astype(jnp.float32)


def loss_fn(params, tokens):
    """All texts have one length, so that means over microbatches and devices are those over the batch."""
    logits = apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 2 * args.steps)
matrices = partial(jax.tree.map, lambda leaf: leaf.ndim > 1)  # adapters' bias is not decayed
of_lora = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1, mask=matrices))
of_gain = optax.adam(1e-3)


def make_transformation(params):
    groups = groups_of(params)
    if args.differentiate == "trained":
        return optax.multi_transform({"lora": of_lora, "gain": of_gain}, groups)
    if args.freeze == "multi":
        return optax.multi_transform({"lora": of_lora, "gain": of_gain, "frozen": optax.set_to_zero()}, groups)

    def only(tx, name):
        return optax.masked(tx, jax.tree.map(lambda group: group == name, groups))

    parts = [only(of_lora, "lora"), only(of_gain, "gain")]
    return optax.chain(*parts) if args.mistake else optax.chain(*parts, only(optax.set_to_zero(), "frozen"))


def divided(params):
    """(trained, frozen) leaves, as trees in which the others are None."""
    groups = groups_of(params)
    trained = jax.tree.map(lambda leaf, group: None if group == "frozen" else leaf, params, groups)
    return trained, jax.tree.map(lambda leaf, group: leaf if group == "frozen" else None, params, groups)


def merged(trained, frozen):
    return jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda leaf: leaf is None)


def train_step(tx, params, frozen, opt_state, batch):
    """batch has the shape (microbatches, texts, tokens)."""

    def of_trained(params, tokens):
        return loss_fn(params if frozen is None else merged(params, frozen), tokens)

    def microbatch(carry, tokens):
        loss, grads = jax.value_and_grad(of_trained)(params, tokens)
        return jax.tree.map(jnp.add, carry, (loss, grads)), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = jax.lax.scan(microbatch, zero, batch)
    loss, grads = jax.tree.map(lambda x: x / args.accumulate, (loss, grads))
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def batches():
    """Texts in which a token mostly follows from the one before."""
    random = np.random.default_rng(1)
    follower = random.permutation(VOCABULARY)
    for _ in range(args.steps):
        texts = random.integers(VOCABULARY, size=(args.batch, LENGTH + 1), dtype=np.int32)
        for i in range(LENGTH):
            texts[:, i + 1] = np.where(random.random(args.batch) < 0.8, follower[texts[:, i]], texts[:, i + 1])
        yield texts.reshape(args.accumulate, -1, LENGTH + 1)


def sharding_of(leaf):
    divides = args.fsdp and len(leaf.shape) > 1 and leaf.shape[0] % mesh.size == 0
    return NamedSharding(mesh, P("data") if divides else P())


def main():
    params, frozen = init(), None
    if args.differentiate == "trained":
        params, frozen = divided(params)
    tx = make_transformation(params)
    shardings = jax.tree.map(sharding_of, params)
    of_frozen = jax.tree.map(sharding_of, frozen)
    of_state = jax.tree.map(sharding_of, jax.eval_shape(tx.init, params))
    of_batch, replicated = NamedSharding(mesh, P(None, "data")), NamedSharding(mesh, P())
    params, frozen = jax.device_put(params, shardings), jax.device_put(frozen, of_frozen)
    opt_state = jax.jit(tx.init, out_shardings=of_state)(params)
    step_fn = jax.jit(
        partial(train_step, tx),
        in_shardings=(shardings, of_frozen, of_state, of_batch),
        out_shardings=(shardings, of_state, replicated),
        donate_argnums=(0, 2),
    )
    for step, batch in enumerate(batches()):
        params, opt_state, loss = step_fn(params, frozen, opt_state, jax.device_put(batch, of_batch))
        print(f"step {step} loss {loss:.9g}")
    trained, kept = divided(params) if frozen is None else (params, frozen)
    print(f"norm of the trained {optax.global_norm(trained):.9g} and the frozen {optax.global_norm(kept):.9g}")
    return trained


if __name__ == "__main__":
    main()
