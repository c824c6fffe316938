"""The settings in which two training commands differ, and commands with some of them exchanged."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crossframe.cli.training_command import TrainingCommand
from crossframe.environment import Difference
from crossframe.environment.collect import FLAGS
from crossframe.environment.command import SCRIPT, words_by_option
from crossframe.environment.configuration import SUFFIXES, format_configuration, hidden, parse_configuration
from crossframe.environment.differences import Absent, made, ranked
from crossframe.environment.effects import ACCELERATOR
from crossframe.environment.facts import COMMAND, CONFIGURATION, RUN, VARIABLES

_PROCESSES, _MODULE = "world_size", "module"
_ABSENT = object()


@dataclass(frozen=True)
class Setting:
    """A setting of one command: an environment variable, the script, an option, or a key of a configuration file.

    Attributes:
        section: as of a fact of an environment.
        name: of the variable or option; of a configuration, the option whose value is its path.
        key: keys of nested mappings in a configuration file.
    """

    section: str
    name: str
    key: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name in words."""
        return f"{self.name}: {'.'.join(self.key)}" if self.key else self.name


class SettingsOfTwo:
    """Two training commands as settings.

    Args:
        a, b: the commands.
        folder: where configuration files with keys of both are written.

    Attributes:
        differences: (setting, difference), those first that most likely change the numbers.

    Raises:
        UsageError: a configuration file that cannot be read.
    """

    def __init__(self, a: TrainingCommand, b: TrainingCommand, folder: Path) -> None:
        self._folder = folder
        sides = [_settings(each) for each in (a, b)]
        self._files = {}
        for setting in [each for each in sides[0] if each in sides[1] and each.section == COMMAND]:
            paths = [_configuration(setting, side[setting]) for side in sides]
            if None not in paths and len({path.suffix.lower() for path in paths}) == 1:  # type: ignore[union-attr]
                self._files[setting.name] = paths[0]
                for side, path in zip(sides, paths, strict=True):
                    for key, value in _leaves(parse_configuration(path)):  # type: ignore[arg-type]
                        side[Setting(CONFIGURATION, setting.name, key)] = value
                sides[1][setting] = sides[0][setting]  # the path itself does not matter
        self._a, self._b = sides
        found: dict[Difference, Setting] = {}
        for setting in dict.fromkeys((*self._a, *self._b)):
            x, y = (side.get(setting, _ABSENT) for side in sides)
            if x != y:
                difference = made(setting.section, setting.label, _fact(setting, x), _fact(setting, y), ACCELERATOR)
                found[difference] = setting
        self.differences = [(found[each], each) for each in ranked(tuple(found))]

    def command(self, exchanged: Collection[Setting], number: int) -> TrainingCommand:
        """The first command with these settings of the second one.

        Args:
            number: a number for the names of configuration files.
        """
        chosen = dict(self._a)
        for setting in exchanged:
            if setting in self._b:
                chosen[setting] = self._b[setting]
            else:
                chosen.pop(setting, None)
        for name, path in self._files.items():
            if any(setting.section == CONFIGURATION and setting.name == name for setting in exchanged):
                values = {
                    each.key: value
                    for each, value in chosen.items()
                    if each.section == CONFIGURATION and each.name == name
                }
                written = self._folder / f"configurations/{number}" / path.name
                written.parent.mkdir(parents=True, exist_ok=True)
                written.write_text(format_configuration(_nested(values), path.suffix.lower()))
                option = Setting(COMMAND, name)
                *before, last = chosen[option][-1]
                head, equals, _ = last.rpartition("=")
                chosen[option] = [*chosen[option][:-1], (*before, f"{head}{equals}{written}")]
        return _command(chosen)


def _settings(command: TrainingCommand) -> dict[Setting, Any]:
    found: dict[Setting, Any] = {}
    for name, text in command.variables.items():
        if name == FLAGS:
            for flag in text.split():
                found[Setting(VARIABLES, f"{FLAGS} {flag.partition('=')[0]}")] = flag
        else:
            found[Setting(VARIABLES, name)] = text
    found[Setting(COMMAND, SCRIPT)] = command.script
    if command.is_module:
        found[Setting(RUN, _MODULE)] = True
    if command.nproc_per_node is not None:
        found[Setting(RUN, _PROCESSES)] = command.nproc_per_node
    for name, words in words_by_option(command.arguments).items():
        found[Setting(COMMAND, name)] = words
    return found


def _command(settings: Mapping[Setting, Any]) -> TrainingCommand:
    variables: dict[str, str] = {}
    made = TrainingCommand(
        settings[Setting(COMMAND, SCRIPT)],
        nproc_per_node=settings.get(Setting(RUN, _PROCESSES)),
        is_module=settings.get(Setting(RUN, _MODULE), False),
    )
    arguments: list[str] = []
    for setting, value in settings.items():
        if setting.section == VARIABLES:
            name, is_flag, _ = setting.name.partition(" ")
            variables[name] = f"{variables[name]} {value}" if is_flag and name in variables else value
        elif setting.section == COMMAND and setting.name != SCRIPT:
            arguments += [word for words in value for word in words]
    return replace(made, arguments=tuple(arguments), variables=variables)


def _configuration(setting: Setting, words: Any) -> Path | None:
    """The configuration file that an option names, if it does."""
    if setting.name == SCRIPT:
        return None
    path = Path(words[-1][-1].rpartition("=")[2])
    return path if path.suffix.lower() in SUFFIXES and path.is_file() else None


def _leaves(value: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*key, name))
    else:
        yield key, value


def _nested(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for (*outer, last), value in values.items():
        at = made
        for name in outer:
            at = at.setdefault(name, {})
        at[last] = value
    return made


def _fact(setting: Setting, value: Any) -> Any:
    """The value of a setting as a fact of an environment."""
    if value is _ABSENT:
        return 1 if setting.section == RUN else Absent
    if setting.section == COMMAND and setting.name != SCRIPT:
        texts = [words[1] if len(words) > 1 else words[0].partition("=")[2] or words[0] for words in value]
        value = " ".join(texts) if texts != [setting.name] else True
    elif setting.section == VARIABLES and setting.name.startswith(f"{FLAGS} "):
        _, equals, text = value.partition("=")
        value = text if equals else True
    elif not isinstance(value, bool | int | float):
        value = str(value)
    return hidden(setting.label, value)
