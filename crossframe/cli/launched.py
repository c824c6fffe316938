"""This command in each process of a launcher, as in `srun crossframe record train.py`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

_NAMES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}
"""Variables by which a launcher tells a process its number, and how many there are. torchrun may be started by srun, so it comes
first. A batch script of SLURM has a SLURM_PROCID, but is no step of the job."""
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_PORT = "MASTER_PORT"
_NEXT_PORT = 101
_FIRST_PORT, _LAST_PORT = 1024, 65535


@dataclass(frozen=True)
class Launched:
    """A process of several that a launcher has started.

    Attributes:
        by: the launcher.
        number: of this process, from 0.
        count: of all processes, 2 and more.
    """

    by: str
    number: int
    count: int


def launched(variables: Mapping[str, str] = os.environ) -> Launched | None:
    """Which process of a launcher this is; None: no launcher has started several.

    >>> launched({"RANK": "1", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"})
    Launched(by='torchrun', number=1, count=4)
    >>> launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    """
    for by, names in _NAMES.items():
        number, count = (variables.get(name, "") for name in names)
        if number.isdecimal() and count.isdecimal():
            return Launched(by, int(number), int(count)) if int(number) < int(count) > 1 else None
    return None


def own_port(run: int, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable by which the processes of a run meet at another port than those of the runs before.

    Where rank 0 ends last, since it saves a checkpoint, the others begin the next run and would meet a store that is about to
    end. The store of torchrun's agent outlives all runs.

    Args:
        run: how many runs this command has begun before.

    >>> own_port(2, {"MASTER_PORT": "29500"}), own_port(1, {"MASTER_PORT": "65500"}), own_port(2, {})
    ({'MASTER_PORT': '29702'}, {'MASTER_PORT': '1089'}, {})
    """
    port = variables.get(_PORT, "")
    if not run or not port.isdecimal() or variables.get(_AGENT_STORE) == "True":
        return {}
    return {_PORT: str((int(port) + run * _NEXT_PORT - _FIRST_PORT) % (_LAST_PORT + 1 - _FIRST_PORT) + _FIRST_PORT)}
