"""R33, R34: dtypes beside those that torch resolves."""

from itertools import product

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from crossframe.precision import resolve_precision
from experiments.spec.checks import Scope
from experiments.spec.fake_ranks import DTYPES, fake_mesh, flat_handle
from experiments.spec.per_param import build_param
from experiments.spec.tally import Tallies

ASKED = (None, *DTYPES)
CASES = tuple(product(DTYPES, ASKED, ASKED))


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]


def flat_dtypes(tallies: Tallies, scope: Scope) -> None:
    """FSDP1: every stored dtype with every `param_dtype` and `reduce_dtype`."""
    for stored, param_dtype, reduce_dtype in CASES:
        module = nn.Module()
        module.register_parameter("p0", nn.Parameter(torch.zeros(3, dtype=DTYPES[stored])))
        handle = flat_handle(module, True, param_dtype, reduce_dtype)
        ours = resolve_precision(stored, param_dtype, reduce_dtype)
        theirs = (handle._fwd_bwd_param_dtype, handle._reduce_dtype)
        case = f"stored {stored}, param_dtype {param_dtype}, reduce_dtype {reduce_dtype}"
        tallies["R33"].compare((DTYPES[ours.gathered], DTYPES[ours.reduced]), theirs, case)


def per_param_dtypes(tallies: Tallies, scope: Scope) -> None:
    """FSDP2: the same; torch takes a dtype that changes nothing as not given."""
    with fake_mesh(0, 2) as mesh:
        built = build_param((3,), 0, FSDPMeshInfo(mesh, shard_mesh_dim=0))
        for stored, param_dtype, reduce_dtype in CASES:
            built.sharded_param = nn.Parameter(built.sharded_param.detach().to(DTYPES[stored]))
            built.init_dtype_attrs(MixedPrecisionPolicy(_dtype(param_dtype), _dtype(reduce_dtype)))
            gathered = built.param_dtype or built.orig_dtype
            ours = resolve_precision(stored, param_dtype, reduce_dtype)
            theirs = (gathered, built.reduce_dtype or gathered)
            case = f"stored {stored}, param_dtype {param_dtype}, reduce_dtype {reduce_dtype}"
            tallies["R34"].compare((DTYPES[ours.gathered], DTYPES[ours.reduced]), theirs, case)
            # A dtype that says nothing new is not given: the policy without it resolves to the same.
            if param_dtype == stored:
                shorter = resolve_precision(stored, None, reduce_dtype)
                tallies["R34"].compare(shorter, ours, (case, "without param_dtype"), "with it")
            if reduce_dtype == param_dtype:
                shorter = resolve_precision(stored, param_dtype, None)
                tallies["R34"].compare(shorter, ours, (case, "without reduce_dtype"), "with it")
