"""Where state dicts of `torch_backend` and of `torch.distributed.fsdp` do not do the same: one operation each, with the smallest
case of it, as in `departures_fsdp1`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.on_torch.helpers.paired_runs import Case
from tests.on_torch.helpers.random_trees import Node, Tree
from tests.on_torch.programs.departures_fsdp1 import Departure, with_mixed, with_nodes, with_options
from tests.on_torch.programs.differential_fsdp1 import HYBRIDS, Mixed
from tests.on_torch.programs.differential_state import StateOptions


def _one(leaf: Node, world_size: int = 2, **options: Any) -> Case:
    return Case(Tree(Node(children=(leaf,), unit=True)), StateOptions(**options), world_size)


def _has_managed(case: Case) -> bool:
    return any(node.kind not in ("group", "plain") and not node.ignored for node in case.nodes)


def _has_trained(case: Case) -> bool:
    return any(node.kind not in ("group", "plain") and node.frozen != "all" for node in _used(case.tree.root))


def _used(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        if child.uses:
            yield from _used(child)


BUGS: tuple[Departure, ...] = ()
# What once differed, and is the same now.
MENDED = {
    "a local state dict loaded where units are sharded and the root is not": _one(
        Node("vector", unit=True), kind="LOCAL", sharding_strategy="NO_SHARD", inner="FULL_SHARD", steps=0
    ),
}
_ALL = (
    Departure(
        "activations checkpointed after a policy has wrapped modules that mixed precision leaves out",
        "torch leaves on each of these that it has no mixed precision, and its own checkpointing takes that for an argument of "
        "the module's forward, which raises; ours leaves nothing behind",
        _one(Node("vector"), steps=0, wrap="module", mixed=Mixed(ignores=("Vector",)), checkpointed="after"),
        "unexpected keyword argument 'mixed_precision'",
        lambda case: (
            case.options.checkpointed == "after"
            and case.options.wrap != "hand"
            and case.options.mixed is not None
            and bool(case.options.mixed.ignores)
        ),
        with_options(checkpointed="before"),
    ),
    Departure(
        "a state dict taken while parameters are summoned, other than a full one on all ranks",
        "torch makes a sharded one of them, and raises of a local one and of one on rank 0; ours copies what the user sees",
        _one(Node("vector"), amid="summoned", kind="SHARDED", steps=0),
        "saved: kind",
        lambda case: case.options.amid == "summoned" and (case.options.kind != "FULL" or case.options.rank0_only),
        with_options(amid=""),
    ),
    Departure(
        "a full state dict moved to the CPU, where it lies already",
        "torch frees the memory of the tensor that it returns: it raises, or ends the process; ours returns it",
        _one(Node("vector"), use_orig_params=False, offload=True, steps=0),
        "out of bounds for storage of size 0",
        lambda case: case.options.kind == "FULL" and case.options.offload,
        with_options(offload=False),
        mended_in=(2, 14),
    ),
    Departure(
        "a local state dict of several shard groups",
        "torch says of every rank that it is the first, second ... of all, and raises on those that are not; the others wait",
        _one(
            Node("vector"),
            world_size=4,
            kind="LOCAL",
            sharding_strategy="HYBRID_SHARD",
            mesh="groups",
            shard_size=2,
            steps=0,
        ),
        "TimeoutError",
        lambda case: (
            case.options.kind == "LOCAL"
            and case.options.sharding_strategy in HYBRIDS
            and case.options.shard_size < case.world_size
        ),
        with_options(kind="SHARDED"),
    ),
    Departure(
        "the second name of a module that mixed precision leaves out",
        "torch makes a unit of it under its first name alone, and gives this rank's piece under the second; ours gives the same "
        "under both",
        _one(
            Node("vector", shape=(5,), again=True),
            kind="SHARDED",
            steps=0,
            wrap="module",
            mixed=Mixed(ignores=("Vector",)),
        ),
        "saved: kind",
        lambda case: (
            case.options.mixed is not None
            and case.options.mixed.ignores != ()
            and case.options.wrap != "hand"
            and any(node.again for node in case.nodes)
        ),
        with_nodes(lambda node: replace(node, again=False)),
    ),
    Departure(
        "low-precision buffers beside a root without parameters of its own",
        "torch saves those of units with parameters in the dtype that they had, and these as they are; ours all as they were",
        Case(
            Tree(Node(children=(Node("vector", unit=True), Node("buffers", ignored=True)), unit=True)),
            StateOptions(
                steps=0, mixed=Mixed(buffer_dtype="bfloat16", ignores=()), inner="FULL_SHARD", ignored="params"
            ),
        ),
        "saved: kind",
        lambda case: (
            case.options.mixed is not None
            and case.options.mixed.buffer_dtype is not None
            and case.options.ignored == "params"
            and any(node.ignored and node.kind == "buffers" for node in case.nodes)
        ),
        with_mixed(buffer_dtype=None),
    ),
    Departure(
        "a state dict between forward and backward, where activations are checkpointed in low precision",
        "torch takes views of memory that it has freed: it raises, or ends the process; ours gives what the shards hold",
        Case(
            Tree(Node(children=(Node(children=(Node("vector"),), unit=True), Node("vector")), unit=True)),
            StateOptions(
                use_orig_params=False,
                kind="SHARDED",
                amid="forward",
                mixed=Mixed("float16"),
                checkpointed="after",
                steps=0,
            ),
        ),
        "EOFError",
        lambda case: (
            case.options.amid == "forward"
            and bool(case.options.checkpointed)
            and case.options.mixed is not None
            and case.options.mixed.param_dtype is not None
        ),
        with_options(amid=""),
    ),
    Departure(
        "a parameter that is not used in a unit that is used twice, where nothing is sharded",
        "torch registers it no more once the unit was used; ours does",
        Case(
            Tree(
                Node(
                    children=(
                        Node(children=(Node("vector", uses=0), Node("vector", unit=True)), unit=True, uses=2),
                        Node("vector"),
                    ),
                    unit=True,
                )
            ),
            StateOptions(steps=0),
            world_size=1,
        ),
        "param (step 200",
        lambda case: (
            case.options.use_orig_params
            and (case.world_size == 1 or "NO_SHARD" in (case.options.sharding_strategy, case.options.inner))
            and any(node.uses == 0 for node in case.nodes)
        ),
        with_nodes(lambda node: replace(node, uses=max(node.uses, 1))),
    ),
    Departure(
        "full optimizer state by the older function, with original parameters, on the CPU",
        "torch gathers one kind of state after the other into the same memory, and leaves it there where it is to move it to the "
        "CPU: all of it reads as what came last; ours keeps each",
        _one(Node("vector"), legacy=True, optimizer="adam"),
        "as PARAM_ID",
        lambda case: case.options.legacy and case.options.kind == "FULL" and case.options.use_orig_params,
        with_options(legacy=False),
    ),
    Departure(
        "other keys for an optimizer without state",
        "torch returns what it was given, whose groups keep their keys; ours gives the groups theirs",
        _one(Node("vector"), legacy=True, optimizer="sgd", use_orig_params=False),
        "as PARAM_ID",
        lambda case: (
            case.options.legacy
            and case.options.kind == "FULL"
            and (
                case.options.optimizer == "sgd"
                or case.options.steps == 0
                or case.options.without == "unit"
                or not _has_trained(case)
            )
        ),
        with_options(legacy=False),
    ),
    Departure(
        "optimizer state to load, where all parameters are ignored",
        "torch looks for the first unit that has parameters, and ends with StopIteration; ours loads as a plain optimizer",
        _one(Node("vector", ignored=True), steps=0),
        "StopIteration",
        lambda case: not _has_managed(case),
        with_nodes(lambda node: replace(node, ignored=False)),
    ),
    Departure(
        "buffers of an ignored module with two names, where other ranks than the first have no full state dict",
        "torch takes them from it under the first name alone, and leaves those under the second; ours leaves both",
        _one(Node("buffers", again=True, ignored=True), rank0_only=True, steps=0),
        "keys",
        lambda case: case.options.rank0_only and any(node.ignored and node.again for node in case.nodes),
        with_nodes(lambda node: replace(node, again=False) if node.ignored else node),
    ),
    Departure(
        "the ShardedTensor of a parameter without elements",
        "torch gives each rank a shard without rows; ours the first alone, as where there are fewer rows than ranks",
        _one(Node("empty"), kind="SHARDED", steps=0),
        "saved: kind",
        lambda case: case.options.kind in ("SHARDED", "LOCAL") and any(node.kind == "empty" for node in case.nodes),
        with_nodes(lambda node: replace(node, kind="vector") if node.kind == "empty" else node),
    ),
    Departure(
        "the sharded state of an optimizer whose flat parameters are not sharded",
        "torch cuts it into ShardedTensors, unlike the model's and unlike that of original parameters; ours gives it whole",
        _one(Node("vector"), use_orig_params=False, kind="SHARDED", sharding_strategy="NO_SHARD"),
        "optimizer: kind",
        lambda case: (
            case.options.kind != "FULL"
            and not case.options.use_orig_params
            and (case.world_size == 1 or "NO_SHARD" in (case.options.sharding_strategy, case.options.inner))
        ),
        with_options(kind="FULL"),
    ),
    Departure(
        "buffers in low precision in a local state dict",
        "torch leaves them in the dtype of compute, unlike in other state dicts; ours gives the dtype that they had",
        _one(Node("buffers"), kind="LOCAL", mixed=Mixed(buffer_dtype="bfloat16"), steps=0),
        "saved: kind",
        lambda case: (
            case.options.kind == "LOCAL"
            and case.options.mixed is not None
            and case.options.mixed.buffer_dtype is not None
            and any(node.kind in ("buffers", "batch_norm") for node in case.nodes)
        ),
        with_mixed(buffer_dtype=None),
    ),
)
DEPARTURES = tuple(each for each in _ALL if not each.is_mended)
MENDED |= {each.name: each.smallest for each in _ALL if each.is_mended}
