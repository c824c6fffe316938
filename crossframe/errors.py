"""The errors of this project. Every message says what was expected, what was found, where, and what to do."""

LONGEST_MESSAGE = 2000
"""Maximum characters of a message. Longer ones are shortened in the middle, since the advice is at the end."""


class CrossframeError(ValueError):
    """Base of all errors that invalid input or wrong use raises in the core and in both backends."""

    longest_message: int | None = LONGEST_MESSAGE

    def __init__(self, *args: object) -> None:
        most = self.longest_message
        if most and len(args) == 1 and isinstance(args[0], str) and len(args[0]) > most:
            args = (f"{args[0][: most * 2 // 3]} [...] {args[0][-(most // 3 - 7) :]}",)
        super().__init__(*args)


class ParamError(CrossframeError):
    """A parameter whose name, shape or dtype is invalid."""


class ReplacedError(ParamError, RuntimeError):
    """A replacement of a parameter that does not fit (R20, R25). Also a RuntimeError, since torch raises that."""


class MeshError(CrossframeError):
    """An invalid mesh, world size or rank."""


class LayoutError(CrossframeError):
    """Parameters that a layout cannot hold, or an invalid argument of a layout."""


class UnitError(CrossframeError):
    """Units that do not fit the module tree, or parameters that belong to two of them."""


class PlanError(CrossframeError):
    """A step that cannot be planned with these arguments."""


class MappingError(CrossframeError):
    """Names of two frameworks that are not in one-to-one correspondence."""


class RecordingError(CrossframeError):
    """A recording that is missing, cut off or damaged, or that does not have the requested data."""


class UsageError(CrossframeError):
    """Wrong use of a backend or of the command line."""


class FailedRunError(UsageError):
    """A training command that cannot be run, or that failed."""


class WrongTypeError(UsageError, TypeError):
    """An argument of the wrong type. Also a TypeError, since torch raises that."""


class StateDictConfigError(UsageError, RuntimeError):
    """A state dict config for another type of state dict. Also a RuntimeError, since torch raises that."""


class AssertedError(UsageError, AssertionError):
    """Wrong use that torch rejects with an assertion."""


class RunOrderError(UsageError, RuntimeError):
    """A unit that runs before its root. Also a RuntimeError, since torch raises that."""


class AgreementError(CrossframeError, RuntimeError):
    """Ranks that have different models, units or settings."""


class CollectiveError(CrossframeError, RuntimeError):
    """A collective that failed because another rank ended, left the step or timed out. Also a RuntimeError, since
    torch.distributed raises that."""


class StateError(CrossframeError, AssertionError, RuntimeError):
    """A move that the lifecycle does not allow (R12, R18). Also an AssertionError, since torch's FSDP1 raises that."""


class UnsupportedError(CrossframeError, NotImplementedError):
    """An unsupported combination of options, in most cases one that torch rejects too (R23)."""


class StateDictError(CrossframeError, RuntimeError):
    """A state dict of a model or an optimizer that does not fit (R36, R37). Also a RuntimeError, since torch raises that. The
    message lists every name, as in torch."""

    longest_message = None


class InitialisationError(CrossframeError, RuntimeError):
    """A model on the meta device that cannot be initialised to the values of the model built in full (R38)."""
