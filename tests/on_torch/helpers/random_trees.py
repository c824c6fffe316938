"""Random module trees that train: what FSDP has to shard, described as data, so that a failing one can be written down and cut
smaller.

Every module of a tree maps a stream of shape (rows, width) to such a stream, and is also given the plain inputs of the batch.
A tree computes in one of two ways. *Real*: each module works on the stream that comes in. *Exact*: each module adds to
the stream something that is linear in its parameters and in plain inputs of zeros and ones, so that the gradients are
small integers times the weights of the loss, whatever the parameters hold; their sums are exact in any order (R32).
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTHS = (2, 3, 5)
NUM_TOKENS = 5
ROWS = 3
# Shapes of 1 to 17 elements, most of them odd.
SHAPES = ((1,), (2,), (5,), (17,), (1, 3), (3, 1), (7, 1), (1, 1, 5), (3, 5), (2, 2, 3), (13,), (1, 11))
INNER_SIZES = (1, 2, 3, 5, 7, 17)
EXACT_LEAVES = ("square", "square", "mlp", "tied", "vector", "vector", "empty", "embedding", "buffers", "plain")
REAL_LEAVES = (*EXACT_LEAVES, "layer_norm", "batch_norm", "attention", "conv")
OUTPUTS = ("tensor", "tensor", "tensor", "tuple", "dict", "halves", "record")


@dataclass(frozen=True, repr=False)
class Node:
    """One module of a tree.

    Attributes:
        kind: "group" (its children in a row) or a kind of leaf.
        children: those of a group.
        unit: whether it is wrapped; the root always is.
        dtype: of all parameters below, up to inner units.
        frozen: "all" of a leaf's own parameters, its "first", or "" for none.
        uses: how often its parent calls it.
        again: whether its parent has it under a second name, and calls that too.
        ties: whether the group's children of kind "square" share one weight.
        ignored: whether sharding leaves it alone.
        skipped_by: the rank on which its parent does not call it, or -1.
        shape, size: of a leaf's parameters, where its kind leaves them open.
        output: what a group returns: a tensor, or one in a tuple, a dict, a dict of dicts, or a dataclass.
    """

    kind: str = "group"
    children: tuple["Node", ...] = ()
    unit: bool = False
    dtype: str = "float32"
    frozen: str = ""
    uses: int = 1
    again: bool = False
    ties: bool = False
    ignored: bool = False
    skipped_by: int = -1
    shape: tuple[int, ...] = (2,)
    size: int = 1
    output: str = "tensor"

    def __repr__(self) -> str:
        """As an expression that makes it, without what is as by default."""
        return written(self)

    def walk(self) -> Iterator["Node"]:
        """It and all nodes below, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, repr=False)
class Tree:
    """A root, the width of the stream, and whether it computes exactly."""

    root: Node
    width: int = 2
    exact: bool = False

    def __repr__(self) -> str:
        """As an expression that makes it."""
        return written(self)


def written(value: Any) -> str:
    """A dataclass as an expression that makes it, without the fields that are as by default."""
    given = [(f.name, getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{name}={item!r}' for name, item in given)})"


@dataclass
class Record:
    """What a group with the output "record" returns."""

    stream: Tensor
    count: int


class Unit(nn.Module):
    """The mark, for policies by class, of every module that is to be wrapped."""


class Part(nn.Module):
    """What all modules of a tree have: how they compute, and a list in which they note what they see."""

    def __init__(self, node: Node, width: int, exact: bool, seen: list[tuple]) -> None:
        super().__init__()
        self.node, self.width, self.exact, self.seen = node, width, exact, seen

    def source(self, stream: Tensor, given: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """What a leaf computes with, in the dtype of its parameters."""
        self.seen.append((self.node.kind, stream.dtype, given["plain"].dtype, like.dtype, tuple(like.shape)))
        return (given["plain"] if self.exact else stream).to(like.dtype)

    def bend(self, x: Tensor) -> Tensor:
        """Something that bends, where the tree is not exact."""
        return x if self.exact else torch.tanh(x)


class Square(Part):
    """One linear layer as wide as the stream."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layer = nn.Linear(self.width, self.width)

    def forward(self, stream: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        x = self.source(stream, given, self.layer.weight)
        return stream + self.bend(self.layer(x)).to(stream.dtype)


class Mlp(Part):
    """Two linear layers of uneven sizes, the first one without a bias."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.up = nn.Linear(self.width, self.node.size, bias=False)
        self.down = nn.Linear(self.node.size, self.width)

    def forward(self, stream: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        x = self.source(stream, given, self.up.weight)
        if self.exact:
            wide = x[:, :1].expand(-1, self.node.size)
            return stream + (self.up(x).sum(1, keepdim=True) + self.down(wide)).to(stream.dtype)
        return stream + self.down(torch.tanh(self.up(x))).to(stream.dtype)


class Tied(Part):
    """Two linear layers with one weight and two biases."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.one = nn.Linear(self.width, self.width)
        self.two = nn.Linear(self.width, self.width)
        self.two.weight = self.one.weight

    def forward(self, stream: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        x = self.source(stream, given, self.two.weight)
        y = self.one(x) + self.two(x) if self.exact else self.two(torch.tanh(self.one(x)))
        return stream + y.to(stream.dtype)


class Vector(Part):
    """A parameter of an odd shape, each element of it with a sign of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.values = nn.Parameter(torch.rand(self.node.shape) - 0.5)

    def factor(self) -> Tensor:
        """The signed sum of the elements."""
        signs = torch.ones(self.values.numel(), dtype=self.values.dtype)
        signs[::2] = -1
        return (self.values.flatten() * signs).sum()

    def forward(self, stream: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        x = self.source(stream, given, self.values)[:, :1]
        return stream + (self.bend(x) * self.factor()).to(stream.dtype)


class Empty(Vector):
    """As `Vector`, beside a parameter without elements."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def factor(self) -> Tensor:
        return super().factor() + self.nothing.sum()


class Buffers(Vector):
    """As `Vector`, with buffers: one that counts, one that is read, one that collects and is not saved."""

    count: Tensor
    scale: Tensor
    sums: Tensor

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("sums", torch.zeros(self.width), persistent=False)

    def factor(self) -> Tensor:
        return super().factor() * self.scale.to(self.values.dtype)

    def forward(self, stream: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        if self.training:
            self.count += 1
            self.sums += stream.detach().sum(0).to(self.sums.dtype)
        return super().forward(stream, given)


class Embedding(Part):
    """Rows by token."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.table = nn.Embedding(NUM_TOKENS, self.width)

    def forward(self, stream: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        self.source(stream, given, self.table.weight)
        return stream + self.table(given["tokens"]).to(stream.dtype)


class Plain(Part):
    """No parameters."""

    def forward(self, stream: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return stream + self.bend(self.source(stream, given, stream))


class LayerNorm(Part):
    """A layer norm."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = nn.LayerNorm(self.width)

    def forward(self, stream: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return stream + self.norm(self.source(stream, given, self.norm.weight)).to(stream.dtype)


class BatchNorm(Part):
    """A batch norm, which under mixed precision may become a unit of its own, and casts its inputs then."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = nn.BatchNorm1d(self.width)

    def forward(self, stream: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        running_mean = self.norm.running_mean
        assert running_mean is not None
        x = stream.to(running_mean.dtype)
        return stream + self.norm(x).to(stream.dtype)


class Attention(Part):
    """Self-attention between the rows: its module reads parameters of a submodule that it never calls."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mix = nn.MultiheadAttention(self.width, 1)

    def forward(self, stream: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        x = self.source(stream, given, self.mix.out_proj.weight)
        return stream + self.mix(x, x, x, need_weights=False)[0].to(stream.dtype)


class Conv(Part):
    """A convolution along the stream."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layer = nn.Conv1d(1, self.node.size, 3, padding=1)

    def forward(self, stream: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        x = self.source(stream, given, self.layer.weight)
        return stream + torch.tanh(self.layer(x[:, None])).mean(1).to(stream.dtype)


class Group(Part):
    """Its children in a row."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        squares = []
        for i, child in enumerate(self.node.children):
            module = build(child, self.width, self.exact, self.seen)
            self.add_module(f"part{i}", module)
            if child.again:
                self.add_module(f"again{i}", module)
            if child.kind == "square" and not (child.unit or child.ignored):
                squares.append(module)
        if self.node.ties:
            for square in squares[1:]:
                square.layer.weight = squares[0].layer.weight

    def forward(self, stream: Tensor, given: Mapping[str, Tensor]) -> Any:
        for i, child in enumerate(self.node.children):
            names = [f"part{i}"] * child.uses + [f"again{i}"] * child.again * (child.uses > 0)
            for name in names if child.skipped_by < 0 or child.skipped_by != dist.get_rank() else ():
                stream = opened(getattr(self, name)(stream, given=given))
        return closed(self.node.output, stream)

    def along(self, stream: Tensor, given: Mapping[str, Tensor]) -> Any:
        """Forward, by another name."""
        return Group.forward(self, stream, given)


LEAVES: dict[str, type[Part]] = {
    "square": Square,
    "mlp": Mlp,
    "tied": Tied,
    "vector": Vector,
    "empty": Empty,
    "embedding": Embedding,
    "buffers": Buffers,
    "plain": Plain,
    "layer_norm": LayerNorm,
    "batch_norm": BatchNorm,
    "attention": Attention,
    "conv": Conv,
}
CLASSES: dict[str, type[Part]] = {"group": Group, **LEAVES}
UNIT_CLASSES = {kind: type(f"{cls.__name__}Unit", (cls, Unit), {}) for kind, cls in CLASSES.items()}


def closed(output: str, stream: Tensor) -> Any:
    """What a group returns."""
    match output:
        case "tuple":
            return stream, None, 3
        case "dict":
            return {"stream": stream, "detached": [stream.detach()]}
        case "halves":
            return {"one": stream * 0.5, "other": {"half": (stream * 0.5,)}}
        case "record":
            return Record(stream, 1)
    return stream


def opened(output: Any) -> Tensor:
    """The stream in what a module returned."""
    match output:
        case Tensor():
            return output
        case tuple():
            return output[0]
        case Record():
            return output.stream
        case {"one": one, "other": {"half": (half,)}}:
            return one + half
    return output["stream"]


def build(node: Node, width: int, exact: bool, seen: list[tuple]) -> Part:
    """The module of a node, with everything below."""
    module = (UNIT_CLASSES if node.unit else CLASSES)[node.kind](node, width, exact, seen)
    own = list(module.parameters()) if node.kind != "group" else []
    for param in own[: 1 if node.frozen == "first" else None] if node.frozen else ():
        param.requires_grad_(False)
    if node.kind != "group":
        for param in own:
            param.data = param.data.to(getattr(torch, node.dtype))
        if node.kind == "batch_norm":
            module.to(getattr(torch, node.dtype))
    return module


def build_tree(tree: Tree) -> tuple[Part, list[tuple]]:
    """The module of a tree, the same on every rank, and the list in which its leaves note what they see."""
    torch.manual_seed(0)
    seen: list[tuple] = []
    return build(tree.root, tree.width, tree.exact, seen), seen


@dataclass
class Grower:
    """Grows random trees.

    Attributes:
        per_param_frozen: parameters of one unit may differ in whether they are trained.
        dtypes: those that units may have.
        frozen_dtypes: those that leaves may have that are not trained; as their unit where there are none.
        ignores: some leaves are left alone.
        batch_norms: there may be some, which torch computes with parameters and inputs of one dtype alone.
        freezes: some parameters are not trained.
        skips: of how many ranks one may skip a leaf; then every module is used, by the others.
        shares: parameters and modules may have two names; `shares_units`: units too.
    """

    rng: random.Random
    exact: bool = False
    per_param_frozen: bool = True
    dtypes: tuple[str, ...] = ("float32",)
    frozen_dtypes: tuple[str, ...] = ()
    skips: int = 0
    ignores: bool = False
    batch_norms: bool = True
    freezes: bool = True
    shares: bool = True
    shares_units: bool = True
    leaves: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        leaves = EXACT_LEAVES if self.exact else REAL_LEAVES
        left_out = [*["batch_norm"] * (not self.batch_norms), *["tied"] * (not self.shares)]
        self.leaves = tuple(kind for kind in leaves if kind not in left_out)

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return self.rng.random() < probability

    def tree(self) -> Tree:
        """A random tree."""
        dtype = self.rng.choice(self.dtypes)
        frozen = "all" if self.freezes and self.chance(0.1) else ""
        root = self.group(dtype, frozen, depth=self.rng.choice((1, 2, 2, 3)), unit=True, again=False)
        if not any(node.kind not in ("group", "plain") and not node.ignored for node in root.walk()):
            root = replace(root, children=(*root.children, Node("vector", dtype=dtype, frozen=frozen)))
        return Tree(replace(root, uses=1), self.rng.choice(WIDTHS), self.exact)

    def group(self, dtype: str, frozen: str, depth: int, *, unit: bool, again: bool) -> Node:
        """A group; below `depth` groups there are leaves alone."""
        children = []
        for _ in range(self.rng.randint(1, 3)):
            children.append(self.child(dtype, frozen, depth))
        return Node(
            "group",
            tuple(children),
            unit=unit,
            dtype=dtype,
            ties=self.shares and self.chance(0.3),
            output=self.rng.choice(OUTPUTS),
            uses=self.uses(),
            again=again,
        )

    def child(self, dtype: str, frozen: str, depth: int) -> Node:
        """A group or a leaf, as a unit or not."""
        is_group = depth > 0 and self.chance(0.6)
        unit = self.chance(0.7 if is_group else 0.2)
        if unit:
            dtype = self.rng.choice(self.dtypes)
            frozen = "all" if self.freezes and self.chance(0.2) else ""
        again = self.shares and self.chance(0.1) and (self.shares_units or not unit)
        if is_group:
            return self.group(dtype, frozen, depth - 1, unit=unit, again=again)
        kind = self.rng.choice(self.leaves)
        if self.freezes and self.per_param_frozen:
            frozen = self.rng.choice(("", "", "", "", "", "", "all", "first"))
        if (
            frozen == "all" and self.frozen_dtypes and kind not in ("square", "tied")
        ):  # these may share with trained ones
            dtype = self.rng.choice(self.frozen_dtypes)
        return Node(
            kind,
            unit=unit,
            dtype=dtype,
            frozen=frozen,
            uses=self.uses(),
            again=again,
            ignored=self.ignores and not unit and self.chance(0.25),
            skipped_by=self.rng.randrange(self.skips) if self.skips and not unit and self.chance(0.4) else -1,
            shape=self.rng.choice(SHAPES),
            size=self.rng.choice(INNER_SIZES),
        )

    def uses(self) -> int:
        """Mostly one."""
        return self.rng.choice((1, 1, 1, 1, 1, 1, 1, 1, 2, 1 if self.skips else 0))


def smaller_trees(tree: Tree) -> Iterator[Tree]:
    """Trees that are simpler by one thing each, the most first."""
    for root in _smaller(tree.root, is_root=True):
        yield replace(tree, root=root)
    if tree.width > WIDTHS[0]:
        yield replace(tree, width=WIDTHS[0])


def _smaller(node: Node, *, is_root: bool = False) -> Iterator[Node]:
    children = node.children
    for i, child in enumerate(children):
        if len(children) > 1:
            yield replace(node, children=children[:i] + children[i + 1 :])
        if child.kind == "group" and not child.unit:
            yield replace(node, children=children[:i] + child.children + children[i + 1 :])
    for name, simple in (
        ("unit", False),
        ("again", False),
        ("uses", 1),
        ("ties", False),
        ("ignored", False),
        ("skipped_by", -1),
        ("frozen", ""),
        ("output", "tensor"),
        ("shape", (2,)),
        ("size", 1),
    ):
        if getattr(node, name) != simple and not (is_root and name == "unit"):
            yield replace(node, **{name: simple})
    if node.kind not in ("group", "vector"):
        yield replace(node, kind="vector")
    for i, child in enumerate(children):
        for smaller in _smaller(child):
            yield replace(node, children=(*children[:i], smaller, *children[i + 1 :]))
