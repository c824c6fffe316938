"""Faults in models, in torch."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from crossframe.replacing import replacing
from experiments.faults.catalogue.fault import TELLABLE, TORCH, Answer, Family, each_made, with_method

MODELS = Family("model", TORCH)
INPUT, OUTPUT, LOSS = ("forward", "input"), ("forward", "output"), ("forward", "loss")
LOCAL = ("backward", "backward")


@MODELS.fault(
    "GELU by erf, torch's default, where the other has the tanh formula, JAX's",
    Answer(*INPUT, unit="blocks.0", parameter="blocks.0.down", signature="tanh_gelu"),
    source="goodfire-ai/spd#624",
    # What goes into gpt-tiny's is so small that both formulas are one in float32.
    model="vit",
)
def gelu_by_erf() -> Iterator[None]:
    from torch.nn import functional

    right = functional.gelu
    with replacing(functional, "gelu", lambda x, approximate="none": right(x)):
        yield


@MODELS.fault(
    "the last norm of Llama has an epsilon of 1e-6, not 1e-5",
    Answer(*OUTPUT, unit="", parameter="model.norm", signature="norm_epsilon"),
    source="Lightning-AI/lit-llama#339",
    model="llama-tiny",
)
def rms_epsilon() -> Iterator[None]:
    yield from each_made("llama_torch", "Body", lambda body: setattr(body.norm, "eps", 1e-6))


@MODELS.fault(
    "BatchNorm has Keras' epsilon of 1e-3",
    Answer(*OUTPUT, unit="blocks.0", parameter="blocks.0.norm", signature="norm_epsilon"),
    source="scverse/scvi-tools#2309",
    model="conv",
)
def batch_norm_epsilon() -> Iterator[None]:
    yield from each_made("conv_torch", "Block", lambda block: setattr(block.norm, "eps", 1e-3))


@MODELS.fault(
    "BatchNorm was left in its mode of evaluation",
    Answer(*OUTPUT, unit="blocks.0", parameter="blocks.0.norm", signature=None),
    source="pytorch/xla#806",
    model="conv",
)
def batch_norm_in_eval() -> Iterator[None]:
    yield from each_made("conv_torch", "Block", lambda block: block.norm.eval())


@MODELS.fault(
    "the last block's values are multiplied by the weight as it lies, not by its transpose",
    Answer(*OUTPUT, unit="blocks.1", parameter="blocks.1.attention.value", signature="transposed"),
)
def weight_not_transposed() -> Iterator[None]:
    from types import MethodType

    def change(model: Any) -> None:
        value = model.blocks[-1].attention.value
        value.forward = MethodType(lambda self, x: x @ self.weight + self.bias, value)

    yield from each_made("gpt_torch", "GPT", change)


def _attention(
    *,
    scale: Callable[[Any, Any], float] | None = None,
    diagonal: int = 0,
    dim: int = -1,
    low: bool = False,
) -> Callable[[Any, Any], Any]:
    """The GPT's attention, with a part of it otherwise."""

    def forward(self: Any, x: Any) -> Any:
        import torch

        query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
        width = math.sqrt(query.shape[-1]) if scale is None else scale(self, query)
        scores = query @ key.transpose(-1, -2) / width
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril(diagonal)
        scores = scores.masked_fill(~visible, -math.inf if dim == -1 else -1e4)
        weights = scores.bfloat16().softmax(dim=dim).to(x.dtype) if low else scores.softmax(dim=dim)
        return self.out((weights @ value).transpose(1, 2).flatten(-2))

    return forward


ATTENTION_OUT = Answer(*INPUT, unit="blocks.0", parameter="blocks.0.attention.out")


@MODELS.fault(
    "attention is scaled by the root of the whole width, not of a head's",
    ATTENTION_OUT,
    source="omihub777/ViT-CIFAR#12",
)
def scaled_by_the_width() -> Iterator[None]:
    yield from with_method(
        "gpt_torch", "Attention", "forward", _attention(scale=lambda self, query: math.sqrt(self.query.in_features))
    )


@MODELS.fault("each token sees the next one", ATTENTION_OUT, source="huggingface/transformers#48745")
def mask_one_off() -> Iterator[None]:
    yield from with_method("gpt_torch", "Attention", "forward", _attention(diagonal=1))


@MODELS.fault("softmax goes over the queries, not over the keys", ATTENTION_OUT)
def softmax_over_queries() -> Iterator[None]:
    yield from with_method("gpt_torch", "Attention", "forward", _attention(dim=-2))


@MODELS.fault("attention weights are computed in bfloat16", ATTENTION_OUT, source="apple/axlearn#18", dtypes=TELLABLE)
def softmax_in_bfloat16() -> Iterator[None]:
    yield from with_method("gpt_torch", "Attention", "forward", _attention(low=True))


@MODELS.fault(
    "dropout was left on behind the activation",
    Answer(*INPUT, unit="blocks.0", parameter="blocks.0.mlp.down", signature="dropout"),
    source="pytorch/pytorch#26338",
)
def dropout_left_on() -> Iterator[None]:
    import torch
    from torch.nn import functional

    right = functional.gelu
    generator = torch.Generator().manual_seed(1)

    def gelu(x: Any, approximate: str = "none") -> Any:
        kept = torch.rand(x.shape, generator=generator) < 0.9
        return right(x, approximate=approximate) * kept / 0.9

    with replacing(functional, "gelu", gelu):
        yield


@MODELS.fault(
    "the last block does not add its MLP to what comes in",
    Answer(*OUTPUT, unit="blocks.1", parameter="blocks.1", signature=None),
)
def residual_dropped() -> Iterator[None]:
    from types import MethodType

    def forward(self: Any, x: Any) -> Any:
        x = x + self.attention(self.attention_norm(x))
        return self.mlp(self.mlp_norm(x))

    yield from each_made(
        "gpt_torch", "GPT", lambda model: setattr(model.blocks[-1], "forward", MethodType(forward, model.blocks[-1]))
    )


@MODELS.fault(
    "the bias of one layer is not added: at its start, of zeros, nothing but its gradient shows it",
    Answer(*LOCAL, unit="blocks.1", parameter="blocks.1.mlp.down.bias", signature=None),
)
def bias_forgotten() -> Iterator[None]:
    from types import MethodType

    def change(model: Any) -> None:
        down = model.blocks[-1].mlp.down
        down.forward = MethodType(lambda self, x: x @ self.weight.T, down)

    yield from each_made("gpt_torch", "GPT", change)


@MODELS.fault(
    "rotary positions turn neighbours together, as Meta's code does, with weights for halves",
    Answer(*INPUT, unit="model.layers.0", parameter="model.layers.0.self_attn.o_proj", signature=None),
    source="huggingface/transformers#25199",
    model="llama-tiny",
)
def rotary_interleaved() -> Iterator[None]:
    def turned(self: Any, x: Any) -> Any:
        import torch

        from experiments.models.llama import rotary

        cos, sin = (torch.from_numpy(each).to(x) for each in rotary(self.config, x.shape[-2]))
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)

    from experiments.models import llama_torch

    with replacing(llama_torch.Attention, "_turned", turned):
        yield


@MODELS.fault(
    "rotary angles have the base of 10000, that of the first Llama",
    Answer(*INPUT, unit="model.layers.0", parameter="model.layers.0.self_attn.o_proj", signature=None),
    source="sgl-project/SpecForge#265",
    model="llama-tiny",
)
def rotary_base() -> Iterator[None]:
    from dataclasses import replace

    from experiments.models import llama_torch

    right = llama_torch.rotary
    with replacing(llama_torch, "rotary", lambda config, time: right(replace(config, rotary_base=1e4), time)):
        yield


@MODELS.fault(
    "SwiGLU gates the wrong one of its two projections",
    Answer(*INPUT, unit="model.layers.0", parameter="model.layers.0.mlp.down_proj", signature=None),
    source="ml-explore/mlx-lm#767",
    model="llama-tiny",
)
def gate_exchanged() -> Iterator[None]:
    from torch.nn import functional

    yield from with_method(
        "llama_torch",
        "MLP",
        "forward",
        lambda self, x: self.down_proj(self.gate_proj(x) * functional.silu(self.up_proj(x))),
    )


@MODELS.fault(
    "a convolution flips its kernel, as the mathematics of convolution has it",
    Answer(*OUTPUT, unit="", parameter="stem", signature=None),
    model="conv",
)
def kernel_flipped() -> Iterator[None]:
    from types import MethodType

    from torch.nn import functional

    def change(model: Any) -> None:
        stem = model.stem
        stem.forward = MethodType(
            lambda self, x: functional.conv2d(x, self.weight.flip(-1, -2), self.bias, padding=1), stem
        )

    yield from each_made("conv_torch", "ConvNet", change)


@MODELS.fault(
    "labels are shifted once more inside of the loss: each token predicts the one after the next",
    Answer(*LOSS, signature=None),
    source="huggingface/transformers#37830",
)
def labels_shifted_twice() -> Iterator[None]:
    from torch.nn import functional

    right = functional.cross_entropy

    def cross_entropy(logits: Any, targets: Any, *args: Any, **kwargs: Any) -> Any:
        return right(logits, targets.roll(-1), *args, **kwargs)

    with replacing(functional, "cross_entropy", cross_entropy):
        yield


@MODELS.fault(
    "labels are smoothed by a tenth",
    Answer(*LOSS, signature=None),
)
def labels_smoothed() -> Iterator[None]:
    from torch.nn import functional

    right = functional.cross_entropy

    def cross_entropy(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs, label_smoothing=0.1)

    with replacing(functional, "cross_entropy", cross_entropy):
        yield


@MODELS.fault(
    "the gradient of the embedding stops at the head that is tied to it: the head's share is lost",
    Answer(*LOCAL, unit="", parameter="token_embedding.weight", signature="tied_weight"),
    source="verl-project/verl#7834",
    model="gpt-tied",
)
def tied_head_detached() -> Iterator[None]:
    from experiments.models import gpt_torch

    right = gpt_torch.tied_logits
    with replacing(gpt_torch, "tied_logits", lambda x, weight: right(x, weight.detach())):
        yield


@MODELS.fault(
    "the head that should be tied to the embedding has a copy of its own, which is never trained",
    Answer(*LOCAL, unit="", parameter="token_embedding.weight", signature="tied_weight"),
    source="facebookresearch/lingua#75",
    model="gpt-tied",
)
def tied_head_apart() -> Iterator[None]:
    from experiments.models import gpt_torch

    right, first = gpt_torch.tied_logits, []

    def logits(x: Any, weight: Any) -> Any:
        first.append(weight.detach().clone())
        del first[1:]
        return right(x, first[0])

    with replacing(gpt_torch, "tied_logits", logits):
        yield
