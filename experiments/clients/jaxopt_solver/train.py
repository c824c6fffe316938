"""Trains a text classifier with attention pooling by JAXopt's OptaxSolver: solver.update, run_iterator, or run.

python train.py [--loop eager|iterator|optax] [--value-and-grad] [--one-batch [--loop run]] [--mistake]

The objective is the mean logistic loss plus half of the squared norm of the weights, times L2. With --mistake the norm is not
squared: jaxopt.tree_util.tree_l2_norm returns the norm itself unless it is called with squared=True.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import jaxopt
import numpy as np
import optax
from jaxopt import tree_util

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=7)
parser.add_argument("--batch", type=int, default=12)
parser.add_argument(
    "--loop",
    choices=["jit", "eager", "iterator", "run", "optax"],
    default="jit",
    help="Jitted or eager solver.update, solver.run_iterator, solver.run (--one-batch), or optax without a solver.",
)
parser.add_argument(
    "--value-and-grad", action="store_true", help="The objective returns its gradient, from parts of the batch."
)
parser.add_argument("--one-batch", action="store_true", help="The same texts in all steps.")
parser.add_argument(
    "--average", action="store_true", help="Average the parameters after each step, for the evaluation."
)
parser.add_argument("--mistake", action="store_true", help="The penalty has the norm of the weights, not its square.")
args = parser.parse_args()

VOCABULARY, LENGTH, WIDTH, CLASSES, L2 = 40, 14, 20, 4, 0.01


def init(key):
    keys = jax.random.split(key, 4)
    return {
        "embedding": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "attention": {
            "query": jax.random.normal(keys[1], (WIDTH,)),
            "key": jax.random.normal(keys[2], (WIDTH, WIDTH)) * 0.2,
        },
        "head": {"w": jax.random.normal(keys[3], (WIDTH, CLASSES)) * 0.3, "b": jnp.zeros(CLASSES)},
    }


def logits_of(params, tokens):
    """Token 0 is padding."""
    x = params["embedding"][tokens]
    scores = jnp.tanh(x @ params["attention"]["key"]) @ params["attention"]["query"]
    weights = jax.nn.softmax(jnp.where(tokens > 0, scores, -jnp.inf))
    return jnp.einsum("bt,btd->bd", weights, x) @ params["head"]["w"] + params["head"]["b"]


def penalty(params):
    weights = (params["embedding"], params["attention"], params["head"]["w"])
    return 0.5 * L2 * tree_util.tree_l2_norm(weights, squared=not args.mistake)


def objective(params, data):
    """(objective, accuracy)."""
    tokens, labels = data
    logits = logits_of(params, tokens)
    losses = jax.vmap(jaxopt.loss.multiclass_logistic_loss)(labels, logits)
    return losses.mean() + penalty(params), (logits.argmax(-1) == labels).mean()


def objective_and_grad(params, data):
    """((objective, accuracy), gradient) as means over thirds of the batch."""
    parts = jax.tree.map(lambda x: x.reshape(3, -1, *x.shape[1:]), data)
    in_parts = jax.lax.map(lambda part: jax.value_and_grad(objective, has_aux=True)(params, part), parts)
    return jax.tree.map(lambda x: x.mean(0), in_parts)


def batches():
    """Texts whose tokens are drawn from the words of their class, half of the time."""
    random = np.random.default_rng(3)
    words = random.integers(1, VOCABULARY, size=(CLASSES, 6))
    for _ in range(args.steps):
        labels = random.integers(CLASSES, size=args.batch)
        tokens = random.integers(1, VOCABULARY, size=(args.batch, LENGTH))
        typical = words[labels[:, None], random.integers(6, size=tokens.shape)]
        tokens = np.where(random.random(tokens.shape) < 0.5, typical, tokens)
        tokens[np.arange(LENGTH) >= random.integers(6, LENGTH + 1, size=(args.batch, 1))] = 0
        yield tokens.astype(np.int32), labels.astype(np.int32)


def make_transformation():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0.05, 0.01, args.steps)))


def optax_loop(params, data):
    tx = make_transformation()
    opt_state = tx.init(params)

    @jax.jit
    def train_step(params, opt_state, batch):
        (loss, _), grads = jax.value_and_grad(objective, has_aux=True)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for step, batch in enumerate(data):
        params, opt_state, loss = train_step(params, opt_state, batch)
        print(f"step {step} loss {loss:.9g}")
    return params


def main():
    params = init(jax.random.key(0))
    data = [jax.tree.map(jnp.asarray, batch) for batch in batches()]
    last = data[-1]
    if args.one_batch:
        data = data[:1] * args.steps
    fun = objective_and_grad if args.value_and_grad else objective
    solver = jaxopt.OptaxSolver(
        fun, make_transformation(), value_and_grad=args.value_and_grad, has_aux=True, maxiter=args.steps, tol=0.0
    )
    average = params
    if args.loop == "optax":
        params = optax_loop(params, data)
    elif args.loop == "iterator":
        # run_iterator initializes its state with the first batch of the iterator, and does not train on it.
        params, state = solver.run_iterator(params, itertools.chain(data[:1], data))
        print(f"last step loss {state.value:.9g}")
    elif args.loop == "run":
        params, state = solver.run(params, data=data[0])
        print(f"last step loss {state.value:.9g}")
    else:
        state = solver.init_state(params, data=data[0])
        update = jax.jit(solver.update) if args.loop == "jit" else solver.update
        for step, batch in enumerate(data):
            params, state = update(params, state, data=batch)
            print(f"step {step} loss {state.value:.9g} accuracy {state.aux:.4f}")
            if args.average:
                average = optax.incremental_update(params, average, 0.3)
    if args.average:
        print(f"loss of the averaged parameters {objective(average, last)[0]:.9g}")
    loss, accuracy = objective(params, last)
    print(f"norm of the parameters {optax.global_norm(params):.9g} loss {loss:.9g} accuracy {accuracy:.4f}")
    return params


if __name__ == "__main__":
    main()
