"""Where `torch_backend` and `torch.distributed.fsdp` do not do the same: one operation each, with the smallest case of it.

Every random case is led around these: `avoid` takes the operation out of it, and what is left must be the same. Nothing
else is excepted. A departure whose fault lies here is in BUGS, each with a test that is expected to fail until it is
mended; one that is torch's, or where ours is the better, in DEPARTURES, each with a test that both do as is said.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.on_torch.differential import Case, Options
from tests.on_torch.trees import Node, Tree


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
    """

    name: str
    why: str
    smallest: Case
    shows: str
    when: Callable[[Case], bool]
    avoid: Callable[[Case], Case]


def with_options(**changes: object) -> Callable[[Case], Case]:
    """A case with other options."""
    return lambda case: replace(case, options=replace(case.options, **changes))


def with_nodes(change: Callable[[Node], Node]) -> Callable[[Case], Case]:
    """A case with every node changed."""

    def changed(node: Node) -> Node:
        return change(replace(node, children=tuple(changed(child) for child in node.children)))

    return lambda case: replace(case, tree=replace(case.tree, root=changed(case.tree.root)))


def used_once(node: Node) -> Node:
    """A node that is called once, under one name."""
    return replace(node, uses=min(node.uses, 1), again=False)


def _reused(case: Case) -> bool:
    return any(node.uses > 1 or node.again for node in case.nodes)


def _passes_on(node: Node) -> bool:
    return node.kind == "group" and all(child.uses == 0 or _passes_on(child) for child in node.children)


def _has_frozen(node: Node) -> bool:
    return any(inner.frozen for inner in node.walk())


def _one(leaf: Node, **options: object) -> Case:
    return Case(Tree(Node(children=(leaf,), unit=True)), Options(steps=1, **options))


BUGS = (
    Departure(
        "a trained parameter that is not used, in a unit of which only frozen parameters are",
        "torch takes the unit as used and gives zeros (R29); ours gives none",
        Case(Tree(Node(children=(Node("vector", uses=0), Node("vector", frozen="all")), unit=True)), Options(steps=1)),
        "grad",
        lambda case: (
            case.options.use_orig_params
            and any(node.frozen for node in case.nodes)
            and any(node.uses == 0 for node in case.nodes)
        ),
        with_nodes(lambda node: replace(node, uses=max(node.uses, 1))),
    ),
    Departure(
        "a frozen unit that is used twice",
        "the second use's end frees the parameters that the backward through the first use needs",
        _one(Node("tied", unit=True, frozen="all", again=True)),
        "raises",
        lambda case: any(node.frozen for node in case.nodes) and _reused(case),
        with_nodes(used_once),
    ),
    Departure(
        "gradients of a unit that is used twice, accumulated under no_sync",
        "torch adds up the uses within a microbatch, then the microbatches; ours adds each use to what is there",
        _one(Node(children=(Node("vector"),), unit=True, uses=2), micro=(False, True)),
        "grad",
        lambda case: (_reused(case) or case.options.forwards > 1) and not all(case.options.micro),
        with_options(micro=(True, True)),
    ),
    Departure(
        "the gradient of a parameter without elements, with original parameters",
        "torch gives the rank in whose shard the parameter lies a gradient without elements; ours gives none",
        _one(Node("empty")),
        "grad",
        lambda case: case.options.use_orig_params and any(node.kind == "empty" for node in case.nodes),
        with_nodes(lambda node: replace(node, kind="vector") if node.kind == "empty" else node),
    ),
)
DEPARTURES = (
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


def around_departures(case: Case) -> Case:
    """The case without any operation of the lists."""
    for departure in (*BUGS, *DEPARTURES):
        if departure.when(case):
            case = departure.avoid(case)
    return case
