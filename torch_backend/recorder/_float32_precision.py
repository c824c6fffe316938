"""Reads the precision of float32 products. After a use of torch's newer interface (fp32_precision), the older one may raise."""

from typing import Any

import torch

from crossframe.dtypes import TF32, unit_roundoff

_OLDER_NAMES = {"tf32": "high", "bf16": "medium"}
_BACKENDS: Any = torch.backends


def matmul_precision() -> str:
    """The precision of float32 matrix products: "highest", "high" (TF32) or "medium" (bfloat16)."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the interfaces disagree: the newer one was used
        return _OLDER_NAMES.get(_BACKENDS.cuda.matmul.fp32_precision, "highest")


def allows_tf32_in_matmul() -> bool:
    """Whether matrix products on GPUs use TF32."""
    try:
        return bool(_BACKENDS.cuda.matmul.allow_tf32)
    except RuntimeError:
        return _BACKENDS.cuda.matmul.fp32_precision == "tf32"


def allows_tf32_in_convolutions() -> bool:
    """Whether convolutions on GPUs use TF32."""
    try:
        return bool(_BACKENDS.cudnn.allow_tf32)
    except RuntimeError:
        return _BACKENDS.cudnn.conv.fp32_precision == "tf32"


def roundoff_of_factors(device: str, *, convolution: bool) -> float:
    """The unit roundoff of the format to which a device may round the factors of float32 products; 0 if it keeps them.

    GPUs use TF32 for "high" and "medium" alike; processors that have such instructions TF32 and bfloat16. Source:
    torch.set_float32_matmul_precision.
    """
    if device == "cuda":
        return unit_roundoff(TF32) if (allows_tf32_in_convolutions if convolution else allows_tf32_in_matmul)() else 0.0
    kind = {"high": TF32, "medium": "bfloat16"}.get(matmul_precision()) if device == "cpu" and not convolution else None
    return 0.0 if kind is None else unit_roundoff(kind)
