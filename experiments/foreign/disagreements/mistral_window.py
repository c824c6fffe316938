"""transformers 4.57.6: Mistral in flax attends to one token more than Mistral in torch of the same `sliding_window`; without a
window it attends to the token itself alone. Each line prints which positions the last output of one layer depends on.

Run it in the environment `torch` and in `flax`.
"""

import numpy as np
import transformers
from transformers import MistralConfig

LENGTH = 8


def logits_of(window: int | None):
    """A function from tokens to the logits of the last position."""
    config = MistralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        sliding_window=window,
        initializer_range=0.2,
    )
    if transformers.is_torch_available():
        import torch

        model = transformers.MistralForCausalLM(config)
        return lambda tokens: model(torch.from_numpy(tokens)).logits[0, -1].detach().numpy()
    model = transformers.FlaxMistralForCausalLM(config, input_shape=(1, LENGTH))
    return lambda tokens: np.asarray(model(tokens).logits[0, -1])


for window in (3, 4, None):
    logits, tokens = logits_of(window), np.arange(1, 1 + LENGTH)[None]
    seen = [
        position
        for position in range(LENGTH)
        if not np.array_equal(logits(tokens), logits(np.where(np.arange(LENGTH) == position, 20, tokens)))
    ]
    print(f"sliding_window={window}: the last of {LENGTH} positions depends on {seen}")
