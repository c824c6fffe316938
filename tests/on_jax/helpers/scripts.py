"""Training scripts in the style of public examples, which know nothing of the recorder. Each trains on `batches` for a few steps.

`FAULT` in the environment of a script is a factor on the gradient of one parameter, which is a bug unless it is 1.
"""

HEAD = """
import os
from functools import partial
import jax, jax.numpy as jnp, numpy as np, optax
FAULT = float(os.environ.get("FAULT", "1"))
rng = np.random.default_rng(0)
batches = [
    {"image": rng.normal(size=(8, 6)).astype(np.float32), "label": rng.integers(3, size=8)} for _ in range(3)
]
def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
"""

FUNCTIONS = (
    HEAD
    + """
def init(key):
    keys = jax.random.split(key)
    dense = lambda key, n, m: {"w": 0.3 * jax.random.normal(key, (n, m)), "b": jnp.zeros(m)}
    return {"hidden": dense(keys[0], 6, 5), "out": dense(keys[1], 5, 3)}
def dense(params, x):
    return x @ params["w"] + params["b"]
def forward(params, x):
    x = jax.nn.relu(jax.named_call(dense, name="hidden")(params["hidden"], x))
    return jax.named_call(dense, name="out")(params["out"], x)
def loss_fn(params, x, y):
    return cross_entropy(forward(params, x), y)
def spoil(grads):
    return grads | {"out": grads["out"] | {"w": grads["out"]["w"] * FAULT}}
params = init(jax.random.key(0))
"""
)
"""A model of functions, as in haiku after `transform`, with named calls."""

TIED = """
from flax import linen as nn
outside = nn.Dense(7)
class Net(nn.Module):
    def setup(self):
        self.embed = nn.Embed(7, 5)
        self.head = nn.Dense(7, use_bias=False)
        self.bias = self.param("bias", nn.initializers.ones, (7,))
    def __call__(self, x):
        hidden = self.embed(x.astype(int) % 7).mean(1)
        kernel = self.variables["params"]["embed"]["embedding"].T if not self.is_initializing() else jnp.ones((5, 7))
        other = outside.apply(outside.init(jax.random.key(1), hidden), hidden)
        return self.head.apply({"params": {"kernel": kernel}}, hidden) + self.bias + other
net = Net()
variables = net.init(jax.random.key(0), np.ones((2, 6)))
"""
"""A model that applies two modules itself: a tied head, and a module that is not part of it."""

LINEN = (
    HEAD
    + """
from flax import linen as nn
from flax.training import train_state
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Dense(5)(x))
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(3)(x)
class State(train_state.TrainState):
    batch_stats: dict
@partial(jax.jit, static_argnums=3)
def train_step(state, batch, key, train):
    def loss_fn(params):
        logits, changed = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats}, batch["image"], train=train,
            mutable=["batch_stats"], rngs={"dropout": key},
        )
        return cross_entropy(logits, batch["label"]), (logits, changed)
    (loss, (logits, changed)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    grads["Dense_1"]["kernel"] = grads["Dense_1"]["kernel"] * FAULT
    state = state.apply_gradients(grads=grads, batch_stats=changed["batch_stats"])
    return state, {"loss": loss, "accuracy": (logits.argmax(-1) == batch["label"]).mean()}
net = Net()
variables = net.init(jax.random.PRNGKey(0), batches[0]["image"], train=False)
state = State.create(
    apply_fn=net.apply, params=variables["params"], batch_stats=variables["batch_stats"], tx=optax.sgd(0.1, momentum=0.9)
)
for i, batch in enumerate(batches):
    state, metrics = train_step(state, batch, jax.random.PRNGKey(i), True)
result = state.params
"""
)

NNX = (
    HEAD
    + """
from flax import nnx
class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(6, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)])
        self.norm = nnx.BatchNorm(5, rngs=rngs)
    def __call__(self, x):
        return self.layers[1](nnx.relu(self.norm(self.layers[0](x))))
def loss_fn(model, batch):
    logits = model(batch["image"])
    return cross_entropy(logits, batch["label"]), logits
@nnx.jit
def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss)
    grads["layers"][1]["kernel"][...] = grads["layers"][1]["kernel"][...] * FAULT
    optimizer.update(model, grads)
model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
for batch in batches:
    train_step(model, optimizer, metrics, batch)
result = nnx.to_pure_dict(nnx.state(model, nnx.Param))
"""
)

EQUINOX = (
    HEAD
    + """
import equinox as eqx
class Net(eqx.Module):
    layers: list
    scale: jax.Array
    def __init__(self, key):
        keys = jax.random.split(key)
        self.layers = [eqx.nn.Linear(6, 5, key=keys[0]), jax.nn.relu, eqx.nn.Linear(5, 3, key=keys[1])]
        self.scale = jnp.ones(3)
    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale
@eqx.filter_value_and_grad
def compute_loss(model, x, y):
    return cross_entropy(jax.vmap(model)(x), y)
@eqx.filter_jit
def make_step(model, opt_state, x, y):
    loss, grads = compute_loss(model, x, y)
    grads = eqx.tree_at(lambda tree: tree.layers[2].weight, grads, replace_fn=lambda leaf: leaf * FAULT)
    updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return loss, eqx.apply_updates(model, updates), opt_state
model = Net(jax.random.key(0))
optim = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))
opt_state = optim.init(eqx.filter(model, eqx.is_array))
for batch in batches:
    loss, model, opt_state = make_step(model, opt_state, batch["image"], batch["label"])
result = eqx.filter(model, eqx.is_array)
"""
)

NNX_OUTSIDE_OF_JIT = NNX.replace("@nnx.jit\n", "")

NESTED = (
    FUNCTIONS
    + """
tx = optax.inject_hyperparams(optax.adamw)(learning_rate=0.01)
opt_state = tx.init(params)
loss_and_gradients = jax.jit(jax.value_and_grad(jax.jit(loss_fn)))
class Trainer:
    @partial(jax.jit, static_argnums=0, static_argnames="verbose", donate_argnums=(1, 2))
    def step(self, params, opt_state, batch, *, verbose):
        loss, grads = loss_and_gradients(params, batch["image"], batch["label"])
        updates, opt_state = tx.update(spoil(grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss
trainer = Trainer()
for batch in batches:
    params, opt_state, loss = trainer.step(params, opt_state, batch, verbose=True)
result = params
"""
)
"""Functions under jit inside of functions under jit, one of them a method with static arguments."""

TWO_CALLS = (
    FUNCTIONS
    + """
tx = optax.adam(optax.linear_schedule(0.01, 0.0, 10))
opt_state = tx.init(params)
gradients = jax.jit(jax.grad(loss_fn))
for batch in batches:
    grads = spoil(gradients(params, batch["image"], batch["label"]))
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
result = params
"""
)
"""The gradient alone under jit, without its value; the optimizer outside of jit, with a schedule."""

EAGER = (
    FUNCTIONS
    + """
tx = optax.sgd(0.1)
opt_state = tx.init(params)
for batch in batches:
    loss, grads = jax.value_and_grad(lambda params: loss_fn(params, batch["image"], batch["label"]))(params)
    updates, opt_state = tx.update(spoil(grads), opt_state)
    params = optax.apply_updates(params, updates)
result = params
"""
)

ACCUMULATED = (
    FUNCTIONS
    + """
tx = optax.MultiSteps(optax.adamw(0.01), every_k_schedule=2)
opt_state = tx.init(params)
@partial(jax.jit, donate_argnums=(0, 1))
def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch["image"], batch["label"])
    updates, opt_state = tx.update(spoil(grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss
for batch in batches:
    for rows in (slice(4), slice(4, 8)):
        params, opt_state, loss = step(params, opt_state, {name: part[rows] for name, part in batch.items()})
result = params
"""
)

SCANNED = (
    FUNCTIONS
    + """
tx = optax.adamw(0.01)
opt_state = tx.init(params)
@jax.jit
def step(params, opt_state, microbatches):
    def body(total, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch["image"], batch["label"])
        return jax.tree.map(jnp.add, total, grads), loss
    grads, losses = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), microbatches)
    updates, opt_state = tx.update(spoil(jax.tree.map(lambda g: g / 2, grads)), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, losses.mean()
for batch in batches:
    microbatches = {name: part.reshape(2, 4, *part.shape[1:]) for name, part in batch.items()}
    params, opt_state, loss = step(params, opt_state, microbatches)
result = params
"""
)

CUT_INSIDE = SCANNED.replace(
    "def step(params, opt_state, microbatches):",
    "def step(params, opt_state, batch):\n"
    "    microbatches = {name: part.reshape(2, 4, *part.shape[1:]) for name, part in batch.items()}",
).replace("opt_state, microbatches)\nresult", "opt_state, batch)\nresult")
"""The same, but jit gets the whole batch."""

_MESH = """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
tx = optax.adamw(0.01)
"""

SHARDED = (
    FUNCTIONS
    + _MESH
    + """
def placed(leaf):
    cut = leaf.ndim == 2 and leaf.shape[0] % 2 == 0
    return jax.device_put(leaf, NamedSharding(mesh, P("data") if cut else P()))
params = jax.tree.map(placed, params)
opt_state = tx.init(params)
@partial(jax.jit, donate_argnums=(0, 1))
def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch["image"], batch["label"])
    updates, opt_state = tx.update(spoil(grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss
for batch in batches:
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    params, opt_state, loss = step(params, opt_state, batch)
result = params
"""
)

SHARDED_STEP = """
@jax.jit
def step(params, opt_state, batch):
    result = value_and_grad(params, batch)
    grads = jax.tree.map(lambda grad: FAULT * grad, result.grads)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return jax_backend.apply_updates(params, updates), opt_state, result.loss
"""
"""A step of jax_backend."""

RESHARDED = (
    FUNCTIONS
    + """
import jax_backend
from crossframe import MeshSpec
mesh = jax_backend.make_mesh(MeshSpec(2), jax.devices()[:2])
params = jax_backend.shard(params, mesh, units=("hidden",))
optimizer = jax_backend.sharded_optimizer(optax.adamw(0.01))
opt_state = optimizer.init(params)
value_and_grad = jax_backend.value_and_grad(
    lambda params, batch: loss_fn(params, batch["image"], batch["label"]), mesh, mode="MODE"
)
"""
    + SHARDED_STEP
    + """for batch in batches:
    params, opt_state, loss = step(params, opt_state, batch)
result = params
"""
)
"""A unit of jax_backend, whose parameters backward gathers again."""

MAPPED = (
    FUNCTIONS
    + _MESH
    + """
opt_state = tx.init(params)
@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P(), P()))
def step(params, opt_state, batch):
    varying = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), params)
    loss, grads = jax.value_and_grad(loss_fn)(varying, batch["image"], batch["label"])
    grads = jax.lax.pmean(grads, "data")
    updates, opt_state = tx.update(spoil(grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")
for batch in batches:
    params, opt_state, loss = step(params, opt_state, batch)
result = params
"""
)

IN_PMAP = (
    FUNCTIONS
    + """
tx = optax.adamw(0.01)
replicate = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)
def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch["image"], batch["label"])
    grads, loss = jax.lax.pmean((grads, loss), "data")
    updates, opt_state = tx.update(spoil(grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss
step = jax.pmap(step, axis_name="data")
opt_state = replicate(tx.init(params))
params = replicate(params)
for batch in batches:
    parts = jax.tree.map(lambda leaf: leaf.reshape(2, 4, *leaf.shape[1:]), batch)
    params, opt_state, loss = step(params, opt_state, parts)
result = jax.tree.map(lambda leaf: leaf[0], params)
"""
)

META_LEARNED = (
    FUNCTIONS
    + """
inner, tx, task_loss = optax.sgd(0.05), optax.adamw(0.01), loss_fn
opt_state = tx.init(params)
def loss_fn(params, x, y):
    updates, _ = inner.update(jax.grad(task_loss)(params, x, y), inner.init(params))
    return task_loss(optax.apply_updates(params, updates), x, y)
gradients = jax.jit(jax.value_and_grad(loss_fn))
@jax.jit
def update(params, opt_state, grads):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
for batch in batches:
    loss, grads = gradients(params, batch["image"], batch["label"])
    params, opt_state = update(params, opt_state, spoil(grads))
result = params
"""
)
"""An optimizer, and a gradient, inside of the loss function."""

PER_SAMPLE = (
    FUNCTIONS
    + """
tx = optax.sgd(0.1)
opt_state = tx.init(params)
@jax.jit
def step(params, opt_state, x, y):
    of_sample = jax.vmap(jax.value_and_grad(lambda p, x, y: loss_fn(p, x[None], y[None])), (None, 0, 0))
    losses, grads = of_sample(params, x, y)
    grads = spoil(jax.tree.map(lambda g: jnp.clip(g, -9, 9).mean(0), grads))
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state
for batch in batches:
    params, opt_state = step(params, opt_state, batch["image"], batch["label"])
result = params
"""
)

IN_A_SCAN = (
    FUNCTIONS
    + """
tx = optax.adamw(0.01)
@jax.jit
def epoch(params, opt_state, batches):
    def step(carry, batch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch["image"], batch["label"])
        updates, opt_state = tx.update(spoil(grads), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss
    (params, opt_state), losses = jax.lax.scan(step, (params, opt_state), batches)
    return params, opt_state, losses
stacked = jax.tree.map(lambda *parts: np.stack(parts), *batches)
result, opt_state, losses = epoch(params, tx.init(params), stacked)
"""
)
"""An epoch in one call."""

OUTSIDE_OF_JIT = IN_A_SCAN.replace("@jax.jit\ndef epoch", "def epoch")

IN_LOOPS = (
    FUNCTIONS
    + """
tx = optax.adamw(0.01)
images, labels = (np.stack([batch[name] for batch in batches]) for name in ("image", "label"))
@jax.jit
def train(key):
    start = init(key)
    def step(carry, i):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, jnp.asarray(images)[i], jnp.asarray(labels)[i])
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss
    def epoch(_, state):
        carry, losses = jax.lax.scan(step, (*jax.lax.optimization_barrier(state[:2]),), jnp.arange(3))
        return *carry, jnp.append(state[2], losses)[3:]
    state = jax.lax.fori_loop(0, 2, epoch, (start, tx.init(start), jnp.zeros(6)))
    (params, _), last = jax.lax.scan(step, state[:2], jnp.array([2, 0]), reverse=True)
    return start, params, jnp.append(state[2], last[::-1])
start, result, losses = train(jax.random.key(0))
"""
)
"""A scan in a loop and another one after it; parameters are made in the same call, in which the losses are kept."""

MAPPED_SCAN = (
    FUNCTIONS
    + _MESH
    + """
@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P(None, "data")), out_specs=(P(), P(), P()), check_vma=False)
def epoch(params, opt_state, batches):
    def step(carry, batch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch["image"], batch["label"])
        grads = jax.lax.pmean(grads, "data")
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss, "data")
    carry, losses = jax.lax.scan(step, (params, opt_state), batches)
    return *carry, losses
stacked = jax.tree.map(lambda *parts: np.stack(parts), *batches)
result, opt_state, losses = epoch(params, tx.init(params), stacked)
"""
)
"""An epoch in one call, on two devices."""

AHEAD_OF_TIME = (
    FUNCTIONS
    + """
tx = optax.adamw(0.01)
opt_state = tx.init(params)
@jax.jit
def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch["image"], batch["label"])
    updates, opt_state = tx.update(spoil(grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state
compiled = step.lower(params, opt_state, batches[0]).compile()
compiled.cost_analysis()
for batch in batches:
    params, opt_state = compiled(params, opt_state, batch)
result = params
"""
)

LOOKAHEAD = (
    FUNCTIONS
    + """
tx = optax.lookahead(optax.adamw(0.01), sync_period=2, slow_step_size=0.5)
pair = optax.LookaheadParams.init_synced(params)
opt_state = tx.init(pair)
@jax.jit
def step(pair, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(pair.fast, batch["image"], batch["label"])
    updates, opt_state = tx.update(spoil(grads), opt_state, pair)
    return optax.apply_updates(pair, updates), opt_state
for batch in batches:
    pair, opt_state = step(pair, opt_state, batch)
result = pair.fast
"""
)

LINE_SEARCHED = (
    FUNCTIONS
    + """
tx = optax.lbfgs()
opt_state = tx.init(params)
batch = batches[0]
@jax.jit
def step(params, opt_state):
    value_fn = lambda params: loss_fn(params, batch["image"], batch["label"])
    loss, grads = optax.value_and_grad_from_state(value_fn)(params, state=opt_state)
    updates, opt_state = tx.update(grads, opt_state, params, value=loss, grad=grads, value_fn=value_fn)
    return optax.apply_updates(params, updates), opt_state, loss
losses = []
for _ in range(3):
    params, opt_state, loss = step(params, opt_state)
    losses.append(float(loss))
result = params
"""
)
"""Losses and gradients come from the state of a line search where it has them."""

EVALUATED = (
    FUNCTIONS
    + """
tx = optax.sgd(0.1)
opt_state = tx.init(params)
gradients = jax.jit(jax.value_and_grad(loss_fn))
@jax.jit
def update(params, opt_state, grads):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
losses = []
for batch in batches:
    loss, grads = gradients(params, batch["image"], batch["label"])
    losses.append(float(loss))
    params, opt_state = update(params, opt_state, grads)
    gradients(params, batches[0]["image"], batches[0]["label"])
result = params
"""
)
"""The function that takes gradients also evaluates the model after each step."""

ADDED_BY_HAND = (
    FUNCTIONS
    + """
tx = optax.sgd(0.1)
opt_state = tx.init(params)
for batch in batches:
    grads = spoil(jax.grad(loss_fn)(params, batch["image"], batch["label"]))
    updates, opt_state = tx.update(grads, opt_state)
    params = jax.tree.map(lambda p, u: p + u, params, updates)
result = params
"""
)
"""Updates are added by the script, outside of jit."""

ADDED_IN_JIT = NESTED.replace("optax.apply_updates(params, updates)", "jax.tree.map(jnp.add, params, updates)")
ADDED_ONE_BY_ONE = EQUINOX.replace(
    "eqx.apply_updates(model, updates)",
    "jax.tree.map(lambda p, u: p if u is None else eqx.apply_updates(p, u), model, updates, is_leaf=lambda x: x is None)",
)
"""As haliax adds updates."""
ADDED_IN_A_SCAN = IN_A_SCAN.replace("optax.apply_updates(params, updates)", "jax.tree.map(jnp.add, params, updates)")

RECORDED = {
    "added_by_hand": ADDED_BY_HAND,
    "added_in_jit": ADDED_IN_JIT,
    "added_one_by_one": ADDED_ONE_BY_ONE,
    "in_a_scan": IN_A_SCAN,
    "in_a_scan_outside_of_jit": OUTSIDE_OF_JIT,
    "ahead_of_time": AHEAD_OF_TIME,
    "lookahead": LOOKAHEAD,
    "linen": LINEN,
    "nnx": NNX,
    "nnx_outside_of_jit": NNX_OUTSIDE_OF_JIT,
    "nested": NESTED,
    "equinox": EQUINOX,
    "two_calls": TWO_CALLS,
    "eager": EAGER,
    "accumulated": ACCUMULATED,
    "scanned": SCANNED,
    "cut_inside": CUT_INSIDE,
    "sharded": SHARDED,
    "mapped": MAPPED,
    "in_pmap": IN_PMAP,
    "per_sample": PER_SAMPLE,
    "meta_learned": META_LEARNED,
}
"""Scripts that are recorded, by name."""

_NOT_USED = (
    FUNCTIONS
    + """
tx = optax.sgd(0.1)
opt_state = tx.init(params)
gradients = jax.jit(jax.value_and_grad(loss_fn))
for batch in batches * 5:
    loss, grads = gradients(params, batch["image"], batch["label"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
"""
)
_TWO_MODELS = (
    FUNCTIONS
    + """
tx = optax.sgd(0.1)
@jax.jit
def step(params, x, y):
    updates, _ = tx.update(jax.grad(loss_fn)(params, x, y), tx.init(params))
    return optax.apply_updates(params, updates)
for batch in batches:
    params = step(params, batch["image"], batch["label"])
other = {"w": jnp.ones((6, 3)), "b": jnp.zeros(3)}
grads = jax.grad(lambda p: cross_entropy(dense(p, batch["image"]), batch["label"]))(other)
tx.update(grads, tx.init(other))
"""
)
_OTHER_AXES = (
    FUNCTIONS
    + """
tx = optax.sgd(0.1)
@partial(jax.pmap, in_axes=(None, {"image": 1, "label": 0}))
def step(params, batch):
    grads = jax.grad(loss_fn)(params, batch["image"], batch["label"])
    return optax.apply_updates(params, tx.update(grads, tx.init(params))[0])
params = step(params, {"image": batches[0]["image"][:, None], "label": batches[0]["label"][None]})
raise AssertionError("refused too late")
"""
)
_ENSEMBLE = (
    FUNCTIONS
    + """
tx = optax.sgd(0.1)
@jax.jit
@partial(jax.vmap, in_axes=(-1, None), out_axes=-1)
def step(params, batch):
    grads = jax.grad(loss_fn)(params, batch["image"], batch["label"])
    return optax.apply_updates(params, tx.update(grads, tx.init(params))[0])
params = step(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf], -1), params), batches[0])
raise AssertionError("refused too late")
"""
)
_ENSEMBLE_IN_A_SCAN = (
    FUNCTIONS
    + """
tx = optax.adam(0.1)
images, labels = (jnp.stack([batch[name] for batch in batches]) for name in ("image", "label"))
@jax.jit
@jax.vmap
def train(params, opt_state):
    def step(carry, batch):
        params, opt_state = carry
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, *batch), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None
    return jax.lax.scan(step, (params, opt_state), (images, labels))[0]
members = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
train(members, jax.vmap(tx.init)(members))
raise AssertionError("refused too late")
"""
)
_UPDATED_TWICE = (
    FUNCTIONS
    + """
tx = optax.sgd(0.1)
grads = jax.grad(loss_fn)(params, batches[0]["image"], batches[0]["label"])
for _ in range(2):
    updates, _ = tx.update(grads, tx.init(params))
"""
)
_STATIC_AHEAD_OF_TIME = (
    AHEAD_OF_TIME.replace("@jax.jit", "@partial(jax.jit, static_argnums=3)")
    .replace("batch):", "batch, rate=1):")
    .replace("batches[0])", "batches[0], 1)")
)
_NOTHING = FUNCTIONS + "loss_fn(params, batches[0]['image'], batches[0]['label'])\n"

REFUSED = {
    "not_used": (_NOT_USED, "no optimizer of optax updated them"),
    "two_models": (_TWO_MODELS, "more than one model"),
    "other_axes": (_OTHER_AXES, "jax.pmap of several processes, inside jax.jit, or with axes other than 0"),
    "ensemble_in_a_scan": (_ENSEMBLE_IN_A_SCAN, "whose values cannot leave it"),
    "ensemble": (_ENSEMBLE, "or of parameters by other dims than the first"),
    "updated_twice": (_UPDATED_TWICE, "made updates twice"),
    "ahead_of_time": (_STATIC_AHEAD_OF_TIME, "was compiled ahead of time"),
    "nothing": (_NOTHING, "nothing was trained"),
}
"""Scripts that cannot be recorded, each with an excerpt of its error message."""
