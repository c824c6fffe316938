"""transformers 4.57.6: vision models in flax convert images to float32, also with `dtype=float64`: images that differ by
less give equal outputs.

Run it in the environment `flax`.
"""

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from transformers import FlaxViTModel, ViTConfig  # noqa: E402

config = ViTConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=4, patch_size=2
)
model = FlaxViTModel(config, input_shape=(1, 4, 4, 3), dtype=jnp.float64)
images = np.ones((1, 3, 4, 4))
outputs = [np.asarray(model(given).last_hidden_state) for given in (images, images * (1 + 1e-9))]
print(outputs[0].dtype, "equal:", np.array_equal(*outputs))
