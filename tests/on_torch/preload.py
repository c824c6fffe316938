"""What the ranks import: loaded once in the server that they are forked from."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed.fsdp
    import torch.distributed.tensor

torch.set_num_threads(1)
