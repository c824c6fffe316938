"""`python -m experiments public-scripts`: records training scripts of public repositories, twice and with a mistake.

The first answer to each case is kept: later runs, with corrected code, add theirs next to it.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.errors import CrossframeError, UsageError
from crossframe.recording.reader import Recording
from experiments.environments import CODE, OURS_ALONE, install_packages, run, without_places
from experiments.results import Results
from experiments.untouched.run import place_of, said_in

HERE = Path(__file__).parent
SETS = {
    "first": "cases.toml",
    "second": "second.toml",
    "third": "third.toml",
    "fourth": "fourth.toml",
    "fifth": "fifth.toml",
    "sixth": "sixth.toml",
    "seventh": "seventh.toml",
    "eighth": "eighth.toml",
    "ninth": "ninth.toml",
}
_MOST = 1_000_000
"""Characters of the output of a script."""
_LOSS = re.compile(r"\bloss[\s=:]+(-?[\d.]+(?:e[-+]?\d+)?)", re.IGNORECASE)

Replacement = tuple[str, ...]
"""(old, new) text of the script, or (file, old, new) of a file beside it or below the root of the repository."""


@dataclass(frozen=True)
class Mistake:
    """An edit of a script, and where the first difference must be.

    Attributes:
        places: "phase/event name", shell patterns.
    """

    what: str
    replace: tuple[Replacement, ...]
    step: int
    places: tuple[str, ...]


@dataclass(frozen=True)
class Pair:
    """Another correct run of a script, which must be equal to the first one or differ by rounding.

    Attributes:
        replaced: torch_backend stands for torch's FSDP. Such a run must be equal in every bit.
        replace: in addition to the replacements of the script.
        options: instead of those of the script; None for the same.
        ranks: 0 for those of the script.
        environment: in addition to that of the script.
    """

    what: str
    replace: tuple[Replacement, ...] = ()
    options: str | None = None
    ranks: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    replaced: bool = False

    @property
    def expected(self) -> tuple[str, ...]:
        return ("equal",) if self.replaced else ("equal", "rounding")


@dataclass(frozen=True)
class Script:
    """A script of a public repository, and the expected answer of `crossframe record`.

    Attributes:
        repository: owner/name, of which there is a clone in the folder of repositories.
        path: of the script in the repository; a notebook is run as the script that jupytext makes of it.
        take: the folders of the repository that it needs; () for the folder of the script.
        root: a folder of the repository to import from.
        replace: makes it short, or seeds it.
        before: a Python program that makes its data, run in its folder.
        steps: that the recording must have; 0 if it must be refused.
        ranks: if more than one, torchrun starts the script and its pairs, a pair of one rank too.
    """

    name: str
    repository: str
    commit: str
    path: str
    steps: int = 0
    options: str = ""
    take: tuple[str, ...] = ()
    root: str = ""
    replace: tuple[Replacement, ...] = ()
    before: str = ""
    mistake: Mistake | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    pairs: tuple[Pair, ...] = ()

    @property
    def expected(self) -> str:
        return f"recorded, {self.steps} steps" if self.steps else "refused"


def scripts_of(name: str = "first") -> list[Script]:
    """All cases of a set.

    Raises:
        UsageError: no set of this name.
    """
    if name not in SETS:
        raise UsageError(f"public-scripts: --set: expected one of {', '.join(SETS)}, got {name!r}")
    found = []
    for each in tomllib.loads((HERE / SETS[name]).read_text())["scripts"]:
        mistake = Mistake(**each.pop("mistake")) if "mistake" in each else None
        pairs = tuple(Pair(**pair) for pair in each.pop("pairs", ()))
        found.append(Script(**each, mistake=mistake, pairs=pairs))
    return found


def run_public_scripts(
    repositories: Path,
    only: Sequence[str],
    *,
    name: str,
    cache: Path,
    output: Path | None,
    console: Console,
    plain: bool = False,
) -> int:
    """Run cases and write their results; returns the exit status, 0 if all answers are right.

    Args:
        repositories: a folder with a clone of each repository, called owner+name.
        only: names of cases. Empty: all.
        name: of the set.
        output: JSON of results, and beside it Markdown. Results of other cases that it has are kept.
        plain: only run the scripts, their pairs and mistakes without recording, and show how they end.
    """
    scripts, target = scripts_of(name), output or HERE / "results" / f"{name}.json"
    if unknown := set(only) - {each.name for each in scripts}:
        raise UsageError(f"public-scripts: expected names of cases, got {sorted(unknown)}")
    packages = install_packages("public-scripts", HERE / "requirements.txt", cache, console)
    results, right = Results(target, "case", table_of, [each.name for each in scripts]), True
    for script in [each for each in scripts if not only or each.name in only]:
        with tempfile.TemporaryDirectory(prefix="public-scripts-") as folder:
            work = Work(script, repositories, packages, Path(folder))
            if plain:
                _run_plain(work, console)
                continue
            found = judge(work)
        results.add({"case": script.name, "expected": script.expected, **found})
        console.print(f"{script.name}: {', '.join(found['wrong']) or 'right'}", markup=False)
        right &= not found["wrong"]
    return int(not right)


class Work:
    """A folder in which a script runs, with and without recording."""

    def __init__(self, script: Script, repositories: Path, packages: Path, folder: Path) -> None:
        self.script, self.repositories, self.packages, self.folder = script, repositories, packages, folder

    def run(
        self, name: str, replace: Sequence[Replacement], *, recorded: bool = False, pair: Pair | None = None
    ) -> tuple[int, str]:
        """(exit status, output) of the script with these replacements, in a copy of its own, recorded or not.

        Args:
            pair: its options, ranks and environment are used; not its replacements.
        """
        script, root = self.script, self.folder / name / "repository"
        self._extract(root)
        path = root / script.path
        if path.suffix == ".ipynb":
            # A notebook has magics, which jupytext comments out, and cells, whose results are shown.
            subprocess.run([sys.executable, "-m", "jupytext", "--quiet", "--to", "py:percent", path], check=True)
            path = path.with_suffix(".py")
        for *file, old, new in replace:
            edited = root / file[0] if file else path
            text = edited.read_text()
            if old not in text:
                raise UsageError(f"{script.name}: expected a text of {edited.name} to replace, got {old!r}")
            edited.write_text(text.replace(old, new))
        if script.before:
            subprocess.run([sys.executable, "-c", script.before], cwd=path.parent, check=True)
        parts = [CODE, self.packages, path.parent, *([root / script.root] if script.root else [])]
        environment = {"PYTHONPATH": ":".join(map(str, parts)), "MPLBACKEND": "Agg", **script.environment}
        environment |= pair.environment if pair else {}
        command = [sys.executable]
        if script.ranks > 1:
            ranks = str((pair and pair.ranks) or script.ranks)
            # torchrun picks the port itself: one chosen here may be taken before it listens there.
            command += ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
            command += ["--nproc-per-node", ranks]
        words = [str(OURS_ALONE)] if pair is not None and pair.replaced else []
        words.append(path.name)
        if recorded:
            to = ("--output", str(self.folder / f"runs_{name}"), "--every", "1", "--dense", "2", "--")
            words = ["-m", "crossframe", "record", words[0], *to, *words[1:]]
        command += words
        options = script.options if pair is None or pair.options is None else pair.options
        return run([*command, *options.split()], environment, path.parent, most=_MOST)

    def _extract(self, root: Path) -> None:
        script = self.script
        clone = self.repositories / script.repository.replace("/", "+")
        if not clone.is_dir():
            raise UsageError(
                f"public-scripts: expected a clone at {clone}: git clone https://github.com/{script.repository} {clone}"
            )
        paths = script.take or (str(Path(script.path).parent),)
        packed = subprocess.run(["git", "-C", clone, "archive", script.commit, *paths], check=True, capture_output=True)
        root.mkdir(parents=True)
        subprocess.run(["tar", "-x", "-C", root], input=packed.stdout, check=True)

    def compare(self, a: str, b: str) -> dict[str, Any]:
        """The verdict on two recordings."""
        report, runs = self.folder / "report", [str(self.folder / f"runs_{name}") for name in (a, b)]
        shutil.rmtree(report, ignore_errors=True)
        status, said = run([sys.executable, "-m", "crossframe", "compare", *runs, "--output", str(report)])
        return said_in(report, status, said, self.folder)


def _run_plain(work: Work, console: Console) -> None:
    """Show how a script, its pairs and its mistake end without recording."""
    script = work.script
    runs = [("as it is", Pair(""))] + [(f"pair, {pair.what}", pair) for pair in script.pairs if not pair.replaced]
    if script.mistake:
        runs.append((f"mistake, {script.mistake.what}", Pair("", script.mistake.replace)))
    for i, (what, pair) in enumerate(runs):
        status, printed = work.run(f"plain_{i}", [*script.replace, *pair.replace], pair=pair)
        console.print(f"{script.name}, {what}: {status}\n{printed[-600:]}", markup=False)


def judge(work: Work) -> dict[str, Any]:
    """What was answered for one script, and what of it is not as expected."""
    script, wrong = work.script, []
    status, plain = work.run("plain", script.replace)
    if status:
        return _found("does not run", [f"the script itself ends with {status}"], plain)
    status, printed = work.run("a", script.replace, recorded=True)
    if status:
        answer = "refused" if "crossframe: not recorded" in printed else "crashed"
        if answer != script.expected:
            wrong.append(f"{answer} instead of {script.expected}")
        elif "Recorder" not in printed:
            wrong.append("the message shows no lines to add")
        return _found(answer, wrong, printed)
    try:
        steps = Recording.open(work.folder / "runs_a").num_steps
    except CrossframeError as error:
        return _found("recorded", [f"the recording cannot be read: {error}"])
    answer = f"recorded, {steps} steps"
    if answer != script.expected:
        wrong.append(f"{answer} instead of {script.expected}")
    losses = [_LOSS.findall(each) for each in (printed, plain)]
    if script.ranks > 1:  # which print in any order
        losses = [sorted(each) for each in losses]
    if losses[0] != losses[1]:
        wrong.append("the script prints other losses than without recording")
    if (failed := work.run("again", script.replace, recorded=True))[0]:
        return _found(answer, [*wrong, "not recorded again"], failed[1])
    again = work.compare("a", "again")
    if again["verdict"] != "equal":
        wrong.append(f"the same run again is {again['verdict']}, {place_of(again)}")
    pairs, message = _judge_pairs(work, wrong)
    if script.mistake is None:
        return _found(answer, wrong, message or again.get("reason", ""), again=again["verdict"], pairs=pairs)
    status, printed = work.run("mistake", [*script.replace, *script.mistake.replace], recorded=True)
    if status:
        return _found(answer, [*wrong, "the mistake is not recorded"], printed, again=again["verdict"], pairs=pairs)
    said = work.compare("a", "mistake")
    place = place_of(said)
    if said["verdict"] not in ("bug", "different computation"):
        wrong.append(f"the mistake is {said['verdict']}, {place}")
    elif not any(fnmatchcase(place, each) for each in script.mistake.places):
        wrong.append(f"the mistake is at {place} instead of {' or '.join(script.mistake.places)}")
    elif (step := said["first_divergence"]["step"]) != script.mistake.step:
        wrong.append(f"the mistake is at step {step} instead of {script.mistake.step}")
    message = " ".join(each for each in (message, said.get("reason", "")) if each)
    mistake = f"{said['verdict']}, {place}"
    return _found(answer, wrong, message, again=again["verdict"], mistake=mistake, pairs=pairs)


def _judge_pairs(work: Work, wrong: list[str]) -> tuple[list[str], str]:
    """(the answer to each pair of a script, the reasons of wrong ones); appends to `wrong` what is not as expected."""
    script, answers, reasons = work.script, [], []
    for i, pair in enumerate(script.pairs):
        status, printed = work.run(f"pair_{i}", [*script.replace, *pair.replace], recorded=True, pair=pair)
        if status:
            answers.append("not recorded")
            wrong.append(f"the pair ({pair.what}) is not recorded")
            reasons.append(printed)
            continue
        said = work.compare("a", f"pair_{i}")
        answers.append(", ".join(each for each in (said["verdict"], place_of(said)) if each))
        if said["verdict"] not in pair.expected:
            wrong.append(f"the pair ({pair.what}) is {answers[-1]}")
            reasons.append(said.get("reason", ""))
    return answers, " ".join(reasons)


def _found(
    answer: str, wrong: Sequence[str], message: str = "", again: str = "", mistake: str = "", pairs: Sequence[str] = ()
) -> dict[str, Any]:
    text = without_places(message.replace(f"{CODE}/", "").replace(f"{tempfile.gettempdir()}/", ""))
    said = " ".join(text.split())[-1500:] if wrong else ""
    found = {"answer": answer, "again": again, "mistake": mistake, "wrong": list(wrong), "message": said}
    return {**found, "pairs": list(pairs)} if pairs else found


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row for each case: expected, first answer, answer; and what is not as expected."""
    heads = ["script", "expected", "first answer", "answer", "again", "mistake"]
    if with_pairs := any(row.get("pairs") for row in rows):
        heads.append("pairs")
    lines, notes = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)], []
    for row in rows:
        both = [f"{each['answer']} ({'wrong' if each['wrong'] else 'right'})" for each in (row["first"], row)]
        cells = [row["case"], row["expected"], *both, row["again"], row["mistake"]]
        if with_pairs:
            cells.append("; ".join(row.get("pairs", ())))
        lines.append("| " + " | ".join(each.replace("|", "/") for each in cells) + " |")
        for when, each in (("first answer", row["first"]), ("answer", row)):
            if each["wrong"]:
                notes.append(f"- {row['case']}, {when}: {'; '.join(each['wrong'])}. {each['message']}".rstrip())
    return "\n".join([*lines, "", *notes]) + "\n"
