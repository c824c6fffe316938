"""Plans and their costs, as drawings show them."""

from crossframe.api import Api
from crossframe.cost import Hardware, step_cost
from crossframe.layout import FlatLayout, PerParamLayout
from crossframe.params import ParamSpec
from crossframe.plan import Prefetch, Strategy, Sync, plan_units, step_plan
from crossframe.precision import PrecisionPolicy

SLOW = Hardware(flops_per_second=1e6, bytes_per_second=2e6, replica_bytes_per_second=1e6, latency_seconds=1e-4)


def cost_of(world_size=4, strategy=Strategy.FULL_SHARD, shard=None, *, api=Api.FSDP1, reshards=None, policy=None,
            hardware=SLOW, num_units=3, names=("", "u{}"), per_param=False, **options):  # fmt: skip
    mesh = strategy.mesh(world_size, shard)
    layouts = []
    for i in range(num_units):
        name = names[1].format(i) if i else names[0]
        params = (ParamSpec(f"{name}.w" if name else "w", (40 + i, 10)), ParamSpec(f"{name}.b" if name else "b", (7,)))
        made = PerParamLayout(params, mesh.shard) if per_param else FlatLayout(params, mesh.shard, True)
        layouts.append((name, made))
    units = plan_units(layouts, strategy, api=api, reshard_after_forward=reshards, policy=policy)
    return step_cost(step_plan(units, mesh, 1 % world_size, **options), units, hardware, tokens=5)


CASES = {
    "full_shard": {},
    "shard_grad_op": {"strategy": Strategy.SHARD_GRAD_OP, "backward_prefetch": None},
    "no_shard": {"strategy": Strategy.NO_SHARD},
    "no_shard low": {"strategy": Strategy.NO_SHARD, "policy": PrecisionPolicy("bfloat16")},
    "hybrid": {"strategy": Strategy.HYBRID_SHARD, "shard": 2},
    "reshard group": {"api": Api.FSDP2, "reshards": 2, "per_param": True},
    "no_sync": {"microbatches": 3, "sync": Sync.LAST},
    "prefetch": {"forward_prefetch": 2, "backward_prefetch": Prefetch.BACKWARD_POST},
    "one rank": {"world_size": 1},
    "tiny times": {"hardware": Hardware(1e18, 1e18, None, 1e-12)},
    "huge times": {"hardware": Hardware(1.0, 1.0, None, 1.0)},
}
