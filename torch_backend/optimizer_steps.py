"""How often optimizers have stepped: what every rank knows alike of when shards may have changed."""

from torch.optim.optimizer import register_optimizer_step_post_hook

_optimizer_steps = 0


def optimizer_steps() -> int:
    """How many optimizers have stepped in this process: shards may have changed when this has."""
    return _optimizer_steps


def _count_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)
