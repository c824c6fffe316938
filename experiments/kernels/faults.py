"""The faults: one line of a program each, replaced by another. The expected answer is that line."""

from dataclasses import dataclass
from pathlib import Path

from experiments import kernels

TORCH, JAX = "torch_matmul", "jax_matmul"


@dataclass(frozen=True)
class Change:
    """A piece of a program's text and what takes its place, without a line break."""

    old: str
    new: str


@dataclass(frozen=True)
class KernelFault:
    """A wrong kernel.

    Attributes:
        name, description: for the table.
        by_program: how it is put into each program.
    """

    name: str
    description: str
    by_program: dict[str, Change]

    def applied(self, program: str) -> tuple[str, int]:
        """The faulty program's text, and the number of the line that is changed."""
        text, change = text_of(program), self.by_program[program]
        assert text.count(change.old) == 1, (self.name, program)
        return text.replace(change.old, change.new), text[: text.index(change.old)].count("\n") + 1


def path_of(program: str) -> Path:
    """The file of a program."""
    return Path(kernels.__path__[0], f"{program}.py")


def text_of(program: str) -> str:
    """Its text."""
    return path_of(program).read_text()


def _fault(name: str, description: str, torch: tuple[str, str], jax: tuple[str, str]) -> KernelFault:
    return KernelFault(name, description, {TORCH: Change(*torch), JAX: Change(*jax)})


FAULTS = (
    _fault(
        "rms_epsilon",
        "RMSNorm: an epsilon of 1e-6, not 1e-5",
        ("(squares + 1e-5)", "(squares + 1e-6)"),
        ("(squares + 1e-5)", "(squares + 1e-6)"),
    ),
    _fault(
        "rms_epsilon_outside",
        "RMSNorm: the epsilon is added to the root",
        ("torch.rsqrt(squares + 1e-5)", "1 / (squares.sqrt() + 1e-5)"),
        ("jax.lax.rsqrt(squares + 1e-5)", "1 / (jnp.sqrt(squares) + 1e-5)"),
    ),
    _fault(
        "rms_accumulation",
        "RMSNorm: the mean of squares is taken in bfloat16",
        ("x.pow(2).mean(-1, keepdim=True)", "x.bfloat16().pow(2).mean(-1, keepdim=True).to(x.dtype)"),
        (
            "jnp.square(x).mean(-1, keepdims=True)",
            "jnp.square(x.astype(jnp.bfloat16)).mean(-1, keepdims=True).astype(x.dtype)",
        ),
    ),
    _fault(
        "variance_of_a_sample",
        "LayerNorm: the variance is divided by n - 1",
        ("centred.pow(2).mean(-1, keepdim=True)", "centred.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1)"),
        (
            "jnp.square(centred).mean(-1, keepdims=True)",
            "jnp.square(centred).sum(-1, keepdims=True) / (x.shape[-1] - 1)",
        ),
    ),
    _fault(
        "gelu_tanh",
        "GELU by tanh, not by erf",
        ("gelu(x @ self.up.T)", 'gelu(x @ self.up.T, approximate="tanh")'),
        ("approximate=False", "approximate=True"),
    ),
    _fault(
        "attention_scale",
        "attention: scores are divided by the root of the model's width",
        ("scores / math.sqrt(query.shape[-1])", "scores / math.sqrt(x.shape[-1])"),
        ("scores / math.sqrt(query.shape[-1])", "scores / math.sqrt(x.shape[-1])"),
    ),
    _fault(
        "mask_shifted",
        "attention: the mask lets each position see the next one",
        ("dtype=torch.bool).tril()", "dtype=torch.bool).tril(1)"),
        ("x.shape[1]), bool))", "x.shape[1]), bool), 1)"),
    ),
    _fault(
        "mask_finite",
        "attention: hidden scores are -10, not minus infinity",
        ("scores.masked_fill(~visible, -math.inf)", "scores.masked_fill(~visible, -10.0)"),
        ("jnp.where(visible, scores, -jnp.inf)", "jnp.where(visible, scores, -10.0)"),
    ),
    _fault(
        "softmax_bfloat16",
        "attention: softmax in bfloat16, a cast to float32 is missing",
        ("scores.softmax(-1)", "scores.bfloat16().softmax(-1).to(x.dtype)"),
        ("jax.nn.softmax(scores, axis=-1)", "jax.nn.softmax(scores.astype(jnp.bfloat16), axis=-1).astype(x.dtype)"),
    ),
    _fault(
        "product_float16",
        "attention: the product of weights and values in float16",
        ("weights @ value", "(weights.half() @ value.half()).to(x.dtype)"),
        ("weights @ value", "(weights.astype(jnp.float16) @ value.astype(jnp.float16)).astype(x.dtype)"),
    ),
    _fault(
        "rotary_base",
        "rotary positions: a base of 500, not 10000",
        ("values.angles(10000.0)", "values.angles(500.0)"),
        ("values.angles(10000.0)", "values.angles(500.0)"),
    ),
    _fault(
        "rotary_sign",
        "rotary positions: one half is turned the other way",
        ("first * cos - second * sin", "first * cos + second * sin"),
        ("first * cos - second * sin", "first * cos + second * sin"),
    ),
    _fault(
        "positions_from_one",
        "positions count from 1",
        ("torch.arange(inputs.shape[1])", "torch.arange(1, inputs.shape[1] + 1)"),
        ("jnp.arange(inputs.shape[1])", "jnp.arange(1, inputs.shape[1] + 1)"),
    ),
    _fault(
        "softcap",
        "logits are capped at 5, not at 3",
        ("3.0 * torch.tanh(logits / 3.0)", "5.0 * torch.tanh(logits / 5.0)"),
        ("3.0 * jnp.tanh(logits / 3.0)", "5.0 * jnp.tanh(logits / 5.0)"),
    ),
    _fault(
        "padding_counted",
        "the loss is divided by all tokens, padding too",
        ("counted.sum()", "counted.numel()"),
        ("counted.sum()", "counted.size"),
    ),
    _fault(
        "backward_factor",
        "a backward by hand lacks its factor of 2",
        ("grads[0] * 2.0 * x.relu()", "grads[0] * x.relu()"),
        ("grad * 2.0 * jnp.maximum(x, 0)", "grad * jnp.maximum(x, 0)"),
    ),
)
