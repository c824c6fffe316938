"""Recomputes the intermediate values of a fused operator in float64.

Another program may have several operators where this one has a single kernel. To match their values, a fused operator is
evaluated once more in float64, by torch's own decomposition into simpler ones, on the inputs that it had, and every value on the
way is noted. Attention is written out here: its scale may stand at the scores, at the query, or half of it at query and key.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torch_backend.recorder._float64_check import widened

_ATTENTION = "aten::_scaled_dot_product"


def interior_of(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The values on the way to an operator's result; none if it is not known to consist of others."""
    # It takes long to import, and is needed for runs of different programs only.
    from torch._decomp import decomposition_table

    name = str(func.overloadpacket._qualified_op_name)
    is_attention = name.startswith(_ATTENTION) and not name.endswith("backward")
    own = decomposition_table.get(func)
    if func.is_view or (own is None and not is_attention):
        return []
    try:
        own_args, own_kwargs = tree_map(widened, (args, kwargs))
        if is_attention:
            names = [each.name for each in func._schema.arguments]
            return list(_attention(dict(zip(names, own_args, strict=False)) | own_kwargs))
        assert own is not None
        with _Noting() as noting:
            own(*own_args, **own_kwargs)
        return noting.values
    except Exception:  # a decomposition may refuse float64, or devices, in any way of its own
        return []


class _Noting(TorchDispatchMode):
    """A context that keeps what operators compute."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.values += [each.clone() for each in tree_leaves(result) if isinstance(each, Tensor)]
        return result


def _attention(given: dict[str, Any]) -> Iterator[Tensor]:
    query, key, value = given["query"], given["key"], given["value"]
    scale = given.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    yield from (query * scale, query * math.sqrt(scale), key * math.sqrt(scale))
    yield (scores := query @ key.transpose(-1, -2))
    yield (scores := scores * scale)
    bias = next((given[name] for name in ("attn_mask", "attn_bias") if given.get(name) is not None), None)
    if given.get("is_causal"):
        bias = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if bias is not None and bias.dtype == torch.bool:
        yield from (bias, ~bias)
        yield (scores := scores.masked_fill(~bias, -math.inf))
    elif bias is not None:
        yield (scores := scores + bias)
    yield (shifted := scores - scores.amax(-1, keepdim=True))
    yield from (exponentials := shifted.exp(), exponentials.sum(-1, keepdim=True))
    yield (weights := scores.softmax(-1))
    yield weights @ value
