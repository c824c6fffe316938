"""Follows scripts that change their parameters by themselves, without an optimizer of torch.

[Note: updates by hand] Nothing tells when such a script updates. After each backward the recorder keeps the gradients and copies
of the parameters. If a parameter has changed where the next forward or backward begins, or where the script ends, a step has
ended in between. That there is no optimizer shows at the second backward, after a step that was not recorded; so the command
records again with `--by-hand`.
"""

import gc
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from torch_backend.recorder._models_together import made_modules, models_together, outermost


class UpdatesByHand:
    """Tells whether parameters have changed since gradients were taken of them."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, int, Tensor]] = []

    def keep(self, params: Iterable[Tensor]) -> None:
        """Gradients of these parameters have been taken."""
        self._kept = [(param, param._version, _local(param).clone()) for param in params]

    def forget(self) -> None:
        """Forget the parameters."""
        self._kept = []

    def have_happened(self) -> bool:
        """Whether a parameter was changed. Versions do not count changes of `param.data`, nor values an update by zero."""
        return any(
            param._version != version or not torch.allclose(_local(param), before, rtol=0, atol=0, equal_nan=True)
            for param, version, before in self._kept
        )


def _local(param: Tensor) -> Tensor:
    """The part of a parameter on this rank."""
    own = param.detach()
    return getattr(own, "_local_tensor", own)


def leaves_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The leaves whose gradients backward from these tensors computes.

    >>> w = torch.ones(2, requires_grad=True)
    >>> [leaf is w for leaf in leaves_of([(w * 2).sum()])]
    [True]
    """
    nodes, seen, found = [each.grad_fn for each in tensors if each.grad_fn is not None], set(), []
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            found.append(leaf)
        nodes += [each for each, _ in node.next_functions if each is not None]
    return found


def model_by_hand(part: nn.Module | None, leaves: Sequence[Tensor], callers: frozenset[int]) -> nn.Module | None:
    """What a script trains that has no optimizer: all modules that it has made and that have parameters with gradients, or where
    it calls none, the leaves of its first backward.

    Args:
        part: a module that is being called; None: backward begins.
        leaves: of the backward.
        callers: the ids of modules of which a method is being called.
    """
    if part is None:
        return models_together(None, {id(leaf): leaf for leaf in leaves}, callers) if leaves else None
    if not any(param.requires_grad for param in part.parameters()):
        return None
    gc.collect()  # models that the script has discarded
    found = outermost([each for each in made_modules() if any(param.requires_grad for param in each.parameters())])
    if len(found) == 1:
        return found[0]
    wanted = {id(param): param for each in found for param in each.parameters() if param.requires_grad}
    return models_together(part, wanted, callers)
