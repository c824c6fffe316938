"""The benchmark of the torch backend: that it measures what it says, and that the command writes and judges it."""

import json
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from typer.testing import CliRunner

from experiments.bench import memory
from experiments.bench.command import SECTIONS
from experiments.bench.contestants import Dtypes, build
from experiments.bench.copies import (
    BACK,
    CAST_GRADS,
    CAST_PARAMS,
    COLUMNS,
    DIVISION,
    IN,
    OTHER,
    OUT,
    PRECISIONS,
    TAKEN,
    ZEROS,
    CopyCounter,
    copies_figures,
    copies_grid,
    count,
)
from experiments.bench.figure import Figure, Section
from experiments.bench.gpu import exposed_copies, gpu_figures
from experiments.bench.host import host_figures
from experiments.bench.memory import WATCHED, memory_figures, peak_bytes
from experiments.bench.ranks import FAKE, on_ranks
from experiments.bench.resident import Resident
from experiments.bench.sizes import FULL, QUICK
from experiments.bench.state import LIMIT as STATE_LIMIT
from experiments.bench.state import OPERATIONS, fullest, time_figures
from experiments.bench.state import memory_figures as state_memory_figures
from experiments.bench.step import step_figures
from experiments.bench.timing import WARM_UP, alternate
from experiments.bench.wrap import LIMIT as WRAP_LIMIT
from experiments.bench.wrap import wrap_figures
from experiments.cli.commands import app


def run(*arguments):
    """Exit status and what was printed."""
    result = CliRunner().invoke(app, ["bench", "torch", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.exhaustive
def test_all_is_measured_and_written(tmp_path):
    # Without GPUs, which the quick form would use at their real backend: what they measure is tested by parts.
    path, readable = tmp_path / "torch.json", tmp_path / "torch.md"
    chosen = [
        part for name in SECTIONS if name != "gpu" or not torch.cuda.is_available() for part in ("--section", name)
    ]
    status, said = run("--quick", "--json", path, "--output", readable, *chosen)
    assert status == 0, said
    report = json.loads(path.read_text())
    assert report["quick"] and report["versions"]["torch"] == torch.__version__ and report["machine"]["cores"] >= 1
    by_title = {section["title"]: section for section in report["sections"]}
    measured = [
        "Time of a training step",
        "Bookkeeping of the host",
        "Peak memory",
        "Time to wrap a model",
        "Bytes copied",
    ]
    assert list(by_title)[:5] == measured
    for section in report["sections"]:
        assert bool(section["figures"]) != bool(section["skipped"])
        for figure in section["figures"]:
            assert math.isfinite(figure["value"]), figure
            assert figure["value"] > 0 or (figure["value"] == 0 and section["title"] == "Bytes copied"), figure
            assert figure["ok"] == (figure["limit"] is None or figure["value"] <= figure["limit"])
            assert figure["what"] in said and figure["what"] in readable.read_text()
        assert section["ok"] == all(figure["ok"] for figure in section["figures"])
    assert report["ok"] == all(section["ok"] for section in report["sections"])
    for title in measured[:4]:
        what = [figure["what"].rpartition("ranks: ")[2] for figure in by_title[title]["figures"]]
        assert {"our FSDP1", "our FSDP1 flat", "torch FSDP1", "torch FSDP2", "torch FSDP1 flat"} <= {*what}
        assert {"our FSDP2", "our FSDP2 flat", "our FSDP2 ragged"} <= {*what} and "torch FSDP2 flat" not in what
        assert any(figure["limit"] for figure in by_title[title]["figures"])
    # Nothing about bytes depends on the size of the model, so these limits hold in the quick form too.
    assert by_title["Bytes copied"]["ok"], said
    grid = by_title["Bytes copied"]["grid"]
    assert grid["columns"] == [*COLUMNS, "all"] and len(grid["rows"]) == 2 * 4
    for name in grid["rows"]:
        assert name in said and f"| {name} |" in readable.read_text()


def test_a_figure_over_its_limit_fails_only_if_asked(tmp_path, monkeypatch):
    over = Section("Peak memory", "somehow", (Figure("x", 2.0, "times", 1.0), Figure("y", 0.5, "times", 1.0)))
    asked = []
    monkeypatch.setattr(memory, "memory_section", lambda sizes: asked.append(sizes) or over)
    path = tmp_path / "torch.json"
    assert run("--section", "memory", "--json", path)[0] == 0
    report = json.loads(path.read_text())
    assert not report["ok"] and [figure["ok"] for figure in report["sections"][0]["figures"]] == [False, True]
    assert run("--section", "memory", "--strict")[0] == 1
    assert run("--section", "memory", "--quick")[0] == 0
    assert asked == [FULL, FULL, QUICK]
    within = Section("Peak memory", "somehow", (Figure("x", 1.0, "times", 1.0),))
    monkeypatch.setattr(memory, "memory_section", lambda sizes: within)
    assert run("--section", "memory", "--strict")[0] == 0


def test_an_unknown_section_is_refused():
    status, said = run("--section", "speed")
    assert status == 2 and "expected some of step, host, memory, wrap, copies, gpu, got speed" in said


def _fail(rank):
    raise ValueError(f"rank {rank} is out of order")


@pytest.mark.exhaustive
def test_a_rank_that_fails_is_named():
    from crossframe.errors import UsageError

    with pytest.raises(UsageError, match=r"rank 0 of 8 failed(?s:.)*rank 0 is out of order"):
        on_ranks(8, FAKE, _fail)


def test_everyone_is_timed_in_every_round():
    calls, meetings = [], []
    steps = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times = alternate(steps, 5, lambda: meetings.append(len(calls)))
    assert all(len(times[clock][name]) == 5 for clock in ("wall", "processor") for name in "abc")
    assert meetings == list(range(3 * (WARM_UP + 5)))
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds) and len({*map(tuple, rounds)}) > 1


def found(figures, what):
    [figure] = [figure for figure in figures if figure.what == what]
    return figure.value, figure.limit


WALL = {
    "our FSDP1": [2.0, 2.0, 8.0],
    "our FSDP2": [6.0, 6.0, 6.0],
    "our FSDP1 flat": [3.0, 3.0, 3.0],
    "our FSDP2 flat": [2.0, 2.0, 2.0],
    "our FSDP2 ragged": [3.0, 3.0, 3.0],
    "torch FSDP1": [5.0, 5.0, 5.0],
    "torch FSDP2": [4.0, 4.0, 4.0],
    "torch FSDP1 flat": [1.0, 1.0, 1.0],
}
# The same with torch's FSDP1 as the faster.
FSDP1_WINS = {**WALL, "torch FSDP1": [3.0, 3.0, 3.0]}


def limited(figures):
    return {figure.what for figure in figures if figure.limit is not None}


def test_a_step_of_FSDP1_is_held_to_the_faster_of_torch_and_fully_shard_to_its_own():
    wall = {**WALL, "torch FSDP1 again": [5.0, 10.0, 5.0], "torch DDP": [1.0, 1.0, 1.0]}
    processor = {name: [2 * seconds for seconds in taken] for name, taken in wall.items()} | {"our FSDP1": [2.5] * 3}
    figures = step_figures(wall, processor)
    assert found(figures, "our FSDP1 to torch FSDP2, the faster") == (0.5, 1.0)
    assert found(figures, "our FSDP2 to torch FSDP2") == (1.5, 1.0)
    assert found(figures, "our FSDP2 flat to torch FSDP2") == (0.5, 0.97)
    assert found(figures, "our FSDP2 ragged to torch FSDP2") == (0.75, 0.97)
    assert len(limited(figures)) == 4
    assert found(figures, "our FSDP1 to torch FSDP1, time of the processor") == (0.25, None)
    assert found(figures, "our FSDP1 to torch FSDP1") == (0.4, None)
    assert found(figures, "our FSDP1 flat to torch FSDP1 flat") == (3.0, None)
    assert found(figures, "torch FSDP1 again to itself: noise") == (1.0, None)
    assert found(figures, "torch DDP") == (1000.0, None)


def test_fully_shard_stays_held_to_torchs_own_where_that_is_the_slower():
    wall = {**FSDP1_WINS, "torch FSDP1 again": [3.0] * 3, "torch DDP": [1.0] * 3}
    figures = step_figures(wall, wall)
    assert found(figures, "our FSDP1 to torch FSDP1, the faster") == (2 / 3, 1.0)
    assert found(figures, "our FSDP2 to torch FSDP1, the faster") == (2.0, None)
    assert found(figures, "our FSDP2 flat to torch FSDP1, the faster") == (2 / 3, None)
    assert found(figures, "our FSDP2 to torch FSDP2") == (1.5, 1.0)
    assert found(figures, "our FSDP2 ragged to torch FSDP2") == (0.75, 0.97)
    assert len(limited(figures)) == 4 and len({figure.what for figure in figures}) == len(figures)


def test_bookkeeping_is_what_is_longer_than_the_bare_model():
    figures = host_figures({**WALL, "bare": [0.5, 0.5, 0.5]}, 8, (0.45, 0.45))
    assert found(figures, "8 ranks: our FSDP1 to torch FSDP2, the faster") == (3 / 7, 0.45)
    assert found(figures, "8 ranks: our FSDP2 to torch FSDP2") == (11 / 7, 0.45)
    assert found(figures, "8 ranks: our FSDP2 flat to torch FSDP2") == (3 / 7, None)
    assert found(figures, "8 ranks: our FSDP2 ragged to torch FSDP2") == (5 / 7, None)
    assert found(figures, "8 ranks: our FSDP1 to torch FSDP1") == (1 / 3, None)
    assert len(limited(figures)) == 2
    figures = host_figures({**FSDP1_WINS, "bare": [0.5, 0.5, 0.5]}, 8, (0.45, 0.45))
    assert found(figures, "8 ranks: our FSDP1 to torch FSDP1, the faster") == (3 / 5, 0.45)
    assert found(figures, "8 ranks: our FSDP2 to torch FSDP1, the faster") == (11 / 5, None)
    assert found(figures, "8 ranks: our FSDP2 to torch FSDP2") == (11 / 7, 0.45)
    assert len(limited(figures)) == 2


def test_memory_is_held_to_torchs_FSDP1_and_fully_shard_to_torchs_own():
    figures = memory_figures({name: int(1e6 * taken[0]) for name, taken in WALL.items()}, 2)
    assert found(figures, "2 ranks: our FSDP1 to torch FSDP1") == (0.4, 1.0)
    assert found(figures, "2 ranks: our FSDP1 flat to torch FSDP1") == (0.6, 1.0)
    assert found(figures, "2 ranks: our FSDP1 flat to torch FSDP1 flat") == (3.0, None)
    assert found(figures, "2 ranks: our FSDP2 to torch FSDP2") == (1.5, 1.0)
    assert found(figures, "2 ranks: our FSDP2 flat to torch FSDP2") == (0.5, 1.0)
    assert found(figures, "2 ranks: our FSDP2 ragged to torch FSDP2") == (0.75, 1.0)
    assert found(figures, "2 ranks: torch FSDP1") == (5.0, None)


def test_wrapping_is_held_to_a_third_of_torchs_without_a_mesh():
    given = {f"{name}, given a mesh": [2 * seconds for seconds in WALL[name]] for name in WALL if "FSDP2" in name}
    given["torch FSDP2, given a mesh"] = [1.0] * 3
    figures = wrap_figures({**WALL, **given})
    assert found(figures, "our FSDP2 to torch FSDP2") == (1.5, WRAP_LIMIT) and WRAP_LIMIT == 1 / 3
    assert found(figures, "our FSDP2 flat to torch FSDP2") == (0.5, WRAP_LIMIT)
    assert found(figures, "our FSDP2 ragged to torch FSDP2") == (0.75, WRAP_LIMIT)
    assert found(figures, "our FSDP1 to torch FSDP1") == (0.4, None)
    assert found(figures, "our FSDP2 flat to torch FSDP2, given a mesh") == (4.0, None)
    assert found(figures, "our FSDP1") == (2000.0, None)


# Two linear layers, 4 to 6 with a bias and 6 to 3 without: 24 + 6 and 18 parameters. On two ranks a layout takes, of both layers:
PADDED = {"per_param": 30 + 24, "flat": 30 + 18, "ragged": 32 + 24}  # elements gathered
SHARDS = {layout: numel // 2 for layout, numel in PADDED.items()}
LAYOUTS_OF = {
    "our FSDP2": "per_param",
    "our FSDP2 flat": "flat",
    "our FSDP2 ragged": "ragged",
    "torch FSDP2": "per_param",
}


def _two_layers():
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=False))


def _loss(model, dtype=torch.float32):
    return model(torch.ones(0, 4, dtype=dtype)).sum()


def _count_by_hand(_rank):
    """What the counter counts of two layers, a unit each: in each precision, of each contestant, of a step and then of one whose
    gradients come on top of it."""
    counts = {}
    for precision, dtypes in {**PRECISIONS, "reduced too": Dtypes(torch.bfloat16, torch.bfloat16)}.items():
        dtype = torch.float32 if dtypes is None else dtypes.computed
        bare, plain = CopyCounter(), _two_layers().to(dtype)
        count(plain, lambda plain=plain, dtype=dtype: _loss(plain, dtype), bare)
        counts[precision] = {}
        for name in LAYOUTS_OF:
            model = build(name, _two_layers(), {nn.Linear}, dtypes)
            once, again = CopyCounter(bare.names), CopyCounter(bare.names)
            count(model, lambda model=model: _loss(model), once)
            with again:
                _loss(model).backward()
            counts[precision][name] = once.totals(), again.totals()
    return counts


@pytest.fixture(scope="module")
def counted():
    return on_ranks(2, FAKE, _count_by_hand)[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYOUTS_OF)
def test_copies_of_two_layers_are_those_of_a_count_by_hand(counted, name):
    ours, layout = name.startswith("our"), LAYOUTS_OF[name]
    shards, full, per_param = SHARDS[layout], PADDED[layout], layout == "per_param"
    zeros = 2 + 6 if layout == "ragged" else 0  # in 32 and 24 elements, of which 30 and 18 are the parameters'
    nothing = dict.fromkeys(COLUMNS, 0)
    # Both layers are gathered in forward and in backward, and reduced once. 4 and 2 bytes an element.
    assert counted["float32"][name][0] == {
        **nothing,
        TAKEN: 2 * shards * 4,
        IN: 0 if ours else 2 * shards * 4,
        OUT: 2 * full * 4 if per_param else 0,
        BACK: full * 4,
        ZEROS: zeros * 4,
        DIVISION: shards * 4 if ours else 0,
    }
    half = {
        **nothing,
        TAKEN: 2 * shards * 2,
        IN: 0 if ours else 2 * shards * 2,
        CAST_PARAMS: 2 * shards * 2,
        OUT: 2 * full * 2 if per_param else 0,
        ZEROS: zeros * 2,
    }
    wide, narrow = ({DIVISION: shards * size if ours else 0} for size in (4, 2))
    # What is reduced goes to the dtype of the shards.
    assert counted["reduced too"][name][0] == {**half, **narrow, BACK: full * 2, CAST_GRADS: shards * 4}
    assert {**counted["bfloat16"][name][0], BACK: 0, CAST_GRADS: 0} == {**half, **wide}
    # Into float32, at once or in a pass of its own.
    back = [counted["bfloat16"][name][0][column] for column in (BACK, CAST_GRADS)]
    assert back in ([full * 4, 0], [full * 2, full * 4])


@pytest.mark.exhaustive
def test_gradients_that_accumulate_are_sums_beside_all_else(counted):
    for precision, by_name in counted.items():
        for name, (once, again) in by_name.items():
            # All are of float32 here. In single parameters, what pads 3 rows of 6 to 4 is on rank 1 alone.
            assert again == {**once, OTHER: SHARDS[LAYOUTS_OF[name]] * 4}, (precision, name)


def test_copies_are_told_apart_by_where_they_lead():
    """What is no part of a step around collectives, or is a kind of op that no one thought of, is not lost."""
    source = torch.ones(10)
    with CopyCounter({"aten::sin", "aten::add", "aten::add_"}) as counter:
        torch.sin(source)  # the bare model computes it
        torch.cos(source)
        source.view(2, 5).t()  # a view
        torch.empty(10)
        source.clone()
        source.to(torch.bfloat16)
        source.add_(source)
        source.split([4, 6])
        torch.split_with_sizes_copy(source, [4, 6])
        source.new_zeros(3)
        source.div_(2)
    assert counter.totals() == {
        **dict.fromkeys((*COLUMNS, TAKEN), 0),
        OTHER: 40 + 40 + 20 + 40 + 40,
        ZEROS: 12,
        DIVISION: 40,
    }


def _gather_what_two_wrote(_rank):
    buffer, gathered, ones = torch.empty(8), torch.empty(16), torch.ones(8)
    with CopyCounter() as counter:
        buffer[:4].copy_(ones[:4])
        buffer[4:].copy_(ones.double()[4:])
        dist.all_gather_into_tensor(gathered, buffer)
        gathered[:2].clone()
        buffer.copy_(ones)  # leads to no collective
    return counter.totals()


@pytest.mark.exhaustive
def test_all_that_was_written_into_what_a_collective_takes_counts_and_nothing_later():
    [totals] = on_ranks(2, FAKE, _gather_what_two_wrote)
    # There and back again in float64 are two casts, and both are on the way.
    expected = {TAKEN: 32, IN: 16, CAST_PARAMS: 64 + 16, OUT: 8, OTHER: 32}
    assert {what: num_bytes for what, num_bytes in totals.items() if num_bytes} == expected


def test_copies_have_their_limits():
    per_param = {**dict.fromkeys(COLUMNS, 0), TAKEN: 1_000_000, CAST_PARAMS: 1_000_000, OUT: 4_000_000}
    flat = {**per_param, OUT: 0, IN: 500_000, CAST_PARAMS: 2_000_000}
    ragged = {**per_param, OUT: 250_000}
    theirs = {**per_param, IN: 5_000_000}
    by_name = {"our FSDP2": per_param, "our FSDP2 flat": flat, "our FSDP2 ragged": ragged, "torch FSDP2": theirs}
    counts = {"float32": by_name, "bfloat16": by_name}
    figures = copies_figures(counts)
    for precision in counts:
        assert found(figures, f"{precision}: our FSDP2: all-gather copy-in") == (0.0, 0.0)
        assert found(figures, f"{precision}: our FSDP2 flat: all-gather copy-in") == (0.5, 0.0)
        assert found(figures, f"{precision}: our FSDP2 ragged: all-gather copy-out") == (0.25, 0.0)
        assert found(figures, f"{precision}: all of our FSDP2 to torch FSDP2") == (0.5, None)
    cast = "cast of parameters to what is taken by all-gathers"
    assert found(figures, f"bfloat16: our FSDP2: {cast}") == (1.0, 1.0)
    assert found(figures, f"bfloat16: our FSDP2 flat: {cast}") == (2.0, 1.0)
    over = {figure.what for figure in figures if not figure.ok}
    assert over == {
        *(f"{precision}: our FSDP2 flat: all-gather copy-in" for precision in counts),
        *(f"{precision}: our FSDP2 ragged: all-gather copy-out" for precision in counts),
        f"bfloat16: our FSDP2 flat: {cast}",
    }
    grid = copies_grid(counts, 2_000_000)
    assert grid.rows["float32: torch FSDP2"] == (5_000_000, 1_000_000, 4_000_000, 0, 0, 0, 0, 0, 10_000_000)
    assert grid.lines()[4][-1] == "10.0 MB = 5.000"


def test_the_profiler_sees_every_byte():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        gone = torch.ones(10_000_000)  # before the watched step, and larger
        kept = torch.ones(250_000)  # 1 MB
        del gone
        uncounted = [torch.ones(31) for _ in range(100)]  # 124 bytes each: what a model's own integers may take
        with record_function(WATCHED):
            buffer = torch.empty(0)
            for _ in range(3):
                buffer.untyped_storage().resize_(2_000_000)
                other = torch.ones(125_000)  # 0.5 MB
                del other
                buffer.untyped_storage().resize_(0)
            small = torch.ones(25_000)
        after = torch.ones(10_000_000)
        del after
    del kept, small, uncounted
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    assert peak_bytes(profiler.profiler.kineto_results.events()) == 3_500_000


class Event:
    """What the profiler tells of an allocation, or of a function."""

    def __init__(self, name, start, num_bytes=0, duration=0):
        self.name, self.nbytes = lambda: name, lambda: num_bytes
        self.start_ns, self.duration_ns = lambda: start, lambda: duration


def test_what_lives_when_a_step_begins_counts():
    changes = [(0, 9000), (1, -4000), (11, -3000), (12, 2000), (30, 9000)]
    events = [Event("[memory]", start, num_bytes) for start, num_bytes in changes]
    assert peak_bytes([*events, Event(WATCHED, 10, duration=10)]) == 5000


def _resident(rank, world_size):
    resident, held = Resident(), 1 << 28
    torch.ones(1 << 12)  # what torch loads at its first use
    before = resident.num_bytes
    tensor = torch.ones(held // 4)
    while_held = resident.num_bytes
    del tensor
    after, peak = resident.num_bytes, resident.peak_bytes
    resident.forget_peak()
    return [value - before for value in (while_held, after, peak, resident.peak_bytes)], held


def test_memory_that_is_freed_is_no_longer_resident_and_was_at_the_peak(ranks):
    [(figures, held)] = ranks.run(1, _resident)
    assert [round(figure / held, 1) for figure in figures] == [1, 0, 1, 0]


def test_gpu_figures_are_of_the_slowest_and_fullest_rank():
    wall = {name: WALL[name] for name in WALL if not name.endswith("FSDP1 flat")}
    alone = {name: [[1e9 * taken[0], 0.25], [0.5e9, 0.125]] for name, taken in wall.items()}
    issued = {name: [seconds / 4 for seconds in taken] for name, taken in wall.items()}
    figures = gpu_figures("2 over NCCL", [wall], [issued], alone, 100)

    def figure(what):
        return found(figures, f"2 over NCCL: {what}")

    assert figure("time of our FSDP1 to torch FSDP2") == (0.5, 1.0)
    assert figure("time of our FSDP2 flat to torch FSDP2") == (0.5, 1.0)
    assert figure("time of our FSDP2 ragged to torch FSDP2") == (0.75, 1.0)
    assert figure("time of the host of our FSDP1 to torch FSDP2") == (0.5, 1.0)
    assert figure("peak memory of our FSDP2 ragged to torch FSDP2") == (0.75, 1.0)
    assert figure("our FSDP1") == (50.0, None)
    assert figure("our FSDP1: issued") == (500.0, None)
    assert figure("our FSDP2: peak memory") == (6.0, None)
    assert figure("peak memory of our FSDP2 to torch FSDP2") == (1.5, 1.0)
    assert figure("our FSDP1: exposed copies of a step") == (250.0, None)


def test_copies_are_exposed_where_nothing_computes():
    def event(name, start, stop, kind="kernel"):
        return {"ph": "X", "cat": kind, "name": name, "ts": start * 1e6, "dur": (stop - start) * 1e6}

    events = [
        event("sm90_xmma_gemm_bf16", 0, 4),
        event("Memcpy DtoD (Device -> Device)", 3, 6, "gpu_memcpy"),
        event("void at::native::chunk_cat_cuda_kernel<float, float>", 5, 7),
        event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 6, 9),
        event("Memset (Device)", 5, 6, "gpu_memset"),
        event("scatter_add_kernel", 10, 11),
        event("vectorized_elementwise_kernel<bfloat16tofloat32_copy_kernel_cuda>", 8, 9),
        event("cudaMemcpyAsync", 20, 30, "cuda_runtime"),
        event("FSDP::pre_forward", 0, 30, "gpu_user_annotation"),
    ]
    assert exposed_copies(events) == pytest.approx(3 + 1)


def test_state_is_held_to_torchs_own_operation_by_operation():
    wall = {name: WALL[name] for name in WALL}
    taken = {
        operation: {"wall": wall, "processor": {n: [2 * t for t in v] for n, v in wall.items()}}
        for operation in OPERATIONS
    }
    figures = time_figures(taken)
    for operation in OPERATIONS:
        assert found(figures, f"{operation}: our FSDP1 to torch FSDP1") == (0.4, STATE_LIMIT)
        assert found(figures, f"{operation}: our FSDP1 flat to torch FSDP1 flat") == (3.0, STATE_LIMIT)
        assert found(figures, f"{operation}: our FSDP2 ragged to torch FSDP2") == (0.75, None)
        assert found(figures, f"{operation}: our FSDP2 to torch FSDP2, time of the processor") == (1.5, None)
        assert found(figures, f"{operation}: torch FSDP2") == (4000.0, None)
    assert STATE_LIMIT == 1.0 and len(limited(figures)) == 3 * len(OPERATIONS)


def test_memory_of_state_is_that_of_the_fullest_rank():
    peaks = {
        name: fullest([dict.fromkeys(OPERATIONS, int(1e6 * taken[0])), dict.fromkeys(OPERATIONS, 7)])
        for name, taken in WALL.items()
    }
    figures = state_memory_figures(peaks)
    for operation in OPERATIONS:
        assert found(figures, f"{operation}: our FSDP1 to torch FSDP1") == (0.4, STATE_LIMIT)
        assert found(figures, f"{operation}: our FSDP2 flat to torch FSDP2") == (0.5, None)
        assert found(figures, f"{operation}: torch FSDP1") == (5.0, None)


@pytest.mark.exhaustive
def test_state_is_measured_and_written(tmp_path):
    path, readable = tmp_path / "state.json", tmp_path / "state.md"
    result = CliRunner().invoke(app, ["bench", "state", "--quick", "--json", str(path), "--output", str(readable)])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    time_section, memory_section = report["sections"]
    for section in (time_section, memory_section):
        what = {figure["what"] for figure in section["figures"]}
        for operation in OPERATIONS:
            assert {
                f"{operation}: our FSDP2 flat",
                f"{operation}: torch FSDP1",
                f"{operation}: our FSDP1 to torch FSDP1",
            } <= what
        assert all(math.isfinite(figure["value"]) and figure["value"] > 0 for figure in section["figures"])
        assert section["title"] in result.output and section["title"] in readable.read_text()
