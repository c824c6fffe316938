"""Records an unchanged training script. `crossframe record SCRIPT` starts `main` or `launch` in a process.

The model is the first module that is called outside of other modules with gradients enabled and has all parameters of an
optimizer; the recording begins there. Where several modules have the parameters of the optimizers that exist by then, such as a
generator and a discriminator, they are the model together, with what these optimizers have besides: tensors that no module has,
such as the temperature of an agent. Where no module is called, the recording begins with the first backward. A step ends when
every parameter that the optimizers have was updated, and its loss is the sum of the tensors on which backward was called; one
that does not end is left out. If none ends, since an optimizer is never used, the command records again without it, and if there
is no optimizer, with the script's own updates ([Note: updates by hand] in `_updates_by_hand.py`). A script that
trains yet another model, or models one after another, is rejected; it can use a `Recorder`.

Of a schedule of `torch.distributed.pipelining`, the stages of all ranks are the model; the loss is the mean over microbatches.
Inside of `context_parallel`, ranks have parts of the same sequences.

With `forward_only` the model is the first module with parameters that is called outside of other modules; each call is a step.
"""

import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from traceback import walk_stack
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import crossframe.scripts
from crossframe.errors import UsageError
from crossframe.processes import module_command
from crossframe.recording.known_settings import BY_HAND, BY_HAND_OPTION, EARLIER_UPDATES, UPDATES
from crossframe.recording.manifest import MANIFEST_NAME
from crossframe.replacing import replacing
from crossframe.scripts import RunAgainError, run_again_file, run_script
from torch_backend.ranks._collectives import default_process_group
from torch_backend.recorder._contexts import in_backward, in_transform, is_differentiated, watching_checkpoints
from torch_backend.recorder._fastai_optimizers import follow_fastai
from torch_backend.recorder._keras_optimizers import KerasOptimizers
from torch_backend.recorder._models_together import models_together, modules_beside, whole_of
from torch_backend.recorder._module_tree import reshard
from torch_backend.recorder._open_step import is_wrapper, params_of, stepped_params
from torch_backend.recorder._recorder import Recorder
from torch_backend.recorder._script_parallelism import Sequences, pipelines, sequences, stages_of
from torch_backend.recorder._script_processes import end_process, recorded_processes
from torch_backend.recorder._temporary_wrappers import TemporaryWrappers
from torch_backend.recorder._updates_by_hand import SearchByHand, leaves_of, model_by_hand

# torch.distributed has a function of this name.
_rendezvous = import_module("torch.distributed.rendezvous")
_USE_RECORDER = """record from inside the script:

    from torch_backend.recorder import Recorder

    with Recorder("runs/mine", model=model) as recorder:
        for batch in batches:
            ...                # forward, backward, update: as before
            recorder.step()"""
_MOST_UPDATES = 100
"""Updates of a parameter before all parameters are updated. Critics of the first Wasserstein GANs have as many for one of the
generator."""


class ScriptRecorder:
    """Finds the model of a running script, and records it.

    Args:
        directory, options: of `Recorder`.
        stop_after: number of steps after which the script ends as by `sys.exit()`; None: it runs to its end.
        idle_optimizers: numbers of optimizers, in the order in which they are made, that the script does not use.
        by_hand: the script changes its parameters by itself, without an optimizer.
        is_started: whether the script has started this process, which may train nothing.
        manifest_before: of a started process, what `_manifest_in` had returned before the script started any.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        stop_after: int | None = None,
        idle_optimizers: Sequence[int] = (),
        by_hand: bool = False,
        is_started: bool = False,
        manifest_before: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        self._in_process = partial(
            ScriptRecorder,
            directory,
            stop_after=stop_after,
            idle_optimizers=idle_optimizers,
            by_hand=by_hand,
            is_started=True,
            **options,
        )
        self._is_started, self._has_started, self._manifest_before = is_started, False, manifest_before
        self._directory, self._options, self._stop_after = directory, options, stop_after
        self._forward_only = options.get("forward_only", False)
        self._made: list[weakref.ref[Optimizer]] = []
        self._idle_optimizers = frozenset(idle_optimizers)
        self._by_hand = by_hand
        self._search_by_hand = SearchByHand(stop_after or _MOST_UPDATES, self)
        self._temporary = TemporaryWrappers(lambda: bool(self._made))
        self._depth = 0
        self._recorder: Recorder | None = None
        self._params: set[int] = set()
        self._optimizers: list[Optimizer] = []
        # Those of them that have stepped.
        self._used: list[Optimizer] = []
        self._stepping: list[Optimizer] = []  # the last one is called by those before it
        # How often each parameter was updated since all were, and at most until all were.
        self._updated: Counter[int] = Counter()
        self._most_updated: Counter[int] = Counter()
        self._without_whole: set[tuple[int, int, frozenset[int]]] = set()
        self._alone: set[tuple[int, int, frozenset[int]]] = set()
        self._called = weakref.WeakSet[nn.Module]()
        self._num_strange_steps = self._num_steps = 0
        # How often each parameter was updated before the recording began.
        self._updated_before: Counter[int] = Counter()
        self._sequences: Sequences | None = None
        self._losses: list[Tensor] = []
        self._knew_jax = "jax" in sys.modules  # not by the script
        self._until_found, self._whole_run = ExitStack(), ExitStack()
        self._knows_fastai = False
        self._keras = KerasOptimizers(self._whole_run)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the script runs."""
        with self._whole_run as stack:
            if self._options.get("perturbed_run") or self._by_hand or self._idle_optimizers:
                stack.enter_context(
                    replacing(_rendezvous, "_create_c10d_store", self._with_own_keys(_rendezvous._create_c10d_store))
                )
            if not self._forward_only:
                stack.enter_context(replacing(Optimizer, "__init__", self._noting(Optimizer.__init__)))
                stack.callback(register_optimizer_step_pre_hook(self._begins_step).remove)
                stack.callback(register_optimizer_step_post_hook(self._steps).remove)
            processes = recorded_processes(self._starting, self._ended, self._whole_run.close)
            stack.enter_context(processes)
            stack.enter_context(watching_checkpoints())
            stack.enter_context(self._until_found)
            if not self._forward_only:
                stack.enter_context(pipelines(self._schedule, self._losses.extend))
                stack.enter_context(sequences(self._parts_of_sequences))
            # Calls are looked at only until the model is found: after that they cost nothing.
            self._until_found.enter_context(replacing(nn.Module, "__call__", self._looking(nn.Module.__call__)))
            if not self._forward_only:
                self._until_found.enter_context(
                    replacing(nn.Module, "__init__", self._temporary.noting(nn.Module.__init__))
                )
                self._until_found.enter_context(replacing(torch, "compile", self._compiling(torch.compile)))
                self._until_found.enter_context(
                    replacing(torch.autograd, "backward", self._beginning_backward(torch.autograd.backward))
                )
                run = torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateImportUsage]
                self._until_found.enter_context(
                    replacing(torch.autograd, "_engine_run_backward", self._taking_gradients(run))
                )
            yield

    def finish(self, error: BaseException | None = None) -> None:
        """End the recording, unless the script failed.

        Raises:
            UsageError: the script succeeded without training.
        """
        if error is None and self._by_hand and self._recorder is not None:
            self._recorder.look_for_update()
        if error is None and self._updated and not self._num_steps:
            self._refuse_without_step()
        if error is None and self._recorder is None:
            self._search_by_hand.end()
        if self._num_steps and error is None and not self._updated <= self._most_updated:
            raise UsageError(f"the script trains models one after another; {_USE_RECORDER}")
        if self._recorder is not None and (self._num_steps or self._forward_only or error is not None):
            self._recorder.__exit__(type(error) if error else None, error, None)
        elif error is None and not self._has_trained_elsewhere and (self._num_strange_steps or not self._is_started):
            raise UsageError(self._why_nothing())

    @property
    def _has_trained_elsewhere(self) -> bool:
        """Whether processes that the script has started are recorded."""
        return self._has_started and _manifest_in(self._directory) not in (None, self._manifest_before)

    def _why_nothing(self) -> str:
        if self._forward_only:
            return "no module of torch with parameters was called in this process"
        if self._num_strange_steps:
            return (
                "an optimizer stepped, but no module that the script calls by itself has all of its parameters; put what is "
                f"trained together into one module, or {_USE_RECORDER}"
            )
        if "jax" in sys.modules and not self._knew_jax:
            return (
                "nothing was trained with torch: no optimizer of torch stepped, and JAX was imported; if the script trains with "
                "JAX, use --framework jax"
            )
        return (
            "nothing was trained in this process: no optimizer of torch stepped. Of processes that a "
            "script starts by itself, those of torch.multiprocessing.spawn are followed: let it or --nproc-per-node start them. "
            f"If the script makes new tensors as parameters instead of changing them, {_USE_RECORDER}"
        )

    def _starting(self) -> Callable[[], "ScriptRecorder"] | None:
        """What makes the recorder of a process that the script is about to start; None if this one trains."""
        if self._recorder is not None:
            return None
        if not self._has_started and not self._is_started:
            self._manifest_before = _manifest_in(self._directory)
        self._has_started = True
        return partial(self._in_process, manifest_before=self._manifest_before)

    def _ended(self) -> None:
        """Processes that the script has started have ended."""
        if self._stop_after is not None and self._has_trained_elsewhere:
            raise SystemExit

    def _with_own_keys(self, own: Any) -> Any:
        """Where torchrun started the command, its store still has the keys of the runs before this one."""

        def create(*args: Any, **kwargs: Any) -> Store:
            number = self._options.get("perturbed_run", 0)
            return PrefixStore(f"run {number} {self._by_hand} {sorted(self._idle_optimizers)}", own(*args, **kwargs))

        return create

    def _noting(self, own: Any) -> Any:
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            own(optimizer, *args, **kwargs)
            self._made.append(weakref.ref(optimizer))

        return init

    def _looking(self, own: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # what is compiled was looked for before, and may allow no graph breaks
                return own(module, *args, **kwargs)
            trains = is_differentiated() and not in_backward() and not in_transform()
            if self._recorder is None and not self._depth and (trains or self._forward_only):
                self._consider(module)
                self._called.add(module)
            self._depth += 1
            try:
                return own(module, *args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _compiling(self, own: Any) -> Any:
        """Calls of modules inside of compiled functions are not seen, and hooks that modules get later are not compiled. So the
        model is looked for before such a function is called."""

        @wraps(own)
        def compile(*args: Any, **kwargs: Any) -> Any:
            compiled = own(*args, **kwargs)
            function = args[0] if args else kwargs.get("model")
            if function is None or isinstance(compiled, nn.Module):  # a decorator, which calls this again
                return compiled

            @wraps(compiled)
            def call(*args: Any, **kwargs: Any) -> Any:
                if self._recorder is None:
                    self._look_before_compiled()
                return compiled(*args, **kwargs)

            return call

        return compile

    @_disable_dynamo
    def _look_before_compiled(self) -> None:
        if is_differentiated() and not (self._depth or self._stepping or in_backward() or in_transform()):
            self._consider()

    def _beginning_backward(self, own: Any) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._recorder is None and not in_backward():
                given = args[0] if args else kwargs["tensors"]
                self._consider(losses=[given] if isinstance(given, Tensor) else given)
                if self._recorder is not None:
                    self._recorder.begin_with_backward()  # which it listens for by now
                    return torch.autograd.backward(*args, **kwargs)
            return own(*args, **kwargs)

        return backward

    def _taking_gradients(self, own: Any) -> Any:
        """`torch.autograd.backward` calls it, and `torch.autograd.grad` under whatever name the script has imported that."""

        def run(
            tensors: Any, grads: Any, keep_graph: Any, create_graph: Any, inputs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            given = (tensors, grads, keep_graph, create_graph, inputs, *args)
            if self._recorder is not None or in_backward() or in_transform():
                return own(*given, **kwargs)
            if self._by_hand:
                self._consider(losses=tensors)
                if self._recorder is not None:
                    self._recorder.begin_with_backward()
                    engine: Any = torch.autograd
                    return engine._engine_run_backward(*given, **kwargs)
                return own(*given, **kwargs)
            return self._search_by_hand.take_gradients(tensors, inputs, lambda: own(*given, **kwargs), **kwargs)

        return run

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped, of whatever model."""
        return self._num_strange_steps > 0

    def has_optimizer(self) -> bool:
        """Whether there is one by now."""
        return self.has_stepped() or bool(self._held())

    def record_by_hand(self) -> NoReturn:
        """Let the command run the script again, with `by_hand`."""
        self._state_for_next_run({"by_hand": True})
        raise RunAgainError(f"the script updates its parameters by itself, which {BY_HAND_OPTION} states")

    def _end_step(self, loss: Tensor | None = None) -> None:
        assert self._recorder is not None
        self._num_steps += 1
        self._recorder.step(loss=loss)
        if self._num_steps == self._stop_after:
            raise SystemExit

    def _schedule(self, schedule: Any) -> None:
        """A schedule is about to run a step: start recording its stages."""
        if self._recorder is not None:
            return
        stages = stages_of(schedule)
        self._consider(
            *(stage.submod for stage in stages),
            pipeline=stages[0].group or default_process_group(),
            stages=[stage.stage_index for stage in stages],
        )
        if self._recorder is None:
            raise UsageError(f"no optimizer has parameters of the stages of the pipeline alone; {_USE_RECORDER}")

    def _parts_of_sequences(self, found: Sequences) -> None:
        self._sequences = found

    @_disable_dynamo
    def _consider(self, *modules: nn.Module, losses: Sequence[Tensor] = (), **options: Any) -> None:
        """Start recording modules if they have all parameters of an optimizer, or any where nothing is trained.

        Args:
            losses: of the backward that begins.
            options: of `Recorder`.
        """
        if self._by_hand:
            model = model_by_hand(next(iter(modules), None), leaves_of(losses), _modules_in_calls())
            if model is not None:
                options["in_parts"] = not modules or model is not modules[0]
                options["settings"] = {**(self._options.get("settings") or {}), UPDATES: BY_HAND}
                self._begin([model], self._own([model])[0], [], options)
                assert self._recorder is not None
                self._recorder.follow_updates_by_hand(self._end_step)
            return
        modules = tuple(map(self._temporary.model_in, modules))
        if not self._forward_only:
            self._knows_fastai = self._knows_fastai or follow_fastai(self._whole_run)
            self._keras.find(modules)
        own, mine = self._own(modules)
        if not mine and sum(map(reshard, modules)):
            own, mine = self._own(modules)
        if not mine and len(modules) == 1 and (whole := self._whole(modules[0], own)) is not None:
            modules = (whole,)
            own, mine = self._own(modules)
            options["in_parts"] = True
        if len(modules) < 2 and (together := self._together(next(iter(modules), None), mine)) is not None:
            modules = (together,)
            own, mine = self._own(modules)
            options["in_parts"] = True
        if mine or (self._forward_only and own):
            self._begin(modules, own, mine, options)

    def _begin(
        self, modules: Sequence[nn.Module], own: set[int], mine: list[Optimizer], options: dict[str, Any]
    ) -> None:
        """Start recording modules.

        Args:
            own: the ids of their parameters.
            mine: the optimizers of these.
            options: of `Recorder`.
        """
        is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
        if self._is_started and is_first_rank and _manifest_in(self._directory) not in (None, self._manifest_before):
            raise UsageError(
                f"processes that the script has started train separately, or one after another; {_USE_RECORDER}"
            )
        self._params, self._optimizers = own, mine
        if self._sequences is not None:
            options |= dict(zip(("context", "context_order"), self._sequences, strict=True))
        self._until_found.close()
        self._search_by_hand.forget()
        if self._num_strange_steps:
            print(
                f"crossframe: {self._num_strange_steps} updates before the recording began are not in it: their optimizers were "
                "made after the forward, or have parameters of another model",
                file=sys.stderr,
            )
        if updates := max((self._updated_before[param] for param in own), default=0):
            options["settings"] = {**(self._options.get("settings") or {}), EARLIER_UPDATES: updates}
        self._recorder = Recorder(
            self._directory,
            beside=modules_beside(modules),
            model=modules[0] if len(modules) == 1 else modules,
            optimizer=mine if self._keras.are_known and (len(mine) == 1 or options.get("pipeline")) else None,
            **(self._options | options),
        ).__enter__()
        self._recorder.read_buffers_late()
        if self._stepping:
            self._recorder.begin_in_step()

    def _own(self, modules: Sequence[nn.Module]) -> tuple[set[int], list[Optimizer]]:
        """The ids of the parameters of modules, and the optimizers that have no others."""
        own = {id(param) for module in modules for param in module.parameters()}
        return own, [optimizer for optimizer in self._held() if own >= _params_of(optimizer)]

    def _held(self) -> list[Optimizer]:
        """The optimizers that the script has made and not freed, without wrappers."""
        made = [ref() for i, ref in enumerate(self._made) if i not in self._idle_optimizers]
        return [optimizer for optimizer in made if optimizer is not None and not is_wrapper(optimizer)]

    def _refuse_without_step(self) -> None:
        """Say why no step has ended although optimizers have stepped. Those that never have are left out of the next run."""
        unused = [held for held in self._optimizers if all(held is not each for each in self._used)]
        numbers = [i for i, ref in enumerate(self._made) if any(ref() is held for held in unused)]
        kinds = Counter(type(held).__name__ for held in unused)
        listed = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
        text = (
            f"no step of training ended: of {len(self._optimizers)} optimizers, {len(unused)} never stepped ({listed})"
        )
        if not numbers:
            raise UsageError(f"{text}; do not make them, or {_USE_RECORDER}")
        self._state_for_next_run({"idle_optimizers": numbers})
        raise RunAgainError(text)

    def _state_for_next_run(self, options: dict[str, Any]) -> None:
        """Options of this class with which the command is to run the script again."""
        rank = str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "0")
        path = run_again_file(Path(self._directory), rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(options))

    def _together(self, part: nn.Module | None, mine: Sequence[Optimizer]) -> nn.Module | None:
        """A model of all modules and tensors that optimizers train, if these are several; `mine` are those of `part`. If there is
        none, backward begins: what was called before is no part of the model then."""
        others = [held for held in self._held() if all(held is not own for own in mine)]
        callers = _modules_in_calls()
        if self._forward_only or not others or (known := (id(part), len(others), callers)) in self._alone:
            return None
        self._alone.add(known)
        wanted = {id(param): param for held in (*mine, *others) for param in params_of(held)}
        found = models_together(part, wanted, callers)
        if part is None and found is not None:
            called = [each for each in found.modules() if each in self._called]
            if any(True for each in called for _ in each.parameters()):
                return None
        return found

    def _whole(self, part: nn.Module, own: set[int]) -> nn.Module | None:
        """See `whole_of`; `own` are the ids of the parameters of the part."""
        wanted = [params for held in self._held() if own & (params := _params_of(held))]
        callers = _modules_in_calls()
        if not wanted or (known := (id(part), len(wanted), callers)) in self._without_whole:
            return None
        self._without_whole.add(known)
        return whole_of(part, wanted, callers)

    @_disable_dynamo
    def _begins_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping.append(optimizer)

    @_disable_dynamo
    def _steps(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An optimizer has stepped."""
        while self._stepping and self._stepping.pop() is not optimizer:
            pass  # the step of one inside of it has failed
        if self._by_hand:
            raise UsageError(
                f"{type(optimizer).__name__} has stepped, but {BY_HAND_OPTION} states that there is no optimizer; leave it out"
            )
        if self._recorder is None:
            self._num_strange_steps += not self._stepping
            self._updated_before.update([] if is_wrapper(optimizer) else _params_of(optimizer))
            return
        if len(stepped_params(optimizer, args, kwargs)) < len(params_of(optimizer)):
            return
        if not is_wrapper(optimizer):
            self._count(optimizer)
        # Not every optimizer: a script may go on with another one, as L-BFGS after Adam.
        if not self._stepping and self._updated.keys() >= set().union(*map(_params_of, self._optimizers)):
            self._most_updated |= self._updated
            self._updated.clear()
            losses = [loss.detach().clone() for loss in self._losses]
            self._losses.clear()
            self._end_step(torch.stack(losses).mean() if losses else None)

    def _count(self, optimizer: Optimizer) -> None:
        """Count the updates of the parameters of an optimizer."""
        assert self._recorder is not None
        if all(optimizer is not own for own in self._optimizers):
            if not _params_of(optimizer) & self._params:
                raise UsageError(
                    f"the script trains more than one model: {type(optimizer).__name__} updated parameters that are "
                    f"not in the first model that was trained; {_USE_RECORDER}"
                )
            self._optimizers.append(optimizer)
            self._recorder.follow(optimizer)
        if all(optimizer is not each for each in self._used):
            self._used.append(optimizer)
            if any(ref() is optimizer and i in self._idle_optimizers for i, ref in enumerate(self._made)):
                raise UsageError(
                    f"an optimizer steps that had not at first, or that --idle-optimizer states: {type(optimizer).__name__}; "
                    f"{_USE_RECORDER}"
                )
        self._updated.update(own := _params_of(optimizer))
        if max((self._updated[each] for each in own), default=0) > _MOST_UPDATES:
            if not self._num_steps:
                self._refuse_without_step()
            raise UsageError(
                f"{_MOST_UPDATES} steps of {type(optimizer).__name__} passed without one of another optimizer of the model; "
                f"{_USE_RECORDER}"
            )


def _manifest_in(directory: str | Path) -> tuple[int, int] | None:
    """Tells the manifest in a directory from an earlier one; None if there is none."""
    try:
        found = (Path(directory) / MANIFEST_NAME).stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _modules_in_calls() -> frozenset[int]:
    """The ids of modules of which a method is being called."""
    found = set()
    for frame, _ in walk_stack(sys._getframe()):
        code = frame.f_code
        if code.co_argcount and isinstance(first := frame.f_locals.get(code.co_varnames[0]), nn.Module):
            found.add(id(first))
    return frozenset(found)


def _params_of(optimizer: Optimizer) -> set[int]:
    return {id(param) for param in params_of(optimizer)}


def run(words: Sequence[str], directory: str, **options: Any) -> int:
    """`crossframe.scripts.run_script` with the recorder of this module.

    Args:
        directory, options: of `Recorder`.
    """
    return run_script(ScriptRecorder(directory, **options), words)


def main() -> int:
    """`crossframe.scripts.main`; ends the process itself if the script succeeded ([Note: threads of gloo])."""
    status = crossframe.scripts.main(run)
    if status == 0:
        end_process()
    return status


def launch() -> int:
    """Run torchrun with processes that run `main`; returns the exit status.

    NPROC_PER_NODE OPTIONS WORDS are on the command line, the latter two as of `main`.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    nproc_per_node, *arguments = sys.argv[1:]
    python, *rest = module_command(f"{__name__}:{main.__name__}", arguments)
    try:
        torchrun(["--standalone", "--nproc-per-node", nproc_per_node, "--no-python", python, "-u", *rest])
    except SignalException as ended:
        return 128 + ended.sigval
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
