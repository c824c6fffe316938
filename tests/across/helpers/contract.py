"""What every backend is asked, and how each answers: four layers, two of them nested, trained by a few microbatches and steps."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from crossframe.api import Api
from crossframe.layout import Layout
from crossframe.mesh import MeshSpec
from crossframe.plan import Sync, plan_units, step_plan
from crossframe.precision import PrecisionPolicy
from crossframe.reference.optim import SGD
from crossframe.reference.world import World
from crossframe.strategy import Strategy
from crossframe.unshard import UnshardRequest
from tests.core.helpers.training_worlds import LAYERS, UNITS

LR, MOMENTUM, STEPS = 0.1, 0.5, 2


@dataclass(frozen=True)
class Question:
    """The choices of a run.

    Attributes:
        mesh, strategy, microbatches, clip, divide_factor, policy, dtype: as everywhere; the last microbatch alone reduces.
        reshards: what the user says of resharding after forward.
        edits: add to the parameters within an unsharding, each rank its own number; or "lost": without writeback.
    """

    mesh: MeshSpec
    strategy: Strategy = Strategy.FULL_SHARD
    microbatches: int = 1
    clip: float | None = None
    divide_factor: float | None = None
    policy: PrecisionPolicy = field(default_factory=PrecisionPolicy)
    dtype: str = "float64"
    reshards: bool | None = None
    edits: str = ""

    def batch(self, step: int, microbatch: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """One rank's samples."""
        x, y = LAYERS.batch(1000 * step + 100 * microbatch + rank)
        return x.astype(self.dtype), y.astype(self.dtype)


@dataclass(frozen=True)
class Answer:
    """What a run gave.

    Attributes:
        before: by rank, what it holds of each parameter at the start, as a line; its shard, in the layout's order.
        losses: of each step and microbatch and rank.
        norms: of the gradients of each step, if they were clipped.
        after: all parameters in full, as every rank sees them at the end.
    """

    before: list[dict[str, np.ndarray]]
    losses: np.ndarray
    norms: list[float]
    after: list[dict[str, np.ndarray]]


def layouts_of(question: Question, make: Callable[..., Layout]) -> list[tuple[str, Layout]]:
    """The layout of every unit, in the order of forward."""
    return [(unit, make(specs, question)) for unit, specs in LAYERS.specs(question.dtype).items()]


def edit_of(rank: int, position: int) -> float:
    """What a rank adds to the parameter at this place in the order of names, in an unsharding."""
    return 10.0 * rank + position


def on_numpy(question: Question, make: Callable[..., Layout], api: Api, ranks: Any = None) -> Answer:
    """The reference."""
    del ranks
    layouts = layouts_of(question, make)
    units = plan_units(
        layouts, question.strategy, api=api, reshard_after_forward=question.reshards, policy=question.policy
    )
    initial = LAYERS.initial(0, question.dtype)
    world = World(units, question.mesh, initial, optimizer=SGD(LR, MOMENTUM), divide_factor=question.divide_factor)
    before = [
        {
            piece.name: bucket.unit.shards[rank][piece.shard_start : piece.shard_stop].copy()
            for unit in world.units.values()
            for bucket in unit.buckets
            for piece in bucket.layout.pieces(question.mesh.coordinate(rank)[1])
        }
        for rank in range(question.mesh.world_size)
    ]
    plan = step_plan(units, question.mesh, microbatches=question.microbatches, sync=Sync.LAST)
    losses, norms = [], []
    for step in range(STEPS):
        batches = [
            [question.batch(step, microbatch, rank) for rank in range(question.mesh.world_size)]
            for microbatch in range(question.microbatches)
        ]
        losses.append(world.run(plan[:-1], LAYERS, batches))
        if question.clip is not None:
            norms.append(world.clip_grad_norm(question.clip))
        world.step()
    if question.edits:
        request = UnshardRequest(writeback=question.edits != "lost")
        with world.summon_full_params(request):
            for rank in range(question.mesh.world_size):
                for unit in world.units.values():
                    for position, (name, value) in enumerate(sorted(unit.shown(rank).items())):
                        unit.edit(rank, name, value + edit_of(rank, position))
    after = world.full_params()
    return Answer(before, np.stack(losses), norms, [after] * question.mesh.world_size)


# torch


def _torch_layers() -> Any:
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self, name: str, inner: Mapping[str, nn.Module]) -> None:
            super().__init__()
            prefix = f"{name}." if name else ""
            initial = LAYERS.initial(0)
            self.weight = nn.Parameter(torch.tensor(initial[f"{prefix}weight"]))
            self.bias = nn.Parameter(torch.tensor(initial[f"{prefix}bias"]))
            self.inner = list(inner)
            for key, module in inner.items():
                self.add_module(key, module)

        def forward(self, x: Any) -> Any:
            for key in self.inner:
                x = getattr(self, key)(x)
            return torch.tanh(x @ self.weight.T + self.bias)

    a = Layer("a", {"0": Layer("a.0", {})})
    return Layer("", {"a": a, "b": Layer("b", {})})


def torch_rank(rank: int, world_size: int, question: Question, api: str, layout: str) -> tuple[Any, ...]:
    """One rank's part of a run."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import torch_backend
    from torch_backend.shards import sharded_units

    model = _torch_layers().to(getattr(torch, question.dtype))
    mesh = question.mesh
    if mesh.replicate > 1:
        devices = init_device_mesh("cpu", (mesh.replicate, mesh.shard), mesh_dim_names=("replicate", "shard"))
    else:
        devices = init_device_mesh("cpu", (mesh.shard,), mesh_dim_names=("shard",))
    dtypes = {
        name: None if (dtype := getattr(question.policy, name)) is None else getattr(torch, dtype)
        for name in ("param_dtype", "reduce_dtype")
    }
    if api == "fsdp1":
        model = torch_backend.FullyShardedDataParallel(
            model,
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or hasattr(module, "weight"),
            sharding_strategy=torch_backend.ShardingStrategy[question.strategy.name],
            device_mesh=devices,
            use_orig_params=True,
            mixed_precision=torch_backend.MixedPrecision(**dtypes),
        )
    else:
        policy = torch_backend.MixedPrecisionPolicy(**dtypes)
        how = {"mesh": devices, "mp_policy": policy, "layout": layout, "reshard_after_forward": question.reshards}
        for module in (getattr(model.a, "0"), model.a, model.b, model):
            torch_backend.fully_shard(module, **how)
            if question.divide_factor is not None:
                module.set_gradient_divide_factor(question.divide_factor)
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    own: dict[str, np.ndarray] = {}
    losses, norms = [], []
    for step in range(STEPS):
        losses.append([])
        for microbatch in range(question.microbatches):
            is_last = microbatch == question.microbatches - 1
            if api != "fsdp1":
                model.set_requires_gradient_sync(is_last)
            x, y = (torch.tensor(part) for part in question.batch(step, microbatch, rank))
            if api == "fsdp1" and not is_last:
                with model.no_sync():
                    loss = ((model(x) - y) ** 2).mean()
                    loss.backward()
            else:
                loss = ((model(x) - y) ** 2).mean()
                if not own:
                    own = _pieces(sharded_units(model), mesh.coordinate(rank)[1])
                loss.backward()
            losses[-1].append(float(loss))
        if question.clip is not None:
            clip = (
                model.clip_grad_norm_(question.clip)
                if api == "fsdp1"
                else torch.nn.utils.clip_grad_norm_(model.parameters(), question.clip)
            )
            norms.append(float(clip.full_tensor() if hasattr(clip, "full_tensor") else clip))
        optimizer.step()
        optimizer.zero_grad()
    if question.edits:
        summon = torch_backend.FullyShardedDataParallel.summon_full_params
        with summon(model, writeback=question.edits != "lost"), torch.no_grad():
            named = sorted(
                (name.replace("_fsdp_wrapped_module.", ""), param) for name, param in model.named_parameters()
            )
            for unit in UNITS:
                members = [param for name, param in named if name.rpartition(".")[0] == unit]
                for position, param in enumerate(members):
                    param += edit_of(rank, position)
    full = _full(model, api)
    dist.barrier()
    return own, losses, norms, full


def _pieces(units: Any, place: int) -> dict[str, np.ndarray]:
    found = {}
    for name, buckets in units:
        for bucket in buckets:
            for piece in bucket.layout.pieces(place):
                short = piece.name.rpartition(".")[2]
                held = bucket.store.buffer[piece.shard_start : piece.shard_stop]
                found[f"{name}.{short}" if name else short] = held.clone().numpy()
    return found


def _full(model: Any, api: str) -> dict[str, np.ndarray]:
    import torch_backend

    if api == "fsdp1":
        with torch_backend.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: param.detach().numpy().copy() for name, param in model.named_parameters()}
    return {name: param.full_tensor().detach().numpy().copy() for name, param in model.named_parameters()}


def on_torch(api: str, layout: str) -> Callable[..., Answer]:
    """A run of torch_backend, by the processes of the `ranks` fixture."""

    def run(question: Question, make: Any, _api: Api, ranks: Any) -> Answer:
        parts = ranks.run(question.mesh.world_size, torch_rank, question, api, layout)
        losses = np.moveaxis(np.array([part[1] for part in parts]), 0, -1)
        return Answer([part[0] for part in parts], losses, parts[0][2], [part[3] for part in parts])

    return run


# JAX


def on_jax(mode: str, layout: str) -> Callable[..., Answer]:
    """A run of jax_backend on devices of this process."""

    def run(question: Question, make: Any, api: Api, ranks: Any) -> Answer:
        import jax
        import jax.numpy as jnp

        import jax_backend
        from crossframe.param_map import identity_map

        specs = [spec for members in LAYERS.specs(question.dtype).values() for spec in members]
        mesh, size = jax_backend.make_mesh(question.mesh), question.mesh.world_size
        params = _tree({spec.name: LAYERS.initial(0, question.dtype)[spec.name] for spec in specs})
        sharded = jax_backend.shard(
            params,
            mesh,
            units=[unit for unit in UNITS if unit],
            layout=layout,
            param_map=identity_map(spec.name for spec in specs),
            mp_policy=question.policy,
            reshard_after_forward=question.reshards,
        )
        before = [jax_backend.pieces_of(sharded, rank) for rank in range(size)]

        def layer(params: Any, x: Any) -> Any:
            return jnp.tanh(x @ params["weight"].T + params["bias"])

        def loss_fn(params: Any, batch: Any) -> Any:
            x, y = batch
            x = layer(params["a"], layer(params["a"]["0"], x))
            return jnp.mean((layer(params, layer(params["b"], x)) - y) ** 2)

        choices = {
            "mode": mode,
            "api": api,
            "strategy": question.strategy,
            "gradient_divide_factor": question.divide_factor,
        }
        waits = jax_backend.value_and_grad(loss_fn, mesh, reduces=False, **choices)
        reduces = jax_backend.value_and_grad(loss_fn, mesh, **choices)
        momenta, losses, norms = jax.tree.map(jnp.zeros_like, sharded), [], []
        for step in range(STEPS):
            waiting, of_step = None, []
            for microbatch in range(question.microbatches):
                pairs = [question.batch(step, microbatch, rank) for rank in range(size)]
                batch = tuple(np.concatenate(part) for part in zip(*pairs, strict=True))
                is_last = microbatch == question.microbatches - 1
                result = (reduces if is_last else waits)(sharded, batch, accumulated=waiting if is_last else None)
                if not is_last:
                    waiting = result.grads if waiting is None else waiting + result.grads
                of_step.append(np.asarray(result.losses))
            grads = result.grads
            if question.clip is not None:
                grads, norm = jax_backend.clip_grad_norm(grads, question.clip)
                norms.append(float(norm))
            momenta = jax.tree.map(lambda m, g: MOMENTUM * m + g, momenta, grads)
            sharded = jax.tree.map(lambda p, m: p - LR * m, sharded, momenta)
            losses.append(of_step)
        if question.edits:
            sharded = _edited(sharded, question, jax_backend)
        after = _named(jax_backend.unshard(sharded))
        return Answer(before, np.array(losses), norms, [after] * size)

    return run


def _edited(sharded: Any, question: Question, jax_backend: Any) -> Any:
    """Each rank's own edits: a replicated array of which every device holds another value."""
    import jax

    if question.edits == "lost":
        with jax_backend.summon_full_params(sharded, writeback=False) as shown:
            for leaf in jax.tree.leaves(shown.params):
                leaf += 1.0
        return shown.sharded
    full, devices = jax_backend.unshard(sharded), jax.devices()[: question.mesh.world_size]

    def of_ranks(path: Any, leaf: Any) -> Any:
        position = ("bias", "weight").index(str(path[-1].key))
        copies = [jax.device_put(np.asarray(leaf) + edit_of(r, position), device) for r, device in enumerate(devices)]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, copies)

    return jax_backend.writeback(sharded, jax.tree_util.tree_map_with_path(of_ranks, full))


def _tree(named: Mapping[str, np.ndarray]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in named.items():
        *modules, attribute = name.split(".")
        at = found
        for module in modules:
            at = at.setdefault(module, {})
        at[attribute] = value
    return found


def _named(tree: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    found = {}
    for key, value in tree.items():
        found |= (
            _named(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": np.asarray(value)}
        )
    return found
