"""R35: the dtypes that a unit's forward, its output and its buffers have in torch's FSDP, beside the policy's."""

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map

from crossframe.api import Api
from crossframe.precision import PrecisionPolicy
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import DTYPES, fake_mesh, quiet
from experiments.spec.tally import Tallies
from experiments.spec.watch import dtype_name

NOT_FLOATING = ("int64", "int32", "int8", "uint8", "bool")
ASKED = (None, *DTYPES)
ALL = (*DTYPES, *NOT_FLOATING)


@dataclass(frozen=True)
class Options:
    """A policy and whose it is."""

    api: Api
    policy: PrecisionPolicy


def options() -> list[Options]:
    """Every choice of either API."""
    casts = (False, True)
    flat = [
        Options(
            Api.FSDP1,
            PrecisionPolicy(low, buffer_dtype=buffer, cast_forward_inputs=cast, cast_root_forward_inputs=root),
        )
        for low, buffer, cast, root in product(ASKED, ASKED, (None, *casts), casts)
    ]
    per_param = [
        Options(Api.FSDP2, PrecisionPolicy(low, output_dtype=out, cast_forward_inputs=cast))
        for low, out, cast in product(ASKED, ASKED, (None, *casts))
    ]
    return flat + per_param


class Probe(nn.Module):
    """Records the dtypes of inputs and outputs, and calls the module inside it with inputs of every dtype."""

    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        for name in ALL:
            self.register_buffer(f"of_{name}", torch.zeros(1, dtype=getattr(torch, name)))
        self.inner = inner
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = [
            _dtypes((args, kwargs)),
            {name: dtype_name(buffer.dtype) for name, buffer in self.named_buffers(recurse=False)},
        ]
        if self.inner is not None:
            nested, named = every_dtype()
            self.seen.append(_dtypes(self.inner(*nested, **named)))
        return [tensors_of_every_dtype(), {"deeper": (tensors_of_every_dtype(),)}]


def tensors_of_every_dtype() -> dict[str, Tensor]:
    """One tensor of each dtype, by its name."""
    return {name: torch.ones(1, dtype=getattr(torch, name)) for name in ALL}


def every_dtype() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named inputs, in lists, tuples and dicts inside each other."""
    some = tensors_of_every_dtype
    return (some()["float32"], [some(), (some(), 3)]), {"named": some(), "deep": {"er": [some()]}, "text": "as it is"}


def _dtypes(nested: Any) -> Any:
    return tree_map(lambda leaf: dtype_name(leaf.dtype) if isinstance(leaf, Tensor) else leaf, nested)


def casts(tallies: Tallies, scope: Scope) -> None:
    """Root and inner unit under every policy: inputs of every dtype however nested, buffers, outputs."""
    for case in scope.take(options(), num_quick=25):
        with fake_mesh(0, 2) as mesh, quiet():
            inner = Probe(None)
            root = Probe(inner)
            model = _wrap(case, mesh, root, inner)
            nested, named = every_dtype()
            returned = _dtypes(model(*nested, **named))
        for unit, is_root in ((root, True), (inner, False)):
            cast = partial(case.policy.input_dtype, api=case.api, is_root=is_root)
            # What is no tensor is no dtype either, and so stays as it is.
            ours = tree_map(cast, _dtypes(every_dtype()))
            tallies["R35"].compare(ours, unit.seen[0], (case, f"is_root={is_root}"))
            buffers = {f"of_{name}": case.policy.buffer(name) for name in ALL}
            tallies["R35"].compare(buffers, unit.seen[1], (case, f"is_root={is_root}", "buffers"))
        for came, where in ((returned, "root"), (root.seen[2], "inner")):
            result = {name: case.policy.result_dtype(name) for name in ALL}
            tallies["R35"].compare([result, {"deeper": (result,)}], came, (case, where, "output"))


def _wrap(case: Options, mesh: Any, root: Probe, inner: Probe) -> nn.Module:
    policy = case.policy
    asked = {name: None if given is None else DTYPES[given] for name, given in _asked(case).items()}
    chosen = {} if policy.cast_forward_inputs is None else {"cast_forward_inputs": policy.cast_forward_inputs}
    if case.api is Api.FSDP2:
        mixed = MixedPrecisionPolicy(**asked, **chosen)  # type: ignore[arg-type]
        for module in (inner, root):
            fully_shard(module, mesh=mesh, mp_policy=mixed)
        return root
    options: dict[str, Any] = {
        "mixed_precision": MixedPrecision(**asked, **chosen, cast_root_forward_inputs=policy.cast_root_forward_inputs),  # type: ignore[arg-type]
        "device_id": torch.device("cpu"),
    }
    root.inner = FullyShardedDataParallel(inner, **options)
    return FullyShardedDataParallel(root, **options)


def _asked(case: Options) -> dict[str, str | None]:
    other = "buffer_dtype" if case.api is Api.FSDP1 else "output_dtype"
    return {"param_dtype": case.policy.param_dtype, other: getattr(case.policy, other)}
