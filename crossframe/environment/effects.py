"""The table of facts that affect the numbers of a run: how likely another value changes them, and why.

The first matching row decides. Differences are ranked by `Effect`, then by the order of rows.
"""

import re
from dataclasses import dataclass
from enum import Enum

from crossframe.environment.facts import (
    COMMAND,
    CONFIGURATION,
    FRAMEWORK,
    MACHINE,
    MODULES,
    OPTIMIZER,
    PACKAGES,
    PARAMETERS,
    RANDOM,
    RUN,
    SOURCE,
    VALUES,
    VARIABLES,
)


class Effect(Enum):
    """How likely another value of a fact changes the numbers of a run."""

    CERTAINLY = "certainly"
    POSSIBLY = "possibly"
    HARDLY = "hardly"

    @property
    def order(self) -> int:
        """The place in a ranking; the most likely effect is first."""
        return list(Effect).index(self)

    @property
    def title(self) -> str:
        """The effect as words before a reason."""
        return {
            Effect.CERTAINLY: "changes the numbers",
            Effect.POSSIBLY: "may change the numbers",
            Effect.HARDLY: "should not change the numbers",
        }[self]


@dataclass(frozen=True)
class Row:
    """One kind of fact.

    Attributes:
        section: the section of the facts.
        names: a pattern that matches the whole name, ignoring case.
        effect: how likely another value changes the numbers.
        reason: why, as a clause.
        device: "cpu" or "accelerator" if the row holds there alone; a device that is not stated counts as an accelerator.
    """

    section: str
    names: str
    effect: Effect
    reason: str
    device: str = ""

    def matches(self, section: str, name: str, device: str) -> bool:
        """Whether the row is about this fact."""
        return (
            section == self.section
            and self.device in ("", device)
            and re.fullmatch(self.names, name, re.IGNORECASE) is not None
        )


CERTAINLY, POSSIBLY, HARDLY = Effect
CPU, ACCELERATOR = "cpu", "accelerator"
_SHORT = "float32 products keep 10 or fewer bits of their inputs' significand instead of 23"


def _words(*words: str) -> str:
    """A pattern of option names and dotted keys, optionally after a file name, whose last component has one of these words."""
    return rf"(.*: )?(-*|.*\.)([a-z0-9]+[-_])*({'|'.join(words)})([-_][a-z0-9]+)*"


_OUTPUT = _words(
    *("out", "output", "logs?", "logging", "logger", "wandb", "tensorboard", "verbose", "quiet", "port", "notes"),
    *(
        "tags?",
        "print",
        "profile",
        "profiler",
        "run[-_]?name",
        "exp[-_]?name",
        "experiment",
        "save",
        "workers",
        "progress",
    ),
)
_IN_LOGGER = r"(.*: )?.*\b(wandb|logger|logging|tensorboard|mlflow)\..*"
_PATH = _words("dir", "directory", "path", "root", "cache", "folder", "files?")
_NUMERIC = _words(
    *(
        "lr",
        "learning[-_]rate",
        "seed",
        "batch",
        "bs",
        "eps",
        "epsilon",
        "betas?",
        "beta[12]",
        "momentum",
        "decay",
        "wd",
    ),
    *(
        "dropout",
        "hidden",
        "width",
        "embd",
        "depth",
        "layers?",
        "heads?",
        "dims?",
        "dtype",
        "precision",
        "bf16",
        "fp16",
        "amp",
    ),
    *(
        "optimizer",
        "optim",
        "scheduler",
        "schedule",
        "warmup",
        "clip",
        "clipping",
        "accumulation",
        "accumulate",
        "grad",
    ),
    *("model", "arch", "architecture", "dataset", "data", "seq", "length", "block", "vocab", "tokenizer", "activation"),
    *(
        "norm",
        "init",
        "initializer",
        "resume",
        "checkpoint",
        "ckpt",
        "pretrained",
        "shuffle",
        "augment",
        "loss",
        "temperature",
    ),
    *("scale", "smoothing", "experts?", "rope", "theta", "tie"),
)

TABLE: tuple[Row, ...] = (
    Row(PARAMETERS, ".*", CERTAINLY, "the models have other parameters, or store them in another shape or dtype"),
    Row(RUN, "dtype|param_dtype|reduce_dtype", CERTAINLY, "every operation rounds to another dtype"),
    Row(MODULES, ".*", CERTAINLY, "the module computes another function"),
    Row(VALUES, "initial values.*", CERTAINLY, "the runs start from other parameters"),
    Row(VALUES, "order of samples.*", POSSIBLY, "sums over samples are in another order"),
    Row(VALUES, ".*", CERTAINLY, "the runs are trained on other samples"),
    Row(FRAMEWORK, "the constant .*", CERTAINLY, "the step gets other values beside its batch, such as frozen weights"),
    Row(OPTIMIZER, ".*", CERTAINLY, "every update follows another rule"),
    Row(RUN, "seed", CERTAINLY, "initial values and samples are drawn from other numbers"),
    Row(
        RUN,
        "accumulate|batch_size|clip|loss_scale",
        CERTAINLY,
        "gradients are of other samples, or scaled in another way",
    ),
    Row(
        FRAMEWORK,
        r"jax_enable_x64|jax_default_dtype_bits|jax_numpy_dtype_promotion|torch\.get_default_dtype",
        CERTAINLY,
        "arrays are created in another dtype",
    ),
    Row(
        VARIABLES,
        "JAX_ENABLE_X64|JAX_DEFAULT_DTYPE_BITS|JAX_NUMPY_DTYPE_PROMOTION",
        CERTAINLY,
        "arrays are created in another dtype",
    ),
    Row(
        FRAMEWORK,
        r".*allow_tf32|tf32|matmul|.*fp32_precision|jax_default_matmul_precision|torch\.get_float32_matmul_precision",
        CERTAINLY,
        f"on this device {_SHORT}",
        ACCELERATOR,
    ),
    Row(
        VARIABLES,
        "NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|JAX_DEFAULT_MATMUL_PRECISION",
        CERTAINLY,
        f"on this device {_SHORT}",
        ACCELERATOR,
    ),
    Row(
        FRAMEWORK,
        "jax_default_prng_impl|jax_threefry_partitionable|jax_enable_custom_prng",
        CERTAINLY,
        "random keys draw other numbers",
    ),
    Row(
        VARIABLES,
        "JAX_DEFAULT_PRNG_IMPL|JAX_THREEFRY_PARTITIONABLE",
        CERTAINLY,
        "random keys draw other numbers",
    ),
    Row(COMMAND, _IN_LOGGER, HARDLY, "it selects outputs"),
    Row(CONFIGURATION, _IN_LOGGER, HARDLY, "it selects outputs"),
    Row(COMMAND, _OUTPUT, HARDLY, "it selects outputs or the number of workers"),
    Row(CONFIGURATION, _OUTPUT, HARDLY, "it selects outputs or the number of workers"),
    Row(COMMAND, _PATH, POSSIBLY, "another path, whose content may differ"),
    Row(CONFIGURATION, _PATH, POSSIBLY, "another path, whose content may differ"),
    Row(COMMAND, _NUMERIC, CERTAINLY, "by its name it changes the model, its data or its optimizer"),
    Row(CONFIGURATION, _NUMERIC, CERTAINLY, "by its name it changes the model, its data or its optimizer"),
    Row(SOURCE, r"(file|changed) .*\.py", POSSIBLY, "other code ran"),
    Row(COMMAND, ".*", POSSIBLY, "an argument of the script"),
    Row(CONFIGURATION, ".*", POSSIBLY, "a value that the script may read"),
    Row(RANDOM, "python|numpy", HARDLY, "samples and initial values, for which they are used, are compared themselves"),
    Row(RANDOM, ".*", POSSIBLY, "dropout, shuffling and later initial values draw other numbers"),
    Row(RUN, "framework", POSSIBLY, "every operation has another implementation, which rounds in another way"),
    Row(FRAMEWORK, "device", POSSIBLY, "another device has other kernels, which round in another way"),
    Row(FRAMEWORK, "compiled", POSSIBLY, "compiled modules fuse operations, which rounds in another way"),
    Row(
        FRAMEWORK,
        r".*reduced_precision.*|.*accumulation.*|.*fp16.*|.*bf16.*",
        POSSIBLY,
        "products in 16-bit dtypes are summed in another precision",
    ),
    Row(FRAMEWORK, ".*allow_tf32|tf32", HARDLY, "TF32 exists on GPUs alone", CPU),
    Row(
        FRAMEWORK,
        r"matmul|.*fp32_precision|.*matmul_precision",
        POSSIBLY,
        "some processors then compute float32 products in bfloat16",
        CPU,
    ),
    Row(VARIABLES, "NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32.*", HARDLY, "TF32 exists on GPUs alone", CPU),
    Row(PACKAGES, "torch", POSSIBLY, "another version has other kernels and defaults"),
    Row(PACKAGES, "jaxlib|jax|libtpu|jax-cuda.*|jax-rocm.*", POSSIBLY, "another version compiles to other kernels"),
    Row(
        PACKAGES,
        "(nvidia-)?(cudnn|cublas|cuda|cufft|cusolver|cusparse|nccl|nvjitlink|cutlass).*|triton.*|pytorch-triton.*|onednn|mkl.*",
        POSSIBLY,
        "another version has other kernels, which round in another way",
    ),
    Row(
        PACKAGES,
        "flash-attn.*|transformer-engine.*|xformers|apex|torchao|bitsandbytes|liger-kernel|deepspeed|fairscale|megatron.*",
        POSSIBLY,
        "another version has other kernels, which round in another way",
    ),
    Row(
        PACKAGES,
        "flax|optax|equinox|transformers|accelerate|lightning|pytorch-lightning|trl|peft|timm|diffusers|torchtitan|torchtune"
        "|torchvision|torchaudio|haiku|dm-haiku|chex|orbax.*|crossframe",
        POSSIBLY,
        "the training loop or the model may be from this package, whose defaults change",
    ),
    Row(
        PACKAGES,
        "numpy|scipy|datasets|tokenizers|sentencepiece|tiktoken|pillow|opencv.*|tensorflow-datasets|grain.*|webdataset"
        "|mosaicml-streaming|pandas|pyarrow|albumentations|librosa|ml-dtypes",
        POSSIBLY,
        "samples or initial values may be made by this package",
    ),
    Row(
        FRAMEWORK,
        r"deterministic|.*deterministic.*|.*benchmark.*",
        POSSIBLY,
        "another algorithm sums in another order, or in an order that changes from run to run",
    ),
    Row(
        FRAMEWORK,
        "attention|.*sdp.*|optimizer_kernel|channels_last|mkldnn|capability",
        POSSIBLY,
        "another kernel rounds in another way",
    ),
    Row(RUN, "mesh|strategy|world_size|layout", POSSIBLY, "gradients are summed over ranks in another order"),
    Row(RUN, "steps|model", POSSIBLY, "a schedule may depend on the number of steps, and a model on its class"),
    Row(
        VARIABLES,
        "XLA_FLAGS --xla_(dump|hlo_dump|log|.*profile|.*verbose|.*_cache).*",
        HARDLY,
        "it selects outputs of the compiler",
    ),
    Row(
        VARIABLES,
        "XLA_FLAGS .*|LIBTPU_INIT_ARGS",
        POSSIBLY,
        "the compiler fuses, reorders or approximates operations in another way",
    ),
    Row(
        VARIABLES,
        "(NCCL|RCCL)_(ALGO|PROTO|NTHREADS|(MIN|MAX)_(NCHANNELS|CTAS|NRINGS)|NVLS_.*|COLLNET_.*|CROSS_NIC|TREE_.*|P2P_.*NCHANNELS"
        "|GRAPH_FILE|TOPO_FILE|TUNER_.*|ALLOC_P2P.*)",
        POSSIBLY,
        "all-reduces sum over ranks in another order",
    ),
    Row(
        VARIABLES,
        "CUBLAS_WORKSPACE_CONFIG|CUBLASLT_.*|CUDNN_.*|ROCBLAS_.*|MIOPEN_.*|DISABLE_.*CUBLASLT.*|TORCH_BLAS.*",
        POSSIBLY,
        "libraries choose other kernels, which may sum in another order",
    ),
    Row(
        VARIABLES,
        "(OMP|MKL|OPENBLAS|GOTO|BLIS|NUMEXPR|VECLIB)_(NUM|MAXIMUM)_THREADS|OMP_(DYNAMIC|SCHEDULE|THREAD_LIMIT)|MKL_DYNAMIC",
        POSSIBLY,
        "sums are divided among another number of threads",
    ),
    Row(FRAMEWORK, "threads|processes", POSSIBLY, "sums are divided among another number of threads"),
    Row(
        VARIABLES,
        "MKL_CBWR|MKL_ENABLE_INSTRUCTIONS|(ONEDNN|DNNL)_.*|ATEN_CPU_CAPABILITY|OPENBLAS_CORETYPE|KMP_DETERMINISTIC.*|NVTE_.*"
        "|FLASH_.*|XFORMERS_.*|TRITON_.*|TORCHINDUCTOR_.*|TORCH_COMPILE.*|TF_.*ONEDNN.*|TF_.*DETERMINISTIC.*|JAX_.*|DEEPSPEED_.*"
        "|NEURON_.*",
        POSSIBLY,
        "libraries choose other kernels, which round in another way",
    ),
    Row(VARIABLES, "PYTHONHASHSEED", POSSIBLY, "sets are in another order, which may order data or parameters"),
    Row(VARIABLES, "LD_PRELOAD|LD_LIBRARY_PATH", POSSIBLY, "other libraries may be loaded"),
    Row(MACHINE, "processor|system", POSSIBLY, "libraries choose kernels by the processor"),
    Row(MACHINE, "driver", POSSIBLY, "kernels are compiled by another driver"),
    Row(FRAMEWORK, ".*", POSSIBLY, "a setting or a library of the framework"),
    Row(SOURCE, "commit", POSSIBLY, "other code may have run"),
    Row(PACKAGES, ".*", HARDLY, "this package is not known to compute numbers of a run"),
    Row(VARIABLES, "(NCCL|RCCL|GLOO|UCX|FI)_.*", HARDLY, "it selects logs or transports, which move the same bits"),
    Row(VARIABLES, ".*", HARDLY, "this variable is not known to change numbers"),
    Row(MACHINE, "python", HARDLY, "Python computes no tensors"),
    Row(MACHINE, ".*", HARDLY, "the place of a run does not enter its numbers"),
    Row(RUN, ".*", HARDLY, "it states what was recorded"),
    Row(SOURCE, ".*", HARDLY, "no code of Python"),
)


def row_of(section: str, name: str, device: str) -> tuple[int, Row]:
    """The row of a fact, and its place in the table.

    Args:
        device: CPU or ACCELERATOR.
    """
    return next((i, row) for i, row in enumerate(TABLE) if row.matches(section, name, device))
