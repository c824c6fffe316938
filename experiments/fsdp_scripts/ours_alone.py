"""Runs a script as `python -m torch_backend` does, and fails as soon as the FSDP of torch shards anything."""

import sys
from functools import partial
from typing import Any, NoReturn

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from torch_backend.__main__ import main


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(f"the script trains with torch's own {name}")


if __name__ == "__main__":
    FullyShardedDataParallel.__init__ = partial(_refuse, "FullyShardedDataParallel")
    FSDPState.__init__ = partial(_refuse, "fully_shard")
    del sys.path[0]  # the folder of this file
    main(sys.argv[1:])
