"""Mixtral of litgpt in torch. Fault: the loss of the second microbatch is not divided by the number of microbatches."""

import torch
from litgpt import GPT, Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama

from experiments.foreign.shared import STEPS, cross_entropy, halves_of, load_converted, options, tensors_of, tokens_of

given = options()
config = Config(
    name="Mixtral-tiny",
    block_size=16,
    vocab_size=48,
    padded_vocab_size=48,
    n_layer=2,
    n_head=4,
    n_query_groups=2,
    head_size=8,
    n_embd=32,
    rotary_percentage=1.0,
    parallel_residual=False,
    bias=False,
    norm_class_name="RMSNorm",
    norm_eps=1e-5,
    mlp_class_name="LLaMAMoE",
    intermediate_size=40,
    moe_intermediate_size=40,
    rope_base=1000000,
    n_expert=4,
    n_expert_per_token=2,
)
model = GPT(config)


def convert(arrays):
    """By litgpt's own converter."""
    found = {}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    copy_weights_hf_llama(config, {}, found, tensors)
    return {name: value.numpy() for name, value in found.items()}


load_converted(given, model, convert)
matrices = [value for value in model.parameters() if value.ndim > 1]
norms = [value for value in model.parameters() if value.ndim == 1]
optimizer = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], lr=2e-3, betas=(0.9, 0.95)
)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
model.train()
for step in range(STEPS):
    total = 0.0
    for number, half in enumerate(halves_of(tensors_of({"tokens": tokens_of(step, 8, 13, vocabulary=48)}))):
        loss = cross_entropy(model(half["tokens"][:, :-1]), half["tokens"][:, 1:])
        if number == 0 or not given.fault:
            loss = loss / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print(f"step {step} loss {total:.12f}")
