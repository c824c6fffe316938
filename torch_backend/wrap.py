"""Auto-wrap policies, which choose the modules that become units, and wrapping by hand.

The public names are those of torch.distributed.fsdp.wrap. `units_to_wrap` only reads the tree: if a policy raises, no module
has changed.

A policy is one of two things:

- an object, `ModuleWrapPolicy` or `CustomPolicy`, which decides for each module independently;
- a function `policy(module, recurse, nonwrapped_numel) -> bool`, which is called twice for each module: before its children
  (`recurse=True`) to decide whether to visit them, and after them (`recurse=False`) to decide whether to wrap it.
  `nonwrapped_numel` first counts all elements below the module, and then those in no inner unit.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import nn

from crossframe.errors import UnsupportedError, UsageError
from crossframe.quoting import quote
from crossframe.unit_assignment import Slot, UnitSpec, assign_units
from torch_backend.compat._dtypes import dtype_name

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


def units_to_wrap(
    root: nn.Module,
    policy: ModuleWrapPolicy | CustomPolicy | Callable[..., bool],
    *,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    root_kwargs: Kwargs,
    is_wrapped: Callable[[nn.Module], bool],
    mixed_precision_ignores: tuple[type, ...] = (),
) -> dict[nn.Module, Kwargs]:
    """The submodules of `root` that a policy selects, with their arguments, in the order in which to wrap them.

    Args:
        root: the outermost unit, which is always wrapped and not included in the result.
        ignored_modules: modules that are not wrapped. Policy functions do not visit their children; policy objects do, so include
            their descendants.
        ignored_params: parameters that belong to no unit and do not count in `nonwrapped_numel`.
        root_kwargs: the keyword arguments of the root. Each unit gets a copy.
        is_wrapped: whether a module is already a unit.
        mixed_precision_ignores: if `root_kwargs` has a mixed precision, classes whose modules always become separate units with
            `mixed_precision=None`. Policy functions then visit all modules, including forced leaves (as in PyTorch, even without
            such classes).

    Returns:
        (module, arguments), children before parents, each module once.

    Raises:
        UsageError: not a policy, an invalid result of a policy, arguments that the wrapper does not accept, or a tree that
            already has units.
        UnitError: two units would share a parameter. (PyTorch wraps such a tree and silently unties the parameter.)

    Warns:
        UserWarning: modules of `mixed_precision_ignores` become units; or, with a policy object, a unit with original parameters
        has trained and frozen ones.
    """
    _check_not_wrapped(root, is_wrapped)
    mixed = root_kwargs.get("mixed_precision") is not None
    kept = tuple(mixed_precision_ignores) if mixed else ()
    if isinstance(policy, ModuleWrapPolicy | CustomPolicy):
        selected = _select_each(root, policy, ignored_modules, set(root_kwargs), kept)
    else:
        selected = _select_by_asking(root, policy, ignored_modules, ignored_params, kept, mixed)
    units = {module: root_kwargs | overrides for module, overrides in selected.items()}
    in_full = [module for module in units if isinstance(module, kept)]
    for module in in_full:
        units[module]["mixed_precision"] = None
    owners = _assign(root, set(units), ignored_params)
    if in_full_classes := sorted({type(module).__name__ for module in in_full if module is not root}):
        warnings.warn(
            f"with mixed precision and a wrapping policy, modules of the classes {in_full_classes} become units of their "
            "own, which stay in full precision",
            stacklevel=3,
        )
    if isinstance(policy, ModuleWrapPolicy | CustomPolicy):
        _warn_of_frozen(owners, units)
    units.pop(root, None)
    return units


def wrap_modules(root: nn.Module, targets: dict[nn.Module, Kwargs], wrap: Callable[..., nn.Module]) -> None:
    """Replace all registrations of each module of `targets` by `wrap(module, **kwargs)`, in order. Does not replace `root`.

    (PyTorch only replaces the first registration; the others run the module without its wrapper.)
    """
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {module: [] for module in targets}
    for parent in root.modules():
        for attribute, child in parent._modules.items():  # named_children leaves out what is registered twice
            if child in places:
                places[child].append((parent, attribute))
    for module, kwargs in targets.items():
        assert places[module], f"a {type(module).__name__} to wrap is not below the root"
        wrapped = wrap(module, **kwargs)
        for parent, attribute in places[module]:
            setattr(parent, attribute, wrapped)


def _select_each(
    root: nn.Module,
    policy: ModuleWrapPolicy | CustomPolicy,
    ignored: set[nn.Module],
    known: set[str],
    kept: tuple[type, ...],
) -> dict[nn.Module, Kwargs]:
    """The units of a policy object, possibly including the root, with their overriding arguments."""
    answers: dict[nn.Module, Kwargs | None] = {}
    for module in root.modules():  # a user's function sees modules in the order that torch shows them in
        if module in ignored:
            continue
        answers[module] = policy.overrides(module)
        if unknown := [key for key in answers[module] or () if key not in known]:
            raise UsageError(
                f"{type(policy).__name__}: a {type(module).__name__} is to be wrapped with arguments {unknown}; expected "
                f"some of {sorted(known)}"
            )
        if isinstance(module, kept) and answers[module] is None:
            answers[module] = {}
    return {module: found for module in _post_order(root) if (found := answers.get(module)) is not None}


def _select_by_asking(
    root: nn.Module,
    policy: Callable[..., bool],
    ignored: set[nn.Module],
    ignored_params: set[nn.Parameter],
    kept: tuple[type, ...],
    looks_everywhere: bool,
) -> dict[nn.Module, Kwargs]:
    """The units of a policy function, without the root."""
    _check_signature(policy)
    selected: dict[nn.Module, Kwargs] = {}
    in_units: dict[nn.Module, set[nn.Parameter]] = {}  # of each module: the parameters below it in units below or at it

    def ask(module: nn.Module, recurse: bool, params: Iterable[nn.Parameter]) -> bool:
        numel = sum(param.numel() for param in params)
        answer = _truth(policy(module=module, recurse=recurse, nonwrapped_numel=numel), policy, module)
        return answer or (looks_everywhere if recurse else isinstance(module, kept))

    def visit(module: nn.Module) -> set[nn.Parameter]:
        if module in in_units:
            return in_units[module]
        in_units[module] = set()
        params = [param for param in module.parameters() if param not in ignored_params]
        if ask(module, True, params):
            for child in module.children():
                if child not in ignored:
                    in_units[module] |= visit(child)
            rest = (param for param in params if param not in in_units[module])
            if module is not root and ask(module, False, rest):
                selected[module] = {}
                in_units[module] = set(params)
        return in_units[module]

    visit(root)
    return selected


def _post_order(root: nn.Module) -> Iterator[nn.Module]:
    """All modules in post-order, once for each registration."""
    for child in root.children():
        yield from _post_order(child)
    yield root


def _assign(root: nn.Module, units: set[nn.Module], ignored_params: set[nn.Parameter]) -> dict[nn.Module, UnitSpec]:
    """The parameters that each unit would own (R01)."""
    first: dict[nn.Module, str] = {}
    modules: list[str] = []
    slots: list[Slot] = []
    again: list[str] = []  # further names of a unit, whose submodules have been visited
    for name, module in root.named_modules(remove_duplicate=False):
        if any(name == other or name.startswith(f"{other}.") for other in again):
            continue
        if first.setdefault(module, name) != name and module in units:
            again.append(name)
            continue
        modules.append(name)
        for attribute, param in module._parameters.items():
            if param is not None and param not in ignored_params:
                shape, dtype = tuple(param.shape), dtype_name(param.dtype)
                slots.append(Slot(name, attribute, id(param), shape, dtype, param.requires_grad))
    specs = {spec.name: spec for spec in assign_units(modules, slots, [first[unit] for unit in units])}
    return {module: specs[name] for module, name in first.items() if name in specs}


def _warn_of_frozen(owners: dict[nn.Module, UnitSpec], units: dict[nn.Module, Kwargs]) -> None:
    """Warn of units with both trained and frozen original parameters. (Flat parameters raise: R11.)"""
    for module, kwargs in units.items():
        params = owners[module].params if module in owners else ()
        trained = [param.name for param in params if param.requires_grad]
        frozen = [param.name for param in params if not param.requires_grad]
        if kwargs.get("use_orig_params") and trained and frozen:
            numel = sum(param.numel for param in params)
            needed = sum(param.numel for param in params if param.requires_grad)
            warnings.warn(
                f"unit {owners[module].name!r} holds trained parameters {trained} and frozen ones {frozen}: its unsharded "
                f"gradient takes {numel} elements where {needed} would do; wrap the frozen ones in units of their own",
                stacklevel=4,
            )


def _check_not_wrapped(root: nn.Module, is_wrapped: Callable[[nn.Module], bool]) -> None:
    for name, module in root.named_modules():
        if is_wrapped(module):
            raise UsageError(
                f"with a wrapping policy the submodules must not be wrapped yet, but {name!r} is; wrap by policy or by "
                "hand, not both"
            )


def _check_signature(policy: Any) -> None:
    """Raise UsageError unless this is callable with the arguments of a policy function."""
    how = (
        "expected a ModuleWrapPolicy, a CustomPolicy (both of torch_backend.wrap), or a function of (module, recurse, "
        "nonwrapped_numel); bind further arguments by functools.partial"
    )
    if not callable(policy) or isinstance(policy, type | nn.Module):
        raise UsageError(f"auto_wrap_policy: {how}; got {quote(policy)}")
    try:
        signature = inspect.signature(policy)
    except ValueError:  # no signature, as for functions written in C
        return
    try:
        signature.bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError as error:
        raise UsageError(f"auto_wrap_policy: {how}; got {_name_of(policy)}{signature}: {error}") from error


def _truth(answer: Any, policy: Any, module: nn.Module) -> bool:
    """Convert to bool; UsageError for dicts and functions, which are truthy but mistakes here."""
    if not isinstance(answer, dict) and not callable(answer):
        try:
            return bool(answer)
        except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several elements
            pass
    raise UsageError(
        f"auto_wrap_policy: expected {_name_of(policy)} to return a bool, got {quote(answer)} for a "
        f"{type(module).__name__}; a unit's own arguments need a CustomPolicy"
    )


def _name_of(policy: Any) -> str:
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
            f"enable_wrap inside enable_wrap(wrapper_cls={_name_of(_enabled.wrapper_cls)}, ...): one is open already; give "
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
