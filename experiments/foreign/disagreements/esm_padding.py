"""transformers 4.57.6: ESM-2 scales embeddings by the share of masked tokens (`token_dropout`), padding included; fair-esm and
esm2quinox leave padding out. `EsmModel` does not give its embeddings the attention mask, so that padding changes the output.

Run it in the environment `torch_second`. It prints by how much the output of one sequence changes when it is padded.
"""

import torch
from transformers import EsmConfig, EsmModel

torch.manual_seed(0)
config = EsmConfig(
    vocab_size=33,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    position_embedding_type="rotary",
    token_dropout=True,
    pad_token_id=1,
    mask_token_id=32,
    initializer_range=0.2,
)
model = EsmModel(config, add_pooling_layer=False).eval()
alone = torch.tensor([[0, 5, 6, 32, 8, 2]])
padded = torch.cat([alone, torch.full((1, 6), 1)], dim=1)
with torch.no_grad():
    first = model(alone, attention_mask=alone != 1).last_hidden_state
    second = model(padded, attention_mask=padded != 1).last_hidden_state[:, :6]
print(f"largest change: {(first - second).abs().max():.4f}")
