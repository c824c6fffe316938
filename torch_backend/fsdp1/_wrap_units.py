"""The submodules that an auto-wrap policy makes units, and their wrapping.

`units_to_wrap` only reads the tree: if a policy raises, no module has changed.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from crossframe.errors import UsageError
from crossframe.quoting import quote
from crossframe.unit_assignment import Slot, UnitSpec, assign_units
from torch_backend.compat._dtypes import dtype_name
from torch_backend.modules._ignored import Ignored, IsUnit
from torch_backend.modules._nested_tensors import cast_floating, tensors_in
from torch_backend.wrap import CustomPolicy, Kwargs, ModuleWrapPolicy, name_of, own_policy

# How many classes of a model a warning names.
_NUM_NAMED = 6


def wrap_inside(
    module: nn.Module,
    policy: Any,
    ignored: Ignored,
    is_wrapped: IsUnit,
    wrapper_cls: Callable[..., nn.Module],
    **arguments: Any,
) -> None:
    """Wrap the submodules that a policy selects, with these arguments unless the policy overrides them."""
    mixed = arguments["mixed_precision"]
    targets = units_to_wrap(
        module,
        policy,
        ignored_modules=set(ignored.modules),
        ignored_params=set(ignored.params),
        root_kwargs=arguments | {"ignored_states": ignored.params},
        is_wrapped=is_wrapped,
        mixed_precision_ignores=() if mixed is None else tuple(mixed._module_classes_to_ignore),
    )
    if mixed is not None:
        for inner in module.modules():
            if isinstance(inner, tuple(mixed._module_classes_to_ignore)):
                _compute_in_full(inner)
    wrap_modules(module, targets, wrapper_cls)


def _compute_in_full(module: nn.Module) -> None:
    """Cast the floating-point inputs of a full-precision module to the dtype of its parameters, and its outputs back to the
    inputs' dtype."""
    full = next((param.dtype for param in module.parameters() if param.is_floating_point()), torch.float32)
    came: list[torch.dtype] = []

    def before(_: nn.Module, args: Any) -> Any:
        came.clear()
        came.extend(tensor.dtype for tensor in tensors_in(args) if tensor.is_floating_point() and tensor.dtype != full)
        return cast_floating(args, full)

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        return cast_floating(output, came[-1]) if came else output

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


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
        UserWarning: modules of `mixed_precision_ignores` become units; a ModuleWrapPolicy whose classes no module has; or, with a
        policy object, a unit with original parameters has trained and frozen ones.
    """
    policy = own_policy(policy)
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
            stacklevel=4,
        )
    if isinstance(policy, ModuleWrapPolicy):
        _warn_of_no_match(root, policy)
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


def _warn_of_no_match(root: nn.Module, policy: ModuleWrapPolicy) -> None:
    """Warn of classes that no module has, since the whole model silently becomes one unit."""
    modules = list(root.modules())
    if any(policy.overrides(module) is not None for module in modules):
        return
    found = dict.fromkeys(type(module) for module in modules[1:])
    if policy.classes and found:
        rest = f" and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
        warnings.warn(
            f"ModuleWrapPolicy: no module of the {type(root).__name__} is a {_listed(policy.classes, ' or ')}, so it becomes one "
            "unit, whose parameters are all-gathered together; pass classes that it has: "
            f"{_listed(list(found)[:_NUM_NAMED], ', ')}{rest}",
            stacklevel=5,
        )


def _listed(classes: Iterable[type], separator: str) -> str:
    # With their modules, since the policy may have a class of the same name from another one.
    return separator.join(f"{each.__module__}.{each.__qualname__}" for each in classes)


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
                stacklevel=5,
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
        "expected a ModuleWrapPolicy, a CustomPolicy, or a function of (module, recurse, "
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
        raise UsageError(f"auto_wrap_policy: {how}; got {name_of(policy)}{signature}: {error}") from error


def _truth(answer: Any, policy: Any, module: nn.Module) -> bool:
    """Convert to bool; UsageError for dicts and functions, which are truthy but mistakes here."""
    if not isinstance(answer, dict) and not callable(answer):
        try:
            return bool(answer)
        except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several elements
            pass
    raise UsageError(
        f"auto_wrap_policy: expected {name_of(policy)} to return a bool, got {quote(answer)} for a "
        f"{type(module).__name__}; a unit's own arguments need a CustomPolicy"
    )
