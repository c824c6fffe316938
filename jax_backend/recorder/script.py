"""Records an unchanged training script. `crossframe record SCRIPT` starts `main` in a process.

With `forward_only`, each call of a model of flax or equinox is a step (`_model_calls.py`), and nothing is trained.

The script's calls of `jax.jit`, `jax.value_and_grad`, `jax.grad` and optax are followed. The parameters are what an optimizer of
optax updates, and the loss is that of the gradients of their shapes. A step ends when `optax.apply_updates` adds the updates, or
where the next one begins ([Note: updates that optax does not add] in `_script_turns.py`). Without an optimizer the parameters are
the arrays at which gradients are taken ([Note: updates by hand] in `_updates_by_hand.py`). The batch is what the step, or else
the loss function, is called with besides parameters, state and random keys.

[Note: what a recorded script runs] A jitted function that takes a gradient or updates parameters runs as a program that also
returns the loss, at every step. At recorded steps another program runs before it on the same arguments, which returns all that is
recorded and takes as long again. So the script gets the same bits whichever steps are recorded.
"""

import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

import crossframe.scripts
from crossframe.errors import UsageError
from crossframe.operators import Request
from crossframe.recording import Schedule
from crossframe.recording.known_settings import BY_HAND, GRADIENT_NORM, LOSSES, NOT_RECORDED, UPDATES
from crossframe.recording.perturbed_runs import perturbed_run_number
from crossframe.recording.program import GRADIENTS, PROGRAM
from crossframe.scripts import run_script
from jax_backend.recorder._array_interior import may_be_batch
from jax_backend.recorder._forward_steps import USE_FORWARD, ForwardSteps
from jax_backend.recorder._late_variables import settings_of_script
from jax_backend.recorder._manifest import program
from jax_backend.recorder._model_calls import following_models
from jax_backend.recorder._model_state import carried
from jax_backend.recorder._module_calls import canonical_module
from jax_backend.recorder._moved_params import MovedParams
from jax_backend.recorder._operator_trace import OperatorTrace
from jax_backend.recorder._optimizer_settings import noted
from jax_backend.recorder._params_as_shards import frozen_names, names_by_path
from jax_backend.recorder._patches import Patches
from jax_backend.recorder._recorder import Recorder
from jax_backend.recorder._script_batch import arrays_named_in, batch_arguments, samples_of_all_ranks
from jax_backend.recorder._script_session import Differentiated, JittedFunction, Root
from jax_backend.recorder._script_steps import Steps
from jax_backend.recorder._script_turns import USE_RECORDER
from jax_backend.recorder._taps import (
    BY_REFERENCE,
    FORWARD,
    GRADIENT,
    UPDATE,
    Detail,
    Packed,
    PackedTap,
    Tap,
    Value,
    collecting,
    merged,
    unpacked,
)
from jax_backend.recorder._updates_by_hand import check_scans, optimizer_state_arguments
from jax_backend.shards._sharded_params import ShardedParams
from jax_backend.tree import path_name

_MOST_BYTES = 4 * 2**30
"""The largest result of a program for the steps inside of it."""
_NOTICE_SECONDS = 60.0
"""When a script that has not trained so far is told what to add."""


@dataclass(frozen=True)
class Plan:
    """A jitted function as it is known before it runs. Arguments are known by their index in the flattened arguments.

    Attributes:
        kinds: kinds of its taps, in order.
        num_steps: the number of steps that one call makes.
        is_incomplete: whether recorded steps need a program with more detail.
        params: names of the arguments that are parameters.
        gradients: the arguments at which each gradient is taken, by names.
        batch: the arguments that are the batch.
        by_rank: the arguments that have a leading dim of ranks.
        lengths: of the scans in which its first gradient is taken.
        state: (index of the argument, index of the result) of state of the model that is no parameter, by path.
    """

    kinds: tuple[str, ...]
    num_steps: int
    is_incomplete: bool
    params: dict[int, str]
    gradients: tuple[dict[str, int], ...]
    batch: tuple[int, ...]
    by_rank: frozenset[int]
    lengths: tuple[int, ...]
    state: Mapping[str, tuple[int, int]]


class ScriptRecorder:
    """Follows a running script, and records it.

    Args:
        directory, options: of `Recorder`.
        stop_after: number of steps after which the script ends as by `sys.exit()`; None: it runs to its end.
    """

    def __init__(self, directory: str | Path, *, stop_after: int | None = None, **options: Any) -> None:
        self._stop_after = stop_after
        self.perturbed_run = perturbed_run_number(options.pop("perturbed_run", None))
        self.forward_only = options.pop("forward_only", False)
        self._directory, self._options = directory, options
        self._schedule = Schedule(options.get("dense", 2), options.get("every", 100), tuple(options.get("windows", ())))
        request = Request.from_environment()
        # The run is repeated for the operators of one step; its recording does not matter.
        self._request, self._trace = request, None if request is None else OperatorTrace(request)
        begin = self._begin if request is None else None
        self._training = None if self.forward_only else Steps(begin, self._stepped)
        self._steps = self._training or ForwardSteps(begin, self._stepped)
        self._moved = MovedParams(self.perturbed_run, forward_only=self.forward_only)
        self._returned: tuple[Value, ...] = ()
        self._places: dict[str, int] = {}
        self._patches, self._root = Patches(forward_only=self.forward_only), Root(self)
        self._hidden: set[str] = set()
        self._is_compiled = True
        self._num_gradients = 0
        self._num_models_at_once = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the script runs."""
        models = following_models() if self.forward_only else nullcontext()
        notice = threading.Timer(_NOTICE_SECONDS, self._notice)
        notice.daemon = True
        notice.start()
        try:
            with settings_of_script(), self._patches, models, collecting(self._root):
                yield
        finally:
            notice.cancel()

    def _notice(self) -> None:
        """Say what to add, if nothing has been recorded so far."""
        if not self._num_gradients and not self._steps.number:
            so_far = f"crossframe: nothing to record in the first {_NOTICE_SECONDS:.0f} seconds (the script goes on): "
            print(so_far + self._why_nothing(), file=sys.stderr, flush=True)

    def finish(self, error: BaseException | None = None) -> None:
        """End the recording, unless the script failed.

        Raises:
            UsageError: the script succeeded without training.
        """
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._end_last_step()
        if self._trace is not None:
            self._trace.end()
        if self._steps.recorder is not None:
            self._steps.recorder.__exit__(type(error) if error else None, error, None)
        elif error is None:
            raise UsageError(self._why_nothing())

    def _why_nothing(self) -> str:
        if self._hidden:
            return self._about_hidden()
        if self.forward_only:
            return f"no model of flax or equinox with parameters was called; if the model is made of functions, {USE_FORWARD}"
        what = "jax.jit did not see gradients of jax.grad or jax.value_and_grad (a jax.vmap around them is followed inside of it)"
        if self._num_gradients:
            what = (
                "no optimizer of optax is used, and no gradients of jax.grad or jax.value_and_grad were taken again of arrays "
                "that are given to the jitted function and have changed (a jax.vmap around them is followed inside of jax.jit, "
                "and if it maps the arrays by their first dims)"
            )
            if noted.has_optimizer:
                what = (
                    "the script has made an optimizer of optax, which never updated parameters with gradients of jax.grad or "
                    "jax.value_and_grad (if it does not use this optimizer, let it not make it)"
                )
        return (
            f"nothing was trained that can be followed: {what}. Processes that the script starts by itself are not followed; "
            f"{USE_RECORDER}"
        )

    def _about_hidden(self) -> str:
        if self.forward_only:
            return (
                "a model is called where its values cannot leave (inside jax.grad, jax.pmap, jax.checkpoint, jax.lax.cond, "
                "while_loop, or fori_loop with bounds that are no numbers); call it outside, or in jax.lax.scan, or "
                f"{USE_FORWARD}"
            )
        return (
            f"an optimizer of optax was used inside a function whose values cannot leave it ({', '.join(sorted(self._hidden))} "
            "inside jax.lax.cond, while_loop, jax.checkpoint, a fori_loop with bounds that are no numbers, a jax.vmap outside of "
            "jax.jit or of parameters by other dims than the first, or a jax.pmap of several processes, inside jax.jit, or with "
            f"axes other than 0 and None); move it out of there (jax.lax.scan is followed), or {USE_RECORDER}"
        )

    # The script calls

    def call(self, jitted: JittedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a jitted function of the script."""
        self._patches.libraries()
        plan = self._plan(jitted, args, kwargs)
        if not plan.kinds:
            return jitted.program(Detail.LOSSES)(*args, **kwargs)[0]
        leaves, structure = jax.tree.flatten((args, kwargs))
        own = list(leaves)
        names = {i: name for params in plan.gradients for name, i in params.items()}
        moved_at = {i: self._moved_by_hand(leaves[i], name) for i, name in names.items()}
        for params in plan.gradients:
            self._begin_gradient({name: Value(moved_at[i], i in plan.by_rank) for name, i in params.items()}, jitted)
        self._moved.note((leaves[i], moved) for i, moved in moved_at.items())
        if self.perturbed_run and (self._steps.number == 0 or self.forward_only or self._is_by_hand):
            for i, name in plan.params.items():
                self._move(leaves[i], name, by_rank=i in plan.by_rank)
            leaves = [self._moved.now(leaf) for leaf in leaves]
            args, kwargs = jax.tree.unflatten(structure, leaves)
        at = [i for i in plan.batch if not self._is_of_model(own[i])]
        if GRADIENT in plan.kinds:
            is_batch = {id(leaf) for leaf in self._begin_batch([own[i] for i in at], (args, kwargs))}
            at = [i for i in at if id(own[i]) in is_batch]
        steps = range(self._steps.number, self._steps.number + max(plan.num_steps, 1))
        if self._trace is not None:
            return self._traced(jitted, args, kwargs, steps)
        is_dense = any(map(self._is_dense, steps))
        copy = _copied if jitted.donates else lambda leaf: leaf
        kept = {i: _copied(leaves[i]) for i in plan.params} if is_dense or self._steps.number == 0 else {}
        state = plan.state if len(steps) == 1 and self._records_state(steps.start) else {}
        own_state = {i: copy(leaves[i]) for i, _ in state.values()}
        batch = [samples_of_all_ranks(leaves[i], plan.lengths) if i in plan.by_rank else copy(leaves[i]) for i in at]
        self._note_copies(batch, [own[i] for i in at])
        given = [kept.get(i, leaf) for i, leaf in enumerate(leaves)]
        originals = {id(leaf): its for leaf, its in zip(given, own, strict=True) if leaf is not its}
        more: list[Tap] | None = None
        if (is_dense and {GRADIENT, FORWARD} & {*plan.kinds}) or (
            plan.is_incomplete and any(map(self._records, steps))
        ):
            program = jitted.program(Detail.INTERIOR if is_dense else Detail.VALUES)
            if len(steps) > 1:
                _check_size(program.eval_shape(*args, **kwargs)[1], len(steps))
            result, packed = program(*args, **kwargs)
            more = unpacked(packed, given, result)
        result, packed = jitted.program(Detail.LOSSES)(*args, **kwargs)
        mapped = jitted.results_by_rank(result)
        returned = [Value(leaf, i in mapped) for i, leaf in enumerate(jax.tree.leaves(result))]
        if UPDATE in plan.kinds or self._is_by_hand:
            self._returned = tuple(returned)
            if self._training is not None:
                self._training.note_returned(self._returned)
        if state:  # which the next step may donate
            before = {path: Value(own_state[i], i in plan.by_rank) for path, (i, _) in state.items()}
            after = {path: replace(returned[j], array=copy(returned[j].array)) for path, (_, j) in state.items()}
            self._note_state(before, after)
        taps = unpacked(packed, given, result)
        self._add(taps if more is None else merged(taps, more), batch, originals)
        if self._training is not None:
            for i, j in packed.passed:
                self._training.follow(own[i], returned[j].array)
        return result

    def _records(self, step: int) -> bool:
        """Whether the tensors of a step are recorded."""
        return self._is_dense(step) or self._schedule.records(step, None)

    def _records_state(self, step: int) -> bool:
        """Whether state of the model that is no parameter is recorded at a step."""
        return self._trace is None and self._records(step)

    def _note_state(self, before: Mapping[str, Value], after: Mapping[str, Value]) -> None:
        assert self._training is not None
        self._training.note_state(before, after)

    def _traced(self, jitted: JittedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], steps: range) -> Any:
        assert self._trace is not None and self._request is not None
        if len(steps) > 1 and self._request.step in steps:
            raise UsageError(
                f"step {self._request.step} runs inside a jax.lax.scan over {len(steps)} steps, where its operators cannot be "
                "told apart; let the script call one step at a time"
            )
        self._trace.begin_step(steps.start)
        # Its operators know their modules.
        program = jitted.program(Detail.INTERIOR if self._trace.active else Detail.LOSSES)
        result, packed = program(*args, **kwargs)
        self._add(unpacked(packed, (args, kwargs), result), [])
        return result

    def gradient(self, step: Differentiated, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a differentiated function outside of jit."""
        self._patches.libraries()
        leaves = jax.tree_util.tree_flatten_with_path(step.diff(args))[0]
        moved_params = [self._moved_by_hand(leaf, path_name(path)) for path, leaf in leaves]
        found = None
        if step.is_vjp and self._trace is not None:  # whose steps have begun when their operators run
            if not step.takes_gradient(args, kwargs):
                return step.plain(args, kwargs)[0]
        elif step.is_vjp:
            self._moved.note((leaf, moved) for (_, leaf), moved in zip(leaves, moved_params, strict=True))
            if self.perturbed_run and self._steps.number == 0:
                for path, leaf in leaves:
                    self._move(leaf, path_name(path))
            found = step.plain(self.replaced(args), self.replaced(kwargs))
            if found[1] is None:
                return found[0]
        self._is_compiled = False
        params = {path_name(path): Value(moved) for (path, _), moved in zip(leaves, moved_params, strict=True)}
        self._begin_gradient(params, getattr(step.fun, "__code__", id(step.fun)))
        if self._training is not None:
            self._training.note_returned(())
        self._moved.note((leaf, moved) for (_, leaf), moved in zip(leaves, moved_params, strict=True))
        if self.perturbed_run and (self._steps.number == 0 or self._is_by_hand):
            for path, leaf in leaves:
                self._move(leaf, path_name(path))
            args, kwargs = self.replaced(args), self.replaced(kwargs)
        own = {id(self._moved.now(leaf)) for _, leaf in leaves}
        before = jax.tree.leaves((args, kwargs))
        if self._trace is not None:
            self._trace.begin_step(self._steps.number)
        result, tap = found or step.plain(args, kwargs)
        state = carried(args, kwargs, result, {i for i, leaf in enumerate(before) if id(leaf) in own})
        own |= {id(before[i]) for i, _ in state.values()}
        given, named = (
            [leaf for leaf in each if id(leaf) not in own and may_be_batch(leaf) and not self._is_of_model(leaf)]
            for each in (before, jax.tree.leaves(arrays_named_in(step.fun)))
        )
        batch = self._begin_batch(given or named, (args, kwargs))
        if self._records_state(self._steps.number):
            after = jax.tree.leaves(result)
            self._note_state(
                {path: Value(before[i]) for path, (i, _) in state.items()},
                {path: Value(after[j]) for path, (_, j) in state.items()},
            )
        if self._trace is None and self._is_dense(self._steps.number):
            with_interior = step.with_interior(args, kwargs)[1]
            tap = merged([tap], [with_interior])[0]
        self._add([tap], batch, self._moved.originals())
        return result

    def begins_call(self, params: Mapping[str, Any]) -> Detail:
        """A model with these parameters is called outside of jit; returns what is wanted of it."""
        self._patches.libraries()
        if self.perturbed_run:
            for name, leaf in params.items():
                self._move(leaf, name)
        self._is_compiled = False
        if self._trace is not None:
            self._trace.begin_step(self._steps.number)
        return Detail.INTERIOR if self._is_dense(self._steps.number) else Detail.LOSSES

    def replaced(self, tree: Any) -> Any:
        """A pytree with the initial parameters of this run."""
        return self._moved.replaced(tree)

    def shifted(self, updates: Any) -> Any:
        """Updates that lead from a script's own initial parameters to where those of a perturbed run lead."""
        return self._moved.shifted_updates(updates)

    def follows(self, jitted: JittedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a jitted function takes gradients or updates parameters."""
        self._patches.libraries()
        return bool(self._plan(jitted, args, kwargs).kinds)

    def compiled(self) -> None:
        """Refuse a step that was compiled ahead of time."""
        raise UsageError(
            "a function that takes gradients or updates parameters was compiled ahead of time (lower and compile) with static "
            f"arguments or compiler options, and what it computes cannot be seen; let the script call the jitted function, or "
            f"{USE_RECORDER}"
        )

    def mapped(self) -> None:
        """Refuse an optimizer inside a jax.pmap that cannot be followed."""
        if self._hidden:
            raise UsageError(self._about_hidden())

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were taken so far."""
        return self._num_gradients > 0

    def hidden(self, what: str) -> None:
        """A function of an optimizer was traced where its values cannot leave."""
        self._hidden.add(what)

    def first_of(self, num_models: int) -> None:
        """Say once that one of several models is recorded."""
        if num_models > 1 and not self._num_models_at_once:
            self._num_models_at_once = num_models
            print(
                f"crossframe: jax.vmap trains {num_models} models; the first is recorded", file=sys.stderr, flush=True
            )

    def tapped(self, taps: list[Tap]) -> None:
        """Taps outside of jit."""
        self._add(taps, [])

    def _is_dense(self, step: int) -> bool:
        """Whether the interior of a step is recorded. A monitor opens windows of the recorder."""
        recorder = self._steps.recorder
        return self._schedule.is_dense(step) if recorder is None else recorder.is_dense(step)

    def _is_of_model(self, leaf: Any) -> bool:
        """Whether an array is of one of several models, and so of no batch."""
        return self._training is not None and self._training.has(leaf)

    @property
    def _is_by_hand(self) -> bool:
        """Whether the script updates its parameters without an optimizer."""
        return self._training is not None and self._training.are_by_hand

    def _is_updated(self, leaf: Any) -> bool:
        """Whether an array is of one of several models, which has had its turn in the first step."""
        return self._training is not None and self._training.has_updated(leaf)

    def _add(
        self, taps: Sequence[Tap], batch: Sequence[Any], originals: Mapping[int, Any] = MappingProxyType({})
    ) -> None:
        self._num_gradients += sum(tap.kind == GRADIENT for tap in taps)
        self._steps.add(taps, batch, originals)
        self._stop_if_due()

    def _begin_gradient(self, params: Mapping[str, Value], function: Any) -> None:
        """A gradient is about to be taken at these parameters by a function."""
        if self._training is None:
            return
        at = {id(value.array): i for i, value in enumerate(self._returned)}
        self._places = {name: at[id(value.array)] for name, value in params.items() if id(value.array) in at}
        self._training.begin_gradient(params, function)
        self._stop_if_due()

    def _begin_batch(self, arrays: Sequence[Any], given: Any) -> Sequence[Any]:
        """A gradient is about to be taken of a function that gets these arguments; returns those of its arrays that are the
        batch."""
        if self._training is None:
            return arrays
        found = self._training.begin_batch(arrays, given)
        self._stop_if_due()
        return found

    def _note_copies(self, copies: Sequence[Any], arrays: Sequence[Any]) -> None:
        if self._training is not None:
            self._training.constants.note_copies(copies, arrays)

    def _end_last_step(self) -> None:
        """End the last step, which may return its parameters where earlier steps returned theirs."""
        if self._training is not None:
            found = {name: self._returned[i] for name, i in self._places.items() if i < len(self._returned)}
            self._training.end(found)

    def _stop_if_due(self) -> None:
        if self._stop_after is not None and self._steps.number >= self._stop_after:
            raise SystemExit

    # Before a jitted function runs

    def _plan(self, jitted: JittedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        leaves, structure = jax.tree.flatten((args, kwargs))
        # What is no number selects a program, if the argument is static.
        static = tuple((i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, bool | str))
        if (structure, static) not in jitted.plans:
            jitted.plans[structure, static] = self._new_plan(jitted, args, kwargs)
        return jitted.plans[structure, static]

    def _new_plan(self, jitted: JittedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        before = set(self._hidden)
        result, packed = jitted.program(Detail.LOSSES).eval_shape(*args, **kwargs)
        kinds = tuple(tap.kind for tap in packed.taps)
        check_scans(packed.taps)
        references = [each for tap in packed.taps for each in tap.references]
        if self._hidden - before and not {UPDATE, FORWARD} & {*kinds}:
            raise UsageError(self._about_hidden())
        params: dict[int, str] = {}
        for what in ("before", "diff", "params"):
            if not params:
                params = _referred(packed, what)
        known = set(params) | {reference[1] for _, reference in references if reference[0] == "in"}
        is_incomplete = any(reference[0] == "missing" and name not in BY_REFERENCE for name, reference in references)
        by_rank = jitted.by_rank(args, kwargs)
        batch = batch_arguments(args, kwargs, result, known, by_rank) if GRADIENT in kinds else ()
        gradients = tuple(_arguments(tap, "diff") for tap in packed.taps if tap.kind == GRADIENT)
        lengths = next((tuple(scan.length for scan in tap.scans) for tap in packed.taps if tap.kind == GRADIENT), ())
        if GRADIENT in kinds and not any(gradients):
            gradients = ({name: i for i, name in params.items()},)
        number = self._steps.number_in(packed.taps)
        of_optimizer = optimizer_state_arguments((args, kwargs), params) if self._is_by_hand else set[int]()
        left_out = known | {*batch} | of_optimizer
        state = carried(args, kwargs, result, left_out) if {GRADIENT, UPDATE} & {*kinds} else {}
        return Plan(kinds, number, is_incomplete, params, gradients, batch, by_rank, lengths, state)

    def _move(self, leaf: Any, name: str, *, by_rank: bool = False) -> None:
        """Give a perturbed run its own initial value of a parameter, on all ranks alike."""
        if (self.forward_only or not self._steps.number) and not self._is_updated(leaf):
            self._moved.move(leaf, name, by_rank=by_rank)

    def _moved_by_hand(self, leaf: Any, name: str) -> Any:
        """A parameter in a perturbed run of a script that adds gradients to its own parameters, which are not moved."""
        if not self._is_by_hand or any(leaf is value.array for value in self._returned):
            return leaf
        return self._moved.shifted(leaf, name)

    # Steps

    def _begin(
        self, params: Any, dtype: str | None, num_gradients: int | None = None, several: bool = False
    ) -> Recorder:
        """Make the recorder.

        Args:
            params: ShardedParams, or by name.
        """
        is_sharded = isinstance(params, ShardedParams)
        names = names_by_path(params.tree) if is_sharded else {name: [name] for name in params}
        stated: dict[str, Any] = {} if self.forward_only else noted.settings(names)
        options: dict[str, Any] = {"dtype": dtype, **self._options}
        described = self._root.described
        stated[PROGRAM] = program(compiled=self._is_compiled, mode=described.mode)
        if num_gradients is not None:  # not of forward alone
            stated[PROGRAM][GRADIENTS] = num_gradients
        if self._training is not None and self._training.are_unseen:
            stated[LOSSES] = GRADIENT_NORM
        if self._is_by_hand and not self.forward_only:
            stated[UPDATES] = BY_HAND
        if is_sharded and (frozen := frozen_names(params.tree)):
            stated[NOT_RECORDED] = frozen
        settings = stated | dict(options.pop("settings", None) or {})
        options.setdefault("strategy", described.strategy)
        recorder = Recorder(
            self._directory,
            params,
            perturbed_run=self.perturbed_run,
            learning_rate=stated.get("lr"),
            settings=settings,
            forward_only=self.forward_only,
            **options,
        ).__enter__()
        if self.perturbed_run:
            recorder.began_with(params)
        if not several:  # those of the first model, whose names it has
            paths = tuple(names) if is_sharded else described.paths
            for raw, text in described.modules.items():
                path = canonical_module(raw, paths, names)
                recorder.modules[recorder.module_names.get(path, path) or "(root)"] = text
        return recorder

    def _stepped(self, loss: Any) -> None:
        self._moved.end_step(is_by_hand=self._is_by_hand)
        if self._trace is not None and self._trace.active:
            self._trace.finish(loss)


def _check_size(packed: Packed, num_steps: int) -> None:
    """Raise UsageError if a program returns too much of the steps inside of it."""
    num_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in packed.arrays)
    if num_bytes > _MOST_BYTES:
        raise UsageError(
            f"{num_steps} steps run inside one call, and what is recorded of them takes {num_bytes / 2**30:.1f} GiB; let the "
            f"script run fewer steps in a call, record with --dense 0 and a larger --every, or {USE_RECORDER}"
        )


def _copied(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def _referred(packed: Packed, what: str) -> dict[int, str]:
    """Names of the arguments that are parameters, by index."""
    found: dict[int, str] = {}
    for tap in packed.taps:
        for name, i in _arguments(tap, what).items():
            found.setdefault(i, name)
    return found


def _arguments(tap: PackedTap, what: str) -> dict[str, int]:
    """The index of each argument that is among these values of a tap, by the names of parameters."""
    own = [reference for name, reference in tap.references if name == what]
    return {name: reference[1] for name, reference in zip(tap.about[0], own, strict=False) if reference[0] == "in"}


def run(words: Sequence[str], directory: str, **options: Any) -> int:
    """`crossframe.scripts.run_script` with the recorder of this module.

    Args:
        directory, options: of `Recorder`.
    """
    return run_script(ScriptRecorder(directory, **options), words)


def main() -> int:
    """`crossframe.scripts.main`."""
    return crossframe.scripts.main(run)
