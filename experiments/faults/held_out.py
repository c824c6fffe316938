"""Faults that were written when everything that finds and names faults had been settled, with the answers they must get: whether
what works on the catalogue works beyond it. Nothing in `crossframe.verdict` was changed for one of them.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

from experiments.faults.core import GATHERED, HYBRID, REDUCED
from experiments.faults.fault import JAX, TELLABLE, TORCH, Answer, Family, each_made, patched, with_method
from experiments.faults.models_torch import INPUT, LOCAL, LOSS, OUTPUT
from experiments.faults.optimizers import SGD, STATE, UPDATE, adam, adamw, calls_of, sgd
from experiments.faults.torch_engine import after_reduction, before_sum

HELD_OUT = Family("held out", TORCH)


@HELD_OUT.fault("the norm is taken, and nothing is clipped", Answer(*STATE, signature="constant_factor"), clip=0.5)
def clip_forgotten() -> Iterator[None]:
    from torch_backend import FullyShardedDataParallel

    right = FullyShardedDataParallel.clip_grad_norm_
    with patched(FullyShardedDataParallel, "clip_grad_norm_", lambda self, most: right(self, math.inf)):
        yield


@HELD_OUT.fault(
    "the gradients of one unit have the wrong sign", Answer(*REDUCED, unit="blocks.1", signature="constant_factor")
)
def sign_of_a_unit() -> Iterator[None]:
    yield from after_reduction(lambda rank, unit, shard: shard.neg_() if unit == "blocks.1" else None)


@HELD_OUT.fault(
    "the loss is scaled by 128 for backward, and its gradients are not scaled back",
    Answer(*LOCAL, signature="constant_factor"),
)
def scale_left_in() -> Iterator[None]:
    from torch import Tensor

    right = Tensor.backward
    with patched(Tensor, "backward", lambda self, *args, **kwargs: right(self * 128, *args, **kwargs)):
        yield


@HELD_OUT.fault(
    "gradients are multiplied by the root of the number of microbatches",
    Answer(*REDUCED, signature="constant_factor"),
    accumulate=3,
)
def root_of_the_microbatches() -> Iterator[None]:
    yield from after_reduction(lambda rank, unit, shard: shard.mul_(math.sqrt(3)))


@HELD_OUT.fault(
    "the loss is divided by the number of microbatches twice", Answer(*LOSS, signature="constant_factor"), accumulate=2
)
def loss_divided_twice() -> Iterator[None]:
    from torch.nn import functional

    right = functional.cross_entropy
    with patched(functional, "cross_entropy", lambda *args, **kwargs: right(*args, **kwargs) / 2):
        yield


@HELD_OUT.fault(
    "the second rank's gradients of one unit reach the sum twice",
    Answer(*REDUCED, unit="blocks.0", signature=None),
    world_size=3,
)
def rank_counted_twice() -> Iterator[None]:
    yield from before_sum(lambda rank, unit, full: full.mul_(2) if rank == 1 and unit == "blocks.0" else None)


@HELD_OUT.fault("the second replica's gradients are zero", Answer(*REDUCED, signature="missing_rank"), **HYBRID)
def replica_left_out() -> Iterator[None]:
    import torch.distributed as dist

    yield from before_sum(lambda rank, unit, full: full.zero_() if dist.get_rank() >= 2 else None)


@HELD_OUT.fault(
    "gradients are reduced in float16 where the policy says in full",
    Answer(*REDUCED, signature="low_precision_reduction"),
    within=(JAX, TORCH),
    dtypes=TELLABLE,
)
def reduced_in_float16() -> Iterator[None]:
    from dataclasses import replace

    from crossframe import precision

    right = precision.resolve_precision
    with patched(precision, "resolve_precision", lambda *args, **kw: replace(right(*args, **kw), reduced="float16")):
        yield


@HELD_OUT.fault("decay is ten times what it should be", Answer(*UPDATE, signature="weight_decay"), dtypes=TELLABLE)
def decay_tenfold() -> Iterator[None]:
    yield from adam(weight_decay=0.1)


@HELD_OUT.fault("there is no decay", Answer(*UPDATE, signature="weight_decay"), within=(JAX,), dtypes=TELLABLE)
def decay_forgotten() -> Iterator[None]:
    yield from adamw(lambda right, rate, decay: right(rate, weight_decay=0.0))


@HELD_OUT.fault("the two betas of Adam have changed places", Answer(*STATE, signature="constant_factor"))
def betas_exchanged() -> Iterator[None]:
    yield from adam(beta1=0.999, beta2=0.9)


@HELD_OUT.fault("the learning rate is doubled", Answer(*UPDATE, signature="constant_factor"), within=(JAX,))
def rate_doubled() -> Iterator[None]:
    yield from adamw(lambda right, rate, decay: right(2 * rate, weight_decay=decay))


@HELD_OUT.fault("momentum keeps 0.8, not 0.9", Answer(*STATE, step=1, signature=None), **SGD)
def other_momentum() -> Iterator[None]:
    yield from sgd(momentum=0.8)


@HELD_OUT.fault(
    "the second moment alone is corrected for its start at zero",
    Answer(*UPDATE, signature="bias_correction"),
    within=(JAX,),
)
def first_moment_not_corrected() -> Iterator[None]:
    import optax

    right = optax.tree.bias_correction
    with patched(optax.tree, "bias_correction", lambda m, decay, count: m if decay == 0.9 else right(m, decay, count)):
        yield


@HELD_OUT.fault("the optimizer's step 1 never happens", Answer(*STATE, step=1, signature="lost_step"), within=(JAX,))
def step_lost() -> Iterator[None]:
    import jax
    from jax import numpy as jnp
    from optax import GradientTransformation

    def make(right: Callable[..., Any], rate: float, decay: float) -> Any:
        given = right(rate, weight_decay=decay)

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            updates, new = given.update(updates, state, params)
            lost = state[0].count == 1
            # The count goes on, so that the step after is not taken for the lost one.
            kept = [
                jax.tree.map(lambda old, new: jnp.where(lost, old, new), *each) for each in zip(state, new, strict=True)
            ]
            kept[0] = kept[0]._replace(count=new[0].count)
            return jax.tree.map(lambda each: jnp.where(lost, 0, each), updates), tuple(kept)

        return GradientTransformation(given.init, update)

    yield from adamw(make)


@HELD_OUT.fault(
    "one unit learns at a tenth of the rate, as groups of parameters have it",
    Answer(*UPDATE, unit="blocks.1", signature="constant_factor"),
)
def rate_of_a_unit() -> Iterator[None]:
    from experiments.parity import record_torch

    right_model, right_optimizer, names = record_torch.build_model, record_torch.optimizer_of, []

    def build_model(*args: Any) -> Any:
        model = right_model(*args)
        names[:] = [name for name, _ in model.named_parameters()]
        return model

    def optimizer_of(settings: Any, params: Any) -> Any:
        named = dict(zip(names, params, strict=True))
        late = [name for name in names if "blocks.1." in name]
        assert late, names
        optimizer = right_optimizer(settings, [named[name] for name in names if name not in late])
        optimizer.add_param_group({"params": [named[name] for name in late], "lr": 0.1 * settings.learning_rate})
        return optimizer

    with patched(record_torch, "build_model", build_model), patched(record_torch, "optimizer_of", optimizer_of):
        yield


@HELD_OUT.fault(
    "heads are put together without bringing time back in front of them",
    Answer(*INPUT, unit="blocks.0", parameter="blocks.0.attention.out", signature=None),
)
def heads_not_brought_back() -> Iterator[None]:
    def forward(self: Any, x: Any) -> Any:
        import torch

        query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        return self.out((weights @ value).reshape(x.shape))

    yield from with_method("gpt_torch", "Attention", "forward", forward)


@HELD_OUT.fault(
    "GELU by erf, where the other has the tanh formula",
    Answer(*INPUT, unit="blocks.0", parameter="blocks.0.down", signature="tanh_gelu"),
    within=(JAX,),
    model="vit",
)
def gelu_by_erf_in_jax() -> Iterator[None]:
    import jax

    right = jax.nn.gelu
    with patched(jax.nn, "gelu", lambda x, approximate=True: right(x, approximate=False)):
        yield


@HELD_OUT.fault(
    "a kernel is multiplied by as it lies in torch, transposed",
    Answer(*OUTPUT, unit="blocks.0", parameter="blocks.0.attention.key", signature="transposed"),
    within=(JAX,),
)
def kernel_as_in_torch() -> Iterator[None]:
    from flax import nnx

    right = nnx.Linear.__call__

    def call(self: Any, x: Any) -> Any:
        return x @ self.kernel[...].T + self.bias[...] if getattr(self, "turned", False) else right(self, x)

    with patched(nnx.Linear, "__call__", call):
        yield from each_made("gpt_flax", "Block", lambda block: setattr(block.attention.key, "turned", True))


@HELD_OUT.fault(
    "dropout was left on behind the embedding",
    Answer(*INPUT, unit="", parameter="blocks.0", signature="dropout"),
    within=(JAX,),
)
def dropout_on_the_embedding() -> Iterator[None]:
    import jax
    from jax import numpy as jnp

    def call(self: Any, tokens: Any) -> Any:
        x = self.token_embedding(tokens) + self.position_embedding(jnp.arange(tokens.shape[1]))
        kept = jax.random.bernoulli(jax.random.key(1), 0.8, x.shape)
        x = jnp.where(kept, x / 0.8, 0)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    yield from with_method("gpt_flax", "GPT", "__call__", call)


@HELD_OUT.fault(
    "RMSNorm has an epsilon of 1e-3",
    Answer(*OUTPUT, unit="model.layers.0", parameter="model.layers.0.input_layernorm", signature="norm_epsilon"),
    within=(JAX,),
    model="llama-tiny",
)
def rms_epsilon_large() -> Iterator[None]:
    def change(block: Any) -> None:
        block.input_layernorm.epsilon = 1e-3

    yield from each_made("llama_flax", "Block", change)


@HELD_OUT.fault(
    "the head's share of the gradient of the embedding is lost",
    Answer(*LOCAL, unit="", parameter="token_embedding.weight", signature="tied_weight"),
    within=(JAX,),
    model="gpt-tied",
)
def tied_head_lost() -> Iterator[None]:
    import jax
    from jax import numpy as jnp

    def call(self: Any, tokens: Any) -> Any:
        x = self.token_embedding(tokens) + self.position_embedding(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ jax.lax.stop_gradient(self.token_embedding.embedding[...]).T

    yield from with_method("gpt_flax", "GPT", "__call__", call)


@HELD_OUT.fault(
    "one unit is gathered with its ranks' shards exchanged",
    Answer(*GATHERED, unit="blocks.0", signature=None),
)
def shards_exchanged() -> Iterator[None]:
    from torch_backend.gather import GatherBuffer

    right, units = GatherBuffer.finish, {}
    begins = GatherBuffer.start

    def start(self: Any, shard: Any, communicator: Any, **kwargs: Any) -> None:
        units[id(self)] = kwargs["unit"]
        begins(self, shard, communicator, **kwargs)

    def finish(self: Any) -> None:
        right(self)
        if units.pop(id(self), "") == "blocks.0":
            half = self.full.numel() // 2
            self.full.copy_(self.full.roll(half))

    with patched(GatherBuffer, "start", start), patched(GatherBuffer, "finish", finish):
        yield


def _own_adam(change: Callable[..., Any]) -> Iterator[None]:
    """AdamW written out for torch, whose step is `change(mean, square, rate, eps, corrections)`."""
    import torch
    from torch.optim import adam as owner

    @torch.no_grad()
    def step(params: Any, grads: Any, means: Any, squares: Any, _: Any, counts: Any, **kw: Any) -> None:
        beta1, beta2, rate = kw["beta1"], kw["beta2"], kw["lr"]
        for param, grad, mean, square, count in zip(params, grads, means, squares, counts, strict=True):
            count += 1
            param.mul_(1 - rate * kw["weight_decay"])
            mean.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            corrections = 1 - beta1 ** count.item(), 1 - beta2 ** count.item()
            param.sub_(change(mean, square, rate, kw["eps"], corrections))

    with patched(owner, "adam", step):
        yield


@HELD_OUT.fault("epsilon stands under the root, in torch", Answer(*UPDATE, signature="optimizer_epsilon"))
def epsilon_under_the_root_in_torch() -> Iterator[None]:
    yield from _own_adam(lambda m, v, rate, eps, by: rate * (m / by[0]) / (v / by[1] + eps).sqrt())


@HELD_OUT.fault("moments are not corrected, in torch", Answer(*UPDATE, signature="bias_correction"))
def bias_not_corrected_in_torch() -> Iterator[None]:
    yield from _own_adam(lambda m, v, rate, eps, by: rate * m / (v.sqrt() + eps))


@HELD_OUT.fault(
    "Adam with decay in its gradient, in JAX", Answer(*STATE, signature="weight_decay"), within=(JAX,), dtypes=TELLABLE
)
def decay_in_the_gradient_in_jax() -> Iterator[None]:
    import optax

    yield from adamw(lambda right, rate, decay: optax.chain(optax.add_decayed_weights(decay), optax.adam(rate)))


@HELD_OUT.fault("the optimizer of the second rank skips step 1", Answer(*STATE, step=1, rank=1, signature=None))
def rank_does_not_step() -> Iterator[None]:
    import torch.distributed as dist

    yield from calls_of("adam", "adam", lambda step, args, kwargs: step != 1 or dist.get_rank() != 1)


@HELD_OUT.fault(
    "the second rank's part of a unit's gradient is zero",
    Answer(*REDUCED, unit="blocks.0", rank=1, signature="missing_rank"),
)
def slice_of_the_gradient_lost() -> Iterator[None]:
    yield from after_reduction(lambda rank, unit, shard: shard.zero_() if rank == 1 and unit == "blocks.0" else None)


@HELD_OUT.fault(
    "kernels of convolutions were loaded with channels in and out exchanged",
    Answer("parameters", "all_gather", signature="transposed"),
    within=(JAX,),
    model="conv",
)
def channels_exchanged() -> Iterator[None]:
    from experiments.parity import record_jax

    right = record_jax.nnx_params

    def nnx_params(definition: Any, params: Any, values: Any) -> Any:
        square = {name for name, value in values.items() if value.ndim == 4 and value.shape[0] == value.shape[1]}
        turned = {name: value.swapaxes(0, 1) if name in square else value for name, value in values.items()}
        return right(definition, params, turned)

    with patched(record_jax, "nnx_params", nnx_params):
        yield


@HELD_OUT.fault(
    "the norm of gradients is the largest element, not the root of the squares",
    Answer("norm", "grad_norm", signature=None),
    clip=0.5,
)
def norm_of_the_largest() -> Iterator[None]:
    from torch_backend import FullyShardedDataParallel

    right = FullyShardedDataParallel.clip_grad_norm_
    with patched(FullyShardedDataParallel, "clip_grad_norm_", lambda self, most: right(self, most, math.inf)):
        yield


@HELD_OUT.fault(
    "logits are divided by a temperature of 2", Answer(*OUTPUT, unit="", parameter="", signature="constant_factor")
)
def logits_halved() -> Iterator[None]:
    from experiments.models import gpt_torch

    right = gpt_torch.GPT.forward
    yield from with_method("gpt_torch", "GPT", "forward", lambda self, tokens: right(self, tokens) / 2)


@HELD_OUT.fault(
    "the embedding of tokens is scaled by the root of its width",
    Answer(*INPUT, unit="", parameter="blocks.0", signature=None),
    within=(JAX,),
)
def embedding_scaled() -> Iterator[None]:
    from jax import numpy as jnp

    def call(self: Any, tokens: Any) -> Any:
        x = self.token_embedding(tokens)
        x = x * math.sqrt(x.shape[-1]) + self.position_embedding(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    yield from with_method("gpt_flax", "GPT", "__call__", call)
