"""The step of a Llama 3 for many devices, compiled without values: its collectives next to the plan's, memory and compile time.

Everything is read from XLA's program. `jax_backend` (both modes) compiles next to FSDP as JAX's documents show it, by
NamedSharding. The model loops over stacked blocks, each of which runs again in backward; AdamW is part of the step. Besides fully
sharded and hybrid meshes there is one of FSDP next to tensor parallelism, whose parameters all contestants divide alike.
"""

import json
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.cli.parallel import ParallelOptions
from crossframe.cli.plan import PlanOptions
from crossframe.errors import UsageError
from crossframe.parallel.styles import KNOWN_STYLES, Style
from crossframe.params import ParamSpec
from crossframe.processes import end_with_parent, starting
from crossframe.shapes import ModelShapes
from crossframe.shapes.published import LLAMA_3_8B, LLAMA_3_70B, LlamaConfig
from crossframe.trace import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Event
from experiments.bench.command import command_line, jax_machine, torch_machine_line

MODELS = {"llama-3-8b": LLAMA_3_8B, "llama-3-70b": LLAMA_3_70B}
SHARD_MAP, JIT, BY_HAND = "our shard_map", "our jit", "NamedSharding"
CONTESTANTS = (SHARD_MAP, BY_HAND, JIT)
KINDS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL)
# XLA's CPU compiler widens collectives of bfloat16 to float32, so all is float32.
DTYPE = "float32"
CONTEXT = 2048
MACHINE_CODE = "--xla_backend_optimization_level=0"


@dataclass(frozen=True)
class Case:
    """A program to compile.

    Attributes:
        config: of the model.
        replicate, shard: the ranks.
        tp: the devices of a rank, over which tensor parallelism divides the model.
        contestant: one of CONTESTANTS.
        context: tokens of a rank's batch, one sample.
        late_gathers: see `jax_backend.value_and_grad`.
    """

    model: str
    config: LlamaConfig
    replicate: int
    shard: int
    contestant: str
    context: int = CONTEXT
    late_gathers: bool = False
    tp: int = 1

    @property
    def num_devices(self) -> int:
        """The number of devices of the mesh."""
        return self.replicate * self.shard * self.tp


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in a step of a device.

    Attributes:
        count, num_bytes: of the step; bytes are of the unsharded side.
        per_layer: how many of them each layer has, forward and backward.
    """

    count: int
    num_bytes: int
    per_layer: float


@dataclass(frozen=True)
class Compiled:
    """What was compiled.

    Attributes:
        traffic: between ranks, by kind.
        model_traffic: between the devices of a rank, by kind.
        argument_bytes, temporary_bytes: as XLA counts them for a device.
        peak_bytes: arguments, results and temporaries, without those that share memory.
        lower_seconds, compile_seconds: to trace and lower, and to compile.
    """

    traffic: dict[str, Traffic]
    model_traffic: dict[str, Traffic]
    argument_bytes: int
    temporary_bytes: int
    peak_bytes: int
    lower_seconds: float
    compile_seconds: float


def planned(case: Case) -> tuple[dict[str, Traffic], dict[str, Traffic]]:
    """The plan's collectives between ranks and between the devices of a rank, as `crossframe plan` lists them, from the published
    shapes alone."""
    hybrid = case.replicate > 1
    params = tuple(ParamSpec(name, shape) for name, shape in case.config.shapes.items())
    shapes = ModelShapes(case.model, params, case.config.units)
    options = PlanOptions(
        case.num_devices,
        strategy="hybrid_shard" if hybrid else "full_shard",
        shard=case.shard if hybrid else None,
        kind="per_param",
        tokens=case.context,
        parallel=ParallelOptions(tp=case.tp),
    )
    model = options.model(shapes)
    events = [span.event for span in options.cost(model, 0).spans]
    layers = case.config.num_blocks
    inner = Counter(event.kind for event in events if event.unit == case.config.units[0])
    found = _traffic(events, inner)
    assert all(sum(event.unit in case.config.units for event in events if event.kind == kind) == inner[kind] * layers
               for kind in found)  # fmt: skip
    inside: dict[str, Traffic] = {}
    for each in options.traffic(model) or ():
        own = inside.get(each.kind, Traffic(0, 0, 0))
        in_a_layer = any(each.module.startswith(unit) for unit in case.config.units)
        inside[each.kind] = Traffic(
            own.count + each.count,
            own.num_bytes + each.count * each.num_bytes,
            own.per_layer + in_a_layer * each.count / layers,
        )
    return found, inside


def compile_case(case: Case, devices: Sequence[Any]) -> Compiled:
    """Lower and compile a case for these devices."""
    import jax

    from jax_backend.programs._compiled_trace import events_of

    step, args = _step(case, devices)
    began = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
    middle = time.perf_counter()
    compiled = lowered.compile()
    stop = time.perf_counter()
    program, memory = compiled.as_text(), compiled.memory_analysis()
    assert program is not None and memory is not None
    # With loops counted once, what is inside of one counts `num_blocks - 1` times less.
    in_loops, once = (
        _by_place(events_of(text), case.tp)
        for text in (program, re.sub(r'"known_trip_count":\{"n":"\d+"\}', "", program))
    )
    between, inside = (
        _traffic(events, _per_layer(events, others, case.config.num_blocks))
        for events, others in zip(in_loops, once, strict=True)
    )
    return Compiled(
        between,
        inside,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes,
        middle - began,
        stop - middle,
    )


def _by_place(events: Iterable[Event], tp: int) -> tuple[list[Event], list[Event]]:
    """The events of device 0 that reach other ranks, and those among the devices of its rank, the first ones of the mesh."""
    between: list[Event] = []
    inside: list[Event] = []
    for event in events:
        (inside if max(event.group) < tp else between).append(event)
    return between, inside


def _per_layer(events: Sequence[Event], once: Sequence[Event], num_layers: int) -> dict[str, float]:
    count, outside = (Counter(event.kind for event in each) for each in (events, once))
    return {kind: (count[kind] - outside[kind]) / (num_layers - 1) for kind in count}


def _traffic(events: Sequence[Event], inner: Mapping[str, float]) -> dict[str, Traffic]:
    found = {}
    for kind in KINDS:
        # Without scalars, such as the mean of the losses.
        own = [event for event in events if event.kind == kind and len(event.group) > 1 and event.num_bytes > 8]
        if own:
            found[kind] = Traffic(len(own), sum(event.num_bytes for event in own), inner[kind])
    return found


# The command

COLUMNS = (
    "mesh", "program", "all-gathers", "reduce-scatters", "all-reduces", "all-to-alls", "gathered", "reduced",
    "bytes of the plan", "inside of ranks", "arguments", "peak", "to lower", "to compile",
)  # fmt: skip


def cases_of(models: Sequence[str], devices: Sequence[int], contestants: Sequence[str], context: int) -> Iterator[Case]:
    """Fully sharded over all devices; hybrid, with eight replicas; next to tensor parallelism, eight devices to a rank; and
    next to it, with two replicas. On eight devices the eights are twos.

    Raises:
        UsageError: an unknown model or contestant, or a number of devices without a hybrid mesh.
    """
    for name, given, known in (("model", models, tuple(MODELS)), ("program", contestants, CONTESTANTS)):
        if unknown := [each for each in given if each not in known]:
            raise UsageError(f"--{name}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    if odd := [number for number in devices if number < 4 or number % 2]:
        raise UsageError(f"--devices: expected even numbers of at least 4, got {odd}")
    for contestant in contestants:
        for model in models:
            for number in devices:
                few = 8 if number > 8 and number % 8 == 0 else 2
                for replicate, tp in ((1, 1), (few, 1), (1, few), (2, few)):
                    shard, left_over = divmod(number, replicate * tp)
                    if not left_over:
                        yield Case(model, MODELS[model], replicate, shard, contestant, context, tp=tp)


def run_compile(
    console: Console, cases: Sequence[Case], *, limit: float, output: Path | None, json_output: Path | None
) -> int:
    """Compile each case in a process of its own, print a table, and write the cases so far to files.

    Args:
        limit: seconds after which a case is given up.

    Returns:
        The exit status: 1 if a program of `jax_backend` has other bytes than the plan, else 0.
    """
    found: list[tuple[Case, Compiled | str]] = []
    where = jax_machine()
    for case in cases:
        with console.status(f"compiling {case.model}, {_mesh(case)}, {case.contestant}"):
            found.append((case, _in_time(case, limit)))
        console.print(" | ".join(_row(*found[-1])), highlight=False, soft_wrap=True)
        # After each case, since all take long.
        if json_output is not None:
            report = {"command": command_line(), **where, "cases": [_as_json(*each) for each in found]}
            json_output.write_text(json.dumps(report, indent=1) + "\n")
        if output is not None:
            output.write_text(_markdown(found, where))
    wrong = [
        case
        for case, each in found
        if isinstance(each, Compiled) and case.contestant == SHARD_MAP and not _agrees(case, each)
    ]
    return int(bool(wrong))


def _compile_alone(case: Case) -> Compiled:
    """Compile a case in a process that has not used JAX before."""
    # Machine code alone depends on this; without it most of the time goes there.
    os.environ["XLA_FLAGS"] = MACHINE_CODE
    from experiments.bench.jax_step import devices_of

    return compile_case(case, devices_of(case.num_devices))


def _in_time(case: Case, limit: float) -> Compiled | str:
    """What was compiled, or why nothing was."""
    with starting():
        pool = multiprocessing.get_context("spawn").Pool(1, initializer=end_with_parent)
    with pool:
        try:
            return pool.apply_async(_compile_alone, (case,)).get(limit)
        except multiprocessing.TimeoutError:
            return f"not compiled within {limit:g} s"
        except Exception as error:  # XLA's errors have types of their own
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _agrees(case: Case, compiled: Compiled) -> bool:
    """Whether XLA's program has the plan's collectives between ranks: counts and bytes, by kind."""
    return compiled.traffic == planned(case)[0]


def _mesh(case: Case) -> str:
    ranks = f"{case.replicate} x {case.shard}" if case.replicate > 1 else f"{case.shard}"
    return ranks if case.tp == 1 else f"{ranks}, tp {case.tp}"


def _row(case: Case, found: Compiled | str | None) -> tuple[str, ...]:
    """A line of the table; None: of the plan."""
    mesh = _mesh(case)
    if isinstance(found, str):
        return mesh, case.contestant, found, *("",) * (len(COLUMNS) - 3)
    traffic, inside = planned(case) if found is None else (found.traffic, found.model_traffic)
    nothing = Traffic(0, 0, 0)
    own = [traffic.get(kind, nothing) for kind in KINDS]
    cells = (
        *(_counts(each, case) for each in own),
        _gigabytes(own[0].num_bytes),
        _gigabytes(sum(each.num_bytes for each in own[1:3])),
    )
    within = "; ".join(
        f"{_counts(each, case)} {kind.replace('_', '-')}s, {_gigabytes(each.num_bytes)}"
        for kind, each in inside.items()
    )
    if found is None:
        return mesh, "the plan", *cells, "", within, *("",) * 4
    return (
        mesh,
        case.contestant,
        *cells,
        "yes" if _agrees(case, found) else "no",
        within,
        _gigabytes(found.argument_bytes),
        _gigabytes(found.peak_bytes),
        f"{found.lower_seconds:.1f} s",
        f"{found.compile_seconds:.1f} s",
    )


def _counts(traffic: Traffic, case: Case) -> str:
    rest = traffic.count - traffic.per_layer * case.config.num_blocks
    return f"{traffic.per_layer:g}" + (f" + {rest:g}" if rest else "")


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"


def _as_json(case: Case, found: Compiled | str) -> dict[str, Any]:
    result = {"error": found} if isinstance(found, str) else asdict(found)
    plan, inside = ({kind: asdict(each) for kind, each in traffic.items()} for traffic in planned(case))
    return {**asdict(case), "plan": plan, "plan_of_model_axes": inside, **result}


def _markdown(found: Sequence[tuple[Case, Compiled | str]], where: dict[str, Any]) -> str:
    lines = [
        "# Llama 3 for many devices, compiled ahead of time",
        "",
        f"`{command_line()}`: {torch_machine_line(where)}.",
        "",
        "No value exists and nothing runs: each step, AdamW included, is lowered from shapes for devices on the CPU, in its own "
        "process. Counts are of a layer, forward and backward, and what is added is of the rest of the step; without scalars. "
        "Bytes are of the unsharded side. Of `tp`, the devices of a rank share its tokens and divide heads, hidden features and "
        "vocabulary; `inside of ranks` are the collectives between them, of the plan those of Megatron-LM, without a forward "
        "that runs again. Peak: arguments, results and temporaries of a device as XLA counts them, without those "
        "that share memory; attention is dense. All is float32, since XLA's CPU compiler widens collectives of bfloat16. "
        f"XLA optimises its program, and LLVM not (`{MACHINE_CODE}`), for the sake of time. "
        "Parameters are cut on their first dim that the ranks divide and that `tp` leaves whole. "
        f"{BY_HAND}: activations lie as the batch does.",
    ]
    for model in dict.fromkeys(case.model for case, _ in found):
        own = [(case, each) for case, each in found if case.model == model]
        own.sort(key=lambda each: (each[0].num_devices, each[0].tp, each[0].replicate))
        lines += ["", f"## {model}, {own[0][0].context} tokens a rank", "", f"| {' | '.join(COLUMNS)} |"]
        lines.append("|---|---|" + "--:|" * (len(COLUMNS) - 2))
        shown = None
        for case, each in own:
            if (mesh := _mesh(case)) != shown:
                lines.append(f"| {' | '.join(_row(case, None))} |")
                shown = mesh
            lines.append(f"| {' | '.join(_row(case, each))} |")
    return "\n".join(lines) + "\n"


# The step


def _step(case: Case, devices: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of training, (parameters, optimizer's state, tokens) to the first two and the loss, and arguments without values."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jax_backend
    from crossframe.mesh import MeshSpec
    from jax_backend.mesh._device_mesh import num_ranks, rank_partition

    axes = {"tp": case.tp} if case.tp > 1 else {}
    mesh = jax_backend.make_mesh(MeshSpec(shard=case.shard, replicate=case.replicate), devices, model_axes=axes)
    full = _params(case.config)
    at = NamedSharding(mesh, rank_partition(mesh))
    tokens = jax.ShapeDtypeStruct((num_ranks(mesh), case.context + 1), jnp.int32, sharding=at)
    optimizer: Any = optax.adamw(3e-4)
    if case.contestant == BY_HAND:
        params: Any = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_cut(path, leaf, mesh)), full
        )

        # Activations lie as the batch does, without which XLA chooses other collectives than those of FSDP.
        value_and_grad = jax.value_and_grad(
            lambda params, tokens: _loss(case.config, params, tokens, lambda x: jax.lax.with_sharding_constraint(x, at))
        )
    else:
        # By hand, and here: without padding, where the first dim has fewer rows than there are ranks, as that of heads.
        params = jax_backend.shard(
            full,
            mesh,
            stacked=("model.layers",),
            dims=lambda spec: _divisible_dim(spec.shape, case.shard, _tp_dim(spec.name, axes)) or 0,
            model_partition=lambda spec: P(*_over_tp(_tp_dim(spec.name, axes))),
        )
        mode = "jit" if case.contestant == JIT else "shard_map"
        result_of = jax_backend.value_and_grad(
            lambda params, tokens: _loss(case.config, params, tokens), mesh, mode=mode, late_gathers=case.late_gathers
        )

        def value_and_grad(params: Any, tokens: Any) -> Any:
            result = result_of(params, tokens)
            return result.loss, result.grads

    def train(params: Any, state: Any, tokens: Any) -> Any:
        loss, grads = value_and_grad(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        # Results lie as arguments do.
        stepped = jax.tree.map(
            lambda new, old: jax.lax.with_sharding_constraint(new, old),
            (optax.apply_updates(params, updates), state),
            shardings,
        )
        return *stepped, loss

    at_path = {_name(path): leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    state = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=_sharding_of(_name(path), at_path, NamedSharding(mesh, P()))
        ),
        jax.eval_shape(optimizer.init, params),
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    return train, (params, state, tokens)


def _cut(path: Any, leaf: Any, mesh: Any) -> Any:
    """On the first dim that the shards divide, and another one over "tp"; of stacked leaves not on that of layers, which the loop
    goes along."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    lead = int("layers" in jax.tree_util.keystr(path))
    over_tp = _tp_dim(_name(path), mesh.axis_names)
    dim = _divisible_dim(leaf.shape[lead:], mesh.shape["shard"], over_tp)
    axes: list[str | None] = [*(None,) * lead, *_over_tp(over_tp), *(None,) * leaf.ndim][: leaf.ndim]
    if dim is not None:
        axes[lead + dim] = "shard"
    return NamedSharding(mesh, P(*axes))


def _divisible_dim(shape: Sequence[int], number: int, other_than: int | None) -> int | None:
    """The first dim whose size is a multiple of a number."""
    return next((dim for dim, size in enumerate(shape) if size % number == 0 and dim != other_than), None)


def _tp_dim(name: str, axes: Iterable[str]) -> int | None:
    """The dim that tensor parallelism divides, of a parameter of the model in flax: heads, hidden features or vocabulary."""
    module = name.rpartition(".")[0]
    style = next((style for pattern, style in KNOWN_STYLES.items() if fnmatchcase(module, pattern)), None)
    # Kernels have inputs before outputs, an embedding its rows first.
    return {Style.COLWISE: 1, Style.ROWWISE: 0, Style.VOCAB: 0}.get(style) if style and "tp" in axes else None


def _over_tp(dim: int | None) -> tuple[str | None, ...]:
    return () if dim is None else (*(None,) * dim, "tp")


def _name(path: Any) -> str:
    import jax

    return jax.tree_util.keystr(path, simple=True, separator=".")


def _sharding_of(name: str, at_path: Mapping[str, Any], otherwise: Any) -> Any:
    """The sharding of a moment, whose path ends in that of its parameter."""
    return next((sharding for path, sharding in at_path.items() if name.endswith(f".{path}")), otherwise)


def _modules(config: LlamaConfig) -> tuple[Any, Any]:
    """(graphdef, parameters, state) of the model without blocks, and of a block, without values."""
    from flax import nnx

    from experiments.models.llama_flax import Block, Llama
    from jax_backend.nnx import split

    outside = nnx.eval_shape(lambda: Llama(replace(config, num_blocks=0), DTYPE))
    return split(outside), split(nnx.eval_shape(lambda: Block(config, nnx.Rngs(0))))


def _params(config: LlamaConfig) -> Any:
    """Parameters in float32 without values, their blocks stacked."""
    import jax

    (_, outside, _), (_, block, _) = _modules(config)
    stored = lambda leaf, *lead: jax.ShapeDtypeStruct((*lead, *leaf.shape), DTYPE)  # noqa: E731
    params = jax.tree.map(stored, outside)
    layers = jax.tree.map(lambda leaf: stored(leaf, config.num_blocks), block)
    return {**params, "model": {**params["model"], "layers": layers}}


def _loss(config: LlamaConfig, params: Any, tokens: Any, placed: Callable[[Any], Any] = lambda x: x) -> Any:
    import jax
    import optax

    from jax_backend import scan
    from jax_backend.nnx import with_params

    (outside, _, rest), (inside, _, block_rest) = _modules(config)
    layers = params["model"]["layers"]
    around = {**params, "model": {name: value for name, value in params["model"].items() if name != "layers"}}
    model: Any = with_params(outside, around, rest)

    @jax.checkpoint
    def block(x: Any, own: Any) -> Any:
        module: Any = with_params(inside, own, block_rest)
        return placed(module(x))

    x = placed(model.model.embed_tokens(tokens[:, :-1]))
    x, _ = scan(lambda x, own, _: (block(x, own), None), x, layers)
    logits = model.lm_head(model.model.norm(x))
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
