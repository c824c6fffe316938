"""Hugging Face's models, small, and training by torch's FSDP and ours that must agree bit for bit."""

from typing import Any

import torch

from experiments.data import text_batch

STEPS = 5
BATCH_SIZE, CONTEXT = 2, 16
SECONDS = 180  # the first test of a world imports transformers
SIDES = {"theirs": "torch.distributed.fsdp", "ours": "torch_backend"}


def gpt2_model() -> tuple[Any, set[type]]:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=20, n_layer=2, n_head=2, use_cache=False)
    config.bos_token_id = config.eos_token_id = None
    return GPT2LMHeadModel(with_eager_attention(config)), {GPT2Block}


def llama_model() -> tuple[Any, set[type]]:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=20,
        intermediate_size=33,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    return LlamaForCausalLM(with_eager_attention(config)), {LlamaDecoderLayer}


def t5_model() -> tuple[Any, set[type]]:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Block, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=256,
        d_model=20,
        d_kv=8,
        d_ff=33,
        num_layers=1,
        num_decoder_layers=2,
        num_heads=2,
        use_cache=False,
    )
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(with_eager_attention(config)), {T5Block}


def mixtral_model() -> tuple[Any, set[type]]:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=256,
        hidden_size=20,
        intermediate_size=13,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        num_local_experts=3,
        num_experts_per_tok=1,
        output_router_logits=True,
        use_cache=False,
    )
    config._experts_implementation = "eager"
    return MixtralForCausalLM(with_eager_attention(config)), {MixtralDecoderLayer}


def with_eager_attention(config: Any) -> Any:
    config._attn_implementation = "eager"
    return config


MODELS = {"gpt2": gpt2_model, "llama": llama_model, "t5": t5_model, "mixtral": mixtral_model}


def inputs_of(turn: int, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Tokens of one rank; Hugging Face's models shift the labels themselves. T5 gets a text to copy."""
    tokens = torch.from_numpy(text_batch(2, turn, rank, world_size, BATCH_SIZE, CONTEXT).tokens).long()
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def assert_same_steps(theirs: list[Any], ours: list[Any]) -> None:
    """By step, by what, by name: the same tensors, bit for bit."""
    for step, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        for what in a:
            assert a[what].keys() == b[what].keys(), (step, what)
            for name, value in a[what].items():
                assert value.dtype == b[what][name].dtype, (step, what, name)
                assert torch.equal(value, b[what][name]), (step, what, name)
