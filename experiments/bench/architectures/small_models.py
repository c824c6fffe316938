"""Small models of all architectures of transformers, with random values, and batches for them."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WIDTH, LAYERS, TOKENS, VOCABULARY = 32, 2, 16, 128
LARGEST = 30_000_000
"""Parameters of the largest model that is trained."""
KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "model_dim", "emb_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_LAYERS += ("num_decoder_layers", "num_encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_INNER = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "hidden_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "d_kv", "head_dim")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# Layers that a rank drops by its own random numbers gather on some ranks only: torch and ours would both wait for the others.
_DROPPED = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "layer_drop")
_FEW: dict[str, Any] = {
    **dict.fromkeys(_LAYERS, LAYERS),
    **dict.fromkeys(_DROPPED, 0.0),
    **_TOKENS,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
_SMALL: dict[str, Any] = {
    **_FEW,
    **dict.fromkeys(_WIDTHS, WIDTH),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_INNER, 40),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_LATENT, WIDTH // 4),
    "num_key_value_heads": 2,
    "ffn_hidden_size": 40,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "state_size": 8,
    "time_step_rank": 8,
    "expand": 2,
}
_WITHOUT_HEAD_SIZES = {name: value for name, value in _SMALL.items() if name not in _LATENT}
# In this order; the first one that trains is taken.
_CHOICES = (_SMALL, {**_SMALL, "num_key_value_heads": 4}, _WITHOUT_HEAD_SIZES, _FEW)


class NotBuilt(Exception):
    """No small model of an architecture trains without sharding; the message has the last reason."""


def architectures() -> Iterator[tuple[str, str]]:
    """(kind, type of model) for all classes with a loss that transformers has for each type; kinds are those of KINDS."""
    for kind, mapping in KINDS.items():
        for model_type in getattr(modeling_auto, mapping):
            yield kind, model_type


def build(kind: str, model_type: str) -> nn.Module:
    """A small model with seed 0, in training mode.

    Raises:
        NotBuilt: none of the choices of sizes gives a model that trains and is small enough.
    """
    reason: Exception | None = None
    for sizes in _CHOICES:
        try:
            config = _config(model_type, sizes)
            with torch.device("meta"):
                num = sum(param.numel() for param in _model(kind, config).parameters())
            if num > LARGEST:
                raise ValueError(f"{num:,} parameters")
            torch.manual_seed(0)
            model = _model(kind, config)
            model(**batch_of(kind, model, 0, 0)).loss.backward()
            model.zero_grad()
            return model
        except Exception as error:  # of any library's validation: the next choice may be valid
            reason = error
    raise NotBuilt(f"{type(reason).__name__}: {' '.join(str(reason).split())[:160]}")


def batch_of(kind: str, model: nn.Module, step: int, rank: int) -> dict[str, Tensor]:
    """Random samples of one rank."""
    generator, config = torch.Generator().manual_seed(100 * step + rank), cast(Any, model.config)
    if kind in ("causal", "masked", "seq2seq"):
        vocabulary = min(getattr(_text(config), "vocab_size", VOCABULARY), VOCABULARY)
        tokens = torch.randint(3, vocabulary, (2, TOKENS), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        return batch | {"attention_mask": torch.ones_like(tokens)} if kind == "seq2seq" else batch
    labels = torch.randint(0, config.num_labels, (2,), generator=generator)
    if kind == "image":
        size = getattr(config, "image_size", None) or WIDTH
        size = size if isinstance(size, int) else size[0]
        shape = (2, getattr(config, "num_channels", 3), size, size)
        return {"pixel_values": torch.randn(shape, generator=generator), "labels": labels}
    if model.main_input_name == "input_features":
        shape = (2, 64, getattr(config, "num_mel_bins", 80))
        return {"input_features": torch.randn(shape, generator=generator), "labels": labels}
    return {"input_values": torch.randn(2, 4000, generator=generator), "labels": labels}


def units_of(model: nn.Module) -> list[nn.Module]:
    """The modules to shard by themselves, inner ones first: blocks, which stand in lists. Those that the library
    does not split, or all members of the outermost lists where it names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    members = [member for each in lists.values() for member in each]
    found = [member for member in members if type(member).__name__ in names]
    if not found:
        outermost = [each for path, each in lists.items() if not any(path.startswith(f"{other}.") for other in lists)]
        found = [member for each in outermost for member in each if any(True for _ in member.parameters())]
    return list(dict.fromkeys(reversed(found)))


def _config(model_type: str, sizes: Mapping[str, Any]) -> Any:
    kind = CONFIG_MAPPING[model_type]
    usual = kind()
    given: dict[str, Any] = _fitting(usual, sizes)
    for name in usual.to_dict():
        if isinstance(inner := getattr(usual, name, None), PretrainedConfig):
            given[name] = _fitting(inner, sizes)
        elif name == "layer_types" and isinstance(inner, list):
            given[name] = inner[:LAYERS]
    config = kind(**given)
    config._attn_implementation = "eager"
    for each in (config, _text(config)):
        for name, token in _TOKENS.items():
            now = getattr(each, name, None)
            if not isinstance(now, int) or now >= VOCABULARY:
                with suppress(AttributeError):
                    setattr(each, name, token)
    return config


def _fitting(usual: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that a configuration has as single numbers."""
    stated = usual.to_dict()
    return {name: size for name, size in sizes.items() if name in stated and not isinstance(stated[name], (list, dict))}


def _text(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


def _model(kind: str, config: Any) -> nn.Module:
    name = getattr(modeling_auto, KINDS[kind])[config.model_type]
    model = getattr(transformers, name if isinstance(name, str) else name[0])(config)
    return model.train()
