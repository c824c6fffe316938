"""Recordings for tests, made by ranks that run already and by the JAX of this process."""

import jax

from crossframe.recording import Recording, create_recording


def record_with_torch(ranks, settings, folder):
    """A recording by torch_backend."""
    from experiments.parity.record_torch import manifest_of

    manifest = manifest_of(settings, "cpu")
    create_recording(folder, manifest)
    ranks.run(settings.world_size, _record_rank, settings, manifest, folder)
    return Recording.open(folder)


def _record_rank(rank, world_size, settings, manifest, folder):
    import torch

    from experiments.parity.record_torch import record_rank

    record_rank(settings, manifest, folder, rank, torch.device("cpu"))


def record_with_jax(settings, folder):
    """A recording by jax_backend."""
    from experiments.parity.record_jax import record_on_devices

    record_on_devices(settings, folder, jax.devices("cpu"))
    return Recording.open(folder)
