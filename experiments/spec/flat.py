"""R01-R06: the flat layout beside torch's FlatParamHandle, on every rank."""

from torch import nn
from torch.distributed.fsdp._flat_param import FlatParamHandle

from crossframe.layout import FlatLayout
from experiments.spec.cases import FlatCase, expected_shard, flat_cases
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import DTYPES, build_params, flat_handle, quiet
from experiments.spec.tally import Tallies

EMPTY_IN_SHARD = "torch lists a parameter without elements as a piece of 0 elements; the core lists no empty piece"
EMPTY_UNIT = "torch fails an assertion on a unit without elements; the core gives every rank an empty shard"


def build_handle(case: FlatCase, rank: int) -> FlatParamHandle:
    """What torch builds of a case on a rank, not yet sharded."""
    module, params = nn.Module(), build_params(case.shapes, DTYPES[case.stored])
    for name, i in case.slots:
        module.register_parameter(name, params[i])
    return flat_handle(module, case.keep_original, case.computed, world_size=case.world_size, rank=rank)


def flat_units(tallies: Tallies, scope: Scope) -> None:
    """Every unit of `flat_cases` on every rank: names, shapes, offsets, paddings, sizes, pieces and every value."""
    for case in scope.take(flat_cases(), num_quick=1500):
        layout = case.layout()
        for rank in range(case.world_size):
            handle = build_handle(case, rank)
            if rank == 0:
                _compare_unit(tallies, case, layout, handle)
            if any(spec.numel for spec in layout.params):
                handle.shard()
                _compare_shard(tallies, case, layout, handle, rank)
            else:
                _empty_unit(tallies, case, layout, handle, rank)
            # Views that torch puts on the module hold the flat parameter where Python's collector cannot see it, and the
            # flat parameter holds the module: without this every handle would stay.
            vars(handle.flat_param).clear()


def _compare_unit(tallies: Tallies, case: FlatCase, layout: FlatLayout, handle: FlatParamHandle) -> None:
    flat = handle.flat_param
    tallies["R01"].compare(
        ([(p.name, p.shape) for p in layout.params], [(a, p.name) for p in layout.params for a in p.aliases]),
        (
            list(zip(flat._fqns, map(tuple, flat._shapes), strict=True)),
            [(info.param_name, info.prim_param_name) for info in flat._shared_param_infos],
        ),
        case,
    )
    end = layout.offsets[-1] + layout.params[-1].numel
    tail = flat.numel() - end
    numels = list(zip(flat._numels_with_padding, flat._is_padding_mask, strict=True))
    if tail and numels[-1] == (tail, True):
        numels.pop()
    expected, running = [], 0
    for offset, spec in zip(layout.offsets, layout.params, strict=True):
        expected += [(offset - running, True)] if offset > running else []
        expected.append((spec.numel, False))
        running = offset + spec.numel
    tallies["R02"].compare(expected, numels, case)
    tallies["R03"].compare(layout.flat_numel - end, tail, case)


def _compare_shard(tallies: Tallies, case: FlatCase, layout: FlatLayout, handle: FlatParamHandle, rank: int) -> None:
    flat, here = handle.flat_param, (case, f"rank {rank}")
    start, stop = layout.shard_range(rank)
    size = flat._sharded_size.numel()
    tallies["R04"].compare((layout.padded_shard_numel, stop - start), (size, size - flat._shard_numel_padded), here)
    tallies["R05"].compare(expected_shard(layout, rank), flat.tolist(), here)
    pieces = {piece.name: piece for piece in layout.pieces(rank)}
    for spec, info in zip(layout.params, flat._shard_param_infos, strict=True):
        piece = pieces.get(spec.name)
        if piece is None and info.in_shard and info.numel_in_shard == 0 and spec.numel == 0:
            tallies["R06"].explain(EMPTY_IN_SHARD, (*here, spec.name))
            continue
        ours = piece and (piece.shard_start, piece.numel, piece.param_start, piece.param_stop)
        # torch's last index is inclusive.
        theirs = (
            (info.offset_in_shard, info.numel_in_shard, info.intra_param_start_idx, (info.intra_param_end_idx or 0) + 1)
            if info.in_shard
            else None
        )
        tallies["R06"].compare(ours, theirs, (*here, spec.name))


def _empty_unit(tallies: Tallies, case: FlatCase, layout: FlatLayout, handle: FlatParamHandle, rank: int) -> None:
    try:
        with quiet():
            handle.shard()
    except AssertionError:
        if layout.padded_shard_numel == 0 and not layout.pieces(rank) and not layout.padding(rank):
            tallies["R04"].explain(EMPTY_UNIT, (case, f"rank {rank}"))
            return
    tallies["R04"].fail(f"{case}, rank {rank}: ours {layout.padded_shard_numel} elements, torch no refusal")
