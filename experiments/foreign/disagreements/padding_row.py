"""transformers 4.57.6: BERT in torch does not train the embedding of token 0, the padding, where that token is a word (its
`nn.Embedding` has a `padding_idx`); BERT in flax does.

Run it in the environment `torch` and in `flax`. It prints the size of the embedding's gradient at token 0.
"""

import numpy as np
import transformers
from transformers import BertConfig

config = BertConfig(
    vocab_size=16,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    max_position_embeddings=8,
)
tokens = np.array([[0, 3, 5, 7]])
if transformers.is_torch_available():
    import torch

    model = transformers.BertModel(config)
    model(torch.from_numpy(tokens)).last_hidden_state[..., 0].square().sum().backward()
    grad = model.embeddings.word_embeddings.weight.grad.numpy()
else:
    import jax

    model = transformers.FlaxBertModel(config, input_shape=(1, 4))
    loss = lambda params: (model(tokens, params=params).last_hidden_state[..., 0] ** 2).sum()  # noqa: E731
    grad = np.asarray(jax.grad(loss)(model.params)["embeddings"]["word_embeddings"]["embedding"])
print(f"gradient at token 0: {np.abs(grad[0]).max():.3f}, at token 3: {np.abs(grad[3]).max():.3f}")
