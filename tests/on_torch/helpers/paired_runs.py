"""What two training runs by different code have in common: a case, its batches, the steps of a run, its history, and whether two
histories agree.

A case is data: a tree, options, a world size. `Options` are those that both interfaces of FSDP have; their own ones, and
what a run does with them, stand in `differential_fsdp1` and `differential_fsdp2`.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.on_torch.helpers.random_trees import NUM_TOKENS, ROWS, Node, Tree, build_tree, written

STEPS = 3
TOO_LARGE = 2.0**20


@dataclass(frozen=True, repr=False)
class Options:
    """How a tree is trained.

    Attributes:
        optimizer: "sgd", "momentum" or "adamw".
        micro: of each microbatch of a step, whether it is reduced.
        forwards: forwards before each backward.
        clip: (max_norm, norm_type), or None.
        evals: a forward without gradients between steps.
        edits: how parameters are changed between steps; "" for not at all.
        zero: how gradients are cleared: "none", "zeros" or "model".
        watches: full parameters are looked at after each step, not just at the end.
    """

    api: ClassVar[str]
    optimizer: str = "sgd"
    micro: tuple[bool, ...] = (True,)
    forwards: int = 1
    clip: tuple[float, float] | None = None
    evals: bool = False
    edits: str = ""
    zero: str = "none"
    watches: bool = False
    steps: int = STEPS

    def __repr__(self) -> str:
        """As an expression that makes it."""
        return written(self)

    def simpler(self) -> "Iterator[Options]":
        """Options that are simpler by one thing each."""
        if self.steps > 1:
            yield replace(self, steps=self.steps - 1)
        for f in fields(self):
            if f.name != "steps" and getattr(self, f.name) != f.default:
                yield replace(self, **{f.name: f.default})


@dataclass(frozen=True, repr=False)
class Case:
    """One run.

    Attributes:
        options: those of one of the interfaces.
        bits: whether histories are equal bit for bit, or within a bound.
    """

    tree: Tree
    options: Any
    world_size: int = 2
    bits: bool = True

    def __repr__(self) -> str:
        """As an expression that makes it."""
        return written(self)

    @property
    def nodes(self) -> list[Node]:
        """All nodes of the tree."""
        return list(self.tree.root.walk())


def drawn(rng: random.Random, probability: float, value: Any, default: Any) -> Any:
    """`value` with this probability, called if it can be; else `default`."""
    if rng.random() >= probability:
        return default
    return value() if callable(value) else value


def dtype_named(name: str | None) -> torch.dtype | None:
    """A dtype, or None for none."""
    return None if name is None else getattr(torch, name)


# Training

History = list[tuple[str, Any]]


def batch(case: Case, rank: int, turn: int) -> tuple[Tensor, dict[str, Any], Tensor]:
    """The stream, the plain inputs and the weights of the loss, of one rank at one forward."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    shape = (ROWS if not case.tree.exact else 2, case.tree.width)
    dtype = dtype_named(case.tree.root.dtype)
    if case.tree.exact:
        plain = torch.randint(0, 2, shape, generator=generator).to(dtype)
        weights = 12.0 * torch.randint(1, 3, shape, generator=generator)
    else:
        plain = torch.randn(shape, generator=generator, dtype=dtype)
        weights = torch.randn(shape, generator=generator)
    tokens = torch.randint(0, NUM_TOKENS, shape[:1], generator=generator)
    # Where something is frozen, unused or skipped there might be nothing else to differentiate, and so no backward.
    alone = any(node.frozen or not node.uses or node.skipped_by >= 0 for node in case.nodes)
    stream = plain.clone().requires_grad_(turn % 2 == 0 or alone or not case.tree.exact)
    return stream, {"plain": plain, "tokens": tokens, "more": [plain]}, weights.double()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an output, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "stream"):
        yield value.stream


def loss_of(case: Case, output: Any, weights: Tensor) -> Tensor:
    """Linear in the output where the tree is exact; otherwise with a square."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors_in(output):
        total = total + (tensor.double() * weights).sum()
        if not case.tree.exact:
            total = total + tensor.double().square().mean()
    return total


class Run:
    """One training run and its history: what happened, in order, each with a label of which the first word is the operation."""

    def __init__(self, case: Case, api: ModuleType, rank: int) -> None:
        self.case, self.api, self.rank = case, api, rank
        self.history: History = []
        self.turn = 0
        self.step = 0
        self.call: Callable[..., Any]

    def wrap(self, root: nn.Module) -> Any:
        """The tree's module as a sharded model of `api`."""
        raise NotImplementedError

    def entry(self) -> Any:
        """What training calls."""
        return self.model

    def microbatch(self, number: int) -> AbstractContextManager:
        """What is around forward and backward of a microbatch."""
        raise NotImplementedError

    def clip(self, max_norm: float, norm_type: float) -> Any:
        """Clip the gradients; the norm before."""
        raise NotImplementedError

    def edit(self) -> None:
        """Change parameters."""
        raise NotImplementedError

    def note_full(self) -> None:
        """Note full parameters."""
        raise NotImplementedError

    def sees_inside(self) -> bool:
        """Whether modules see their parameters in full, whatever is a unit."""
        return True

    def before_step(self) -> None:
        """What comes ahead of a step's forward."""

    def after_backward(self) -> None:
        """What comes between the last backward and the optimizer."""

    def note(self, operation: str, value: Any, where: str = "") -> None:
        """Append to the history."""
        label = f"{operation} (step {self.step}{where and ', '}{where})"
        if isinstance(value, DTensor):
            shape = (value.placements, tuple(value.shape), value.stride(), tuple(value.device_mesh.shape))
            self.history.append((f"placement of {label}", shape))
            value = value.to_local()
        value = value.detach().clone() if isinstance(value, Tensor) else value
        self.history.append((label, value))

    def go(self) -> History:
        """Train. An exception ends the history."""
        try:
            self.train()
        except Exception as error:
            self.note("raises", error)
        return self.history

    def train(self) -> None:
        """Wrap, then step by step."""
        options = self.case.options
        torch.manual_seed(0)
        root, seen = build_tree(self.case.tree)
        self.model: Any = self.wrap(root)
        self.call = self.entry()
        self.note("names", [name for name, _ in self.model.named_parameters()])
        self.optimizer = self.new_optimizer()
        for self.step in range(options.steps):
            self.before_step()
            for number in range(len(options.micro)):
                with self.microbatch(number):
                    self.forward_backward(f"microbatch {number}")
            if self.sees_inside():
                self.note("seen", list(seen))
            seen.clear()
            self.note_grads("grad")
            self.after_backward()
            if options.clip is not None:
                self.note("norm", self.clip(*options.clip))
                self.note_grads("clipped")
            self.optimizer.step()
            for name, param in self.params():
                self.note("param", param, name)
            self.zero()
            if options.edits and self.step == 0:
                self.edit()
            if options.evals:
                self.evaluate()
            if options.watches or self.step == options.steps - 1:
                self.note_full()
            for name, buffer in self.model.named_buffers():
                self.note("buffer", buffer, name)

    def new_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the options; a learning rate that is a power of two."""
        params = list(self.model.parameters())
        match self.case.options.optimizer:
            case "adamw":
                return torch.optim.AdamW(params, lr=2.0**-6)
            case "momentum":
                return torch.optim.SGD(params, lr=2.0**-7, momentum=0.5)
        return torch.optim.SGD(params, lr=2.0**-6)

    def params(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters by name; torch registers some anew, so that their order changes."""
        return sorted(self.model.named_parameters(), key=lambda named: named[0])

    def batch(self) -> tuple[Tensor, dict[str, Any], Tensor]:
        """The next one."""
        self.turn += 1
        return batch(self.case, self.rank, self.turn)

    def forward_backward(self, where: str) -> None:
        """One microbatch, and what it did to the inputs."""
        streams, total = [], torch.zeros((), dtype=torch.float64)
        for _ in range(self.case.options.forwards):
            stream, given, weights = self.batch()
            output = self.call(stream, given=given)
            for tensor in tensors_in(output):
                self.note("output", tensor, where)
            total = total + loss_of(self.case, output, weights)
            streams.append(stream)
        self.note("loss", total, where)
        if total.requires_grad:
            total.backward()
        for stream in streams:
            self.note("input's grad", stream.grad, where)

    def note_grads(self, operation: str) -> None:
        """The sharded gradients."""
        for name, param in self.params():
            self.note(operation, param.grad, name)

    def zero(self) -> None:
        """Clear the gradients."""
        match self.case.options.zero:
            case "model":
                self.model.zero_grad()
            case zero:
                self.optimizer.zero_grad(set_to_none=zero == "none")

    def evaluate(self) -> None:
        """A forward without gradients."""
        self.model.eval()
        with torch.no_grad():
            stream, given, _ = self.batch()
            for tensor in tensors_in(self.call(stream, given=given)):
                self.note("evaluated", tensor)
        self.model.train()


# Comparing


def same(a: Any, b: Any, case: Case) -> bool:
    """Whether two entries of histories agree."""
    if isinstance(a, Exception) and isinstance(b, Exception):
        return same_mistake(a, b)
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if case.bits or not a.is_floating_point():
        numbers = ~(a.isnan() & b.isnan()) if a.is_floating_point() else torch.ones_like(a, dtype=torch.bool)
        return torch.equal(a[numbers], b[numbers]) and torch.equal(_signs(a[numbers]), _signs(b[numbers]))
    return bool((a - b).norm() <= bound(case) * (1 + a.norm()))


# What torch and we say of one mistake: parts of torch's message, and of ours. A message that is equal needs no entry.
MEANINGS: tuple[tuple[str, str], ...] = ()


def same_mistake(torchs: Exception, ours: Exception) -> bool:
    """Whether an `except` for torch's error catches ours, and both are of one mistake."""
    is_caught = isinstance(ours, builtin_of(torchs))
    theirs, told = str(torchs), str(ours)
    return is_caught and (theirs == told or any(a in theirs and b in told for a, b in MEANINGS))


def builtin_of(error: Exception) -> type:
    """The class of an error, or the builtin one that it is a kind of."""
    return next(cls for cls in type(error).__mro__ if cls.__module__ == "builtins")


def _signs(a: Tensor) -> Tensor:
    return torch.signbit(a) if a.is_floating_point() else a


def bound(case: Case) -> float:
    """What float64 histories may differ by where sums of 3 and 4 are in other orders, relative to the size of things, or 1.

    A sum of N terms and a division have a relative error of at most N u in any order; two orders differ by 2 N u of the sizes
    of the terms, of which no model here has more than 2 ** 7. Momentum of 0.5 adds up at most 2 such errors, and a step
    passes a perturbation of the parameters on with a factor of at most 1 + lr * curvature, taken as 2 ** 4 for steps of
    2 ** -6 (norms over few and close numbers bend most).
    """
    return 2 * case.world_size * 2**7 * 2 * 2.0 ** (4 * case.options.steps) * 2.0**-53


def has_diverged(a: Tensor) -> bool:
    """Whether training has blown up: values that are not finite, or too large for the bound to mean anything."""
    return not a.double().norm() < TOO_LARGE


def difference(theirs: History, ours: History, case: Case) -> str:
    """The first difference of two histories, or nothing."""
    for (label, a), (other, b) in zip(theirs, ours, strict=False):
        if label != other:
            return f"torch: {label}: {shown(a)}\nours: {other}: {shown(b)}"
        if not case.bits and isinstance(a, Tensor) and isinstance(b, Tensor) and has_diverged(a):
            # The bound does not hold any more; but both diverge at the same entry.
            return "" if has_diverged(2 * b) else f"{label}: torch's training diverged, ours did not: {shown(b)}"
        if not same(a, b, case):
            return f"{label}:\ntorch: {shown(a)}\nours:  {shown(b)}"
    if len(theirs) != len(ours):
        return f"torch's history has {len(theirs)} entries, ours {len(ours)}"
    return ""


def shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    if isinstance(value, Exception):
        return f"{type(value).__name__}: {' '.join(str(value).split())[:400]}"
    return str(value)
