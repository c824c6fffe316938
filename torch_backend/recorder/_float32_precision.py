"""Reads the precision of float32 products. After a use of torch's newer interface (fp32_precision), the older one may raise."""

from typing import Any

import torch

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
