"""Whisper of openai-whisper in torch: sinusoids are a buffer, and the output layer is the embedding."""

from experiments.foreign.shared import (
    cross_entropy,
    images_of,
    load_converted,
    options,
    tokens_of,
    train_torch,
    without_init,
)

without_init("whisper")
from whisper.model import ModelDimensions, Whisper  # noqa: E402

given = options()
model = Whisper(ModelDimensions(8, 12, 24, 3, 2, 48, 16, 24, 3, 2))
ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}


def convert(arrays):
    """By hand: openai-whisper reads its own checkpoints."""
    found = {
        "encoder.positional_embedding": arrays["model.encoder.embed_positions.weight"],
        "decoder.positional_embedding": arrays["model.decoder.embed_positions.weight"],
        "decoder.token_embedding.weight": arrays["model.decoder.embed_tokens.weight"],  # tied
    }
    names = {"encoder.conv1": "encoder.conv1", "encoder.conv2": "encoder.conv2"}
    names |= {"encoder.ln_post": "encoder.layer_norm", "decoder.ln": "decoder.layer_norm"}
    for tower in ("encoder", "decoder"):
        for i in range(2):
            b, a = f"{tower}.blocks.{i}", f"{tower}.layers.{i}"
            names |= {f"{b}.attn_ln": f"{a}.self_attn_layer_norm", f"{b}.mlp_ln": f"{a}.final_layer_norm"}
            names |= {f"{b}.mlp.0": f"{a}.fc1", f"{b}.mlp.2": f"{a}.fc2"}
            names |= {f"{b}.attn.{mine}": f"{a}.self_attn.{its}" for mine, its in ATTENTION.items()}
            if tower == "decoder":
                names |= {f"{b}.cross_attn_ln": f"{a}.encoder_attn_layer_norm"}
                names |= {f"{b}.cross_attn.{mine}": f"{a}.encoder_attn.{its}" for mine, its in ATTENTION.items()}
    for b, a in names.items():
        for kind in ("weight", "bias"):
            if f"model.{a}.{kind}" in arrays:
                found[f"{b}.{kind}"] = arrays[f"model.{a}.{kind}"]
    return found


load_converted(given, model, convert)
train_torch(
    model,
    lambda step: {"mel": images_of(step, 4, 8, 24), "tokens": tokens_of(step, 4, 12, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["mel"], batch["tokens"][:, :-1]), batch["tokens"][:, 1:]),
)
