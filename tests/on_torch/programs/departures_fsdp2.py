"""Where `torch_backend` and `torch.distributed.fsdp` do not do the same under FSDP2, as `departures_fsdp1` has it for FSDP1."""

import functools
from dataclasses import replace
from typing import Any

from tests.on_torch.helpers.paired_runs import Case
from tests.on_torch.helpers.random_trees import Node, Tree, build
from tests.on_torch.programs.departures_fsdp1 import Departure, with_nodes, with_options
from tests.on_torch.programs.differential_fsdp2 import Precision, ShardOptions


def _one(leaf: Node, **options: Any) -> Case:
    return Case(Tree(Node(children=(leaf,), unit=True)), ShardOptions(steps=1, **options))


@functools.cache
def _trains(leaf: Node) -> bool:
    """Whether it has parameters of its own that are trained."""
    if leaf.kind == "group" or leaf.ignored:
        return False
    return any(param.requires_grad for param in build(leaf, 4, False, []).parameters())


def _trained(unit: Node) -> list[Node]:
    """The leaves that a unit trains, without those of inner units."""
    here = [unit] if _trains(unit) else []
    return here + [leaf for child in unit.children if not child.unit for leaf in _trained(child)]


def _is_skipped(unit: Node) -> bool:
    """Whether one rank skips all that a unit trains."""
    ranks = {leaf.skipped_by for leaf in _trained(unit)}
    return len(ranks) == 1 and ranks != {-1}


def _size(reshard: bool | int | None) -> int:
    return 0 if reshard is None or type(reshard) is bool else reshard


def _is_trained_empty(node: Node) -> bool:
    return node.kind == "empty" and node.frozen != "all" and not node.ignored


def _is_used_again(node: Node) -> bool:
    return any(inner.unit for inner in node.walk()) and (node.uses > 1 or node.again)


def _used_once(node: Node) -> Node:
    return replace(node, uses=1, again=False) if _is_used_again(node) else node


BUGS: tuple[Departure, ...] = (
    Departure(
        "gradients that are not summed over replicas of which there is one",
        "torch keeps them in the dtype of the reduction; ours reduces at once",
        _one(
            Node("embedding"),
            replicate=1,
            micro=(False, True, True),
            partial=True,
            precision=Precision("float16"),
        ),
        "grad (step 0, ",
        lambda case: case.options.partial and case.options.replicate == 1,
        with_options(partial=False),
    ),
    Departure(
        "a unit of which one rank's backward reaches nothing",
        "that rank reduces nothing under ours, and the others wait for it (R29)",
        Case(
            Tree(Node(children=(Node("plain"), Node("vector", skipped_by=1)), unit=True), exact=True),
            ShardOptions(steps=1),
        ),
        "TimeoutError",
        lambda case: any(node.unit and _is_skipped(node) for node in case.nodes),
        with_nodes(lambda node: replace(node, skipped_by=-1)),
    ),
)
DEPARTURES: tuple[Departure, ...] = (
    Departure(
        "a unit that is used again, beside parts that some ranks skip",
        "torch gathers in another order on these ranks, and gloo ends the process; ours goes on (R29)",
        Case(
            Tree(
                Node(
                    children=(
                        Node(
                            children=(
                                Node("vector", skipped_by=2),
                                Node("square", unit=True, uses=2),
                                Node("tied", skipped_by=0),
                            ),
                            unit=True,
                            uses=2,
                        ),
                    ),
                    unit=True,
                ),
            ),
            ShardOptions(),
            world_size=3,
        ),
        "EOFError",
        lambda case: (
            any(node.skipped_by >= 0 for node in case.nodes) and any(node.unit and node.uses > 1 for node in case.nodes)
        ),
        with_nodes(lambda node: replace(node, skipped_by=-1)),
    ),
    Departure(
        "a part that one rank skips, after a microbatch whose gradients wait in another dtype",
        "torch puts zeros in the dtype of compute beside gradients in that of the reduction, and raises on that rank, and the "
        "others wait for it; ours goes on (R15, R29)",
        Case(
            Tree(Node(children=(Node("vector", skipped_by=1), Node("vector")), unit=True)),
            ShardOptions(steps=1, micro=(False, True), precision=Precision(reduce_dtype="float16")),
        ),
        "TimeoutError",
        lambda case: (
            any(node.skipped_by >= 0 for node in case.nodes)
            and case.options.precision is not None
            and case.options.precision.reduce_dtype is not None
            and False in case.options.micro
        ),
        with_nodes(lambda node: replace(node, skipped_by=-1)),
    ),
    Departure(
        "a part that one rank skips, where parameters are sharded to fewer ranks",
        "torch gathers in another order on that rank, and waits for ever; ours goes on (R08, R29)",
        replace(
            Case(
                Tree(
                    Node(
                        children=(
                            Node(children=(Node("vector"),), unit=True),
                            Node("vector", frozen="all", skipped_by=0),
                        ),
                        unit=True,
                    ),
                    exact=True,
                ),
                ShardOptions(steps=1, reshard=2),
            ),
            world_size=4,
        ),
        "TimeoutError",
        lambda case: (
            any(node.skipped_by >= 0 for node in case.nodes)
            and any((_size(case.options.reshard), _size(case.options.inner_reshard)))
        ),
        with_nodes(lambda node: replace(node, skipped_by=-1)),
    ),
    Departure(
        "the gradient of a parameter without elements",
        "torch raises in its copy into the buffer of the reduction; ours reduces no elements",
        Case(Tree(Node(children=(Node("empty"),), unit=True)), ShardOptions(steps=1)),
        "_chunk_cat expects non-empty tensor",
        lambda case: any(map(_is_trained_empty, case.nodes)),
        with_nodes(lambda node: replace(node, frozen="all") if _is_trained_empty(node) else node),
    ),
    Departure(
        "a divide factor where collectives average",
        "torch asks gloo for a sum that multiplies first, which gloo does not have; ours divides by itself (R27)",
        _one(Node("vector"), divide=3.0),
        "Cannot use ReduceOp.PREMUL_SUM with Gloo",
        lambda case: case.options.divide is not None and not case.options.force_sum,
        with_options(force_sum=True),
    ),
    Departure(
        "a unit that was never used, under no_sync with a dtype of reduction",
        "torch looks for the gradient of parameters that it has not made yet, and raises; ours has none",
        Case(
            Tree(Node(children=(Node("vector", unit=True, uses=0), Node("vector")), unit=True)),
            ShardOptions(steps=1, micro=(False, True), precision=Precision("bfloat16", "float32")),
        ),
        "'FSDPParam' object has no attribute '_unsharded_param'",
        lambda case: (
            case.options.precision is not None
            and not case.options.partial
            and not all(case.options.micro)
            and any(node.uses == 0 for node in case.nodes)
        ),
        with_options(micro=(True,)),
    ),
    Departure(
        "several uses of a unit ahead of one backward",
        "torch reduces the gradients of each use, and adds up what was reduced; ours adds up, and reduces once. The same but for "
        "rounding",
        Case(
            Tree(Node(children=(Node("vector", shape=(1, 11)), Node("layer_norm", uses=2)), unit=True)),
            ShardOptions(steps=1, forwards=2),
        ),
        "grad (step 0, ",
        lambda case: (
            not case.tree.exact and case.bits and (case.options.forwards > 1 or any(map(_is_used_again, case.nodes)))
        ),
        lambda case: with_options(forwards=1)(with_nodes(_used_once)(case)),
    ),
    Departure(
        "a divide factor where shard groups have one rank",
        "torch divides by it twice; ours once (R27)",
        _one(Node("vector", dtype="float64"), replicate=2, divide=2.0),
        "grad (step 0, ",
        lambda case: case.options.divide not in (None, 1.0) and case.options.replicate == case.world_size,
        with_options(divide=None),
    ),
    Departure(
        "what is registered between a forward and the next use, where it is sharded to fewer ranks",
        "torch takes rows that are padding for rows of the parameter; ours has none there (R08)",
        replace(_one(Node("vector"), reshard=2, evals=True), world_size=4),
        "full (step 0, ",
        lambda case: case.options.evals and any((_size(case.options.reshard), _size(case.options.inner_reshard))),
        with_options(evals=False),
    ),
    Departure(
        "a state dict loaded in place of a parameter that has two names",
        "torch registers two parameters until the next forward; ours keeps one",
        _one(Node("tied"), edits="assign"),
        "torch's history has",
        lambda case: case.options.edits == "assign" and any(node.kind == "tied" or node.ties for node in case.nodes),
        with_options(edits="load"),
    ),
    Departure(
        "zeros for a unit that was never used",
        "torch has not made its parameters yet, and gives none, and so would wait forever for a rank that uses it; ours gives "
        "zeros",
        _one(Node("vector", unit=True, uses=0), zeros_unused=True),
        "grad (step 0, ",
        lambda case: case.options.zeros_unused and any(node.uses == 0 for node in case.nodes),
        with_nodes(lambda node: replace(node, uses=max(node.uses, 1))),
    ),
)

# Smallest cases that once differed by a fault of ours.
MENDED: tuple[Case, ...] = (
    Case(Tree(Node(children=(Node("vector", uses=0), Node("vector")), unit=True)), ShardOptions(steps=1)),
    Case(Tree(Node(children=(Node("vector"), Node("empty", frozen="all")), unit=True)), ShardOptions(steps=1)),
    _one(Node("vector"), edits="assign"),
    _one(Node("tied"), last_dim=True),
    replace(_one(Node("vector"), replicate=2, zeros_unused=True), world_size=4),
    _one(Node("vector"), evals=True, zero="zeros", switches=True),
    _one(Node("conv"), divide=3.0, force_sum=True),
    Case(
        Tree(Node(children=(Node("vector"), Node("vector", dtype="float64", frozen="all")), unit=True)),
        ShardOptions(steps=1, comms=True),
    ),
)
