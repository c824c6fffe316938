"""The benchmark of the torch backend: that it measures what it says, and that the command writes and judges it."""

import json
import math

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from typer.testing import CliRunner

from experiments.bench import memory
from experiments.bench.command import SECTIONS
from experiments.bench.figure import Figure, Section
from experiments.bench.gpu import exposed_copies, gpu_figures
from experiments.bench.host import host_figures
from experiments.bench.memory import WATCHED, memory_figures, peak_bytes
from experiments.bench.ranks import FAKE, on_ranks
from experiments.bench.sizes import FULL, QUICK
from experiments.bench.step import step_figures
from experiments.bench.timing import WARM_UP, alternate
from experiments.cli import app


def run(*arguments):
    """Exit status and what was printed."""
    result = CliRunner().invoke(app, ["bench", "torch", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


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
    assert list(by_title)[:3] == ["Time of a training step", "Bookkeeping of the host", "Peak memory"]
    for section in report["sections"]:
        assert bool(section["figures"]) != bool(section["skipped"])
        for figure in section["figures"]:
            assert math.isfinite(figure["value"]) and figure["value"] > 0, figure
            assert figure["ok"] == (figure["limit"] is None or figure["value"] <= figure["limit"])
            assert figure["what"] in said and figure["what"] in readable.read_text()
        assert section["ok"] == all(figure["ok"] for figure in section["figures"])
    assert report["ok"] == all(section["ok"] for section in report["sections"])
    for section in list(by_title.values())[:3]:
        what = [figure["what"].rpartition("ranks: ")[2] for figure in section["figures"]]
        assert {"our FSDP1", "our FSDP2", "our FSDP1 flat", "torch FSDP1", "torch FSDP2", "torch FSDP1 flat"} <= {*what}
        assert any(figure["limit"] for figure in section["figures"])


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
    assert status == 2 and "expected some of step, host, memory, gpu, got speed" in said


def _fail(rank):
    raise ValueError(f"rank {rank} is out of order")


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
    "torch FSDP1": [5.0, 5.0, 5.0],
    "torch FSDP2": [4.0, 4.0, 4.0],
    "torch FSDP1 flat": [1.0, 1.0, 1.0],
}


def test_a_step_is_held_to_the_faster_of_torch():
    wall = {**WALL, "torch FSDP1 again": [5.0, 10.0, 5.0], "torch DDP": [1.0, 1.0, 1.0]}
    processor = {name: [2 * seconds for seconds in taken] for name, taken in wall.items()} | {"our FSDP1": [2.0] * 3}
    figures = step_figures(wall, processor)
    assert found(figures, "our FSDP1 to torch FSDP2, the faster") == (0.5, 1.0)
    assert found(figures, "our FSDP2 to torch FSDP2, the faster") == (1.5, 1.0)
    assert found(figures, "our FSDP1 to torch FSDP2, time of the processor") == (0.25, None)
    assert found(figures, "our FSDP1 to torch FSDP1") == (0.4, None)
    assert found(figures, "our FSDP1 flat to torch FSDP1 flat") == (3.0, None)
    assert found(figures, "torch FSDP1 again to itself: noise") == (1.0, None)
    assert found(figures, "torch DDP") == (1000.0, None)


def test_bookkeeping_is_what_is_longer_than_the_bare_model():
    times = {**WALL, "bare": [0.5, 0.5, 0.5]}
    figures = host_figures(times, 8, 0.45)
    assert found(figures, "8 ranks: our FSDP1 to torch FSDP2, the faster") == (3 / 7, 0.45)
    assert found(figures, "8 ranks: our FSDP2 to torch FSDP2, the faster") == (11 / 7, 0.45)
    assert found(figures, "8 ranks: our FSDP1 to torch FSDP1") == (1 / 3, None)


def test_memory_is_held_to_torchs_fsdp1():
    figures = memory_figures({name: int(1e6 * taken[0]) for name, taken in WALL.items()}, 2)
    assert found(figures, "2 ranks: our FSDP1 to torch FSDP1") == (0.4, 1.0)
    assert found(figures, "2 ranks: our FSDP1 flat to torch FSDP1") == (0.6, 1.0)
    assert found(figures, "2 ranks: our FSDP2 to torch FSDP1") == (1.2, 1.0)
    assert found(figures, "2 ranks: our FSDP2 to torch FSDP2") == (1.5, None)
    assert found(figures, "2 ranks: torch FSDP1") == (5.0, None)


def test_the_profiler_sees_every_byte():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        gone = torch.ones(10_000_000)  # before the watched step, and larger
        kept = torch.ones(250_000)  # 1 MB
        del gone
        uncounted = [torch.ones(255) for _ in range(100)]  # 1020 bytes each: what a model's own integers may take
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


def test_gpu_figures_are_of_the_slowest_and_fullest_rank():
    wall = {name: WALL[name] for name in ("our FSDP1", "our FSDP2", "torch FSDP1", "torch FSDP2")}
    alone = {name: [[1e9 * taken[0], 0.25], [0.5e9, 0.125]] for name, taken in wall.items()}
    figures = gpu_figures(wall, alone, 100)
    assert found(figures, "time of our FSDP1 to torch FSDP2") == (0.5, 1.0)
    assert found(figures, "our FSDP1") == (50.0, None)
    assert found(figures, "our FSDP2: peak memory") == (6.0, None)
    assert found(figures, "peak memory of our FSDP2 to torch FSDP2") == (1.5, None)
    assert found(figures, "our FSDP1: exposed copies of a step") == (250.0, None)


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
