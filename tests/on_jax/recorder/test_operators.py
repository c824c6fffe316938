"""Operators traced in JAX: where two versions of a small script part, and at which line."""

import runpy
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from crossframe.operators import Request, Trace, find
from crossframe.operators.request import TRACE_NAME
from crossframe.recording.event_format import BACKWARD, FORWARD, REDUCE, UPDATE
from jax_backend import Recorder, apply_updates, clip_grad_norm, sharded_optimizer, unshard
from jax_backend.recorder._float64_check import judge
from jax_backend.recorder._operator_trace import OperatorTrace
from tests.on_jax.helpers.recorded_loops import sharded_small
from tests.on_jax.helpers.small import small_batch, small_loss

SCRIPT = """
import math
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
WEIGHTS = np.random.default_rng(0)
def weight(*shape):
    return jnp.asarray(WEIGHTS.normal(size=shape) / math.sqrt(shape[-1]), jnp.float32)
params = {"embed": weight(11, 8), "position": weight(9, 8), "qkv": weight(8, 24), "out": weight(8, 8),
          "layers": weight(3, 8, 8), "up": weight(8, 16), "down": weight(16, 11)}
tokens = np.random.default_rng(1).integers(11, size=(4, 7))
@jax.custom_vjp
def twice(x):
    return x * 2.0
def twice_forward(x):
    return twice(x), None
def twice_backward(_, grad):
    return (grad * 2.0,)
twice.defvjp(twice_forward, twice_backward)
@jax.custom_jvp
def softcap(x):
    return jnp.tanh(x / 3.0) * 3.0
@softcap.defjvp
def softcap_jvp(primals, tangents):
    y = jnp.tanh(primals[0] / 3.0)
    return y * 3.0, (1 - y * y) * tangents[0]
def attention(params, x):
    b, t, d = x.shape
    q, k, v = (each.reshape(b, t, 2, 4).swapaxes(1, 2) for each in jnp.split(x @ params["qkv"], 3, -1))
    scores = q @ k.swapaxes(-1, -2)
    scores = scores / math.sqrt(4)
    mask = jnp.tril(jnp.ones((t, t), bool))
    p = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    y = p @ v
    return y.swapaxes(1, 2).reshape(b, t, d) @ params["out"]
@jax.checkpoint
def layer(x, w):
    h = x @ w
    x = x + jnp.tanh(h) * 0.5
    return x, h.sum()
def count(x):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))[1]
@jax.jit
def forward(params, tokens):
    x = params["embed"][tokens] + params["position"][jnp.arange(tokens.shape[1])]
    variance = jnp.mean(x * x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(variance + 1e-5)
    x = twice(x + attention(params, x))
    x, sums = jax.lax.scan(layer, x, params["layers"])
    x = jax.lax.cond(x.shape[0] > 1, lambda x: x * 0.25, lambda x: x, x)
    scale = jax.lax.stop_gradient(count(jnp.abs(sums).max()))
    h = jax.nn.gelu(x @ params["up"], approximate=False)
    return softcap(h @ params["down"]) / scale
mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
def loss_fn(params, tokens):
    logits = forward(params, tokens[:, :-1])
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
    return -picked.mean(), logits
@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P("data"), P()), check_vma=False)
def on_ranks(params, tokens):
    (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, tokens)
    grads = jax.tree.map(lambda grad: jax.lax.psum(grad, "data") / 2, grads)
    return logits, grads
@jax.jit
def update(params, momentum, grads):
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.01 * m, params, momentum), momentum
momentum = jax.tree.map(jnp.ones_like, params)
"""


def line_of(text):
    assert SCRIPT.count(text) == 1, text
    return SCRIPT[: SCRIPT.index(text)].count("\n") + 1


def traced(path, phase=FORWARD, *, text=SCRIPT, in_bits=True, mapped=True):
    path.write_text(text)
    made = runpy.run_path(str(path))
    trace = OperatorTrace(Request("", 0, 0, phase, "", in_bits=in_bits))
    trace.begin_step(0)
    try:
        step = jax.jit(made["on_ranks"]) if mapped else jax.grad(made["loss_fn"], has_aux=True)
        *logits, grads = step(made["params"], made["tokens"])[:: 1 if mapped else -1]
        trace.add_result(*logits)
        made["update"](made["params"], made["momentum"], grads)
    finally:
        trace.end()
    return trace.trace()


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """The trace of the script as it is, by phase."""
    path = tmp_path_factory.mktemp("unchanged") / "a.py"
    return {phase: traced(path, phase) for phase in (FORWARD, REDUCE, UPDATE)}


@pytest.mark.parametrize(
    ("old", "new", "operator", "phase"),
    [
        pytest.param("variance + 1e-5", "variance + 1e-6", "jax.add", FORWARD, id="epsilon"),
        pytest.param("approximate=False", "approximate=True", "jax.", FORWARD, id="tanh", marks=pytest.mark.exhaustive),
        pytest.param("bool))", "bool), 1)", "jax.add", FORWARD, id="mask"),
        pytest.param("p @ v", "p.astype(jnp.bfloat16) @ v", "jax.convert_element_type", FORWARD, id="cast"),
        pytest.param("jnp.tanh(h) * 0.5", "jnp.tanh(h) * 0.6", "jax.mul", FORWARD, id="scan"),
        pytest.param("x: x * 0.25,", "x: x * 0.5,", "jax.mul", FORWARD, id="cond", marks=pytest.mark.exhaustive),
        pytest.param("c[1] * 1.5", "c[1] * 1.6", "jax.mul", FORWARD, id="while", marks=pytest.mark.exhaustive),
        pytest.param('jax.lax.psum(grad, "data") / 2', 'jax.lax.psum(grad, "data")', "jax.div", REDUCE, id="mean"),
        pytest.param("0.9 * m + g", "0.9 * m + 0.1 * g", "jax.mul", UPDATE, id="optimizer"),
    ],
)
def test_one_changed_operator_is_found_at_its_line(tmp_path, unchanged, old, new, operator, phase):
    assert SCRIPT.count(old) == 1, old
    other = traced(tmp_path / "b.py", phase, text=SCRIPT.replace(old, new))
    first = find(unchanged[phase], other, None)
    found = [
        op for op in (first.a, first.b) if op is not None and op.line is not None and op.line.number == line_of(old)
    ]
    assert any(operator in op.name for op in found), (first.a, first.b)


def test_the_same_script_has_nothing_that_parts(tmp_path, unchanged):
    first = find(unchanged[REDUCE], traced(tmp_path / "b.py", REDUCE), None)
    assert (first.a, first.b) == (None, None) and first.num_matched == first.num_operators


@pytest.mark.exhaustive
def test_gradients_outside_of_jit_are_traced(tmp_path, unchanged):
    operators = traced(tmp_path / "b.py", REDUCE, mapped=False).operators
    lines = {op.line.number for op in operators if op.phase == BACKWARD and op.line is not None}
    assert {line_of("scores / math.sqrt(4)"), line_of("h = x @ w"), line_of("approximate=False")} <= lines
    inside = {op.name for op in unchanged[REDUCE].operators}
    assert inside - {op.name for op in operators} <= {"jax.psum", "jax.shard_map", "jax.slice"}


def test_equations_of_right_kernels_are_inside_their_bounds():
    x = np.linspace(-2, 2, 32, dtype=np.float32).reshape(4, 8)
    trace = OperatorTrace(Request("", 0, 0, FORWARD, "", judged=True))
    trace.begin_step(0)
    try:
        jax.lax.exp(jax.lax.dot(x, x.T)).sum()
    finally:
        trace.end()
    assert {op.name for op in trace.trace().judged()} == {"jax.dot_general", "jax.exp", "jax.reduce_sum"}
    assert not trace.trace().outside()


def test_an_inexact_equation_is_outside_its_bound():
    wrong = Primitive("wrong_sum")
    wrong.def_impl(lambda x: (x.astype("bfloat16") if x.dtype == "float32" else x).sum(-1).astype(x.dtype))
    x = jax.numpy.arange(1.0, 9.0, dtype="float32") / 7
    judged = judge(wrong, {}, [x], [wrong.bind(x)])
    assert judged is not None and not judged.inside and judged.error > 1e-3


def in_format(x, bits):
    """x truncated to `bits` bits of its significand."""
    return (x.view(np.uint32) & np.uint32(0xFFFFFFFF << (24 - bits) & 0xFFFFFFFF)).view(np.float32)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize(
    ("precision", "inside"),
    [
        (None, (24, 11)),
        ("default", (24, 11)),
        ("high", (24, 11)),
        ("highest", (24,)),
        (("highest", "default"), (24, 11)),
        ("TF32_TF32_F32", (24, 11)),
        ("TF32_TF32_F32_X3", (24,)),
        ("BF16_BF16_F32", (24, 11, 8)),
        ("BF16_BF16_F32_X3", (24,)),
        ("F32_F32_F32", (24,)),
    ],
)
def test_the_bound_of_a_product_follows_its_precision(monkeypatch, precision, inside, positive):
    """Factors as a GPU truncates them, to TF32 (11 bits) and to bfloat16 (8 bits), in sums of 512 products."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 512), (512, 8)))
    x, w = (abs(x), abs(w)) if positive else (x, w)
    (equation,) = jax.make_jaxpr(lambda x, w: jax.lax.dot(x, w, precision=precision))(x, w).eqns
    as_on_gpu(monkeypatch, "PJRT C API\ncuda 12090")
    for bits in (24, 11, 8):
        computed = in_format(x, bits) @ in_format(w, bits)
        judged = judge(equation.primitive, equation.params, [x, w], [computed])
        assert judged is not None and judged.inside == (bits in inside), (bits, judged)


@pytest.mark.parametrize("precision", [None, "high", "highest"])
def test_amd_gpus_multiply_float32_in_float32(monkeypatch, precision):
    x, w = np.ones((8, 512), np.float32), np.ones((512, 8), np.float32)
    (equation,) = jax.make_jaxpr(lambda x, w: jax.lax.dot(x, w, precision=precision))(x, w).eqns
    as_on_gpu(monkeypatch, "PJRT C API\nrocm 70051")
    for bits in (24, 11):
        # Half a unit of TF32 away in every factor.
        judged = judge(equation.primitive, equation.params, [x, w], [x @ w * np.float32(1 + (bits == 11) * 2.0**-11)])
        assert judged is not None and judged.inside == (bits == 24), judged


def as_on_gpu(monkeypatch, version):
    """Answer as JAX does on the GPU of this version, in JAX's words."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(client=SimpleNamespace(platform_version=version))])


def test_a_product_of_float16_factors_and_one_of_groups_are_judged():
    """As XLA computes them on CPUs."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 64), (2, 64, 4)))
    sizes = np.array([3, 5], np.int32)
    for function, args in (
        (lambda x, w: jax.lax.dot(x, w, precision="F16_F16_F16"), (x, w[0])),
        (jax.lax.ragged_dot, (x, w, sizes)),
    ):
        (equation,) = jax.make_jaxpr(function)(*args).eqns
        judged = judge(equation.primitive, equation.params, args, [function(*args)])
        assert judged is not None and judged.inside, judged


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("is_set", [True, False], ids=["set_mesh", "abstract_mesh"])
def test_a_shard_map_without_devices_runs_on_those_of_its_arguments(is_set):
    mesh = Mesh(np.array(jax.devices()[3:1:-1]), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    x = jax.device_put(np.arange(4.0), NamedSharding(mesh, spec))
    with jax.set_mesh(mesh) if is_set else nullcontext():
        where = None if is_set else mesh.abstract_mesh
        doubled = jax.jit(jax.shard_map(lambda x: 2 * x, mesh=where, in_specs=spec, out_specs=spec))
        wanted = doubled(x)
        trace = OperatorTrace(Request("", 0, 0, FORWARD, ""))
        trace.begin_step(0)
        try:
            found = doubled(x)
        finally:
            trace.end()
    assert "jax.mul" in {op.name for op in trace.trace().operators}
    devices = [[part.device for part in each.addressable_shards] for each in (found, wanted)]
    assert devices[0] == devices[1] and found.sharding.is_equivalent_to(wanted.sharding, 1)


def test_a_loop_outside_of_jit_keeps_its_shards(tmp_path, monkeypatch):
    """While a step is traced, too: `update` and `unshard` need the mesh of their arguments."""
    request = Request(str(tmp_path), 0, 0, UPDATE, "")
    monkeypatch.setenv(*next(iter(request.to_environment().items())))
    optimizer, params = sharded_optimizer(optax.sgd(0.1)), sharded_small()
    batch, state = small_batch(8), optimizer.init(params)
    with pytest.raises(SystemExit), Recorder(tmp_path / "run", params) as recorder:
        result = recorder.value_and_grad(small_loss)(params, batch)
        clipped, _ = clip_grad_norm(result.grads, 1.0)
        updates, state = optimizer.update(clipped, state, params)
        params = apply_updates(params, updates)
        unshard(params)
        recorder.step(params=params, grads=result.grads, loss=result.losses, opt_state=state, batch=batch)
    names = {op.name for op in Trace.read(tmp_path / TRACE_NAME).operators}
    assert {"jax.mul", "jax.add"} <= names
