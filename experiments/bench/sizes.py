"""How large and how often: for figures that count, and for a test that the command works."""

from dataclasses import dataclass

from experiments.models.gpt import GPTConfig


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run of `python -m experiments bench torch` or `python -m experiments bench state`.

    Attributes:
        gpt: of the model whose step is timed and whose memory is counted.
        step_batch: samples a rank and step.
        step_rounds: how often every contestant is timed.
        host_width, host_blocks, host_rounds: of the model in which bookkeeping takes the time.
        host_worlds: world sizes, with the limits of our FSDP1's bookkeeping over that of the faster of torch's two, and of our
            FSDP2's over torch's.
        memory_worlds: world sizes at which memory is counted.
        wrap_rounds: how often the model of `host_blocks` is wrapped.
        state_rounds: how often every operation on state is timed.
        gpu_gpt, gpu_batch, gpu_rounds: the same on GPUs.
    """

    gpt: GPTConfig
    step_batch: int
    step_rounds: int
    host_width: int
    host_blocks: int
    host_rounds: int
    host_worlds: tuple[tuple[int, tuple[float, float]], ...]
    memory_worlds: tuple[int, ...]
    wrap_rounds: int
    state_rounds: int
    gpu_gpt: GPTConfig
    gpu_batch: int
    gpu_rounds: int


# Widths of heads of 64 and 128, as in models of such sizes. 20 million and a billion parameters.
FULL = Sizes(
    gpt=GPTConfig(vocabulary=1024, context=128, width=512, num_heads=8, num_blocks=6),
    step_batch=2,
    step_rounds=21,
    host_width=32,
    host_blocks=48,
    host_rounds=41,
    host_worlds=((8, (0.36, 0.43)), (512, (0.60, 0.69))),
    memory_worlds=(2, 8),
    wrap_rounds=21,
    state_rounds=11,
    gpu_gpt=GPTConfig(vocabulary=32768, context=1024, width=2048, num_heads=16, num_blocks=18),
    gpu_batch=4,
    gpu_rounds=21,
)
QUICK = Sizes(
    gpt=GPTConfig(vocabulary=16, context=8, width=16, num_heads=2, num_blocks=2),
    step_batch=1,
    step_rounds=2,
    host_width=4,
    host_blocks=2,
    host_rounds=2,
    host_worlds=((8, (0.36, 0.43)),),
    memory_worlds=(2,),
    wrap_rounds=2,
    state_rounds=2,
    gpu_gpt=GPTConfig(vocabulary=16, context=8, width=16, num_heads=2, num_blocks=2),
    gpu_batch=1,
    gpu_rounds=2,
)
