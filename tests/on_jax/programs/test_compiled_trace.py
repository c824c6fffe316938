"""What XLA made of a step: collectives, and memory."""

import os
import re
from collections import Counter

import jax
import ml_dtypes
import numpy as np
import pytest

from crossframe import MeshSpec
from crossframe.errors import UnsupportedError
from crossframe.trace import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER, difference
from jax_backend import compiled_trace, make_mesh, scan, shard, trace_of, value_and_grad
from jax_backend.programs._compiled_trace import events_of
from jax_backend.programs._trace import FOREIGN
from tests.on_jax.helpers.small import ITEMSIZE, UNITS, saved_for_backward, small_batch, small_loss, small_params, wide
from tests.on_jax.helpers.stacked import MODES, stacked_loss, stacked_params

HYBRID = MeshSpec(shard=2, replicate=2)


def own(events):
    return [event for event in events if event.unit != FOREIGN]


def test_under_shard_map_xla_issues_in_a_scan_what_the_program_says():
    mesh = make_mesh(HYBRID)
    args = shard(stacked_params(), mesh, stacked=("blocks",), layout="flat"), small_batch()
    step = value_and_grad(stacked_loss, mesh)
    found = own(compiled_trace(step, *args, mesh=mesh, rank=3))
    assert difference(trace_of(step, *args, mesh=mesh, rank=3), found, ordered=False, kinds=COLLECTIVES) == []
    assert {tuple(event.group) for event in found} == {(2, 3), (1, 3)}


def test_under_jit_every_layer_is_gathered_inside_the_loop_in_forward_and_again_in_backward():
    mesh = make_mesh(HYBRID)
    args = shard(stacked_params(), mesh, stacked=("blocks",)), small_batch()
    events = own(compiled_trace(value_and_grad(stacked_loss, mesh, mode="jit"), *args, mesh=mesh))
    gathers = Counter((e.phase, tuple(e.group)) for e in events if (e.kind, e.unit) == (ALL_GATHER, "blocks"))
    assert gathers == {("forward", (0, 1)): 4, ("backward", (0, 1)): 4}


def test_under_jit_every_unit_is_gathered_and_reduced_over_its_groups():
    mesh = make_mesh(HYBRID)
    sharded = shard(small_params(), mesh, units=UNITS)
    events = own(compiled_trace(value_and_grad(small_loss, mesh, mode="jit"), sharded, small_batch(), mesh=mesh))
    sizes = {unit: ITEMSIZE * layout.gathered_numel for unit, layout in sharded.tree.units}
    forward = {e.unit: e.num_bytes for e in events if e.kind == ALL_GATHER and e.phase == "forward"}
    assert forward == sizes
    # XLA puts what is of one group into one collective, under the name of one of them.
    reduced = Counter()
    for event in events:
        if event.kind in (REDUCE_SCATTER, ALL_REDUCE):
            reduced[tuple(event.group)] += event.num_bytes
    assert reduced == {(0, 1): sum(sizes.values()), (0, 2): sum(sizes.values()) // 2}


def test_R14_under_jit_no_full_parameter_of_a_resharded_unit_is_saved():
    step = value_and_grad(small_loss, make_mesh(MeshSpec(2)), mode="jit")
    sharded = shard(small_params(), make_mesh(MeshSpec(2)), units=UNITS)
    shapes = saved_for_backward(step, sharded, small_batch(14))
    assert (2, 7, 5) in shapes
    full = {(5, 5), (30,), (32,)}
    assert not (full | {(2, *shape) for shape in full}) & (set(shapes) - {(32,)})


LAYERS, WIDTH = 8, 64


def temporary_bytes(mode, *, reshards=True):
    """What XLA's program of a loop over layers holds beside its arguments and results, on each of two devices."""

    def loss(params, batch):
        hidden, _ = scan(lambda hidden, block, _: (jax.numpy.tanh(hidden @ block["w"]), None), batch, params["blocks"])
        return (hidden**2).mean()

    mesh, params = make_mesh(MeshSpec(2)), wide({"blocks": {"w": np.zeros((LAYERS, WIDTH, WIDTH))}})
    sharded = shard(params, mesh, stacked=("blocks",), reshard_after_forward=reshards)
    lowered = jax.jit(value_and_grad(loss, mesh, mode=mode)).lower(sharded, np.zeros((2, WIDTH)))
    # XLA's default, which tests/conftest.py turns off where XLA has it.
    emits = "xla_cpu_use_fusion_emitters"
    analysis = lowered.compile({emits: True} if emits in os.environ.get("XLA_FLAGS", "") else None).memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("mode", MODES)
def test_R14_resharding_in_a_scan_saves_memory(mode):
    # What is kept otherwise: every layer's full parameters but the one in use.
    saved = temporary_bytes(mode, reshards=False) - temporary_bytes(mode)
    assert saved > (LAYERS - 2) * ITEMSIZE * WIDTH * WIDTH


def test_under_jit_a_scan_copies_no_shards():
    copied = LAYERS * ITEMSIZE * WIDTH * WIDTH // 2
    assert temporary_bytes("jit") - temporary_bytes("shard_map") < copied


def test_groups_scopes_and_trips_are_read_from_the_program():
    program = """
HloModule jit_step
%body (param: (s64[], f32[8])) -> (s64[], f32[8]) {
  %ag = f32[8]{0} all-gather(f32[4]{0} %x), replica_groups={{0,1},{2,3}}, metadata={op_name="a/crossframe:all_gather[b#1]/c"}
}
ENTRY %main (param: f32[8]) -> f32[8] {
  %w = (s64[], f32[8]{0}) while(%t), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %r = bf16[4] reduce-scatter(bf16[8] %y), replica_groups=[2,2]<=[4], metadata={op_name="transpose(crossframe:reduce_scatter[])"}
  ROOT %ar = f32[] all-reduce(f32[] %z), replica_groups=[1,4]<=[4], metadata={op_name="loss"}
}
"""
    *gathers, scatter, reduce = events_of(program, rank=2)
    assert [(e.kind, e.unit, e.bucket, e.num_bytes, tuple(e.group)) for e in gathers] == [
        (ALL_GATHER, "b", 1, 32, (2, 3))
    ] * 3
    assert (scatter.kind, scatter.unit, scatter.phase, scatter.dtype) == (REDUCE_SCATTER, "", "backward", "bfloat16")
    assert scatter.num_bytes == 16 and tuple(scatter.group) == (2, 3)
    assert (reduce.unit, tuple(reduce.group)) == (FOREIGN, (0, 1, 2, 3))


def test_all_reduces_of_a_unit_over_shards_and_over_replicas_stay_apart():
    """As XLA compiles mode="jit" on a hybrid mesh with a model axis, with arrays of a unit joined."""
    scopes = [f'metadata={{op_name="transpose(crossframe:all_reduce[b:{operand}])"}}' for operand in (0, 3)]
    program = f"""
ENTRY %main (param: f32[8]) -> f32[8] {{
  %s = (f32[8,4], f32[8]) all-reduce(%x, %y), replica_groups={{{{0,2}},{{1,3}},{{4,6}},{{5,7}}}}, {scopes[0]}
  ROOT %r = f32[4,4] all-reduce(%z), replica_groups={{{{0,4}},{{1,5}},{{2,6}},{{3,7}}}}, {scopes[1]}
}}
"""
    found = [(event.kind, event.num_bytes, tuple(event.group)) for event in events_of(program)]
    assert found == [(ALL_REDUCE, 4 * 40, (0, 2)), (ALL_REDUCE, 4 * 16, (0, 4))]


def gather_of(shape):
    """A program that all-gathers an array of a shape, as XLA writes shapes."""
    collective = f"{shape}{{0}} all-gather(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}"
    return f"ENTRY %main () -> {shape} {{\n  ROOT %g = {collective}\n}}\n"


DTYPES = [
    np.dtype(each) for each in vars(ml_dtypes).values() if isinstance(each, type) and issubclass(each, np.generic)
]
DTYPES += [
    np.dtype(name) for name in ("bool", "int8", "int64", "uint16", "float16", "float64", "complex64", "complex128")
]
NO_HLO = {"complex32", "bcomplex32"}
"""Dtypes that JAX does not lower."""
AS_PRED = {"int1", "uint1"}
"""Dtypes that JAX lowers to booleans."""


@pytest.mark.parametrize("dtype", [each for each in DTYPES if each.name not in NO_HLO | AS_PRED], ids=str)
@pytest.mark.skipif(not jax.config.read("jax_enable_x64"), reason="JAX then has no dtypes of 64 bits")
def test_collectives_of_every_dtype_of_XLA_are_read(dtype):
    lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((6,), dtype)).as_text("hlo")
    shape = re.search(r"\w+\[6\]", lowered)
    assert shape is not None
    [event] = events_of(gather_of(shape[0]))
    assert (event.kind, event.dtype, event.num_bytes) == (ALL_GATHER, dtype.name, 6 * dtype.itemsize)


def test_a_collective_of_an_unknown_dtype_raises_with_its_line():
    with pytest.raises(UnsupportedError, match=r"found 'f2e1m0' of XLA in the line 'ROOT %g = f2e1m0\[6\].*all-gather"):
        list(events_of(gather_of("f2e1m0[6]")))


def test_a_dimension_of_bounded_size_counts_with_its_bound():
    [event] = events_of(gather_of("f32[<=6,2]"))
    assert event.num_bytes == 6 * 2 * 4


@pytest.mark.parametrize("mode", MODES)
def test_a_function_that_returns_the_loss_alone_has_forward_alone(mode):
    mesh = make_mesh(MeshSpec(2))
    step, sharded = value_and_grad(small_loss, mesh, mode=mode), shard(small_params(), mesh, units=UNITS)
    found = compiled_trace(jax.jit(lambda params, batch: step(params, batch).losses), sharded, small_batch(), mesh=mesh)
    assert {(event.kind, event.phase) for event in found} == {(ALL_GATHER, "forward")}
    assert {event.unit for event in found} == {"", *UNITS}
