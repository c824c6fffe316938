"""Fits a hidden Markov model of dynamax to sequences by gradients: fit_sgd, or a loop of our own over its minibatches.

python train.py [--loop own] [--scan] [--sequences map] [--likelihood own] [--score] [--thaw [--mistake]]

The parameters are trained in unconstrained form. With --thaw the standard deviations of the emissions are frozen in the first
epoch, and trained after it: the properties of the parameters are changed between two epochs. With --mistake the jitted step takes
the properties from the enclosing function, and not as an argument: JAX does not trace it again, so that the standard deviations
stay frozen.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dynamax.hidden_markov_model import DiagonalGaussianHMM
from dynamax.parameters import from_unconstrained, to_unconstrained
from jax.scipy.special import logsumexp

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch", type=int, default=4, help="Sequences of a step.")
parser.add_argument("--loop", choices=["fit_sgd", "own"], default="fit_sgd")
parser.add_argument(
    "--scan", action="store_true", help="One jitted lax.scan over the minibatches of an epoch; --loop own."
)
parser.add_argument(
    "--sequences", choices=["vmap", "map"], default="vmap", help="jax.vmap or jax.lax.map over sequences; --loop own."
)
parser.add_argument(
    "--likelihood",
    choices=["dynamax", "own"],
    default="dynamax",
    help="Forward algorithm of dynamax, or ours; --loop own.",
)
parser.add_argument("--score", action="store_true", help="Score other sequences after each minibatch; --loop own.")
parser.add_argument(
    "--thaw", action="store_true", help="Train standard deviations from the second epoch on; --loop own."
)
parser.add_argument("--mistake", action="store_true", help="The jitted step closes over the properties; --thaw.")
args = parser.parse_args()

STATES, DIMENSION, LENGTH, SEQUENCES = 3, 2, 25, 12

hmm = DiagonalGaussianHMM(STATES, DIMENSION)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.exponential_decay(0.05, 2, 0.8)))


def sample(seed, number):
    """Sequences of another model, of the shape (number, time, dimension)."""
    random = np.random.default_rng(seed)
    means = np.array([[-2.0, 0.0], [1.0, 1.5], [1.0, -2.0]])
    stay = 0.8
    found = np.empty((number, LENGTH, DIMENSION), np.float32)
    for sequence in found:
        state = random.integers(STATES)
        for t in range(LENGTH):
            sequence[t] = means[state] + (0.4 + 0.3 * state) * random.standard_normal(DIMENSION)
            if random.random() > stay:
                state = random.integers(STATES)
    return found


def log_likelihood(params, sequence):
    if args.likelihood == "dynamax":
        return hmm.marginal_log_prob(params, sequence)
    deviations = params.emissions.scale_diags
    scaled = (sequence[:, None] - params.emissions.means) / deviations
    emitted = -(0.5 * scaled**2 + jnp.log(deviations) + 0.5 * jnp.log(2 * jnp.pi)).sum(-1)
    transitions = jnp.log(params.transitions.transition_matrix)

    def forward(before, here):
        now = logsumexp(before[:, None] + transitions, axis=0) + here
        return now, None

    return logsumexp(jax.lax.scan(forward, jnp.log(params.initial.probs) + emitted[0], emitted[1:])[0])


def loss_fn(unconstrained, props, sequences):
    """As fit_sgd: the negative logarithm of the posterior, estimated from a minibatch, for each number of the data."""
    params = from_unconstrained(unconstrained, props)
    if args.sequences == "vmap":
        logs = jax.vmap(lambda sequence: log_likelihood(params, sequence))(sequences)
    else:
        logs = jax.lax.map(lambda sequence: log_likelihood(params, sequence), sequences)
    log_posterior = hmm.log_prior(params) + logs.sum() * SEQUENCES / len(sequences)
    return -log_posterior / (SEQUENCES * LENGTH * DIMENSION)


def train_step(carry, sequences, props):
    params, opt_state = carry
    loss, grads = jax.value_and_grad(loss_fn)(params, props, sequences)
    updates, opt_state = tx.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), loss


def epoch_of(carry, minibatches, props):
    return jax.lax.scan(lambda carry, sequences: train_step(carry, sequences, props), carry, minibatches)


@jax.jit
def score(params, sequences):
    return jax.vmap(lambda sequence: hmm.marginal_log_prob(params, sequence))(sequences).mean()


def own_loop(params, props, sequences):
    others = jnp.asarray(sample(1, 3))
    minibatches = sequences.reshape(-1, args.batch, LENGTH, DIMENSION)
    params = to_unconstrained(params, props)
    carry = (params, tx.init(params))
    props.emissions.scale_diags.trainable = not args.thaw
    step_fn = jax.jit((lambda carry, sequences: train_step(carry, sequences, props)) if args.mistake else train_step)
    epoch_fn = jax.jit(epoch_of)
    for epoch in range(args.epochs):
        if epoch == 1:
            props.emissions.scale_diags.trainable = True
        if args.scan:
            carry, losses = epoch_fn(carry, minibatches, props)
        else:
            losses = []
            for minibatch in minibatches:
                carry, loss = step_fn(carry, minibatch) if args.mistake else step_fn(carry, minibatch, props)
                losses.append(loss)
                if args.score:
                    print(f"score {score(from_unconstrained(carry[0], props), others):.9g}")
        print("epoch", epoch, "losses", *(f"{loss:.9g}" for loss in losses), f"mean {np.mean(losses):.7g}")
    return from_unconstrained(carry[0], props)


def main():
    sequences = jnp.asarray(sample(0, SEQUENCES))
    params, props = hmm.initialize(
        jax.random.key(0),
        initial_probs=jnp.array([0.5, 0.3, 0.2]),
        transition_matrix=0.1 + 0.7 * jnp.eye(STATES),
        emission_means=sequences[0, ::10][:STATES],
        emission_scale_diags=1.5 * jnp.ones((STATES, DIMENSION)),
    )
    if args.loop == "own":
        params = own_loop(params, props, sequences)
    else:
        params, losses = hmm.fit_sgd(
            params, props, sequences, optimizer=tx, batch_size=args.batch, num_epochs=args.epochs, shuffle=False
        )
        for epoch, loss in enumerate(losses):
            print(f"epoch {epoch} mean loss {loss:.7g}")
    print(f"score of the training sequences {score(params, sequences):.9g}")
    print(f"norm of the parameters {optax.global_norm(params):.9g}")
    return params


if __name__ == "__main__":
    main()
