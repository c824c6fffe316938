"""Hugging Face's models under fully_shard, as a script would shard them: each layer and then the model, so that what is tied (the
head of GPT-2, the embeddings of T5) is in the root's unit. Beside torch.distributed.fsdp, bit for
bit; see fsdp1/test_transformers.py.

T5's decoder layers share an input, the encoder's output. torch adds up what they make of its gradient by layers, since it wraps
the inputs of each; ours leaves autograd its order. So T5 is trained beside the plain model, whose bits it has."""

import itertools
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_backend
from tests.on_torch.helpers.hugging_face import MODELS, SECONDS, SIDES, STEPS, assert_same_steps, inputs_of


@dataclass(frozen=True)
class Script:
    """What a script asks for.

    Attributes:
        reshard: the layers' reshard_after_forward; the root has the default.
        clip: the norm that gradients are clipped to.
        micro: microbatches of a step, of which the last alone reduces.
        checkpointing: whether Hugging Face's layers compute their activations again.
        prefetch: whether each layer names the next to gather ahead, in forward and in backward.
    """

    model: str
    reshard: bool | None = None
    bfloat16: bool = False
    clip: float | None = None
    micro: int = 1
    checkpointing: bool = False
    prefetch: bool = False


SCRIPTS = [
    pytest.param(Script("gpt2", clip=0.5), marks=pytest.mark.exhaustive),
    Script("llama", reshard=True, bfloat16=True, prefetch=True),
    Script("mixtral", checkpointing=True, clip=0.5),
]
SHARED_INPUT = Script("t5", reshard=False, micro=2)


def _plain(script: Script) -> tuple[Any, set[type]]:
    torch.manual_seed(5)
    model, layers = MODELS[script.model]()
    model.train()
    if script.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, layers


def _sharded(api: Any, script: Script) -> Any:
    model, layers = _plain(script)
    policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if script.bfloat16 else api.MixedPrecisionPolicy()
    sharded = [
        api.fully_shard(module, reshard_after_forward=script.reshard, mp_policy=policy)
        for module in model.modules()
        if type(module) in layers
    ]
    if script.prefetch:
        for module, following in itertools.pairwise(sharded):
            module.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([module])
    return api.fully_shard(model, mp_policy=policy)


def _train(model: Any, script: Script, rank: int, world_size: int) -> list[Any]:
    """By step: losses, norm, gradients and parameters, of a sharded model as they lie on this rank; what is not sharded is
    averaged here."""
    sharded = hasattr(model, "reshard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)  # of dropout
    history = []
    for step in range(STEPS):
        losses = []
        for micro in range(script.micro):
            if sharded:
                model.set_requires_gradient_sync(micro == script.micro - 1)
            loss = model(**inputs_of(step * script.micro + micro, rank, world_size)).loss
            loss.backward()
            losses.append(loss.detach())
        params: dict[str, Any] = dict(model.named_parameters())
        for param in () if sharded else params.values():
            dist.all_reduce(param.grad)
            param.grad /= world_size
        norm: Any = torch.zeros(())
        if script.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), script.clip)
            norm = norm.full_tensor()  # type: ignore[attr-defined]
        grads = {name: _local(param.grad).clone() for name, param in params.items() if param.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        history.append(
            {
                "loss": dict(enumerate(losses)),
                "norm": {"": norm},
                "gradient": grads,
                "parameter": {name: _local(param).clone() for name, param in params.items()},
            }
        )
    return history


def _local(tensor: Any) -> torch.Tensor:
    return getattr(tensor.detach(), "_local_tensor", tensor.detach())


def _full(model: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().full_tensor() for name, param in model.named_parameters()}


def _compare(rank: int, world_size: int, script: Script) -> tuple[float, float]:
    """Assert that both sides are the same, bit for bit. Returns the first loss and the last."""
    models = [_sharded(import_module(api), script) for api in SIDES.values()]
    theirs, ours = (_train(model, script, rank, world_size) for model in models)
    assert_same_steps(theirs, ours)
    full_theirs, full_ours = map(_full, models)
    assert list(full_theirs) == list(full_ours)
    for name, value in full_theirs.items():
        assert torch.equal(value, full_ours[name]), name
    plain = dict(MODELS[script.model]()[0].named_parameters())
    assert {name: param.shape for name, param in plain.items()} == {n: p.shape for n, p in full_ours.items()}
    return float(ours[0]["loss"][0]), float(ours[-1]["loss"][0])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.model)
def test_R32_a_model_of_hugging_face_trains_bit_for_bit_as_under_torchs_fully_shard(ranks, script):
    results = ranks.run(2, _compare, script, seconds=SECONDS)
    assert results[0] != results[1]  # each rank has its own text
    for first, last in results:
        assert last < first


def _beside_plain(rank: int, world_size: int) -> tuple[float, float]:
    """Assert that this rank's part of everything is what the plain model has there, bit for bit."""
    script = SHARED_INPUT
    model, plain = _sharded(torch_backend, script), _plain(script)[0]
    ours, theirs = (_train(some, script, rank, world_size) for some in (model, plain))
    for here, there in zip(ours, theirs, strict=True):
        for what in ("gradient", "parameter"):
            there[what] = {name: _part(value, rank, world_size) for name, value in there[what].items()}
        assert_same_steps([there], [here])
    for name, value in _full(model).items():
        assert torch.equal(value, plain.get_parameter(name)), name
    return float(ours[0]["loss"][0]), float(ours[-1]["loss"][0])


def _part(value: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A rank's rows, as torch.chunk cuts them."""
    chunks = value.chunk(world_size)
    return chunks[rank] if rank < len(chunks) else value[:0]


def test_R31_R32_layers_that_share_an_input_have_the_plain_models_bits(ranks):
    results = ranks.run(2, _beside_plain, seconds=SECONDS)
    assert results[0] != results[1]
    for first, last in results:
        assert last < first
