"""Scripts whose step runs in `jax.pmap`, where parameters and batches have a dim of devices."""

import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.recording.perturbed_runs import perturbed_values
from crossframe.scripts import NOT_RECORDED
from crossframe.verdict import Verdict, compare
from tests.on_jax.helpers.scripts import FUNCTIONS, IN_PMAP, MAPPED, SCANNED

_CALL = 'step = jax.pmap(step, axis_name="data")\n'
_APART = IN_PMAP.split("opt_state = replicate")[0]


def _with(options):
    return IN_PMAP.replace(_CALL, f'step = jax.pmap(step, axis_name="data", {options})\n')


FORMS = {
    "stacked": IN_PMAP,
    "donated": _with("donate_argnums=(0, 1)"),
    "arrays of numpy": IN_PMAP.replace("for batch in", "params, opt_state = jax.device_get((params, opt_state))\nfor batch in"),
    "no dim of parameters": _with("in_axes=(None, None, 0), out_axes=(None, None, 0)")
    .replace("replicate(tx.init(params))", "tx.init(params)")
    .replace("replicate(params)", "params")
    .replace("leaf[0], params", "leaf, params"),
    "updates added by hand": IN_PMAP.replace(
        "optax.apply_updates(params, updates)", "jax.tree.map(jnp.add, params, updates)"
    ),
    "a method": IN_PMAP.replace(
        _CALL,
        "class Updater:\n    step = jax.pmap(lambda self, *args: step(*args), 'data', static_broadcasted_argnums=0)\n"
        "updater = Updater()\n",
    ).replace("= step(params, opt_state, parts)", "= updater.step(params, opt_state, parts)"),
    "a static argument and random keys": IN_PMAP.replace("(params, opt_state, batch):", "(name, params, opt_state, batch, key):")
    .replace(_CALL, 'step = jax.pmap(step, axis_name="data", static_broadcasted_argnums=0)\n')
    .replace("step(params, opt_state, parts)", "step('name', params, opt_state, parts, jax.random.split(jax.random.PRNGKey(1)))"),
}  # fmt: skip
"""Scripts that train alike."""
QUICK = ("donated", "a method", "a static argument and random keys")

ACCUMULATED = SCANNED.replace("@jax.jit\n", '@partial(jax.pmap, axis_name="data")\n')
for _own, _mapped in (
    ("grads, losses = jax.lax.scan", "grads, losses = jax.lax.pmean(jax.lax.scan"),
    ("zeros_like, params), microbatches)", 'zeros_like, params), microbatches), "data")'),
    ("part.reshape(2, 4, *part.shape[1:])", "part.reshape(2, 2, 2, *part.shape[1:]).swapaxes(0, 1)"),
    ("for batch in", "params, opt_state = jax.tree.map(lambda x: jnp.stack([x, x]), (params, opt_state))\nfor batch in"),
    ("result = params", "result = jax.tree.map(lambda x: x[0], params)"),
):  # fmt: skip
    assert _own in ACCUMULATED
    ACCUMULATED = ACCUMULATED.replace(_own, _mapped)
_EPOCH = """
def epoch(params, opt_state, batches):
    def body(carry, batch):
        params, opt_state, loss = step(*carry, batch)
        return (params, opt_state), loss
    return jax.lax.scan(body, (params, opt_state), batches)
stacked = jax.tree.map(lambda *each: np.stack(each).reshape(3, 2, 4, *each[0].shape[1:]).swapaxes(0, 1), *batches)
(params, opt_state), losses = jax.pmap(epoch, axis_name="data")(replicate(params), replicate(tx.init(params)), stacked)
"""
EPOCH = _APART.replace(_CALL, "") + _EPOCH


def opened(tmp_path, *names):
    return [Recording.open(tmp_path / name) for name in names]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in FORMS]
)
def test_steps_in_pmap_agree_with_those_in_shard_map(tmp_path, run, name):
    assert run(MAPPED, "mapped")[0] == run(FORMS[name], "own", every=1)[0] == 0
    mapped, own = opened(tmp_path, "mapped", "own")
    assert own.manifest.mesh == mapped.manifest.mesh and own.num_steps == 3
    assert [own.batch(step, rank) for step in range(3) for rank in range(2)] == [
        mapped.batch(step, rank) for step in range(3) for rank in range(2)
    ]
    found = compare(mapped, own)
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason
    assert not found.notes
    assert run(FORMS[name], "spoiled", 1.5)[0] == 0
    where = compare(*opened(tmp_path, "own", "spoiled")).first_divergence
    assert where is not None and (where.step, where.phase, where.parameter) == (0, "reduce", "out.w")


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        pytest.param(ACCUMULATED, SCANNED, id="microbatches"),
        pytest.param(EPOCH, MAPPED, id="steps", marks=pytest.mark.exhaustive),
    ],
)
def test_scans_inside_of_pmap_cut_the_samples_of_all_devices(tmp_path, run, text, alone):
    assert run(alone, "alone")[0] == run(text, "own")[0] == 0
    found = compare(*opened(tmp_path, "alone", "own"))
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason
    ids = [
        [set(r.batch(1, rank).sample_ids) for rank in range(r.manifest.world_size)]
        for r in opened(tmp_path, "alone", "own")
    ]
    assert set.union(*ids[0]) == set.union(*ids[1]) and len(set.union(*ids[1])) == 8


def test_replicas_of_a_perturbed_run_in_pmap_begin_alike(tmp_path, run):
    for number in range(2):
        assert run(IN_PMAP, perturbed_run=number)[0] == 0
    (found,) = opened(tmp_path, "out")
    (other,) = found.perturbed_runs()
    for name in found.manifest.params:
        initial = found.full("parameters", 0, name)
        for replica in range(2):
            moved = other.full("parameters", 0, name, replica=replica)
            np.testing.assert_array_equal(moved, perturbed_values(name, initial, 1), strict=True)


def test_replicas_that_begin_apart_are_a_fault(tmp_path, run):
    apart = "params = replicate(params)\n"
    text = IN_PMAP.replace(apart, f"{apart}params['out']['b'] = params['out']['b'].at[1].add(0.1)\n")
    assert run(IN_PMAP, "a")[0] == run(text, "b")[0] == 0
    a, b = opened(tmp_path, "a", "b")
    initial = [b.full("parameters", 0, "out.b", replica=replica) for replica in range(2)]
    assert initial[0].tolist() == [0.0] * 3 and initial[1].tolist() == [0.1] * 3
    found = compare(a, b)
    assert found.verdict is Verdict.BUG and "rank 1 of b started with other values of 'out.b'" in found.reason


def test_a_mapped_function_that_trains_nothing_computes_as_before(run):
    status, variables = run(
        FUNCTIONS + "found = jax.pmap(lambda x: x * jax.lax.psum(1, 'i'), axis_name='i')(np.arange(2.0))\n"
    )
    assert status == NOT_RECORDED and variables["found"].tolist() == [0.0, 2.0]
