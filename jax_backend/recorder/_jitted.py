"""Replaces `jax.jit`: a jitted function runs as a program that also returns taps."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_backend.recorder._perturbed_rounding import rounded
from jax_backend.recorder._script_session import JittedFunction, Root, Session, following
from jax_backend.recorder._taps import Detail, Packed, collecting, current, innermost, pack, traced, unpacked

_jit = jax.jit
_DONATED = ("donate_argnums", "donate_argnames")
_STATIC = ("static_argnums", "static_argnames")


class Jitted(JittedFunction):
    """A function of `jax.jit`.

    Args:
        options: of `jax.jit`.
    """

    def __init__(self, fun: Callable, options: dict[str, Any]) -> None:
        super().__init__(fun, _jit(fun, **options), (options.get(name) for name in _DONATED))
        self._options = options
        self._programs: dict[tuple[Detail, bool], Any] = {}
        self._paths: list[str | None] = []

    def program(self, detail: Detail, *, in_loss: bool = False) -> Any:
        """See `JittedFunction`.

        Args:
            in_loss: whether a loss function that is differentiated calls it: its taps are then other ones.
        """
        if (detail, in_loss) not in self._programs:

            @functools.wraps(self._fun)
            def run(*args: Any, **kwargs: Any) -> tuple[Any, Packed]:
                above = innermost()
                assert above is not None

                def own(*args: Any, **kwargs: Any) -> tuple[Any, Packed]:
                    inputs = jax.tree.leaves((args, kwargs))
                    named = zip(inputs, self._paths, strict=len(self._paths) == len(inputs))
                    paths = {id(leaf): path for leaf, path in named if path is not None}
                    collector = traced(above, inputs, paths=paths, detail=detail, is_cached=True)
                    with collecting(collector):
                        result = self._fun(*args, **kwargs)
                    return result, pack(collector.taps, result, collector)

                # Where gradients are taken, the loss function alone is rounded otherwise.
                if isinstance(above, Root) and above.session.forward_only:
                    own = rounded(own)
                return own(*args, **kwargs)

            options = {name: value for name, value in self._options.items() if not detail or name not in _DONATED}
            if "out_shardings" in options:
                options["out_shardings"] = (options["out_shardings"], None)
            self._programs[detail, in_loss] = _jit(run, **options)
        return self._programs[detail, in_loss]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(collector := current(), Root):
            return collector.session.call(self, args, kwargs)
        if (collector := following()) is None:
            return self._plain(*args, **kwargs)
        self._paths = [collector.paths.get(id(leaf)) for leaf in jax.tree.leaves((args, kwargs))]
        result, packed = self.program(collector.detail, in_loss=collector.in_loss)(*args, **kwargs)
        collector.add(unpacked(packed, (args, kwargs), result))
        return result

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """See `jax.jit`."""
        lowered = self._plain.lower(*args, **kwargs)
        if isinstance(collector := current(), Root) and collector.session.follows(self, args, kwargs):
            is_same = not any(self._options.get(name) not in (None, ()) for name in _STATIC)
            return _AheadOfTime(lowered, collector.session, self if is_same else None)
        return lowered


class _AheadOfTime:
    """A lowered or compiled function. The jitted function is called instead, unless it takes other arguments or options.

    Args:
        jitted: the jitted function; None: it takes others.
    """

    def __init__(self, stage: Any, session: Session, jitted: Jitted | None) -> None:
        self._stage, self._session, self._jitted = stage, session, jitted

    def compile(self, *args: Any, **kwargs: Any) -> "_AheadOfTime":
        """See `jax.stages.Lowered`."""
        jitted = None if any(map(bool, (*args, *kwargs.values()))) else self._jitted
        return _AheadOfTime(self._stage.compile(*args, **kwargs), self._session, jitted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._jitted is not None:
            return self._jitted(*args, **kwargs)
        self._session.compiled()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


def jit(fun: Any = None, /, **options: Any) -> Any:
    """`jax.jit`."""
    if fun is None:
        return functools.partial(jit, **options)
    return Jitted(fun, options) if callable(fun) else _jit(fun, **options)
