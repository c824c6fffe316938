"""A training step in JAX: ours beside FSDP as JAX users write it, and beside a replicated model; time, compilation, memory."""

import dataclasses
import functools
import multiprocessing
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossframe.processes import end_with_parent, starting
from experiments.bench.figure import TIMES, Figure, Section, median_figure
from experiments.bench.timing import Times, alternate, ratios
from experiments.models import define_gpt
from experiments.models.gpt import GPTConfig

BY_HAND, REPLICATED = "NamedSharding", "replicated"
OURS = ("our shard_map", "our jit")
OURS_SCANNED = ("our shard_map, scan", "our jit, scan")
SCANNED_BY_HAND = "NamedSharding, scan"
CONTESTANTS = (REPLICATED, BY_HAND, SCANNED_BY_HAND, *OURS, *OURS_SCANNED)
COUNTERPARTS = dict.fromkeys(OURS, BY_HAND) | dict.fromkeys(OURS_SCANNED, SCANNED_BY_HAND)
"""The hand-written program in the same form as each of ours."""
COMPILING = (
    "Seconds of the processor for tracing, lowering and compiling, each time in a new process, after the same of one block; the "
    "time in which other processes have it does not count."
)
SYNC, ASYNC = "save", "save with an AsyncSaver"
STEP_LIMIT, COMPILE_LIMIT, MEMORY_LIMIT = 1.0, 1.0, 1.0
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class JaxSizes:
    """Sizes of a run of `python -m experiments bench jax`.

    Attributes:
        gpt: of the model.
        batch: samples a rank.
        rounds: how often every contestant is timed.
        compile_rounds: how often every contestant is compiled, each time in a process of its own.
        worlds: numbers of devices.
        depth_gpt: of the model whose number of blocks grows.
        depths: its numbers of blocks.
        compile_limit: seconds after which the compilation of a program is given up.
    """

    gpt: GPTConfig
    batch: int
    rounds: int
    compile_rounds: int
    worlds: tuple[int, ...]
    depth_gpt: GPTConfig
    depths: tuple[int, ...]
    compile_limit: float = 600


@dataclass(frozen=True)
class Compiled:
    """A compiled step.

    Attributes:
        num_bytes: that a device holds while it runs, as XLA counts them.
        temporary_bytes: those of temporaries.
    """

    num_bytes: int
    temporary_bytes: int


# 20 million parameters, as in the benchmark of the torch backend.
FULL = JaxSizes(
    gpt=GPTConfig(vocabulary=1024, context=128, width=512, num_heads=8, num_blocks=6),
    batch=2,
    rounds=9,
    compile_rounds=3,
    worlds=(2, 4),
    depth_gpt=GPTConfig(vocabulary=256, context=32, width=64, num_heads=4),
    depths=(6, 24),  # NamedSharding of 48 blocks takes 233 s to compile on a quiet machine, of 6 blocks 4 s
)
QUICK = JaxSizes(
    gpt=GPTConfig(vocabulary=16, context=8, width=16, num_heads=2, num_blocks=2),
    batch=1,
    rounds=2,
    compile_rounds=2,
    worlds=(2,),
    depth_gpt=GPTConfig(vocabulary=16, context=8, width=16, num_heads=2),
    depths=(1, 2),
)


def jax_sections(sizes: JaxSizes) -> Iterator[Section | str]:
    """Measure each world in a process of its own, since JAX makes its devices once, then depth; lines say how far it is."""
    how = (
        f"GPT of {define_gpt('measured', sizes.gpt).numel / 1e6:.1f} million parameters in float32, {sizes.batch} samples of "
        f"{sizes.gpt.context} tokens a device, AdamW of optax, donated. {BY_HAND}: parameters cut on their first dim by "
        "NamedSharding where the devices divide it, jit, as JAX's documents show; ours: a unit a block, per_param, resharded "
        "after forward."
    )
    for world in sizes.worlds:
        yield from _world_sections(world, sizes, how)
    yield from _depth_section(sizes)
    yield _save_section(sizes)


def _world_sections(world: int, sizes: JaxSizes, how: str) -> Iterator[Section | str]:
    found: dict[str, Compiled] = {}
    on, missing = f", {world} devices", ""
    with _Process() as process:
        for name in CONTESTANTS:
            compiled = process.run(_compile_for_steps, name, world, sizes, limit=sizes.compile_limit)
            if compiled is None:
                missing = (
                    f"{name} was not compiled within {sizes.compile_limit:g} s; it and what follows it are left out."
                )
                yield missing
                break
            found[name] = compiled
            yield f"{world} devices: {name}: {compiled.num_bytes / 1e6:.0f} MB"
        yield Section(
            f"Memory of the compiled step{on}",
            f"{how} What XLA says that a device holds: arguments, results and temporaries, without those that share memory. "
            "Ours without a loop on CPU devices with late_gathers=True, since XLA's CPU compiler would gather all units at once; "
            f"timed without. {missing}".strip(),
            _memory_figures(found),
        )
        if missing:
            yield Section(f"Time of a step{on}", how, skipped=missing)
        else:
            times = process.run(_measure_steps, sizes.rounds)
            yield Section(f"Time of a step{on}", f"{how} {sizes.rounds} rounds.", _step_figures(times))
    yield Section(
        f"Time to compile{on}",
        f"{how} {COMPILING} {sizes.compile_rounds} rounds. {missing}".strip(),
        _compile_figures(_compile_times(found, world, sizes)),
    )


def _compile_times(names: Iterable[str], world: int, sizes: JaxSizes) -> Times:
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(sizes.compile_rounds):
        for name in random.Random(turn).sample(list(times), len(times)):
            with _Process() as process:
                times[name].append(process.run(_seconds_to_compile, name, world, sizes.gpt, sizes.batch))
    return times


def _step_figures(times: Times) -> tuple[Figure, ...]:
    figures = [
        median_figure(f"{name} to {peer}", ratios(times, name, peer), TIMES, STEP_LIMIT)
        for name, peer in COUNTERPARTS.items()
    ]
    figures += [median_figure(f"{name} to {REPLICATED}", ratios(times, name, REPLICATED), TIMES) for name in OURS]
    figures += [median_figure(name, [1e3 * second for second in seconds], "ms") for name, seconds in times.items()]
    return tuple(figures)


def _compile_figures(times: Times) -> tuple[Figure, ...]:
    figures = [
        median_figure(f"{name} to {peer}", ratios(times, name, peer), TIMES, COMPILE_LIMIT)
        for name, peer in COUNTERPARTS.items()
        if name in times
    ]
    return (*figures, *(median_figure(name, seconds, "s") for name, seconds in times.items()))


def _memory_figures(found: Mapping[str, Compiled]) -> tuple[Figure, ...]:
    figures = []
    for name in COUNTERPARTS:
        if name in found:
            peer = min((BY_HAND, SCANNED_BY_HAND), key=lambda each: found[each].num_bytes)
            ratio = found[name].num_bytes / found[peer].num_bytes
            figures.append(Figure(f"{name} to {peer}", ratio, TIMES, MEMORY_LIMIT))
    for name, each in found.items():
        figures.append(Figure(name, each.num_bytes / 1e6, "MB"))
        figures.append(Figure(f"{name}, temporaries", each.temporary_bytes / 1e6, "MB"))
    return tuple(figures)


def _depth_section(sizes: JaxSizes) -> Iterator[Section | str]:
    figures, slow = [], []
    for name in (*OURS_SCANNED, BY_HAND):
        for depth in sizes.depths:
            config = dataclasses.replace(sizes.depth_gpt, num_blocks=depth)
            with _Process() as process:
                seconds = process.run(_seconds_to_compile, name, 2, config, 1, limit=sizes.compile_limit)
            if seconds is None:
                slow.append(f"{name} of {depth} blocks was not compiled within {sizes.compile_limit:g} s.")
                yield slow[-1]
            else:
                figures.append(Figure(f"to compile {depth} blocks: {name}", seconds, "s"))
                yield f"{depth} blocks: {name}: compiled in {seconds:.1f} s"
    how = " ".join([f"The same on 2 devices, width {sizes.depth_gpt.width}, once each. {COMPILING}", *slow])
    yield Section("Depth", how, tuple(figures))


def _save_section(sizes: JaxSizes) -> Section:
    with _Process() as process:
        times = process.run(_measure_saves, sizes)
    figures = [
        median_figure(f"{ASYNC} to {SYNC}", ratios(times, ASYNC, SYNC), TIMES),
        *(median_figure(name, [1e3 * second for second in times[name]], "ms") for name in (SYNC, ASYNC)),
    ]
    how = (
        f"`save_checkpoint` of the parameters and AdamW's state of {OURS[0]} on {sizes.worlds[0]} devices, to the folder of "
        f"temporary files: how long the call takes. {ASYNC} returns once the values are copied. {sizes.rounds} rounds."
    )
    return Section("Time that training waits for a checkpoint", how, tuple(figures))


class _Process:
    """A process that does one thing after another, and ends with the `with` statement."""

    def __enter__(self) -> "_Process":
        with starting():
            self._pool = multiprocessing.get_context("spawn").Pool(1, initializer=end_with_parent)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.terminate()

    def run(self, work: Callable[..., Any], *args: Any, limit: float | None = None) -> Any:
        """What `work` returns; None if it takes longer than `limit` seconds."""
        try:
            return self._pool.apply_async(work, args).get(limit)
        except multiprocessing.TimeoutError:
            return None


# In a process of its own

_STEPS: dict[str, Callable[[], object]] = {}
"""The compiled steps of this process."""


@functools.cache
def devices_of(number: int) -> Any:
    """GPUs if there are as many, else devices on the CPU. Called before JAX is first used."""
    import jax

    jax.config.update("jax_num_cpu_devices", number)
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if len(gpus) < number:
        jax.config.update("jax_platforms", "cpu")
    return (gpus if len(gpus) >= number else jax.devices("cpu"))[:number]


def _compile_for_steps(name: str, world: int, sizes: JaxSizes) -> Compiled:
    devices = devices_of(world)
    contestant = _contestant(name, sizes.gpt, sizes.batch, devices)
    program = _compiled(contestant)
    _STEPS[name], measured = _stepping(program, contestant), program
    if name in OURS and devices[0].platform == "cpu":  # a loop gathers layer by layer without it
        measured = _compiled(_contestant(name, sizes.gpt, sizes.batch, devices, late_gathers=True))
    memory = measured.memory_analysis()
    num_bytes = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return Compiled(num_bytes, memory.temp_size_in_bytes)


def _measure_steps(rounds: int) -> Times:
    return alternate(_STEPS, rounds)["wall"]


def _seconds_to_compile(name: str, world: int, config: GPTConfig, batch: int) -> float:
    # One block first, so that what JAX does once in a process is not counted.
    for num_blocks in (1, config.num_blocks):
        contestant = _contestant(name, dataclasses.replace(config, num_blocks=num_blocks), batch, devices_of(world))
        start = time.process_time()
        _compiled(contestant)
        seconds = time.process_time() - start
    return seconds


def _measure_saves(sizes: JaxSizes) -> Times:
    from crossframe.checkpoint import AsyncSaver
    from jax_backend import save_checkpoint

    made = _contestant(OURS[0], sizes.gpt, sizes.batch, devices_of(sizes.worlds[0]))
    with tempfile.TemporaryDirectory() as folder, AsyncSaver() as saver:
        path = Path(folder) / "checkpoint"

        def ready() -> None:
            saver.wait()
            shutil.rmtree(path, ignore_errors=True)

        saves = {
            SYNC: lambda: save_checkpoint(path, made.params, made.state),
            ASYNC: lambda: save_checkpoint(path, made.params, made.state, saver=saver),
        }
        return alternate(saves, sizes.rounds, ready, warm_up=1)["wall"]


@dataclass
class _Contestant:
    """A step of training, (parameters, optimizer's state, batch) to the first two and the loss, and what it begins with."""

    step: Any
    params: Any
    state: Any
    batch: Any


def _compiled(contestant: _Contestant) -> Any:
    return contestant.step.lower(contestant.params, contestant.state, contestant.batch).compile()


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
