"""Put small faults into the core, one at a time, and report which of them no test sees.

    python -m tests.mutate --sample 200 --seed 1 [--files crossframe/layout ...] [--jobs 2]

Each fault is judged by the quick tests of tests/core that execute its function, and one that they do not see by those of
tests/across, tests/on_jax and tests/on_torch, which start commands and ranks, and train models. Which tests execute which
functions is learned once for each file of tests, and kept in runs/mutate.

Exit status: 0 if at least 95 in 100 faults are seen, 1 if fewer, 2 if there is nothing to measure. A test that runs into its
limit of time, or a process that dies, has seen the fault. Faults that change nothing are listed in equivalent.toml, each with
its reason.
"""

import argparse
import gc
import os
import random
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tests.mutate.operators import Mutant
    from tests.mutate.suite import Suite

ROOT = Path(__file__).parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
# Most output of commands is tested in tests/across, by running them.
PRINTED = ("crossframe/cli", "crossframe/report", "crossframe/explorer")
REQUIRED = 0.95
# By the clock, for tests that wait; the limits of each test are of the processor's time.
WALL_SECONDS = 1800.0
SEEN, SURVIVED = "seen", "survived"
BY_CORE, BY_OTHERS = "by tests/core", "by other tests"
OUTCOMES = (BY_CORE, BY_OTHERS, SURVIVED)
T = TypeVar("T")


def main(root: Path = ROOT) -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from tests.mutate.operators import mutants_of
    from tests.mutate.suite import Suite

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="crossframe-mutate-") as folder:
        suite = Suite.copied(root, Path(folder).resolve() / "without")
        sources = {path: (suite.folder / path).read_bytes() for path in _paths(suite.folder, options.files)}
        every = [mutant for path, source in sources.items() for mutant in mutants_of(path, source)]
        known = _Known(tomllib.loads(EQUIVALENT.read_text())["equivalent"])
        judged = [mutant for mutant in every if not known.has(mutant.path, mutant.diff(sources[mutant.path]))]
        sample = random.Random(options.seed).sample(judged, min(options.sample, len(judged)))
        if not sample:
            print(f"nothing to mutate in {' '.join(options.files or ['crossframe'])}", file=sys.stderr)
            return 2
        gc.freeze()
        probed = suite.probed()
        counts: dict[str, Counter[str]] = {}
        unseen = []
        _learn(suite, probed, root / "runs/mutate", options.jobs, quick=True)
        print(f"{len(sample)} of {len(judged)} faults (seed {options.seed})", flush=True)
        for mutant, ended, _ in _judged(sample, suite.judge, suite.folder, options.jobs):
            if ended == SEEN:
                counts.setdefault(mutant.path, Counter())[BY_CORE] += 1
            else:
                unseen.append(mutant)
                print(f"not seen by tests/core: {mutant.path}:{mutant.line}  {mutant.what}", flush=True)
        if unseen:
            _learn(suite, probed, root / "runs/mutate", options.jobs, quick=False)
        for mutant, ended, output in _judged(unseen, suite.judge_slowly, suite.folder, options.jobs):
            counts.setdefault(mutant.path, Counter())[BY_OTHERS if ended == SEEN else SURVIVED] += 1
            print(f"\n{mutant.path}:{mutant.line}  {mutant.what}, {ended}", flush=True)
            print("\n".join(f"    {line}" for line in mutant.diff(sources[mutant.path])), flush=True)
            print(output, end="", flush=True)
    if unmatched := known.unmatched(sources):
        print("\nequivalent.toml lists what is no fault of these sources any more:")
        print("\n".join(f"    {entry}" for entry in unmatched))
    return _report(counts, time.monotonic() - started)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=str(__doc__).splitlines()[0])
    parser.add_argument("--sample", type=int, default=200, help="how many faults, drawn evenly from all (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument(
        "--files",
        nargs="+",
        help="files or folders, from the repository's root (default: crossframe, but for what it prints)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    return parser.parse_args()


def _paths(folder: Path, asked: Sequence[str] | None) -> list[str]:
    found: set[Path] = set()
    for name in asked or ["crossframe"]:
        path = folder / name
        found |= {path} if path.is_file() else set(path.rglob("*.py"))
    names = sorted(path.relative_to(folder).as_posix() for path in found)
    return names if asked else [name for name in names if not name.startswith(PRINTED)]


def _in_forks(
    tasks: Sequence[T], work: Callable[[T], Callable[[], int]], folder: Path, jobs: int
) -> Iterator[tuple[T, int, str]]:
    """Run each task's work in a fork, `jobs` at a time; yield (task, exit status or minus a signal, output) as they end."""
    from tests.mutate.suite import fork, log_of

    waiting, running = list(reversed(tasks)), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop()
                running[fork(work(task), folder)] = (task, time.monotonic())
            for pid, (task, since) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended and time.monotonic() - since > WALL_SECONDS:
                    os.killpg(pid, signal.SIGPROF)
                    ended, status = os.waitpid(pid, 0)
                if ended:
                    del running[pid]
                    log = log_of(folder, pid)
                    yield task, os.waitstatus_to_exitcode(status), log.read_text(errors="replace")
                    log.unlink()
            time.sleep(0.02)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)


def _learn(suite: "Suite", probed: Path, kept: Path, jobs: int, *, quick: bool) -> None:
    """Learn what tests execute, of the files that are new or have changed."""
    started, before = time.monotonic(), len(suite.items)
    changed = [file for file in suite.files(quick=quick) if not suite.known(file, kept)]
    for file, status, output in _in_forks(changed, suite.learn(kept), probed, jobs):
        if not suite.known(file, kept):  # without it fewer faults are seen, never more
            print(f"{file} is left out, as it ended with status {status}:\n{output[-2000:]}", file=sys.stderr)
        elif status not in (0, 5):  # 5: no tests in it
            print(f"{file} has tests that fail without any fault, left out:\n{output[-500:]}", file=sys.stderr)
    kinds, seconds = "quick" if quick else "other", time.monotonic() - started
    print(
        f"{len(suite.items) - before} {kinds} tests; to learn {len(changed)} files of them took {seconds:.0f} s",
        flush=True,
    )


def _judged(
    faults: "Sequence[Mutant]", judge: "Callable[[Mutant], Callable[[], int]]", folder: Path, jobs: int
) -> "Iterator[tuple[Mutant, str, str]]":
    """Each fault with SEEN or SURVIVED, and the output of the tests that judged it."""
    for done, (fault, status, output) in enumerate(_in_forks(faults, judge, folder, jobs), 1):
        yield fault, SEEN if status else SURVIVED, output
        if sys.stderr.isatty() or done % 25 == 0:
            print(f"{done}/{len(faults)}", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr)


class _Known:
    """The list of faults that change nothing."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            if missing := {"path", "line", "becomes", "why"} - entry.keys():
                raise SystemExit(f"equivalent.toml: an entry without {', '.join(sorted(missing))}: {entry}")
        self.reasons = {(entry["path"], entry["line"], entry["becomes"]): entry["why"] for entry in entries}
        self.matched: set[tuple[str, str, str]] = set()

    def has(self, path: str, diff: list[str]) -> bool:
        """Whether an entry describes this fault: the lines that it takes away and those that it puts in, without indents."""
        before = " ".join(line[1:].strip() for line in diff if line.startswith("-"))
        after = " ".join(line[1:].strip() for line in diff if line.startswith("+"))
        if (path, before, after) not in self.reasons:
            return False
        self.matched.add((path, before, after))
        return True

    def unmatched(self, sources: dict[str, bytes]) -> list[str]:
        """Entries about these files that describe no fault."""
        return [f"{path}: {line}" for path, line, after in self.reasons
                if path in sources and (path, line, after) not in self.matched]  # fmt: skip


def _report(counts: dict[str, Counter[str]], seconds: float) -> int:
    width = max(len(path) for path in counts)
    print(f"\n{'':{width}}{''.join(f'  {each:>14}' for each in OUTCOMES)}")
    total = sum(counts.values(), Counter())
    for path, count in (*sorted(counts.items()), ("all", total)):
        print(f"{path:{width}}{''.join(f'  {count[each]:14}' for each in OUTCOMES)}")
    by_core, by_all = total[BY_CORE] / total.total(), 1 - total[SURVIVED] / total.total()
    print(
        f"\n{by_all:.1%} of {total.total()} faults were seen ({by_core:.1%} by tests/core), in {seconds / 60:.0f} minutes; "
        f"at least {REQUIRED:.0%} is required"
    )
    return 0 if by_all >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
