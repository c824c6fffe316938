"""Short programs of the rule machine, written by hand."""

from typing import Any

from tests.on_torch.programs.rule_machine import Counts, Job, Pair

Program = list[tuple[str, dict[str, Any]]]


def forward(**job: Any) -> tuple[str, dict[str, Any]]:
    return "forward", {"job": Job(**job)}


BACKWARD = ("backward", {"which": 0, "syncs": True})


TRAIN: Program = [forward(), BACKWARD]


EVALUATE: Program = [forward(training=False)]


def follow(ranks, setup: Any, program: Program, **options: Any) -> Counts:
    counts = Counts()
    pair = Pair(ranks, setup, counts, **options)
    try:
        for operation, arguments in program:
            pair.take(operation, **arguments)
    finally:
        pair.end()
    return counts
