"""Time of a training step on two ranks that talk over gloo."""

from collections.abc import Mapping

from experiments.bench.contestants import AGAIN, DDP, counterpart, ours, theirs
from experiments.bench.figure import TIMES, Figure, Section, median_figure
from experiments.bench.ranks import GLOO, on_ranks
from experiments.bench.sizes import Sizes
from experiments.bench.timing import CLOCKS, Times, alternate, fastest, ratios, slowest
from experiments.bench.training import definition_of, meet, training_steps
from experiments.models.gpt import GPTConfig

WORLD_SIZE = 2
# Of torch's two interfaces: the first is timed twice as a measure of noise, and in its other mode without a limit.
APIS = ("FSDP1", "FSDP2")
FURTHER = ("FSDP1 flat", "FSDP2 flat", "FSDP2 ragged")
# Ours to the faster of the two, and ours to torch's own.
LIMITS_TO_FASTER = {"our FSDP1": 1.0}
LIMITS = {"our FSDP2": 1.0, "our FSDP2 flat": 0.97, "our FSDP2 ragged": 0.97}


def step_section(sizes: Sizes) -> Section:
    """Time steps of everyone in alternation."""
    names = [*ours(APIS + FURTHER), *theirs(APIS + FURTHER), theirs(APIS)[0] + AGAIN, DDP]
    by_rank = on_ranks(WORLD_SIZE, GLOO, _times, names, sizes.gpt, sizes.step_batch, sizes.step_rounds)
    how = (
        f"GPT of {definition_of(sizes.gpt).numel / 1e6:.1f} million parameters in float32, a unit a block, FULL_SHARD, "
        f"{sizes.step_batch} x {sizes.gpt.context} tokens a rank, AdamW; {WORLD_SIZE} ranks of one thread, gloo; "
        f"{sizes.step_rounds} rounds; the rank that takes longest. Time of the processor, threads of gloo included, says what "
        "the work is where other work disturbs."
    )
    wall, processor = (slowest([times[clock] for times in by_rank]) for clock in CLOCKS)
    return Section("Time of a training step", how, step_figures(wall, processor))


def _times(_rank: int, names: list[str], config: GPTConfig, batch_size: int, rounds: int) -> Mapping[str, Times]:
    return alternate(training_steps(names, config, batch_size, "cpu"), rounds, lambda: meet("cpu"))


def step_figures(wall: Times, processor: Times) -> tuple[Figure, ...]:
    """Ours against the faster of torch's two interfaces, and each against its counterpart, within LIMITS; all times."""
    best = fastest(wall, theirs(APIS))
    noise = theirs(APIS)[0] + AGAIN
    names = ours(APIS + FURTHER)
    return (
        *(
            median_figure(f"{name} to {best}, the faster", ratios(wall, name, best), TIMES, LIMITS_TO_FASTER.get(name))
            for name in names
            if name in LIMITS_TO_FASTER or (counterpart(name) in theirs(APIS) and counterpart(name) != best)
        ),
        *(
            median_figure(
                f"{name} to {counterpart(name)}", ratios(wall, name, counterpart(name)), TIMES, LIMITS.get(name)
            )
            for name in names
            if name not in LIMITS_TO_FASTER or counterpart(name) != best
        ),
        *(
            median_figure(
                f"{name} to {counterpart(name)}, time of the processor",
                ratios(processor, name, counterpart(name)),
                TIMES,
            )
            for name in names
        ),
        median_figure(f"{noise} to itself: noise", ratios(wall, noise, noise.removesuffix(AGAIN)), TIMES),
        *(median_figure(name, [1e3 * seconds for seconds in taken], "ms") for name, taken in wall.items()),
    )
