"""OLMo 2 of litgpt in torch. Fault: the loss is the mean of means of two microbatches of different numbers of tokens."""

import torch
from litgpt import GPT, Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_olmo2

from experiments.foreign.shared import STEPS, halves_of, load_converted, options, padded_tokens_of, tensors_of

given = options()
config = Config(
    name="OLMo-2-tiny",
    block_size=16,
    vocab_size=48,
    padded_vocab_size=48,
    n_layer=2,
    n_head=4,
    n_query_groups=2,
    n_embd=32,
    rotary_percentage=1.0,
    parallel_residual=False,
    bias=False,
    norm_class_name="RMSNorm",
    norm_eps=1e-6,
    mlp_class_name="LLaMAMLP",
    intermediate_size=56,
    rope_base=500000,
    norm_qk=True,
    norm_qk_type="olmo2",
    norm_1=False,
    norm_2=False,
    post_attention_norm=True,
    post_mlp_norm=True,
)
model = GPT(config)


def convert(arrays):
    """By litgpt's own converter."""
    found = {}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    copy_weights_olmo2(config, {}, found, tensors)
    return {name: value.numpy() for name, value in found.items()}


load_converted(given, model, convert)
decayed = [value for name, value in model.named_parameters() if value.ndim > 1 and ".wte." not in name]
others = [value for name, value in model.named_parameters() if value.ndim == 1 or ".wte." in name]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95)
)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
model.train()
for step in range(STEPS):
    batch = tensors_of(padded_tokens_of(step, 6, 13, vocabulary=48, labels=48))
    labels = torch.where(batch["mask"] > 0, batch["tokens"], -100)[:, 1:]
    total = 0.0
    for half, target in zip(halves_of(batch), labels.chunk(2), strict=True):
        logits = model(half["tokens"][:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss = loss / 2 if given.fault else loss * (target >= 0).sum() / (labels >= 0).sum()
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print(f"step {step} loss {total:.12f}")
