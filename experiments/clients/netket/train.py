"""Finds the ground state of a chain of spins by variational Monte Carlo with NetKet: an RBM, Metropolis sampling, optax.

python train.py [--loop grad|own] [--complex] [--chunk 32] [--sr dense|onthefly] [--observe] [--mistake]

The loop is NetKet's driver, or expect_and_grad with optax, or a jitted step of our own with jax.value_and_grad on the samples
of the state. With --mistake this step gives gradients of complex parameters to the optimizer as jax.grad returns them,
without conjugating them.
"""

import argparse

import jax
import jax.numpy as jnp
import netket as nk
import optax

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--samples", type=int, default=128)
parser.add_argument("--loop", choices=["driver", "grad", "own"], default="driver")
parser.add_argument("--complex", action="store_true", help="Complex parameters.")
parser.add_argument("--chunk", type=int, help="Samples that are computed at once.")
parser.add_argument("--sr", choices=["no", "dense", "onthefly"], default="no", help="Stochastic reconfiguration.")
parser.add_argument("--observe", action="store_true", help="Estimate the magnetization in each step too.")
parser.add_argument("--mistake", action="store_true", help="Do not conjugate gradients; --loop own --complex.")
args = parser.parse_args()

SPINS = 8


def make_state():
    """(Hamiltonian, state with samples)."""
    chain = nk.graph.Chain(SPINS, pbc=True)
    hilbert = nk.hilbert.Spin(s=1 / 2, N=SPINS)
    hamiltonian = nk.operator.IsingJax(hilbert, graph=chain, h=0.8, J=-1.0)
    model = nk.models.RBM(alpha=1, param_dtype=complex if args.complex else float)
    sampler = nk.sampler.MetropolisLocal(hilbert, n_chains=16)
    state = nk.vqs.MCState(
        sampler, model, n_samples=args.samples, n_discard_per_chain=4, chunk_size=args.chunk, seed=0, sampler_seed=1
    )
    return hamiltonian, state


def loss_fn(params, state, hamiltonian, samples):
    """The energy. Its gradient is that of log psi, weighted by centred local energies."""

    def log_psi(spins):
        return state.model.apply({"params": params}, spins)

    connected, elements = hamiltonian.get_conn_padded(samples)
    here = log_psi(samples)
    local = jax.lax.stop_gradient((elements * jnp.exp(log_psi(connected) - here[:, None])).sum(-1))
    centred = local - local.mean()
    surrogate = 2 * (centred.conj() * here).mean().real
    return local.mean().real + surrogate - jax.lax.stop_gradient(surrogate)


def own_loop(hamiltonian, state, tx):
    @jax.jit
    def train_step(params, opt_state, samples):
        energy, grads = jax.value_and_grad(loss_fn)(params, state, hamiltonian, samples)
        if not args.mistake:
            grads = jax.tree.map(jnp.conj, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, energy

    opt_state = tx.init(state.parameters)
    for step in range(args.steps):
        samples = state.samples.reshape(-1, SPINS)
        state.parameters, opt_state, energy = train_step(state.parameters, opt_state, samples)
        print(f"step {step} energy {energy:.12g}")


def grad_loop(hamiltonian, state, tx):
    opt_state = tx.init(state.parameters)
    for step in range(args.steps):
        energy, grads = state.expect_and_grad(hamiltonian)
        updates, opt_state = tx.update(grads, opt_state, state.parameters)
        state.parameters = optax.apply_updates(state.parameters, updates)
        print(f"step {step} energy {energy.mean.real:.12g}")


def driver_loop(hamiltonian, state, tx):
    qgt = {"no": None, "dense": nk.optimizer.qgt.QGTJacobianDense(), "onthefly": nk.optimizer.qgt.QGTOnTheFly()}[
        args.sr
    ]
    more = {}
    if args.sr != "no":
        solver = nk.optimizer.solver.cholesky
        more["preconditioner"] = nk.optimizer.SR(qgt=qgt, solver=solver, diag_shift=0.05, holomorphic=args.complex)
    driver = nk.driver.VMC(hamiltonian, tx, variational_state=state, **more)
    magnetization = sum(nk.operator.spin.sigmaz(state.hilbert, i) for i in range(SPINS)) / SPINS
    log = nk.logging.RuntimeLog()
    observed = {"magnetization": magnetization} if args.observe else None
    driver.run(args.steps, out=log, obs=observed, show_progress=False)
    for step, energy in enumerate(log.data["Energy"]["Mean"].real):
        print(f"step {step} energy {energy:.12g}")


def main():
    hamiltonian, state = make_state()
    schedule = optax.exponential_decay(0.05, 1, 0.95)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(schedule, momentum=0.9))
    {"driver": driver_loop, "grad": grad_loop, "own": own_loop}[args.loop](hamiltonian, state, tx)
    print(f"norm of the parameters {optax.global_norm(state.parameters):.12g}")
    return state.parameters


if __name__ == "__main__":
    main()
