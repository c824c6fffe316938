"""A command that trains: `[NAME=VALUE ...] [python | torchrun --nproc-per-node N] [-m] SCRIPT ARGUMENTS`."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crossframe.cli.option_values import check_size
from crossframe.errors import UsageError
from crossframe.quoting import quote
from crossframe.scripts import module_file

MAX_PROCESSES = 1024
EXAMPLES = "'train.py --lr 1e-3' or 'torchrun --nproc-per-node 2 train.py'"
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_NPROC = ("--nproc-per-node", "--nproc_per_node")


@dataclass(frozen=True)
class TrainingCommand:
    """A command that trains.

    Attributes:
        script: of Python.
        arguments: of the script.
        variables: environment variables that are set before it.
        nproc_per_node: processes that torchrun starts; None: one, without torchrun.
        is_module: the script is the name of a module.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    nproc_per_node: int | None = None
    is_module: bool = False

    @classmethod
    def parse(cls, words: Sequence[str], *, command: str) -> "TrainingCommand":
        """The parts of a command line.

        Args:
            command: the command of crossframe, for errors.

        Raises:
            UsageError: a command line of another form.

        >>> words = "OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 train.py --lr 1".split()
        >>> TrainingCommand.parse(words, command="check").nproc_per_node
        2
        >>> TrainingCommand.parse(["python", "-m", "a.train", "--lr", "1"], command="check").script
        PosixPath('a.train')
        """
        rest = list(words)
        variables, rest = split_variables(rest)
        nproc_per_node = None
        launcher = Path(rest[0]).name if rest else ""
        if _PYTHON.fullmatch(launcher):
            rest.pop(0)
        elif launcher == "torchrun":
            nproc_per_node, rest = _of_torchrun(rest[1:], command)
        if is_module := rest[:1] in (["-m"], ["--module"]):
            rest.pop(0)
        if not rest or rest[0].startswith("-"):
            raise UsageError(
                f"{command}: expected a training command such as {EXAMPLES}, got {quote(shlex.join(words))}"
            )
        return cls(Path(rest[0]), tuple(rest[1:]), variables, nproc_per_node, is_module)

    def words(self) -> tuple[str, ...]:
        """The command line, which `parse` reads."""
        launcher = ("python",)
        if self.nproc_per_node is not None:
            launcher = ("torchrun", "--standalone", "--nproc-per-node", str(self.nproc_per_node))
        return (
            *(f"{name}={value}" for name, value in self.variables.items()),
            *launcher,
            *self.words_of_python(),
        )

    def words_of_python(self) -> tuple[str, ...]:
        """What stands on a command line after `python`."""
        return (*(["-m"] if self.is_module else []), str(self.script), *self.arguments)

    @property
    def name(self) -> str:
        """The name of the script or module, without folders and packages.

        >>> TrainingCommand(Path("x/train.py")).name, TrainingCommand(Path("x.train"), is_module=True).name
        ('train', 'train')
        """
        return self.script.name.rpartition(".")[2] if self.is_module else self.script.stem

    def file(self) -> Path:
        """The file that Python runs.

        Raises:
            UsageError: there is no such script or module.
        """
        if self.is_module:
            return module_file(str(self.script))
        if not self.script.is_file():
            raise UsageError(f"expected the path of a training script, but {self.script} is not a file")
        return self.script

    def __str__(self) -> str:
        return assignments(self.variables) + shlex.join(self.words()[len(self.variables) :])


def assignments(variables: Mapping[str, str]) -> str:
    """Variables as a shell sets them before a command.

    >>> assignments({"A": "1", "B": "x y"})
    "A=1 B='x y' "
    """
    return "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())


def split_variables(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that are set before a command, and the command.

    >>> split_variables(["A=1", "train.py", "B=2"])
    ({'A': '1'}, ['train.py', 'B=2'])
    """
    rest, variables = list(words), {}
    while rest and (found := _ASSIGNMENT.fullmatch(rest[0])):
        variables[found[1]] = found[2]
        rest.pop(0)
    return variables, rest


def _of_torchrun(words: list[str], command: str) -> tuple[int, list[str]]:
    """The number of processes, and the words from the script on."""
    number = "1"
    while words and words[0].startswith("-") and words[0] not in ("-m", "--module"):
        option, equals, value = words.pop(0).partition("=")
        if option in _NPROC:
            number = value if equals else words.pop(0) if words else ""
        elif option != "--standalone":
            raise UsageError(
                f"{command}: of torchrun's options expected --nproc-per-node and --standalone, got {quote(option)}; on several "
                "machines record runs by `torchrun ... -m crossframe record SCRIPT`, and compare them"
            )
    if not number.isdecimal() or len(number) > 9:
        raise UsageError(f"{command}: torchrun --nproc-per-node: expected a number of processes, got {quote(number)}")
    check_size("nproc-per-node", int(number), 1, MAX_PROCESSES)
    return int(number), words
