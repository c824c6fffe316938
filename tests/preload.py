"""What the ranks import: loaded once in the server that they are forked from."""

import gc
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pytest  # noqa: F401 - what most modules of tests import
    import torch
    import torch._dynamo  # imported by every rank that makes an optimizer, for seconds
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import torch_backend
    import torch_backend.recorder.script  # noqa: F401

torch.set_num_threads(1)
# A collection in a fork would look at all of torch, and copy the pages that it is in. Tests leave few cycles.
gc.collect()
gc.freeze()
gc.set_threshold(50_000, 20, 50)
