"""A training step in JAX: ours beside FSDP as JAX users write it, and beside a replicated model; time, compilation, memory."""

import functools
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossframe.processes import end_with_parent, starting
from experiments.bench.figure import TIMES, Figure, Section, median_figure
from experiments.bench.timing import alternate, ratios
from experiments.models.gpt import GPTConfig

BY_HAND, REPLICATED = "NamedSharding", "replicated"
OURS = ("our shard_map", "our jit")
OURS_SCANNED = ("our shard_map, scan", "our jit, scan")
SCANNED_BY_HAND = "NamedSharding, scan"
STEP_LIMIT, COMPILE_LIMIT, MEMORY_LIMIT = 1.0, 1.0, 1.0
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class JaxSizes:
    """Sizes of a run of `python -m experiments bench jax`.

    Attributes:
        gpt: of the model.
        batch: samples a rank.
        rounds: how often every contestant is timed.
        worlds: numbers of devices.
        depth_gpt: of the model whose number of blocks grows.
        depths: its numbers of blocks.
    """

    gpt: GPTConfig
    batch: int
    rounds: int
    worlds: tuple[int, ...]
    depth_gpt: GPTConfig
    depths: tuple[int, ...]


# 20 million parameters, as in the benchmark of the torch backend.
FULL = JaxSizes(
    gpt=GPTConfig(vocabulary=1024, context=128, width=512, num_heads=8, num_blocks=6),
    batch=2,
    rounds=9,
    worlds=(2, 4),
    depth_gpt=GPTConfig(vocabulary=256, context=32, width=64, num_heads=4),
    depths=(6, 48),
)
QUICK = JaxSizes(
    gpt=GPTConfig(vocabulary=16, context=8, width=16, num_heads=2, num_blocks=2),
    batch=1,
    rounds=2,
    worlds=(2,),
    depth_gpt=GPTConfig(vocabulary=16, context=8, width=16, num_heads=2),
    depths=(1, 2),
)


def jax_sections(sizes: JaxSizes) -> list[Section]:
    """Measure each world in a process of its own, since JAX makes its devices once; then depth."""
    worlds = [_in_process(_measure_world, world, sizes) for world in sizes.worlds]
    growth = _in_process(_measure_depth, sizes)
    words = growth["words"]
    how = (
        f"GPT of {words['numel'] / 1e6:.1f} million parameters in float32, {sizes.batch} samples of {sizes.gpt.context} tokens a "
        f"device, AdamW of optax, donated; {words['devices']}. {BY_HAND}: parameters cut on their first dim by NamedSharding "
        "where the devices divide it, jit, as JAX's documents show; ours: a unit a block, per_param, resharded after forward."
    )
    return [
        Section("Time of a step", f"{how} {sizes.rounds} rounds.", _step_figures(sizes, worlds)),
        Section(
            "Time to compile", f"{how} Tracing, lowering and compiling, once each.", _compile_figures(sizes, worlds)
        ),
        Section(
            "Memory of the compiled step",
            f"{how} What XLA says that a device holds: arguments, results and temporaries, without those that share memory. "
            "Ours without a loop on CPU devices with late_gathers=True, since XLA's CPU compiler would gather all units at once; "
            "timed without.",
            _memory_figures(sizes, worlds),
        ),
        Section("Depth", f"The same on 2 devices, width {sizes.depth_gpt.width}.", _depth_figures(sizes, growth)),
    ]


def _step_figures(sizes: JaxSizes, worlds: Sequence[Mapping[str, Any]]) -> tuple[Figure, ...]:
    figures = []
    for world, measured in zip(sizes.worlds, worlds, strict=True):
        times = measured["wall"]
        for name in (*OURS, *OURS_SCANNED):
            peer = _counterpart(name)
            figures.append(
                median_figure(f"{world} devices: {name} to {peer}", ratios(times, name, peer), TIMES, STEP_LIMIT)
            )
        figures += [
            median_figure(f"{world} devices: {name} to {REPLICATED}", ratios(times, name, REPLICATED), TIMES)
            for name in OURS
        ]
        figures += [
            median_figure(f"{world} devices: {name}", [1e3 * second for second in seconds], "ms")
            for name, seconds in times.items()
        ]
    return tuple(figures)


def _counterpart(name: str) -> str:
    """The hand-written program in the same form."""
    return SCANNED_BY_HAND if name in OURS_SCANNED else BY_HAND


def _compile_figures(sizes: JaxSizes, worlds: Sequence[Mapping[str, Any]]) -> tuple[Figure, ...]:
    figures = []
    for world, measured in zip(sizes.worlds, worlds, strict=True):
        seconds = measured["compile"]
        for name in (*OURS, *OURS_SCANNED):
            peer = _counterpart(name)
            ratio = seconds[name] / seconds[peer]
            figures.append(Figure(f"{world} devices: {name} to {peer}", ratio, TIMES, COMPILE_LIMIT))
        figures += [Figure(f"{world} devices: {name}", taken, "s") for name, taken in seconds.items()]
    return tuple(figures)


def _memory_figures(sizes: JaxSizes, worlds: Sequence[Mapping[str, Any]]) -> tuple[Figure, ...]:
    figures = []
    for world, measured in zip(sizes.worlds, worlds, strict=True):
        held = measured["bytes"]
        peer = min((BY_HAND, SCANNED_BY_HAND), key=held.__getitem__)
        for name in (*OURS, *OURS_SCANNED):
            figures.append(Figure(f"{world} devices: {name} to {peer}", held[name] / held[peer], TIMES, MEMORY_LIMIT))
        for name in held:
            figures.append(Figure(f"{world} devices: {name}", held[name] / 1e6, "MB"))
            figures.append(Figure(f"{world} devices: {name}, temporaries", measured["temporaries"][name] / 1e6, "MB"))
    return tuple(figures)


def _depth_figures(sizes: JaxSizes, growth: Mapping[str, Any]) -> tuple[Figure, ...]:
    return tuple(
        Figure(f"to compile {depth} blocks: {name}", growth["compile"][name][str(depth)], "s")
        for name in growth["compile"]
        for depth in sizes.depths
    )


def _in_process(work: Callable[..., Any], *args: Any) -> Any:
    with starting():
        pool = multiprocessing.get_context("spawn").Pool(1, initializer=end_with_parent)
    with pool:
        return pool.apply(work, args)


# In a process of its own


def devices_of(number: int) -> Any:
    """GPUs if there are as many, else devices on the CPU. Called before JAX is first used."""
    import jax

    jax.config.update("jax_num_cpu_devices", number)
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if len(gpus) < number:
        jax.config.update("jax_platforms", "cpu")
    return (gpus if len(gpus) >= number else jax.devices("cpu"))[:number]


def _measure_world(world: int, sizes: JaxSizes) -> dict[str, Any]:
    devices = devices_of(world)
    steps, seconds, held, temporaries = {}, {}, {}, {}
    for name in (REPLICATED, BY_HAND, SCANNED_BY_HAND, *OURS, *OURS_SCANNED):
        contestant = _contestant(name, sizes.gpt, sizes.batch, devices)
        compiled, seconds[name] = _compiled(contestant)
        measured = compiled
        if name in OURS and devices[0].platform == "cpu":  # a loop gathers layer by layer without it
            measured, _ = _compiled(_contestant(name, sizes.gpt, sizes.batch, devices, late_gathers=True))
        memory = measured.memory_analysis()
        temporaries[name] = memory.temp_size_in_bytes
        held[name] = (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )
        steps[name] = _stepping(compiled, contestant)
    wall = alternate(steps, sizes.rounds)["wall"]
    return {"wall": wall, "compile": seconds, "bytes": held, "temporaries": temporaries}


def _measure_depth(sizes: JaxSizes) -> dict[str, Any]:
    import dataclasses

    from experiments.models import define_gpt

    devices = devices_of(2)
    seconds: dict[str, dict[str, float]] = {}
    for name in (*OURS_SCANNED, BY_HAND):
        for depth in sizes.depths:
            config = dataclasses.replace(sizes.depth_gpt, num_blocks=depth)
            seconds.setdefault(name, {})[str(depth)] = _compiled(_contestant(name, config, 1, devices))[1]
    numel = define_gpt("measured", sizes.gpt).numel
    kind = "GPUs" if devices[0].platform == "gpu" else "devices on the CPU"
    return {"compile": seconds, "words": {"numel": numel, "devices": kind}}


@dataclass
class _Contestant:
    """A step of training, (parameters, optimizer's state, batch) to the first two and the loss, and what it begins with."""

    step: Any
    params: Any
    state: Any
    batch: Any


def _compiled(contestant: _Contestant) -> tuple[Any, float]:
    start = time.perf_counter()
    lowered = contestant.step.lower(contestant.params, contestant.state, contestant.batch)
    return lowered.compile(), time.perf_counter() - start


def _stepping(compiled: Any, contestant: _Contestant) -> Callable[[], object]:
    import jax

    def step() -> None:
        contestant.params, contestant.state, loss = compiled(contestant.params, contestant.state, contestant.batch)
        jax.block_until_ready((contestant.params, loss))

    return step


def _contestant(name: str, config: GPTConfig, batch: int, devices: Any, *, late_gathers: bool = False) -> _Contestant:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_backend
    from crossframe.mesh import MeshSpec
    from experiments.models import define_gpt
    from experiments.models.load_flax import nnx_params
    from jax_backend.nnx import split

    definition, scanned = define_gpt("measured", config), name in (*OURS_SCANNED, SCANNED_BY_HAND)
    graphdef, params, state = split(definition.make_flax("float32"))
    params = nnx_params(definition, params, definition.initial_params(0, "float32"))
    mesh = jax_backend.make_mesh(MeshSpec(shard=len(devices)), devices)
    tokens = np.random.default_rng(0).integers(config.vocabulary, size=(batch * len(devices), config.context + 1))
    data = jax.device_put(jnp.asarray(tokens, jnp.int32), NamedSharding(mesh, P("shard")))
    loss = functools.partial(_scanned_loss if scanned else _loss, graphdef, state, config)
    if scanned:
        params = {**params, "blocks": _stacked(params["blocks"])}
    optimizer: Any = optax.adamw(LEARNING_RATE)
    if name in (*OURS, *OURS_SCANNED):
        names: Any = (
            {"stacked": ("blocks",)} if scanned else {"units": definition.units, "param_map": definition.param_map}
        )
        given: Any = jax_backend.shard(params, mesh, **names)
        mode = "jit" if "jit" in name else "shard_map"
        step = jax_backend.value_and_grad(loss, mesh, mode=mode, late_gathers=late_gathers)

        def value_and_grad(params: Any, batch: Any) -> Any:
            result = step(params, batch)
            return result.loss, result.grads
    else:
        given = jax.tree.map(lambda leaf: jax.device_put(leaf, _cut(leaf, mesh, cut=name != REPLICATED)), params)
        value_and_grad = jax.value_and_grad(loss)

    def train(params: Any, state: Any, batch: Any) -> Any:
        value, grads = value_and_grad(params, batch)
        updates, state = optimizer.update(grads, state, params)
        stepped: Any = optax.apply_updates(params, updates)
        return stepped, state, value

    started = jax.jit(optimizer.init, out_shardings=None)(given)
    started = jax.tree.map(_like_params(given, mesh), started)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (given, started))
    jitted = jax.jit(train, donate_argnums=(0, 1), out_shardings=(*shardings, None))
    return _Contestant(jitted, given, started, data)


def _like_params(params: Any, mesh: Any) -> Callable[[Any], Any]:
    """Moments lie as the parameters of their shape do; a count is everywhere."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    by_shape = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(params)}
    return lambda leaf: jax.device_put(leaf, by_shape.get(leaf.shape, NamedSharding(mesh, P())))


def _cut(leaf: Any, mesh: Any, *, cut: bool) -> Any:
    """On the first dim that the devices divide; of stacked leaves not on that of layers, which a scan goes along."""
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    if not cut:
        return NamedSharding(mesh, P())
    for dim, size in enumerate(leaf.shape):
        if size % mesh.size == 0:
            return NamedSharding(mesh, P(*(None,) * dim, "shard"))
    return NamedSharding(mesh, P())


def _stacked(blocks: Mapping[Any, Any]) -> Any:
    import jax
    import numpy as np

    layers = [blocks[key] for key in sorted(blocks, key=int)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers)


def _loss(graphdef: Any, state: Any, config: GPTConfig, params: Any, tokens: Any) -> Any:
    import optax

    from jax_backend.nnx import with_params

    model: Any = with_params(graphdef, params, state)
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def _scanned_loss(graphdef: Any, state: Any, config: GPTConfig, params: Any, tokens: Any) -> Any:
    import dataclasses

    import jax.numpy as jnp
    import optax
    from flax import nnx

    from experiments.models.gpt_flax import GPT, Block
    from jax_backend import scan
    from jax_backend.nnx import split, with_params

    del graphdef, state
    outside, _, rest = split(nnx.eval_shape(lambda: GPT(dataclasses.replace(config, num_blocks=0), "float32")))
    inside, _, block_rest = split(nnx.eval_shape(lambda: Block(config, nnx.Rngs(0))))
    around: Any = with_params(outside, {name: value for name, value in params.items() if name != "blocks"}, rest)
    inputs = tokens[:, :-1]
    x = around.token_embedding(inputs) + around.position_embedding(jnp.arange(inputs.shape[1]))

    def layer(x: Any, block: Any, _: Any) -> tuple[Any, None]:
        module: Any = with_params(inside, block, block_rest)
        return module(x), None

    x, _ = scan(layer, x, params["blocks"])
    logits = around.head(around.norm(x))
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
