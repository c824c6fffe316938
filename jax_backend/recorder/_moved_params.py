"""Gives a perturbed run of a script its own initial parameters, which the script does not know of."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from crossframe.recording.perturbed_runs import perturbed_values
from jax_backend.recorder._params_as_arrays import placed_like
from jax_backend.tree import as_real, is_inexact, path_name


class MovedParams:
    """Arrays of a script, and the arrays that a perturbed run computes with instead.

    In the first step these are its initial parameters. A script that adds updates to its own parameters adds them to those that
    were not moved; the shifts, by which the initial parameters differ, move what follows.

    Args:
        forward_only: nothing is trained, so that parameters whose values have not changed keep their first move.
    """

    def __init__(self, perturbed_run: int, *, forward_only: bool = False) -> None:
        self._perturbed_run, self._forward_only = perturbed_run, forward_only
        self._pairs: dict[int, tuple[Any, Any]] = {}
        self._shifts: dict[str, Any] = {}
        self._initial: dict[str, np.ndarray] = {}

    def move(self, leaf: Any, name: str, *, by_rank: bool = False) -> None:
        """Move a parameter, on all ranks alike, unless it is moved already.

        Args:
            by_rank: it has a leading dim of ranks.
        """
        if id(leaf) in self._pairs or not is_inexact(leaf):
            return
        values = np.asarray(leaf)
        if self._forward_only and name in self._initial and np.array_equal(values, self._initial[name], equal_nan=True):
            moved = leaf  # the model keeps what it was given
        else:
            each = [
                perturbed_values(name, as_real(own), self._perturbed_run) for own in (values if by_rank else [values])
            ]
            moved = placed_like(leaf, np.stack(each) if by_rank else each[0])
            self._initial[name] = np.asarray(moved)
            if np.shape(moved):
                self._shifts[name] = moved - leaf
        self._pairs[id(leaf)] = leaf, moved
        self._pairs[id(moved)] = moved, moved

    def shifted(self, leaf: Any, name: str) -> Any:
        """A parameter that the script has updated by hand, as far from it as it was at the beginning."""
        shift = self._shifts.get(name)
        if shift is None:
            return leaf
        return self.now(leaf) if id(leaf) in self._pairs else leaf + shift

    def note(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Pairs of an array of the script and the array that the run computes with."""
        for leaf, moved in pairs:
            if moved is not leaf:
                self._pairs |= {id(leaf): (leaf, moved), id(moved): (moved, moved)}

    def now(self, leaf: Any) -> Any:
        """What the run computes with instead of an array."""
        return self._pairs[id(leaf)][1] if id(leaf) in self._pairs else leaf

    def replaced(self, tree: Any) -> Any:
        """A pytree with what the run computes with."""
        return jax.tree.map(self.now, tree) if self._pairs else tree

    def originals(self) -> dict[int, Any]:
        """The script's arrays, by the ids of those that the run computes with."""
        return {id(moved): leaf for leaf, moved in self._pairs.values()}

    def shifted_updates(self, updates: Any) -> Any:
        """Updates that lead from the script's own initial parameters to where those of the run lead."""

        def shifted(path: Any, leaf: Any) -> Any:
            if (shift := self._shifts.get(path_name(path))) is None or shift.shape != leaf.shape:
                return leaf
            found = leaf + shift.astype(leaf.dtype)
            self._pairs[id(found)] = found, leaf
            return found

        return jax.tree_util.tree_map_with_path(shifted, updates) if self._shifts else updates

    def end_step(self, *, is_by_hand: bool) -> None:
        """Forget the arrays of a step; parameters that an optimizer has updated are shifted no more."""
        self._pairs.clear()
        if not is_by_hand:
            self._shifts.clear()
