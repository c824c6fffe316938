"""Overlays: from any sharding to any other, every element once and bit for bit, with nobody holding more than its own."""

import itertools
import os
import random
import tracemalloc

import numpy as np
import pytest

from crossframe.dtypes import numpy_dtype
from crossframe.errors import LayoutError, MeshError
from crossframe.layout import (
    FlatLayout,
    Layout,
    Part,
    PerParamLayout,
    RaggedLayout,
    Sharding,
    Transfer,
    exchange,
    overlay,
)
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.reference.redistribute import apply_overlay
from crossframe.writeback import writeback_copies
from tests.conftest import EXHAUSTIVE
from tests.core.helpers.random_layouts import same_bits, specs

Arrays = dict[str, np.ndarray]
Shards = list[list[np.ndarray]]


def shards_of(sharding: Sharding, arrays: Arrays, fill: int = 0) -> Shards:
    """Every rank's buffers, filled from full parameters; padding and, without arrays, everything holds bytes of `fill`."""
    found = []
    for rank in range(sharding.mesh.world_size):
        found.append([])
        for _, layout in sharding.units:
            shard = np.full(layout.padded_shard_numel * numpy_dtype(layout.dtype).itemsize, fill, np.uint8)
            shard = shard.view(numpy_dtype(layout.dtype))
            for copy in writeback_copies(layout, rank % sharding.mesh.shard) if arrays else ():
                full = arrays[layout.params[copy.index].name].reshape(-1)
                shard[copy.shard_start : copy.shard_stop] = full[copy.param_start : copy.param_stop]
            found[-1].append(shard)
    return found


def random_layout(rng: random.Random, params: tuple[ParamSpec, ...], world_size: int) -> Layout:
    """A layout of any kind, per parameter on any dims that the ranks divide."""
    kind = rng.choice(["flat", "flat", "per_param", "per_param", "ragged"])
    if kind == "flat":
        return FlatLayout(params, world_size, rng.random() < 0.5)
    if kind == "ragged":
        blocks = [[b for b in range(1, p.numel + 1) if p.numel % b == 0] or [1] for p in params]
        return RaggedLayout(params, world_size, tuple(map(rng.choice, blocks)) if rng.random() < 0.5 else None)
    dims = [[d for d, size in enumerate(p.shape) if d == 0 or size % world_size == 0] for p in params]
    return PerParamLayout(params, world_size, tuple(map(rng.choice, dims)))


def random_sharding(rng: random.Random, params: list[ParamSpec]) -> Sharding:
    """These parameters on some mesh, in some order, dealt out to some units."""
    mesh = MeshSpec(rng.randint(1, 9), rng.choice([1, 1, 1, 2, 3]))
    params = rng.sample(params, len(params))
    units: dict[tuple[str, str], list[ParamSpec]] = {}
    for param in params:  # parameters of one dtype only in a bucket
        units.setdefault((f"u{rng.randint(0, 1)}", param.dtype), []).append(param)
    return Sharding(tuple((name, random_layout(rng, tuple(own), mesh.shard)) for (name, _), own in units.items()), mesh)


def random_pair(rng: random.Random) -> tuple[Sharding, Sharding, Arrays]:
    """Two shardings of the same parameters, some of them tied on both sides under swapped names, and values for both."""
    first, second, arrays = [], [], {}
    for i in range(rng.randint(1, 4)):
        shape = tuple(rng.choice([0, 1, 2, 3, 4, 5, 6, 8, 12]) for _ in range(rng.randint(1, 3)))
        shape = shape if np.prod(shape) <= 300 else shape[:1]
        dtype = rng.choice(["float32", "float32", "float64", "bfloat16"])
        tied = rng.random() < 0.2
        a, b = f"p{i}", f"q{i}" if tied else f"p{i}"
        first.append(ParamSpec(a, shape, dtype, (b,) if tied else ()))
        second.append(ParamSpec(b, shape, dtype, (a,) if tied else ()))
        size = first[-1].numel * numpy_dtype(dtype).itemsize
        arrays[a] = arrays[b] = np.frombuffer(rng.randbytes(size), numpy_dtype(dtype)).reshape(shape)
    return random_sharding(rng, first), random_sharding(rng, second), arrays


def test_R10_there_and_back_is_bit_for_bit_and_there_is_what_sharding_gives():
    rng = random.Random(0)
    for trial in range(10_000 if os.environ.get(EXHAUSTIVE) else 2_000):
        seed = rng.getrandbits(32)
        a, b, arrays = random_pair(random.Random(seed))
        here, there, back = shards_of(a, arrays, 7), shards_of(b, {}, 9), shards_of(a, {}, 7)
        apply_overlay(overlay(a, b), here, there)
        apply_overlay(overlay(b, a), there, back)
        for got, expected in ((there, shards_of(b, arrays, 9)), (back, here)):
            for rank, shards in enumerate(got):
                for bucket, shard in enumerate(shards):
                    assert same_bits(shard, expected[rank][bucket]), (trial, seed, rank, bucket)


def test_every_element_of_the_target_is_written_once_and_one_rank_asks_only_for_its_own():
    rng = random.Random(1)
    for trial in range(300):
        seed = rng.getrandbits(32)
        a, b, _ = random_pair(random.Random(seed))
        everything = list(overlay(a, b))
        assert everything == [t for rank in range(b.mesh.world_size) for t in overlay(a, b, rank)], (trial, seed)
        written = [(t.target_rank, t.target_bucket, t.target_start + i) for t in everything for i in range(t.numel)]
        held = [
            (rank, bucket, at)
            for rank in range(b.mesh.world_size)
            for bucket, piece in b.pieces(rank)
            for at in range(piece.shard_start, piece.shard_stop)
        ]
        assert written == held, (trial, seed)


def test_runs_that_meet_on_both_sides_are_one_transfer():
    rng = random.Random(2)
    for trial in range(300):
        seed = rng.getrandbits(32)
        a, b, _ = random_pair(random.Random(seed))
        transfers = list(overlay(a, b))
        for one, two in itertools.pairwise(transfers):
            meet = (one.source_start + one.numel, one.target_start + one.numel) == (two.source_start, two.target_start)
            same = (one.name, one.source_rank, one.target_rank) == (two.name, two.source_rank, two.target_rank)
            assert not (meet and same), (trial, seed)
        assert all(t.numel > 0 for t in transfers), (trial, seed)
        # From a sharding to itself each piece, of however many runs, is one transfer, and it is to the same place.
        itself = list(overlay(a, a))
        assert len(itself) == sum(1 for rank in range(a.mesh.world_size) for _ in a.pieces(rank)), (trial, seed)
        for t in itself:
            target = (t.target_rank, t.target_bucket, t.target_start)
            assert (t.source_rank, t.source_bucket, t.source_start) == target, (trial, seed)


def test_R10_a_rank_reads_its_own_replica_and_ranks_beyond_them_take_turns():
    one = FlatLayout(specs([(4,)]), 2, True)
    source = Sharding((("", one),), MeshSpec(2, replicate=3))
    wide = Sharding((("", one),), MeshSpec(2, replicate=5))
    assert [(t.source_rank, t.target_rank) for t in overlay(source, source)] == [(r, r) for r in range(6)]
    assert [t.source_rank for t in overlay(source, wide)] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    whole = Sharding((("", one.over(1)),), MeshSpec(1, replicate=4))
    assert [(t.target_rank, t.source_rank) for t in overlay(source, whole)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 3), (3, 2), (3, 3),
    ]  # fmt: skip


def test_from_rows_on_two_ranks_to_columns_on_two():
    param = specs([(2, 4)])
    rows = Sharding((("", PerParamLayout(param, 2)),), MeshSpec(2))
    columns = Sharding((("u", PerParamLayout(param, 2, (1,))),), MeshSpec(2))
    assert list(overlay(rows, columns, 1)) == [Transfer("p0", 0, 0, 2, 1, 0, 0, 2), Transfer("p0", 1, 0, 2, 1, 0, 2, 2)]
    assert list(overlay(columns, rows, 1)) == [Transfer("p0", 0, 0, 2, 1, 0, 0, 2), Transfer("p0", 1, 0, 2, 1, 0, 2, 2)]


def single(*params: ParamSpec) -> Sharding:
    return Sharding(tuple((param.name, FlatLayout((param,), 2, True)) for param in params), MeshSpec(2))


def test_R01_tied_in_the_source_and_apart_in_the_target_both_read_it():
    source = single(ParamSpec("a", (3,), aliases=("b",)))
    target = single(ParamSpec("a", (3,)), ParamSpec("b", (3,)))
    shards = shards_of(target, {})
    apply_overlay(overlay(source, target), shards_of(source, {"a": np.arange(3, dtype=np.float32)}), shards)
    assert [[shard.tolist() for shard in each] for each in shards] == [[[0, 1], [0, 1]], [[2, 0], [2, 0]]]
    # One of the two names is enough.
    assert len(list(overlay(source, single(ParamSpec("b", (3,)))))) == 2


def test_R01_apart_in_the_source_and_tied_in_the_target_is_refused_by_name():
    source = single(ParamSpec("a", (3,)), ParamSpec("b", (3,)))
    with pytest.raises(LayoutError, match=r"tied in the target but apart in the source.*'a' is 'a' and 'b'"):
        overlay(source, single(ParamSpec("a", (3,), aliases=("b",))))
    with pytest.raises(LayoutError, match=r"'c' is 'a' and 'b'"):
        overlay(source, single(ParamSpec("c", (3,), aliases=("b", "a"))))


def test_what_the_two_sides_do_not_share_is_listed_at_once():
    source = single(ParamSpec("a", (3,)), ParamSpec("b", (3,)), ParamSpec("c", (2,)), ParamSpec("d", (2,)))
    target = single(
        ParamSpec("b", (4,)),
        ParamSpec("c", (2,), "bfloat16"),
        ParamSpec("d", (2,)),
        ParamSpec("e", (1,)),
        ParamSpec("f", (1,)),
    )
    with pytest.raises(LayoutError) as raised:
        overlay(source, target)
    said = str(raised.value)
    assert "missing in the source: 'e', 'f';" in said and "missing in the target: 'a';" in said
    assert "'b' is float32 (3,) in the source and float32 (4,) in the target" in said
    assert "'c' is float32 (2,) in the source and bfloat16 (2,) in the target" in said
    assert "'d'" not in said and "tied" not in said
    many = single(*(ParamSpec(f"m{i}", (1,)) for i in range(15)))
    with pytest.raises(LayoutError, match=r"'m9' and 5 more"):
        overlay(many, single())
    ten = single(*(ParamSpec(f"m{i}", (1,)) for i in range(10)))
    with pytest.raises(LayoutError, match=r"'m9'\. Expected"):
        overlay(ten, single())


def test_wrong_arguments_are_refused():
    one = single(ParamSpec("a", (3,)))
    for rank in (-1, 2, True, 1.0, "0"):
        with pytest.raises(MeshError, match="from 0 to 1"):
            overlay(one, one, rank)  # type: ignore[arg-type]
    for wrong in (None, 3, one.units):
        with pytest.raises(LayoutError, match="Sharding"):
            overlay(one, wrong)  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match="Sharding"):
            overlay(wrong, one)  # type: ignore[arg-type]


def test_shards_that_are_not_those_of_the_shardings_are_refused_by_name():
    one = single(ParamSpec("a", (8,)))
    right = shards_of(one, {})
    for wrong in ([], right[:1], [right[0], []], [right[0], [right[1][0][:2]]]):
        with pytest.raises(LayoutError, match="'a': expected 4 elements in bucket 0 of source rank"):
            apply_overlay(overlay(one, one), wrong, right)
        with pytest.raises(LayoutError, match="'a': expected 4 elements in bucket 0 of target rank"):
            apply_overlay(overlay(one, one), right, wrong)
    with pytest.raises(LayoutError, match="one dtype, got float32 on source rank 0 and float64"):
        apply_overlay(overlay(one, one), right, [[shard.astype(np.float64) for shard in each] for each in right])


def test_no_rank_holds_more_of_a_parameter_than_its_source_and_target_pieces():
    param = specs([(2048, 1024)])
    a = Sharding((("", FlatLayout(param, 3, True)),), MeshSpec(3))
    b = Sharding((("", PerParamLayout(param, 4, (1,))),), MeshSpec(4))
    source, target = shards_of(a, {"p0": np.arange(2**21, dtype=np.float32)}), shards_of(b, {})
    own = min(shard.nbytes for each in target for shard in each)
    tracemalloc.start()
    apply_overlay(overlay(a, b), source, target)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000 < own / 10, peak
    for rank in range(4):
        received = sum(t.numel for t in overlay(a, b, rank))
        assert received == sum(piece.numel for _, piece in b.pieces(rank))
        assert np.array_equal(
            target[rank][0].reshape(2048, 256), np.arange(2**21).reshape(2048, 1024)[:, rank * 256 :][:, :256]
        )


def test_R36_exchanges_between_ranks_are_the_copies_of_the_overlay():
    rng = random.Random(5)
    for trial in range(500):
        seed = rng.getrandbits(32)
        drawn = random.Random(seed)
        params = tuple(
            ParamSpec(f"p{i}", tuple(drawn.choice([0, 1, 2, 3, 4, 6, 8]) for _ in range(drawn.randint(1, 3))))
            for i in range(drawn.randint(1, 4))
        )
        size = drawn.randint(1, 6)
        source, target = (random_layout(drawn, params, size) for _ in range(2))
        indices = tuple(sorted(drawn.sample(range(len(params)), drawn.randint(1, len(params)))))
        plans = [exchange(source, target, rank, indices) for rank in range(size)]
        arrays = {
            p.name: np.arange(p.numel, dtype=np.float32).reshape(p.shape) + 1000 * i for i, p in enumerate(params)
        }
        held = [_pieces(source, rank, arrays) for rank in range(size)]
        found = [
            {name: np.full_like(piece, -1) for name, piece in _pieces(target, rank, arrays).items()}
            for rank in range(size)
        ]
        wires = {}
        for rank, plan in enumerate(plans):
            assert plan.sent_numels[rank] == plan.received_numels[rank] == 0, (trial, seed)
            for a, b in plan.kept:
                _at(found[rank], params, b)[:] = _at(held[rank], params, a)
            line = np.concatenate([_at(held[rank], params, part) for part in plan.sent] or [np.zeros(0)])
            for other, part in enumerate(np.split(line, np.cumsum(plan.sent_numels)[:-1])):
                wires[rank, other] = part
        for rank, plan in enumerate(plans):
            came = [wires[other, rank] for other in range(size)]
            assert tuple(map(len, came)) == plan.received_numels, (trial, seed)
            line, start = np.concatenate(came), 0
            for part in plan.received:
                _at(found[rank], params, part)[:] = line[start : start + part.numel]
                start += part.numel
        for rank in range(size):
            for i, (name, expected) in enumerate(_pieces(target, rank, arrays).items()):
                wanted = expected if i in indices else np.full_like(expected, -1)
                assert same_bits(found[rank][name], wanted), (trial, seed, rank, name)


def _pieces(layout: Layout, rank: int, arrays: Arrays) -> dict[str, np.ndarray]:
    """What a rank holds of each parameter."""
    found = {param.name: [np.zeros(0, np.float32)] for param in layout.params}
    for piece in layout.pieces(rank):
        line = arrays[piece.name].reshape(-1)
        found[piece.name] += [line[run.param_start : run.param_start + run.numel] for run in piece.runs()]
    return {name: np.concatenate(runs) for name, runs in found.items()}


def _at(held: dict[str, np.ndarray], params: tuple[ParamSpec, ...], part: Part) -> np.ndarray:
    return held[params[part.index].name][part.start : part.start + part.numel]


def test_exchanges_between_other_parameters_or_ranks_are_refused():
    one, two = specs([(2,)]), specs([(2,), (3,)])
    for other in (PerParamLayout(two, 2), PerParamLayout(one, 3)):
        with pytest.raises(LayoutError, match="the same parameters over the same ranks"):
            exchange(FlatLayout(one, 2, True), other, 0, (0,))
