"""Auto-wrap policies, which choose the modules that become units, and wrapping by hand.

The names are those of torch.distributed.fsdp.wrap.

A policy is one of two things:

- an object, `ModuleWrapPolicy` or `CustomPolicy`, which decides for each module independently;
- a function `policy(module, recurse, nonwrapped_numel) -> bool`, which is called twice for each module: before its children
  (`recurse=True`) to decide whether to visit them, and after them (`recurse=False`) to decide whether to wrap it.
  `nonwrapped_numel` first counts all elements below the module, and then those in no inner unit.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import nn

from crossframe.errors import UnsupportedError, UsageError
from crossframe.quoting import quote

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

Kwargs = dict[str, Any]

_TORCH = "torch.distributed.fsdp.wrap"


class ModuleWrapPolicy:
    """Wraps all modules of these classes with the arguments of the root. Can also be called as a policy function.

    Raises:
        UsageError: something other than an iterable of classes.

    >>> policy = ModuleWrapPolicy({nn.Linear})
    >>> policy(nn.Linear(2, 2), recurse=False), policy(nn.ReLU(), recurse=False)
    (True, False)
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._classes = as_classes(module_classes, "ModuleWrapPolicy: module_classes")

    @property
    def classes(self) -> tuple[type, ...]:
        """The classes whose modules become units."""
        return self._classes

    def overrides(self, module: nn.Module) -> Kwargs | None:
        """{} for a unit; None for other modules."""
        return {} if isinstance(module, self._classes) else None

    def __call__(self, module: nn.Module, recurse: bool, *args: object, **kwargs: object) -> bool:
        """Whether to visit the children of `module` (`recurse`), or to wrap it."""
        return True if recurse else isinstance(module, self._classes)

    def __repr__(self) -> str:
        """The names of the classes."""
        return f"ModuleWrapPolicy({{{', '.join(entry.__name__ for entry in self._classes)}}})"


class CustomPolicy:
    """Wraps the modules that a function selects, optionally with other arguments.

    Args:
        lambda_fn: maps a module to False or {} (not wrapped), True (wrapped with the arguments of the root), or a dict of
            overriding arguments.

    Raises:
        UsageError: not callable; when the policy is applied, a result of another type.

    >>> policy = CustomPolicy(lambda module: {"use_orig_params": True} if isinstance(module, nn.Linear) else False)
    >>> policy.overrides(nn.Linear(2, 2))
    {'use_orig_params': True}
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Kwargs]) -> None:
        self._lambda_fn = as_function(lambda_fn, "CustomPolicy: lambda_fn")

    def overrides(self, module: nn.Module) -> Kwargs | None:
        """The overriding arguments of a unit; None for other modules."""
        answer = self._lambda_fn(module)
        if not isinstance(answer, bool | dict):
            raise UsageError(
                f"CustomPolicy: expected lambda_fn to return True, False or a dict of arguments, got {quote(answer)} for "
                f"a {type(module).__name__}"
            )
        if not answer:
            return None
        return {} if answer is True else dict(answer)  # type: ignore[arg-type]


def own_policy(policy: Any) -> Any:
    """A policy of torch.distributed.fsdp.wrap as one of this module; any other policy as it is."""
    name = f"{type(policy).__module__}.{type(policy).__name__}"
    if name == f"{_TORCH}.CustomPolicy":
        return CustomPolicy(policy._lambda_fn)
    return ModuleWrapPolicy(policy._module_classes) if name == f"{_TORCH}.ModuleWrapPolicy" else policy


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """Policy that wraps every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Policy that wraps a module if `lambda_fn(module)`. Bind `lambda_fn` with `functools.partial`.

    >>> lambda_auto_wrap_policy(nn.ReLU(), recurse=False, nonwrapped_numel=0, lambda_fn=lambda m: m.training)
    True
    """
    return True if recurse else as_function(lambda_fn, "lambda_auto_wrap_policy: lambda_fn")(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """Policy that wraps modules of the classes `transformer_layer_cls`, like `ModuleWrapPolicy`. Bind it with
    `functools.partial`.

    Other modules that share a parameter, such as embedding and head of a transformer, stay in one unit.
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
    """Policy that wraps a module if at least `min_num_params` elements below it are in no inner unit.

    Args:
        min_num_params: the number of elements, not of parameters.
        force_leaf_modules: classes whose children are not visited and that are not wrapped. Default: the attribute
            `size_based_auto_wrap_policy.FORCE_LEAF_MODULES` (attention).
        exclude_wrap_modules: classes whose children are visited but that are not wrapped. Default: the attribute
            `size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES` (containers without a forward).

    Raises:
        UsageError: a `min_num_params` that is not a number, or values that are not classes.

    >>> size_based_auto_wrap_policy(nn.Linear(3, 2), recurse=False, nonwrapped_numel=8, min_num_params=8)
    True
    """
    if not isinstance(min_num_params, Real):
        raise UsageError(
            f"size_based_auto_wrap_policy: expected a number of elements as min_num_params, got {quote(min_num_params)}"
        )
    if recurse:
        name, given, default = "force_leaf_modules", force_leaf_modules, FORCE_LEAF_MODULES
    else:
        name, given, default = "exclude_wrap_modules", exclude_wrap_modules, EXCLUDE_WRAP_MODULES
    classes = getattr(size_based_auto_wrap_policy, default) if given is None else given
    excepted = isinstance(module, as_classes(classes, f"size_based_auto_wrap_policy: {name}"))
    return nonwrapped_numel >= min_num_params and not excepted


# Public attributes in PyTorch, which users read and change.
FORCE_LEAF_MODULES, EXCLUDE_WRAP_MODULES = "FORCE_LEAF_MODULES", "EXCLUDE_WRAP_MODULES"
setattr(size_based_auto_wrap_policy, FORCE_LEAF_MODULES, {nn.MultiheadAttention})
setattr(size_based_auto_wrap_policy, EXCLUDE_WRAP_MODULES, {nn.ModuleList, nn.ModuleDict})


def as_classes(value: Any, where: str) -> tuple[type, ...]:
    """Convert an iterable of classes to a tuple; UsageError with the prefix `where` for other values."""
    if isinstance(value, Iterable):
        entries = tuple(value)
        if all(isinstance(entry, type) for entry in entries):
            return entries
    raise UsageError(f"{where}: expected an iterable of classes of modules, got {quote(value)}")


def as_function(value: Any, where: str) -> Callable[..., Any]:
    """Return a callable; UsageError with the prefix `where` for other values."""
    if not callable(value):
        raise UsageError(f"{where}: expected a function of a module, got {quote(value)}")
    return value


def name_of(policy: Any) -> str:
    """The name of a policy function or a wrapper, also of one bound with `functools.partial`."""
    return getattr(getattr(policy, "func", policy), "__name__", type(policy).__name__)


@dataclass(frozen=True)
class _Enabled:
    """The active `enable_wrap` options."""

    wrapper_cls: Callable[..., nn.Module]
    kwargs: Kwargs


_enabled: _Enabled | None = None


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """A context in which `wrap(module)` is `wrapper_cls(module, **wrapper_kwargs)`.

    Use it to shard a large model layer by layer during construction, so that the full model never exists.

    Raises:
        UsageError: a `wrapper_cls` that is not callable.
        UnsupportedError: inside another `enable_wrap`, in any thread.

    >>> with enable_wrap(wrapper_cls=nn.Sequential):
    ...     wrap(nn.ReLU())
    Sequential(
      (0): ReLU()
    )
    >>> wrap(nn.ReLU())
    ReLU()
    """
    global _enabled
    if not callable(wrapper_cls):
        raise UsageError(f"enable_wrap: expected a class or a function as wrapper_cls, got {quote(wrapper_cls)}")
    if _enabled is not None:
        raise UnsupportedError(
            f"enable_wrap inside enable_wrap(wrapper_cls={name_of(_enabled.wrapper_cls)}, ...): one is open already; give "
            "what differs to wrap(module, ...)"
        )
    _enabled = _Enabled(wrapper_cls, wrapper_kwargs)
    try:
        yield
    finally:
        _enabled = None


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module as the enclosing `enable_wrap` specifies; outside of one, return the module.

    Args:
        wrap_overrides: arguments that override those of `enable_wrap`.
    """
    if _enabled is None:
        return module
    if "wrapper_cls" in wrap_overrides:
        raise UsageError("wrap: wrapper_cls is an argument of enable_wrap; call the other wrapper itself")
    return _enabled.wrapper_cls(module, **_enabled.kwargs | wrap_overrides)
