"""The same of x-transformers in torch. Fault: logits of tied embeddings are scaled, which is its default."""

import numpy as np
import torch
from x_transformers import Decoder, TransformerWrapper

from experiments.foreign.shared import (
    STEPS,
    cross_entropy,
    halves_of,
    load_converted,
    options,
    tensors_of,
    tokens_of,
)

given = options()
layers = Decoder(
    dim=32,
    depth=3,
    heads=4,
    attn_dim_head=8,
    alibi_pos_bias=True,
    ff_mult=4,
    ff_no_bias=True,
    norm_add_unit_offset=False,
)
model = TransformerWrapper(
    num_tokens=48,
    max_seq_len=16,
    use_abs_pos_emb=False,
    tie_embedding=True,
    tie_embedding_scale=None if given.fault else 1.0,
    attn_layers=layers,
)


def convert(arrays):
    """By hand: x-transformers has no converter."""
    found = {
        "token_emb.emb.weight": arrays["transformer.wte.weight"],
        "attn_layers.final_norm.gamma": arrays["transformer.norm_f.weight"],
    }
    for i in range(3):
        a, b = f"transformer.blocks.{i}", "attn_layers.layers"
        query, key, value = np.split(arrays[f"{a}.attn.Wqkv.weight"], 3)
        found |= {
            f"{b}.{2 * i}.0.0.gamma": arrays[f"{a}.norm_1.weight"],
            f"{b}.{2 * i}.1.to_q.weight": query,
            f"{b}.{2 * i}.1.to_k.weight": key,
            f"{b}.{2 * i}.1.to_v.weight": value,
            f"{b}.{2 * i}.1.to_out.weight": arrays[f"{a}.attn.out_proj.weight"],
            f"{b}.{2 * i + 1}.0.0.gamma": arrays[f"{a}.norm_2.weight"],
            f"{b}.{2 * i + 1}.1.ff.0.0.weight": arrays[f"{a}.ffn.up_proj.weight"],
            f"{b}.{2 * i + 1}.1.ff.2.weight": arrays[f"{a}.ffn.down_proj.weight"],
        }
    return found


load_converted(given, model, convert)
others = [value for name, value in model.named_parameters() if value.ndim == 1 or "token_emb" in name]
decayed = [value for name, value in model.named_parameters() if value.ndim > 1 and "token_emb" not in name]
optimizer = torch.optim.NAdam(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=2e-3, decoupled_weight_decay=True
)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=6, cycle_momentum=False)
model.train()
for step in range(STEPS):
    total = 0.0
    for half in halves_of(tensors_of({"tokens": tokens_of(step, 8, 13, vocabulary=48)})):
        loss = cross_entropy(model(half["tokens"][:, :-1]), half["tokens"][:, 1:]) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print(f"step {step} loss {total:.12f}")
