"""What is inside of a step, recorded in both frameworks: the same quantities, under the same names and in one order."""

from collections import Counter

import pytest

from crossframe.verdict import Verdict, compare
from experiments.parity.settings import RunSettings
from tests.across.helpers.recorded import record_with_jax, record_with_torch

PHASES = {"parameters", "unsharded", "forward", "backward", "reduce", "norm", "state", "update"}


@pytest.mark.parametrize(
    ("model", "optimizer"), [("conv", "sgd"), pytest.param("llama-tiny", "adamw", marks=pytest.mark.exhaustive)]
)
def test_both_frameworks_record_the_same_quantities_in_the_same_order(ranks, tmp_path, model, optimizer):
    """Images with their channels at one end or the other; heads as dims of their own, or joined."""
    settings = RunSettings(
        model, steps=1, optimizer=optimizer, clip=0.5, accumulate=2, strategy="shard_grad_op", device="cpu"
    )
    a, b = record_with_torch(ranks, settings, tmp_path / "torch"), record_with_jax(settings, tmp_path / "jax")
    assert a.activations(0) == b.activations(0)
    modules = {name.rpartition(".")[0] for name in a.manifest.params} | set(settings.definition.units) | {""}
    assert {module for _, module, _ in a.activations(0)} == modules
    assert Counter(microbatch for microbatch, _, _ in a.activations(0)).keys() == {0, 1}
    for name in a.manifest.params:
        assert a.state_slots(0, name) == b.state_slots(0, name) != ()
        assert a.count(0, name) == b.count(0, name) == (1.0 if optimizer == "adamw" else None)
        for rank in range(settings.world_size):
            # Shards were equal bit for bit, and so are parameters in full.
            assert (a.unsharded(0, rank, name) == b.unsharded(0, rank, name)).all()
    found = compare(a, b)
    assert found.verdict is Verdict.ROUNDING, found.reason
    assert {judged.phase for judged in found.judged} == PHASES
    assert sum(judged.event in ("input", "output") for judged in found.judged) == len(a.activations(0))
