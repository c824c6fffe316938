"""Copy plans: the transfers that turn any sharding of a model into any other."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from crossframe.errors import LayoutError
from crossframe.layout.sharding import Sharding
from crossframe.mesh import check_rank
from crossframe.params import ParamSpec
from crossframe.quoting import quote

# Maximum number of parameters of each kind that an error lists.
LISTED = 10


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy of `numel` elements of a parameter from one rank's shard to another's.

    Both starts are offsets in the buffers of the shards. `name` is the parameter's name in the target; buckets are indices into
    `Sharding.units`.
    """

    name: str
    source_rank: int
    source_bucket: int
    source_start: int
    target_rank: int
    target_bucket: int
    target_start: int
    numel: int


def overlay(source: Sharding, target: Sharding, rank: int | None = None) -> Iterator[Transfer]:
    """The transfers that make the target's shards from the source's, in the order of the target's ranks, buckets and offsets.

    Every element of a parameter in a target shard is written once, and padding never. Runs that are adjacent in both shards
    are one transfer. Target rank r reads replica `r // source.mesh.shard % source.mesh.replicate` of the source, so that
    between equal meshes a rank reads from itself where possible.

    Parameters are matched by name or alias. A parameter that is tied in the source may be two parameters in the target; both
    read it.

    Args:
        rank: yield only the transfers to this rank of the target; None yields all.

    Raises:
        LayoutError: parameters that only one side has, whose shapes or dtypes differ, or that are tied in the target only. All
            of them are listed.
        MeshError: `rank` is not a rank of the target.

    >>> from crossframe.layout import FlatLayout
    >>> from crossframe.mesh import MeshSpec
    >>> one = FlatLayout((ParamSpec("w", (5,)),), world_size=1, keep_original=False)
    >>> two = Sharding((("", one.over(2)),), MeshSpec(2))
    >>> [(t.source_start, t.target_rank, t.target_start, t.numel) for t in overlay(Sharding((("", one),), MeshSpec(1)), two)]
    [(0, 0, 0, 3), (3, 1, 0, 2)]
    """
    for sharding in (source, target):
        if not isinstance(sharding, Sharding):
            raise LayoutError(f"expected a Sharding, got {quote(sharding)}")
    if rank is not None:
        check_rank(rank, target.mesh.world_size)
    matched = _matched(source, target)
    ranks = range(target.mesh.world_size) if rank is None else (rank,)
    return (transfer for each in ranks for transfer in _joined(_received(source, target, matched, each)))


def _received(source: Sharding, target: Sharding, matched: dict[str, tuple[int, int]], rank: int) -> Iterator[Transfer]:
    """The transfers to one rank of the target: the runs of its pieces, cut at the ends of the source's pieces."""
    first = rank // source.mesh.shard % source.mesh.replicate * source.mesh.shard
    for target_bucket, piece in target.pieces(rank):
        source_bucket, i = matched[piece.name]
        layout = source.units[source_bucket][1]
        for run in piece.runs():
            for held in layout.find(i, run.param_start, run.param_start + run.numel):
                at = run.shard_start + held.param_start - run.param_start
                yield Transfer(
                    piece.name, first + held.rank, source_bucket, held.shard_start, rank, target_bucket, at, held.numel
                )


def _joined(transfers: Iterable[Transfer]) -> Iterator[Transfer]:
    """Join transfers of one parameter that are adjacent in both shards.

    In the target they always are adjacent, since they fill one piece from its start to its stop.
    """
    last = None
    for each in transfers:
        if last is None:
            last = each
        elif (
            last.name == each.name
            and last.source_rank == each.source_rank
            and last.source_start + last.numel == each.source_start
        ):
            numel = last.numel + each.numel
            last = Transfer(
                last.name, last.source_rank, last.source_bucket, last.source_start,
                last.target_rank, last.target_bucket, last.target_start, numel,
            )  # fmt: skip
        else:
            yield last
            last = each
    if last is not None:
        yield last


def _matched(source: Sharding, target: Sharding) -> dict[str, tuple[int, int]]:
    """By name of each parameter of the target: its bucket in the source, and its index there."""
    matched, used = {}, set()
    missing, different, tied = [], [], []
    for param in target.params:
        names = (param.name, *param.aliases)
        found = {place for name in names if (place := source.find(name)) is not None}
        used |= found
        if not found:
            missing.append(repr(param.name))
            continue
        here = [_param(source, place) for place in sorted(found)]
        if len(found) > 1:
            tied.append(f"{param.name!r} is " + " and ".join(repr(other.name) for other in here))
        elif (here[0].shape, here[0].dtype) != (param.shape, param.dtype):
            was = f"{here[0].dtype} {here[0].shape}"
            different.append(f"{param.name!r} is {was} in the source and {param.dtype} {param.shape} in the target")
        matched[param.name] = found.pop()
    extra = [
        repr(param.name)
        for bucket, (_, layout) in enumerate(source.units)
        for i, param in enumerate(layout.params)
        if (bucket, i) not in used
    ]
    complaints = [
        f"{problem} {_listed(names)}"
        for problem, names in (
            ("missing in the source:", missing),
            ("missing in the target:", extra),
            ("of another shape or dtype:", different),
            ("tied in the target but apart in the source, where their values may differ:", tied),
        )
        if names
    ]
    if complaints:
        raise LayoutError(
            f"the two shardings hold different parameters: {'; '.join(complaints)}. Expected the same names (or aliases), "
            "shapes and dtypes on both sides"
        )
    return matched


def _param(sharding: Sharding, place: tuple[int, int]) -> ParamSpec:
    return sharding.units[place[0]][1].params[place[1]]


def _listed(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")
