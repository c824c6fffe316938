"""Which modules become units: auto-wrap policies."""

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from crossframe.errors import UsageError


class ModuleWrapPolicy:
    """Every module of one of these classes becomes a unit.

    Raises:
        UsageError: something other than module classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._classes = tuple(module_classes)
        for entry in self._classes:
            if not (isinstance(entry, type) and issubclass(entry, nn.Module)):
                raise UsageError(f"ModuleWrapPolicy: expected classes of modules, got {entry!r}")

    def __call__(self, module: nn.Module, recurse: bool, *args: object, **kwargs: object) -> bool:
        """Whether to look inside `module` (`recurse`), or to wrap it."""
        return True if recurse else isinstance(module, self._classes)

    def __repr__(self) -> str:
        """The classes by name."""
        return f"ModuleWrapPolicy({{{', '.join(entry.__name__ for entry in self._classes)}}})"


def modules_to_wrap(root: nn.Module, policy: ModuleWrapPolicy) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, attribute, child) for every module that the policy makes a unit, children before their parents.

    The root itself is not among them: it becomes the outermost unit. A module registered in several places comes with each.
    """
    for attribute, child in root._modules.items():  # named_children leaves out what is registered twice
        if child is None:
            continue
        yield from modules_to_wrap(child, policy)
        if policy(child, recurse=False):
            yield root, attribute, child


def wrap_children(root: nn.Module, policy: ModuleWrapPolicy, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Replace every module that the policy selects by `wrap(module)`, the same one wherever it is registered."""
    wrapped: dict[nn.Module, nn.Module] = {}
    for parent, attribute, child in list(modules_to_wrap(root, policy)):
        if child not in wrapped:
            wrapped[child] = wrap(child)
        setattr(parent, attribute, wrapped[child])
