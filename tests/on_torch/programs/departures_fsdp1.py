"""Where `torch_backend` and `torch.distributed.fsdp` do not do the same under FSDP1: one operation each, with the smallest case
of it. Those under FSDP2 stand in `departures_fsdp2`.

Every random case is led around these: `avoid` takes the operation out of it, and what is left must be the same. Nothing
else is excepted. A departure whose fault lies here is in BUGS, each with a test that is expected to fail until it is
mended; one that is torch's, or where ours is the better, in DEPARTURES, each with a test that both do as is said.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.on_torch.helpers.device import TORCH_VERSION
from tests.on_torch.helpers.paired_runs import Case
from tests.on_torch.helpers.random_trees import Node, Tree
from tests.on_torch.programs.differential_fsdp1 import Mixed, WrapOptions


@dataclass(frozen=True)
class Departure:
    """An operation whose results differ.

    Attributes:
        name: the operation and its circumstances.
        why: what either does, and why that is so.
        smallest: the smallest case that shows it.
        shows: what the first difference in it reads like, a part of it.
        when: whether a case has the operation under these circumstances.
        avoid: the case without the operation.
        mended_in: the version of torch from which on both do the same; None: none yet.
    """

    name: str
    why: str
    smallest: Case
    shows: str
    when: Callable[[Case], bool]
    avoid: Callable[[Case], Case]
    mended_in: tuple[int, int] | None = None

    @property
    def is_mended(self) -> bool:
        """Whether the installed torch does as ours."""
        return self.mended_in is not None and self.mended_in <= TORCH_VERSION


def with_options(**changes: Any) -> Callable[[Case], Case]:
    """A case with other options."""
    return lambda case: replace(case, options=replace(case.options, **changes))


def with_mixed(**changes: Any) -> Callable[[Case], Case]:
    """A case with another policy of mixed precision."""
    return lambda case: with_options(mixed=replace(case.options.mixed or Mixed(), **changes))(case)


def with_nodes(change: Callable[[Node], Node]) -> Callable[[Case], Case]:
    """A case with every node changed."""

    def changed(node: Node) -> Node:
        return change(replace(node, children=tuple(changed(child) for child in node.children)))

    return lambda case: replace(case, tree=replace(case.tree, root=changed(case.tree.root)))


def _with_kind(kind: str, other: str) -> Callable[[Case], Case]:
    """A case with leaves of one kind instead of those of another."""
    return with_nodes(lambda node: replace(node, kind=other) if node.kind == kind else node)


def _passes_on(node: Node) -> bool:
    return node.kind == "group" and all(child.uses == 0 or _passes_on(child) for child in node.children)


def _has_frozen(node: Node) -> bool:
    return any(inner.frozen for inner in node.walk())


def _one(leaf: Node, **options: Any) -> Case:
    return Case(Tree(Node(children=(leaf,), unit=True)), WrapOptions(steps=1, **options))


_LONG = Node("vector", shape=(17,))

BUGS: tuple[Departure, ...] = ()
DEPARTURES = (
    Departure(
        "a trained parameter that is not used, in a unit of which only frozen parameters are",
        "torch computes gradients of frozen parameters too, so that it takes the unit as used and gives zeros (R29); ours "
        "computes none of these, and gives none",
        Case(
            Tree(Node(children=(Node("vector", uses=0), Node("vector", frozen="all")), unit=True)), WrapOptions(steps=1)
        ),
        "grad (step 0, ",
        lambda case: (
            case.options.use_orig_params
            and any(node.frozen for node in case.nodes)
            and any(node.uses == 0 for node in case.nodes)
        ),
        with_nodes(lambda node: replace(node, uses=max(node.uses, 1))),
    ),
    Departure(
        "gradients that are not sharded, kept in low precision",
        "torch leaves them in the dtype of the reduction; ours in that of compute, as under the other strategies",
        _one(
            Node("vector"),
            sharding_strategy="NO_SHARD",
            mixed=Mixed(reduce_dtype="float16", keep_low_precision_grads=True),
        ),
        "grad (step 0, ",
        lambda case: (
            "NO_SHARD" in (case.options.sharding_strategy, case.options.inner)
            and case.options.mixed is not None
            and case.options.mixed.keep_low_precision_grads
            and case.options.mixed.reduce_dtype is not None
        ),
        with_mixed(reduce_dtype=None),
    ),
    Departure(
        "the gradient of a parameter without elements, with original parameters",
        "torch gives the rank in whose shard the parameter lies a gradient without elements, over which its own largest "
        "gradient then fails; ours gives none",
        Case(Tree(Node(children=(Node("empty"), Node("vector")), unit=True)), WrapOptions(steps=1)),
        "grad (step 0, ",
        lambda case: case.options.use_orig_params and any(node.kind == "empty" for node in case.nodes),
        _with_kind("empty", "vector"),
    ),
    Departure(
        "the dtype of a norm, where gradients have several",
        "torch promotes the dtypes of the gradients that a rank has at the time; ours those of all that there can be, which "
        "are the same on every rank",
        Case(
            Tree(Node(children=(Node("square"), Node("vector", uses=0)), unit=True)),
            WrapOptions(
                steps=1,
                mixed=Mixed("bfloat16", keep_low_precision_grads=True, ignores=("Vector",)),
                wrap="custom",
                clip=(1.0, 2.0),
            ),
        ),
        "norm (step 0)",
        lambda case: (
            case.options.clip is not None
            and case.options.mixed is not None
            and case.options.mixed.keep_low_precision_grads
            and (
                case.options.mixed.ignores != ()
                or case.options.mixed_in != "all"
                or any(node.ignored for node in case.nodes)
            )
        ),
        with_options(clip=None),
    ),
    Departure(
        "buffers of an ignored module in a unit that a policy wraps",
        "torch does not tell the inner unit what is ignored, and casts them; ours leaves them alone",
        Case(
            Tree(Node(children=(Node(children=(Node("buffers", ignored=True), _LONG), unit=True), _LONG), unit=True)),
            WrapOptions(steps=1, mixed=Mixed(buffer_dtype="float16"), wrap="module"),
        ),
        "buffer (step 0, ",
        lambda case: (
            case.options.mixed is not None
            and case.options.mixed.buffer_dtype is not None
            and case.options.wrap != "hand"
            and any(node.ignored and node.kind in ("buffers", "batch_norm") for node in case.nodes)
        ),
        with_mixed(buffer_dtype=None),
    ),
    Departure(
        "the largest gradient in a later step, where a rank has none",
        "torch reduces into the zero that stands for no gradient, and takes what came for it from then on: the largest of all "
        "steps so far; ours takes that of the step",
        Case(
            Tree(Node(children=(Node("vector"),), unit=True), exact=True),
            WrapOptions(steps=2, clip=(0.01, float("inf"))),
            world_size=4,
        ),
        "norm (step 1)",
        lambda case: case.options.clip is not None and case.options.clip[1] == float("inf") and case.options.steps > 1,
        with_options(steps=1),
    ),
    Departure(
        "full gradients of another dtype than float32, where a rank has no part of a unit",
        "that rank sends zeros of float32 under torch, and the others end their processes because the size is wrong",
        _one(Node("vector", shape=(1,), dtype="float64"), sees_grads=True),
        "EOFError",
        lambda case: (
            case.options.sees_grads
            and (
                any(node.dtype == "float64" for node in case.nodes)
                or (case.options.mixed is not None and case.options.mixed.keep_low_precision_grads)
            )
        ),
        with_options(sees_grads=False),
    ),
    Departure(
        "several uses of a parameter ahead of one backward, accumulated under no_sync in low precision",
        "torch adds each use to the gradient that is there, since autograd forgets, whenever the dtype of a flat parameter "
        "changes, that it added up for it; ours adds up the uses first. The same but for rounding",
        Case(
            Tree(Node(children=(Node("square"),), unit=True), width=5),
            WrapOptions(steps=1, mixed=Mixed("bfloat16"), micro=(False, True), forwards=2),
        ),
        "grad (step 0, ",
        lambda case: (
            case.options.mixed is not None
            and (case.options.forwards > 1 or any(node.uses > 1 or node.again for node in case.nodes))
            and not all(case.options.micro)
        ),
        with_options(micro=(True,)),
    ),
    Departure(
        "the largest gradient, where a parameter has no elements",
        "torch takes the largest of no elements, and raises on the rank that has the parameter; ours has no gradient there",
        Case(
            Tree(Node(children=(Node("empty"), _LONG, _LONG, Node("empty"), _LONG), unit=True)),  # one in either shard
            WrapOptions(steps=1, clip=(1.0, float("inf"))),
        ),
        "cannot compute the inf norm on an empty tensor",
        lambda case: (
            case.options.clip is not None
            and case.options.clip[1] == float("inf")
            and any(node.kind == "empty" for node in case.nodes)
        ),
        with_options(clip=None),
    ),
    Departure(
        "a hybrid mesh whose shard groups have one rank",
        "torch divides by the number of replicas and does not sum over them; ours averages (R14)",
        _one(Node("vector"), sharding_strategy="HYBRID_SHARD", mesh="mesh", shard_size=1),
        "grad (step 0, ",
        lambda case: case.options.shard_size == 1,
        lambda case: with_options(shard_size=2 if case.world_size % 2 == 0 else case.world_size)(case),
    ),
    Departure(
        "a gradient accumulated over reductions, not sharded",
        "torch adds one rank's gradient to the reduced sum of earlier ones, and reduces that again; ours reduces, then "
        "adds, as under the other strategies (R28). The same but for rounding",
        _one(Node("mlp"), sharding_strategy="NO_SHARD", micro=(True, True)),
        "grad (step 0, ",
        lambda case: "NO_SHARD" in (case.options.sharding_strategy, case.options.inner) and sum(case.options.micro) > 1,
        with_options(micro=(True,)),
    ),
    Departure(
        "clipping with gradients of float64",
        "torch takes the norm in float32, and so raises on float64; ours takes it in float64 (R30)",
        _one(Node("vector", dtype="float64"), clip=(1.0, 2.0)),
        "torch: raises (step 0): RuntimeError: linalg.vector_norm",
        lambda case: case.options.clip is not None and any(node.dtype == "float64" for node in case.nodes),
        with_options(clip=None),
    ),
    Departure(
        "low precision gradients of a shared parameter, with original parameters",
        "torch assigns them to the second name of the parameter without saying that its gradient has another dtype, and "
        "raises, on the rank that has them",
        Case(
            Tree(Node(children=(Node("tied"),), unit=True), width=5),  # wide enough for both ranks to have a part
            WrapOptions(steps=1, mixed=Mixed("bfloat16", keep_low_precision_grads=True)),
        ),
        "attempting to assign a gradient with dtype 'c10::BFloat16'",
        lambda case: (
            case.options.use_orig_params
            and case.options.mixed is not None
            and case.options.mixed.keep_low_precision_grads
            and any(node.kind == "tied" or node.ties or node.again for node in case.nodes)
        ),
        with_mixed(keep_low_precision_grads=False),
    ),
    Departure(
        "modules of classes that mixed precision ignores, in float64",
        "torch casts their inputs to float32, whatever their parameters are; ours to the dtype of their parameters",
        Case(
            Tree(Node(children=(Node("vector", dtype="float64"),), unit=True, dtype="float64")),
            WrapOptions(steps=1, mixed=Mixed(ignores=("Vector",)), wrap="custom"),
        ),
        "output (step 0, ",
        lambda case: (
            case.options.mixed is not None
            and case.options.mixed.ignores != ()
            and any(node.dtype == "float64" for node in case.nodes)
        ),
        lambda case: with_mixed(ignores=())(_with_kind("batch_norm", "layer_norm")(case)),
    ),
    Departure(
        "the full gradient of a frozen parameter in a unit with trained ones",
        "torch shows zeros while parameters are summoned with gradients; ours shows none, as the plain model has",
        Case(
            Tree(Node(children=(Node("mlp", frozen="first"),), unit=True)),
            WrapOptions(steps=1, sees_grads=True),
        ),
        "full grad (step 0, ",
        lambda case: case.options.sees_grads and any(node.frozen for node in case.nodes),
        with_nodes(lambda node: replace(node, frozen="")),
    ),
    Departure(
        "a frozen unit that returns its input itself",
        "torch takes the input's gradient for the end of the unit's backward before it has begun, and raises; ours goes on",
        _one(Node("vector", frozen="all", uses=0)),
        "raises (step 0): ValueError: expected to be in states",
        lambda case: any(node.unit and _passes_on(node) and _has_frozen(node) for node in case.nodes),
        with_nodes(lambda node: replace(node, uses=max(node.uses, 1))),
    ),
    Departure(
        "a gradient accumulated over reductions, of a flat parameter of one element",
        "its shard is as large as all of it, which torch takes for a gradient that was not reduced yet: what was reduced "
        "before is added to one rank's gradient and reduced again; ours adds up what was reduced",
        _one(Node("vector", shape=(1,)), use_orig_params=False, micro=(True, True)),
        "grad (step 0, ",
        lambda case: (
            not case.options.use_orig_params
            and sum(case.options.micro) > 1
            and any(node.shape == (1,) for node in case.nodes)
        ),
        with_nodes(lambda node: replace(node, shape=(2,)) if node.shape == (1,) else node),
    ),
)

# Smallest cases that once differed by a fault of ours.
MENDED = (
    _one(Node("vector", uses=0)),
    _one(Node("vector"), mixed=Mixed("bfloat16", ignores=("Vector",)), wrap="custom"),
    Case(
        Tree(Node(children=(Node("vector"), Node("mlp", ignored=True, size=3)), unit=True)),
        WrapOptions(steps=1, clip=(0.01, float("inf"))),
    ),
    Case(
        Tree(Node(children=(Node("plain"), Node("square", unit=True)), unit=True)),
        WrapOptions(steps=1, mixed=Mixed("bfloat16", cast_forward_inputs=True, cast_root_forward_inputs=False)),
    ),
    _one(Node("tied", unit=True, frozen="all", again=True)),
    _one(Node(children=(Node("vector"),), unit=True, uses=2), micro=(False, True)),
    Case(
        Tree(
            Node(children=(Node("vector", shape=(13,)), Node("buffers"), Node("empty", shape=(2, 2, 3))), unit=True),
            width=3,
        ),
        WrapOptions(
            micro=(True, True),
            steps=1,
            use_orig_params=False,
            mixed=Mixed("bfloat16", reduce_dtype="float32", keep_low_precision_grads=True),
        ),
    ),
)
