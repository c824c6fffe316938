"""What model axes send, from shapes: the sums of the papers that the formulas are from."""

import pytest

from crossframe.cost import Hardware, step_cost
from crossframe.errors import PlanError
from crossframe.mesh import ParallelMesh
from crossframe.parallel import ParallelModel, Style, idle_share, model_traffic, token_shares
from crossframe.parallel.styles import known_rules
from crossframe.parallel.traffic import by_kind
from crossframe.plan import step_plan
from crossframe.shapes import ModelShapes, model_shapes
from crossframe.strategy import Schedule
from crossframe.trace import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COMPUTE, REDUCE_SCATTER, SEND
from tests.core.parallel.test_model import RULES, shapes_of
from tests.core.parallel.test_plan import units_of

LLAMA = model_shapes("llama-3-8b", "bfloat16")
TOKENS, WIDTH, BLOCKS = 100, 4096, 32


def totals(traffic):
    return {
        key: (sum(each.count for each in found), sum(each.count * each.num_bytes for each in found))
        for key, found in by_kind(traffic).items()
    }


def test_tensor_parallelism_has_two_all_reduces_a_block_in_each_direction():
    """And one of the embedding in forward, one of the head's input in backward."""
    model = ParallelModel(LLAMA, ParallelMesh.of(dp=2, tp=4))
    traffic = model_traffic(model, 5, tokens=TOKENS, microbatches=3)
    for phase in ("forward", "backward"):
        found = [each for each in traffic if each.phase == phase]
        assert {each.kind for each in found} == {ALL_REDUCE}
        assert sum(each.count for each in found) == 3 * (2 * BLOCKS + 1)
        assert {each.num_bytes for each in found} == {2 * TOKENS * WIDTH}
        assert {tuple(each.group) for each in found} == {(4, 5, 6, 7)}


def test_sequence_parallelism_sends_the_same_bytes_in_other_collectives():
    rules = [*known_rules(LLAMA.params), ("*norm", Style.SEQUENCE)]
    plain = model_traffic(ParallelModel(LLAMA, ParallelMesh.of(tp=4)), 0, tokens=TOKENS)
    sequence = totals(model_traffic(ParallelModel(LLAMA, ParallelMesh.of(tp=4), rules), 0, tokens=TOKENS))
    count, num_bytes = totals(plain)["tp", ALL_REDUCE]
    assert sequence["tp", ALL_GATHER] == sequence["tp", REDUCE_SCATTER] == (count, num_bytes)
    norms = [param for param in LLAMA.params if "norm" in param.name]
    assert sequence["tp", ALL_REDUCE] == (len(norms), 2 * sum(param.numel for param in norms))


def test_traffic_of_stages_adds_up_to_that_of_the_model():
    whole = totals(model_traffic(ParallelModel(LLAMA, ParallelMesh.of(dp=1, tp=2)), 0, tokens=TOKENS))
    model = ParallelModel(LLAMA, ParallelMesh.of(pp=4, dp=1, tp=2))
    of_stages = [totals(model_traffic(model, 2 * stage, tokens=TOKENS)) for stage in range(4)]
    for at in (0, 1):
        assert sum(found["tp", ALL_REDUCE][at] for found in of_stages) == whole["tp", ALL_REDUCE][at]
    # Between two stages, the activations in one direction and their gradients in the other.
    assert [found["pp", SEND] for found in of_stages] == [(n, n * 2 * TOKENS * WIDTH) for n in (1, 2, 2, 1)]
    first, *_, last = (model_traffic(model, rank, tokens=TOKENS) for rank in (1, 7))
    assert [(e.phase, e.group) for e in first if e.kind == SEND] == [("forward", (1, 3))]
    assert [(e.phase, e.group) for e in last if e.kind == SEND] == [("backward", (7, 5))]


@pytest.mark.parametrize("numbered", [False, True])
def test_experts_exchange_tokens_twice_in_each_direction(numbered):
    model = ParallelModel(shapes_of(numbered=numbered), ParallelMesh.of(dp=2, ep=2), RULES)
    traffic = model_traffic(model, 3, tokens=TOKENS, dtype="bfloat16", experts_per_token=2)
    assert totals(traffic) == {("ep", ALL_TO_ALL): (2 * 4, 8 * TOKENS * 2 * 4 * 2)}
    assert {tuple(each.group) for each in traffic} == {(2, 3)}
    assert token_shares(model, 2) == {"h.0.experts": 2 * 2 / 4, "h.1.experts": 2 * 2 / 4}


def test_experts_compute_with_the_tokens_that_come_to_them():
    """All ranks of an expert axis together do the work of one device with all experts, for each of them."""
    shapes, rules = shapes_of(), [rule for rule in RULES if rule[1] is Style.EXPERTS]
    operations = {}
    for ep in (2, 4):
        model = ParallelModel(shapes, ParallelMesh.of(dp=4 // ep, ep=ep), rules)
        units = units_of(model, 0)
        slow = Hardware(flops_per_second=1.0)
        cost = step_cost(step_plan(units, model.mesh), units, slow, tokens=6, token_shares=token_shares(model, 2))
        spans = [s for s in cost.spans if s.event.kind == COMPUTE and s.event.unit == "h.0.experts"]
        operations[ep] = sum(span.stop_seconds - span.start_seconds for span in spans)
    expert = 4 * 3 + 3
    assert (
        operations[2] == operations[4] == 6 * 6 * 2 * expert
    )  # forward and backward of 6 tokens with two experts each


def test_models_without_axes_send_nothing_over_them():
    model = ParallelModel(LLAMA, ParallelMesh.of(dp=8))
    assert model_traffic(model, 0, tokens=TOKENS) == () and token_shares(model, None) == {}


def test_stages_wait_as_the_schedules_say():
    """All operations take one unit of time: the share of idle time until the last one is done."""
    for num_stages, microbatches in ((1, 3), (2, 3), (4, 4), (3, 7)):
        for schedule in Schedule:
            orders = [schedule.order(stage, num_stages, microbatches) for stage in range(num_stages)]
            done, at, time = {}, [0] * num_stages, 0
            while any(at[stage] < len(order) for stage, order in enumerate(orders)):
                time += 1
                for stage, order in enumerate(orders):
                    if at[stage] == len(order):
                        continue
                    phase, i = order[at[stage]]
                    needs = (stage - 1, phase, i) if phase == "forward" else (stage + 1, phase, i)
                    if not 0 <= needs[0] < num_stages or done.get(needs, time) < time:
                        done[stage, phase, i] = time
                        at[stage] += 1
            assert 1 - 2 * microbatches / time == pytest.approx(idle_share(num_stages, microbatches))


@pytest.mark.parametrize(
    ("sizes", "options", "said"),
    [
        ({"tp": 2}, {"tokens": 0}, "tokens: expected a number of at least 1, got 0"),
        ({"tp": 2}, {"microbatches": 0}, "microbatches: expected a number of at least 1, got 0"),
        ({"ep": 2}, {}, "with axis 'ep', expected the number of experts that process a token, from 1 to 4, got None"),
        ({"ep": 2}, {"experts_per_token": 5}, "from 1 to 4, got 5"),
    ],
)
def test_traffic_that_cannot_be_stated_is_refused(sizes, options, said):
    with pytest.raises(PlanError, match=said):
        model_traffic(ParallelModel(shapes_of(), ParallelMesh.of(**sizes), RULES), 0, **({"tokens": 1} | options))


def test_an_unknown_width_is_refused():
    shapes = ModelShapes("m", shapes_of().params, shapes_of().units)
    model = ParallelModel(shapes, ParallelMesh.of(pp=2), ())
    with pytest.raises(PlanError, match="model 'm': the width of activations follows from a module of style"):
        model_traffic(model, 0, tokens=1)


def test_times_of_an_all_to_all_and_a_send():
    hardware = Hardware(bytes_per_second=2.0, replica_bytes_per_second=1.0, latency_seconds=3.0)
    assert hardware.collective_seconds(ALL_TO_ALL, 8, 4) == 3 * 3 + 8 / 2 * 3 / 4
    assert hardware.collective_seconds(SEND, 8, 2) == 3 + 8 / 2
    assert hardware.collective_seconds(ALL_REDUCE, 8, 4) == 2 * (2 * 3 + 8 * 3 / 4)
    assert hardware.collective_seconds(ALL_REDUCE, 8, 4, between_replicas=False) == 2 * (2 * 3 + 8 / 2 * 3 / 4)
