"""R36: names without what wrapping put into them, beside the unwrapped model's and what torch's checkpoints make of them."""

import random

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel

from crossframe.state import canonical_name
from experiments.spec.checks import SEED, Scope
from experiments.spec.fake_ranks import fake_world, quiet
from experiments.spec.tally import Tallies, Tally

NUM_STACKS = 200
PARTS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
LEFT = "torch's checkpoints leave a wrapper's part in the name of a module that lies in some stacks of them"


def names(tallies: Tallies, scope: Scope) -> None:
    """Modules under random stacks of torch's FSDP, checkpointing and compilation: their raw names, and torch's own cleaning."""
    tally = tallies["R36"]
    for number in scope.take(range(NUM_STACKS), num_quick=15):
        rng = random.Random(f"{SEED} {number}")
        with fake_world(2, 0), quiet():
            model: nn.Module = nn.Linear(2, 2)
            plain: list[str] = []
            for _ in range(rng.randint(1, 4)):
                model = _stacked(rng, model)
                plain.insert(0, rng.choice(["blocks", "my_orig_mod", "orig_mod", "_fsdp", "0"]))
                parent = nn.Module()
                parent.add_module(plain[0], model)
                model = parent
            (raw,) = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
            expected = ".".join([*plain, "weight"])
            tally.compare(canonical_name(raw), expected, (f"stack {number}", raw), "the unwrapped model")
            _compare_cleaned(tally, model, raw, f"stack {number}")


def _compare_cleaned(tally: Tally, model: nn.Module, raw: str, case: str) -> None:
    """torch's checkpoints name what is compiled by walking through the modules, which goes wrong in two ways."""
    ours = canonical_name(raw)
    (theirs,) = _get_fqns(model, raw)
    if ours != theirs and ours == ".".join(part for part in theirs.split(".") if part not in PARTS):
        tally.explain(LEFT, (case, raw))
    else:
        tally.compare(ours, theirs, (case, raw))


def _stacked(rng: random.Random, module: nn.Module) -> nn.Module:
    """A module under up to three wrappers. A compiled one is never called, and so nothing is compiled."""
    for _ in range(rng.randrange(4)):
        wrapper = rng.choice(["sharded", "checkpointed", "compiled"])
        if wrapper == "sharded":
            module = FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))
        elif wrapper == "checkpointed":
            module = checkpoint_wrapper(module)
        elif not hasattr(module, "_orig_mod"):
            module = torch.compile(module)  # type: ignore[assignment]
    return module
