"""Auto-wrap policies: which modules become units.

A policy is one of two things:

- an object, `ModuleWrapPolicy` or `CustomPolicy`, which looks at each module by itself;
- a function `policy(module, recurse, nonwrapped_numel) -> bool`, which is asked twice of each module: on the way down
  (`recurse=True`) whether to look inside it, and on the way up (`recurse=False`) whether to make it a unit. In between,
  `nonwrapped_numel` has fallen from all elements below the module to those in no unit below it.
"""

from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

from torch import nn

from crossframe.errors import UsageError
from crossframe.shown import shown

Kwargs = dict[str, Any]


class ModuleWrapPolicy:
    """Every module of one of these classes becomes a unit, with the arguments of the root.

    It can also be called as a policy function.

    Raises:
        UsageError: something other than an iterable of classes.

    >>> policy = ModuleWrapPolicy({nn.Linear})
    >>> policy(nn.Linear(2, 2), recurse=False), policy(nn.ReLU(), recurse=False)
    (True, False)
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._classes = as_classes(module_classes, "ModuleWrapPolicy: module_classes")

    def overrides(self, module: nn.Module) -> Kwargs | None:
        """The arguments in which a unit differs from the root: none. None for a module that is no unit."""
        return {} if isinstance(module, self._classes) else None

    def __call__(self, module: nn.Module, recurse: bool, *args: object, **kwargs: object) -> bool:
        """Whether to look inside `module` (`recurse`), or to wrap it."""
        return True if recurse else isinstance(module, self._classes)

    def __repr__(self) -> str:
        """The classes by name."""
        return f"ModuleWrapPolicy({{{', '.join(entry.__name__ for entry in self._classes)}}})"


class CustomPolicy:
    """A function says of each module whether it becomes a unit, and with which arguments.

    Args:
        lambda_fn: from a module to False or {} (no unit), True (a unit with the arguments of the root), or a dict of the
            arguments in which the unit differs from the root.

    Raises:
        UsageError: something that cannot be called; when the policy is applied, an answer of another type.

    >>> policy = CustomPolicy(lambda module: {"use_orig_params": True} if isinstance(module, nn.Linear) else False)
    >>> policy.overrides(nn.Linear(2, 2))
    {'use_orig_params': True}
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Kwargs]) -> None:
        self._lambda_fn = as_function(lambda_fn, "CustomPolicy: lambda_fn")

    def overrides(self, module: nn.Module) -> Kwargs | None:
        """The arguments in which a unit differs from the root. None for a module that is no unit."""
        answer = self._lambda_fn(module)
        if not isinstance(answer, bool | dict):
            raise UsageError(
                f"CustomPolicy: expected lambda_fn to return True, False or a dict of arguments, got {shown(answer)} for "
                f"a {type(module).__name__}"
            )
        if not answer:
            return None
        return {} if answer is True else dict(answer)  # type: ignore[arg-type]


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """Policy: every module becomes a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Policy, with `lambda_fn` bound by `functools.partial`: a module becomes a unit if `lambda_fn(module)`.

    >>> lambda_auto_wrap_policy(nn.ReLU(), recurse=False, nonwrapped_numel=0, lambda_fn=lambda m: m.training)
    True
    """
    return True if recurse else as_function(lambda_fn, "lambda_auto_wrap_policy: lambda_fn")(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """Policy, with `transformer_layer_cls` bound by `functools.partial`: as `ModuleWrapPolicy` of these classes.

    Modules that share a parameter stay in one unit this way, as embedding and head of a transformer do, if neither is of
    these classes.
    """
    return recurse or isinstance(module, as_classes(transformer_layer_cls, "transformer_auto_wrap_policy"))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Policy: a module becomes a unit if at least `min_num_params` elements below it are in no smaller unit.

    Args:
        min_num_params: elements, not parameters.
        force_leaf_modules: classes that are not looked into, and are not units either; by default the attribute
            `size_based_auto_wrap_policy.FORCE_LEAF_MODULES`, attention.
        exclude_wrap_modules: classes that are looked into, and are not units; by default the attribute
            `size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES`, the containers without a forward.

    Raises:
        UsageError: a `min_num_params` that is no number, or something else than classes.

    >>> size_based_auto_wrap_policy(nn.Linear(3, 2), recurse=False, nonwrapped_numel=8, min_num_params=8)
    True
    """
    if not isinstance(min_num_params, Real):
        raise UsageError(
            f"size_based_auto_wrap_policy: expected a number of elements as min_num_params, got {shown(min_num_params)}"
        )
    if recurse:
        name, given, default = "force_leaf_modules", force_leaf_modules, FORCE_LEAF_MODULES
    else:
        name, given, default = "exclude_wrap_modules", exclude_wrap_modules, EXCLUDE_WRAP_MODULES
    classes = getattr(size_based_auto_wrap_policy, default) if given is None else given
    excepted = isinstance(module, as_classes(classes, f"size_based_auto_wrap_policy: {name}"))
    return nonwrapped_numel >= min_num_params and not excepted


# Users of torch read and change these sets.
FORCE_LEAF_MODULES, EXCLUDE_WRAP_MODULES = "FORCE_LEAF_MODULES", "EXCLUDE_WRAP_MODULES"
setattr(size_based_auto_wrap_policy, FORCE_LEAF_MODULES, {nn.MultiheadAttention})
setattr(size_based_auto_wrap_policy, EXCLUDE_WRAP_MODULES, {nn.ModuleList, nn.ModuleDict})


def as_classes(value: Any, where: str) -> tuple[type, ...]:
    """An iterable of classes as a tuple; UsageError in the name of `where` if it is none."""
    if isinstance(value, Iterable):
        entries = tuple(value)
        if all(isinstance(entry, type) for entry in entries):
            return entries
    raise UsageError(f"{where}: expected an iterable of classes of modules, got {shown(value)}")


def as_function(value: Any, where: str) -> Callable[..., Any]:
    """What can be called, as it is; UsageError in the name of `where` if it cannot."""
    if not callable(value):
        raise UsageError(f"{where}: expected a function of a module, got {shown(value)}")
    return value
