"""What the bench of the recorder makes of its times."""

import pytest

from experiments.bench.recorder import (
    AGAIN,
    BETWEEN,
    ENGINES,
    JUDGED,
    LIMIT,
    RECORDED,
    RECORDED_JUDGED,
    WITHOUT,
    recorder_figures,
)


def test_a_step_on_average_is_ninety_nine_ordinary_ones_and_a_recorded_one():
    taken = {WITHOUT: 2.0, AGAIN: 2.0, BETWEEN: 2.02, RECORDED: 4.0, JUDGED: 2.34, RECORDED_JUDGED: 6.0}
    wall = {f"{engine}, {kind}": [seconds, seconds] for engine in ENGINES for kind, seconds in taken.items()}
    cpu = {name: [seconds / 2 for seconds in times] for name, times in wall.items()}
    figures = {figure.what: figure for figure in recorder_figures(wall, cpu)}
    average = figures[f"{ENGINES[0]}: a step on average, one in 100 recorded, to one without"]
    assert average.value == pytest.approx((99 * 1.01 + 2) / 100)
    assert average.limit == LIMIT and average.ok
    monitored = figures[f"{ENGINES[0]}: the same with a monitor that judges every step"]
    assert monitored.value == pytest.approx((99 * 1.17 + 3) / 100)
    assert figures[f"{ENGINES[0]}: what judging takes, between"].value == pytest.approx(320)
    assert figures[f"{ENGINES[0]}: what judging takes, between, CPU"].value == pytest.approx(160)
    assert figures[f"{ENGINES[1]}: what a recorded step takes longer"].value == pytest.approx(2000)
