"""Hugging Face's models, as a script would build and wrap them, trained beside torch.distributed.fsdp: 5 steps with AdamW on
Shakespeare, at 2 ranks, where everything is equal bit for bit (R32).

GPT-2, Llama, T5 and Mixtral are small and random, made from their configurations; nothing is downloaded. Between them they
have tied embeddings (GPT-2 and T5; T5's are in four places), grouped queries, a bias that the first layer alone owns, experts
that few tokens reach, buffers, dropout, outputs that are dictionaries, and a forward that is told its inputs by keyword.
"""

import warnings
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.on_torch.helpers.hugging_face import BATCH_SIZE, MODELS, SECONDS, SIDES, STEPS, assert_same_steps, inputs_of

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)


# Models: 256 tokens, the bytes; each with the classes of its layers


@dataclass(frozen=True)
class Script:
    """What a script asks for.

    Attributes:
        policy: which auto_wrap_policy: "classes", "transformer", "lambda" or "size".
        units: how many units that makes.
        clip: the norm that gradients are clipped to.
        micro: microbatches of a step; all but the last are under no_sync.
        checkpointing: whether Hugging Face's layers compute their activations again.
    """

    model: str
    policy: str
    strategy: str
    use_orig_params: bool
    units: int
    bfloat16: bool = False
    clip: float | None = None
    micro: int = 1
    checkpointing: bool = False

    def __str__(self) -> str:
        return f"{self.model}-{self.policy}-{self.strategy}-{'orig' if self.use_orig_params else 'flat'}"


SCRIPTS = [
    Script("gpt2", "classes", "FULL_SHARD", True, 3, clip=0.5),
    pytest.param(Script("gpt2", "transformer", "SHARD_GRAD_OP", False, 3, micro=2), marks=pytest.mark.exhaustive),
    Script("llama", "size", "FULL_SHARD", False, 6, clip=0.5),
    Script("llama", "lambda", "SHARD_GRAD_OP", True, 3, bfloat16=True),
    pytest.param(Script("t5", "transformer", "FULL_SHARD", False, 4), marks=pytest.mark.exhaustive),
    Script("t5", "lambda", "SHARD_GRAD_OP", True, 4, clip=0.5),
    pytest.param(Script("mixtral", "classes", "FULL_SHARD", True, 3, checkpointing=True), marks=pytest.mark.exhaustive),
    Script("mixtral", "size", "NO_SHARD", False, 6, micro=2),
]


def _policy(api: Any, script: Script, layers: set[type]) -> Any:
    wrap = import_module(f"{api.__name__}.wrap")
    match script.policy:
        case "classes":
            return wrap.ModuleWrapPolicy(layers)
        case "transformer":
            return partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=layers)
        case "lambda":
            return partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: type(module) in layers)
        case "size":
            return partial(wrap.size_based_auto_wrap_policy, min_num_params=1500)
    raise AssertionError(script.policy)


def _wrapped(api: Any, script: Script) -> Any:
    torch.manual_seed(5)
    model, layers = MODELS[script.model]()
    model.train()
    if script.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    low = torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of NO_SHARD
        return api.FullyShardedDataParallel(
            model,
            sharding_strategy=api.ShardingStrategy[script.strategy],
            auto_wrap_policy=_policy(api, script, layers),
            use_orig_params=script.use_orig_params,
            mixed_precision=api.MixedPrecision(low, torch.float32, low) if script.bfloat16 else None,
            device_id=torch.device("cpu"),
        )


def _train(api: Any, script: Script, rank: int, world_size: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """By step: losses, norm, gradients and parameters as they lie on this rank. And the full parameters at the end."""
    model = _wrapped(api, script)
    assert len(api.FullyShardedDataParallel.fsdp_modules(model)) == script.units
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)  # of dropout
    history = []
    for step in range(STEPS):
        losses = []
        for micro in range(script.micro):
            inputs = inputs_of(step * script.micro + micro, rank, world_size)
            if micro < script.micro - 1:
                with model.no_sync():
                    loss = model(**inputs).loss
                    loss.backward()
            else:
                loss = model(**inputs).loss
                loss.backward()
            losses.append(loss.detach())
        norm = torch.zeros(()) if script.clip is None else model.clip_grad_norm_(script.clip)
        named = {name: param.detach() for name, param in model.named_parameters()}
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        grads = {name: grad.clone() for name, grad in grads.items()}
        optimizer.step()
        optimizer.zero_grad()
        history.append(
            {
                "loss": dict(enumerate(losses)),
                "norm": {"": norm},
                "gradient": grads,
                "parameter": {name: param.clone() for name, param in named.items()},
            }
        )
    with api.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        full = {name: param.detach().clone() for name, param in model.named_parameters()}
    return history, full


def _compare(rank: int, world_size: int, script: Script) -> tuple[float, float]:
    """Assert that both sides are the same, bit for bit. Returns the first loss and the last."""
    (theirs, full_theirs), (ours, full_ours) = (
        _train(import_module(api), script, rank, world_size) for api in SIDES.values()
    )
    assert_same_steps(theirs, ours)
    assert list(full_theirs) == list(full_ours)
    for name, value in full_theirs.items():
        assert torch.equal(value, full_ours[name]), name
    plain = dict(MODELS[script.model]()[0].named_parameters())
    assert {name: param.shape for name, param in plain.items()} == {n: p.shape for n, p in full_ours.items()}
    return float(ours[0]["loss"][0]), float(ours[-1]["loss"][0])


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_R32_a_model_of_hugging_face_trains_bit_for_bit_as_under_torch(ranks, script):
    results = ranks.run(2, _compare, script, seconds=SECONDS)
    assert results[0] != results[1]  # each rank has its own text
    for first, last in results:
        assert last < first


def _generate(rank, world_size, use_orig_params):
    """Tokens that follow a prompt, on both sides, after a step. Inside, the root is full; the layers gather themselves."""
    continued = []
    for api in map(import_module, SIDES.values()):
        model = _wrapped(api, Script("llama", "classes", "FULL_SHARD", use_orig_params, 3))
        model(**inputs_of(0, rank, world_size)).loss.backward()
        torch.optim.SGD(model.parameters(), lr=10.0).step()
        model.eval()
        prompt = inputs_of(1, 0, 1)["input_ids"][:, :6]
        with torch.no_grad(), api.FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
            continued.append(model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0))
        model.train()
        continued.append(model(**inputs_of(2, rank, world_size)).loss.detach())  # and training goes on
    return continued


@pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])
def test_R19_R21_text_is_generated_while_the_root_is_summoned(ranks, use_orig_params):
    for tokens_theirs, loss_theirs, tokens_ours, loss_ours in ranks.run(2, _generate, use_orig_params, seconds=SECONDS):
        assert tokens_ours.shape == (BATCH_SIZE, 14)
        assert torch.equal(tokens_theirs, tokens_ours)
        assert torch.equal(loss_theirs, loss_ours)
