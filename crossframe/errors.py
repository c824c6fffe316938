"""The errors that a user can meet. Every message says what was expected, what came, where, and what to do."""

LONGEST_MESSAGE = 2000
"""Characters of a message. Longer ones, which quote many or long names, lose their middle: what to do stands at the end."""


class CrossframeError(ValueError):
    """Base of every error that wrong input or wrong use raises here, in the core and in both backends."""

    longest_message: int | None = LONGEST_MESSAGE

    def __init__(self, *args: object) -> None:
        most = self.longest_message
        if most and len(args) == 1 and isinstance(args[0], str) and len(args[0]) > most:
            args = (f"{args[0][: most * 2 // 3]} [...] {args[0][-(most // 3 - 7) :]}",)
        super().__init__(*args)


class ParamError(CrossframeError):
    """A parameter cannot be described or sharded: its name, shape or dtype."""


class ReplacedError(ParamError, RuntimeError):
    """What a user put in the place of a parameter does not fit (R20, R25). Also a RuntimeError, since torch raises that."""


class MeshError(CrossframeError):
    """A mesh, a world size or a rank that does not exist."""


class LayoutError(CrossframeError):
    """A set of parameters that no layout can hold together, or a question that a layout cannot answer."""


class UnitError(CrossframeError):
    """Units that do not fit the module tree, or parameters that belong to two of them."""


class PlanError(CrossframeError):
    """A step that cannot be planned as asked."""


class MappingError(CrossframeError):
    """Names of two frameworks that do not correspond one to one."""


class RecordingError(CrossframeError):
    """A recording that is missing, cut off, damaged, or not what the caller asked for."""


class UsageError(CrossframeError):
    """Wrong use of a backend or of the command line."""


class WrongTypeError(UsageError, TypeError):
    """An argument of another type. Also a TypeError, since torch raises that."""


class StateDictConfigError(UsageError, RuntimeError):
    """A state dict config that belongs to another type of state dict. Also a RuntimeError, since torch raises that."""


class AssertedError(UsageError, AssertionError):
    """Wrong use that torch refuses by an assertion."""


class RunOrderError(UsageError, RuntimeError):
    """A unit that runs before the root that it should run under. Also a RuntimeError, since torch raises that."""


class AgreementError(CrossframeError, RuntimeError):
    """Ranks that were given different models, units or settings."""


class CollectiveError(CrossframeError, RuntimeError):
    """A collective that failed, since another rank ended, left the step, or did not come in time. Also a RuntimeError, since
    torch.distributed raises that."""


class StateError(CrossframeError, AssertionError, RuntimeError):
    """A move that the lifecycle does not allow (R12, R18). Also an AssertionError, since torch's FSDP1 raises that."""


class UnsupportedError(CrossframeError, NotImplementedError):
    """A combination that is refused, as torch refuses it (R23)."""


class NonFiniteError(CrossframeError, RuntimeError):
    """A gradient norm of inf or NaN where a finite one was asked for (R30). Also a RuntimeError, since torch raises that."""


class StateDictError(CrossframeError, RuntimeError):
    """A state dict of a model or an optimizer that does not fit (R36, R37). Also a RuntimeError, since torch raises that.
    It lists every name, as torch does."""

    longest_message = None


class InitialisationError(CrossframeError, RuntimeError):
    """A model on the meta device that cannot be initialised as if it had been built in full (R38)."""
