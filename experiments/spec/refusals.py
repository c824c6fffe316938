"""What torch refuses to shard, and the core and our torch backend too (R07, R11)."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from crossframe.errors import CrossframeError
from crossframe.layout import FlatLayout
from crossframe.params import ParamSpec
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import DTYPES, fake_mesh, flat_handle, quiet
from experiments.spec.tally import Tallies

Shape = tuple[int, ...]


def _module(shapes: tuple[Shape, ...]) -> nn.Module:
    module = nn.Module()
    for i, shape in enumerate(shapes):
        module.register_parameter(f"p{i}", nn.Parameter(torch.zeros(shape)))
    return module


def _answer(build: Callable[[], Any], *named: str) -> str:
    """ "accepted", "refused", or what is wrong with the refusal; a refusal must hold these words."""
    try:
        build()
    except (ValueError, CrossframeError) as error:
        missing = [word for word in named if word not in str(error)]
        return f"refused without {missing}: {error}" if missing else "refused"
    return "accepted"


def zero_dim(tallies: Tallies, scope: Scope) -> None:
    """A parameter without dims: both interfaces refuse it by name, in torch and here."""
    import torch_backend

    apis: dict[str, tuple[Callable, Callable]] = {
        "FSDP1": (torch_backend.FullyShardedDataParallel, FullyShardedDataParallel),
        "FSDP2": (torch_backend.fully_shard, fully_shard),
    }
    lists: list[tuple[Shape, ...]] = [((),), ((3,), ()), ((), (3,)), ((), (0,), (2, 2))]
    for (api, sides), shapes, size in product(apis.items(), lists, (1, 2, 3)):
        with fake_mesh(0, size) as mesh, quiet():
            where: dict[str, Any] = {"mesh": mesh} if api == "FSDP2" else {"device_id": torch.device("cpu")}
            said = [_answer(partial(build, _module(shapes), **where), f"p{shapes.index(())}") for build in sides]
        tallies["R07"].compare(said[0], said[1], (api, shapes, size))


def _mixed(unit: tuple[tuple[str, bool], ...]) -> nn.Module:
    module = nn.Module()
    for i, (dtype, grad) in enumerate(unit):
        module.register_parameter(f"p{i}", nn.Parameter(torch.zeros(2, dtype=DTYPES[dtype]), grad))
    return module


def flat_unit(tallies: Tallies, scope: Scope) -> None:
    """Up to three parameters of every dtype and every requires_grad, with and without original parameters."""
    kinds = list(product(DTYPES, (True, False)))
    units = [unit for length in (1, 2, 3) for unit in product(kinds, repeat=length)]
    for unit, keep in scope.take(list(product(units, (False, True))), num_quick=len(units) * 2):
        specs = tuple(ParamSpec(f"p{i}", (2,), dtype, requires_grad=grad) for i, (dtype, grad) in enumerate(unit))
        # Of two parameters both are named; of three, the first and one that differs from it.
        named = [f"'p{i}'" for i in range(min(len(unit), 2))] if len(unit) < 3 else ["'p0'"]
        ours = _answer(partial(FlatLayout, specs, 2, keep), *named)
        theirs = _answer(partial(flat_handle, _mixed(unit), keep))
        tallies["R11"].compare(ours, theirs, (unit, f"keep_original={keep}"))


def per_param_unit(tallies: Tallies, scope: Scope) -> None:
    """The same parameters in a per-parameter unit: dtypes and requires_grad may be mixed."""
    import torch_backend

    kinds = list(product(DTYPES, (True, False)))
    units = [unit for length in (1, 2) for unit in product(kinds, repeat=length)]
    for unit in scope.take(units, num_quick=len(units)):
        said = []
        with fake_mesh(0, 2) as mesh, quiet():
            for shard in (torch_backend.fully_shard, fully_shard):
                said.append(_answer(partial(shard, _mixed(unit), mesh=mesh)))
        tallies["R11"].compare(said[0], said[1], unit)
