"""`python -m torch_backend train.py ...` runs a script with the FSDP of this package instead of torch's.

Under torchrun: `torchrun --nproc-per-node 2 -m torch_backend train.py ...`. A module: `python -m torch_backend -m package.train`.
The script stays unchanged: see `replace_torch_fsdp`.
"""

import sys
from collections.abc import Sequence

from crossframe.errors import UsageError
from crossframe.scripts import print_from_script_on, program_of
from torch_backend.replace_torch_fsdp import replace_torch_fsdp

_USAGE = """usage: python -m torch_backend SCRIPT [ARGUMENTS]
       python -m torch_backend -m MODULE [ARGUMENTS]

Runs a script with the FSDP of torch_backend instead of torch's, also under torchrun: torchrun -m torch_backend SCRIPT"""


def main(words: Sequence[str]) -> None:
    """Run a script or module, whose errors Python prints as those of the script alone.

    Args:
        words: `SCRIPT ARGUMENTS`, or `-m MODULE ARGUMENTS`.
    """
    if list(words[:1]) in (["-h"], ["--help"]):
        print(_USAGE)
        sys.exit()
    if not words or list(words) == ["-m"]:
        sys.exit(f"torch_backend: expected a script or module\n{_USAGE}")
    try:
        run = program_of(words)
    except UsageError as error:
        sys.exit(f"torch_backend: {error}")
    replace_torch_fsdp()
    try:
        run()
    except SystemExit:
        raise
    except BaseException:
        print_from_script_on()
        raise


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, which `python SCRIPT` has not
    main(sys.argv[1:])
