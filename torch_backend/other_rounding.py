"""Perturbed runs: the same training with different rounding, by reordered sums and results that are moved to neighbouring values.

[Note: what a perturbed run may do] Two correct implementations of a computation differ in the order of sums, the last digits of
elementary functions, and the points at which low-precision kernels round. `OtherRounding` perturbs a run only in these ways: it
reorders the terms of sums (matrix products, convolutions, means), and moves each element of a rounded result at random to a
neighbouring value or not (D. Parker, Monte Carlo arithmetic, UCLA 1997). Operations that move, select or cast data have one
correct result and are not changed. Neither are zeros (masks, padding, unused parameters), values that are not finite, results
of integers alone (sums and products of positions, buckets and an optimizer's step count are exact), and sums and products that
equal an operand, such as t + 0 and 1 * x: a solver may rely on a time that it begins with.

torch computes Adam's constants, such as 1 - beta2**t, as Python floats, while other implementations use the dtype of the
parameters: in float32, 1 - 0.999 has a relative error of 1e-5. A perturbed run uses the parameters' dtype, with Adam's path for
tensor constants.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_backend.pieces._piece_tensor import PieceTensor

aten = torch.ops.aten

_ROUNDS = """
    mm bmm addmm baddbmm mv dot convolution convolution_backward add add_ sub sub_ rsub mul mul_ div div_ addcmul addcmul_
    addcdiv addcdiv_ lerp lerp_ pow pow_ sqrt sqrt_ rsqrt reciprocal exp exp_ expm1 log log1p tanh sigmoid erf sin cos gelu
    gelu_backward silu silu_backward mish softplus softplus_backward elu elu_backward tanh_backward sigmoid_backward _softmax
    _softmax_backward_data _log_softmax _log_softmax_backward_data logsumexp sum mean cumsum var var_mean std std_mean prod
    linalg_vector_norm norm native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit cudnn_batch_norm cudnn_batch_norm_backward
    _fused_rms_norm _fused_rms_norm_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    nll_loss_forward mse_loss mse_loss_backward binary_cross_entropy binary_cross_entropy_with_logits embedding_dense_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward _foreach_add _foreach_add_ _foreach_sub_ _foreach_mul _foreach_mul_
    _foreach_div _foreach_div_ _foreach_addcmul _foreach_addcmul_ _foreach_addcdiv _foreach_addcdiv_ _foreach_lerp_
    _foreach_sqrt _foreach_sqrt_ _foreach_pow _foreach_reciprocal_ _foreach_norm _fused_adam_ _fused_adamw_ _fused_sgd_
"""
ROUNDING = frozenset(getattr(aten, name) for name in _ROUNDS.split() if hasattr(aten, name))
"""Operations whose results are rounded."""

_ARITHMETIC = frozenset((aten.add, aten.sub, aten.mul, aten.div))

_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class OtherRounding(TorchDispatchMode):
    """A context in which torch rounds differently in forward, backward and the optimizer.

    Args:
        seed: the random seed, which must be equal on all ranks so that replicas stay equal.
        moves: whether results are moved. If not, only sums are reordered.
    """

    def __init__(self, seed: int, *, moves: bool = True) -> None:
        super().__init__()
        self._seed, self._moves = seed, moves
        self._generators: dict[torch.device, torch.Generator] = {}
        self._hooks: list[Any] = []
        self._as_they_were: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> Self:
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._constants_are_tensors(optimizer)),
            register_optimizer_step_post_hook(lambda *_: self._restore_groups()),
        ]
        return super().__enter__()

    def __exit__(self, *of: Any) -> None:
        super().__exit__(*of)
        for hook in self._hooks:
            hook.remove()
        self._restore_groups()

    def _constants_are_tensors(self, optimizer: torch.optim.Optimizer) -> None:
        """Use tensor constants for one step. Not needed in float64, the dtype of Python floats."""
        if not self._moves or not isinstance(optimizer, _ADAMS):
            return
        for group in optimizer.param_groups:
            wide = all(param.dtype == torch.float64 for param in group["params"])
            # With tensor constants torch divides by the learning rate, which a warm-up begins at 0.
            if not wide and group["lr"] != 0 and not group["fused"] and not group["capturable"]:
                other = {"differentiable": True, "foreach": False}
                self._as_they_were.append((group, {name: group[name] for name in other}))
                group.update(other)

    def _restore_groups(self) -> None:
        for group, was in self._as_they_were:
            group.update(was)
        self._as_they_were = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        packet = func.overloadpacket
        if packet not in ROUNDING:
            return func(*args, **(kwargs or {}))
        result = func(*self._reordered(packet, args), **(kwargs or {}))
        if not self._moves:
            return result
        if result is None:  # a list of tensors was changed in place: the first argument
            written = args[0]
        else:
            written = result
        operands = [each for each in args[:2] if isinstance(each, Tensor)] if packet in _ARITHMETIC else []
        for leaf in tree_leaves(written):
            if isinstance(leaf, Tensor):
                self._move(leaf, operands)
        return result

    def _reordered(self, packet: Any, args: tuple) -> tuple:
        """Compute a sum with reordered terms, if its operands can be permuted."""
        match packet:
            case aten.mm | aten.bmm:
                first, dims = 0, (-1, -2)
            case aten.addmm | aten.baddbmm:
                first, dims = 1, (-1, -2)
            case aten.convolution if not args[6] and args[8] == 1:  # neither transposed nor in groups
                first, dims = 0, (1, 1)
            case aten.sum | aten.mean if len(args) > 1 and args[1]:
                # Permuting one of several dims suffices.
                first, dims = 0, (args[1][-1],)
            case _:
                return args
        operands = args[first : first + len(dims)]
        if any(type(operand) is not Tensor for operand in operands):
            return args
        device, numel = operands[0].device, operands[0].shape[dims[0]]
        order = torch.randperm(numel, generator=self._generator(device), device=device)
        found = [operand.index_select(dim, order) for operand, dim in zip(operands, dims, strict=True)]
        return (*args[:first], *found, *args[first + len(found) :])

    def _move(self, tensor: Tensor, operands: Sequence[Tensor]) -> None:
        """Move a result at random, but where it equals an operand."""
        local, *others = map(_local, (tensor, *operands))
        integers = _INTEGERS.get(local.element_size())
        if not local.is_floating_point() or integers is None or local.numel() == 0:
            return
        values = local.detach()
        away = torch.randint(-1, 2, local.shape, generator=self._generator(local.device), device=local.device)
        is_rounded = (values != values.round()).any()
        away = away.to(integers) * ((values != 0) & torch.isfinite(values) & is_rounded)
        for other in others:
            if other.layout is torch.strided and (other.shape == values.shape or other.numel() == 1):
                away = away * (values != other.detach())
        # The bits of a float, read as an integer, count its magnitude.
        local.view(integers).add_(away)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank."""
    return tensor.local if isinstance(tensor, PieceTensor) else getattr(tensor, "_local_tensor", tensor)
