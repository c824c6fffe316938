"""All that was found, as Markdown and as JSON."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from crossframe.verdict import Verdict
from experiments.bench.fsdp_variants.cells import ALONE, NUM_PERTURBED_RUNS, RANKS, SAMPLES, SETTINGS, STEPS, WORLDS
from experiments.bench.fsdp_variants.judge import ANOTHER, Failure, Judged

ORDER = (*(verdict.value for verdict in Verdict), ANOTHER)
THEIRS, WITH_OURS, OURS = (
    "torch's own, on as many ranks",
    "torch's and ours, on as many ranks",
    "ours, on as many ranks",
)
COLUMNS = (THEIRS, WITH_OURS, OURS, "torch's and one device", "ours and one device", "one number of ranks and the next")


def column_of(pair: Judged) -> str:
    """Where a pair is counted."""
    num_ours = sum(name.startswith("our ") for name in (pair.a, pair.b))
    if pair.kind == WORLDS:
        return COLUMNS[5]
    if pair.kind == ALONE:
        return COLUMNS[3 + num_ours]
    return COLUMNS[num_ours]


def counts(pairs: Sequence[Judged]) -> str:
    """How many pairs were called what.

    >>> counts([Judged("m", "float64", "adamw", "same ranks", "a", "b", verdict) for verdict in ("bug", "equal", "bug")])
    '1 equal, **2 bug**'
    """
    count = Counter(pair.verdict for pair in pairs)
    calm = {Verdict.EQUAL.value, Verdict.ROUNDING.value, ANOTHER}
    known = [verdict for verdict in ORDER if count[verdict]] + sorted(set(count) - set(ORDER))
    return ", ".join(f"{count[v]} {v}" if v in calm else f"**{count[v]} {v}**" for v in known)


def markdown(pairs: Sequence[Judged], failures: Sequence[Failure], commands: Sequence[str]) -> str:
    """The whole text."""
    open_ = [pair for pair in pairs if not pair.is_fine and pair.verdict != ANOTHER]
    lines = [
        "# torch's own, held against one another",
        "",
        *(f"- {command}" for command in commands),
        "",
        f"{len(pairs)} pairs: {counts(pairs)}. A run is {STEPS} steps, where the command says no other number, of "
        f"{SAMPLES} samples, on up to {RANKS[-1]} ranks over gloo, and every step is recorded in full, but for gpt, "
        "of which there are sketches. Settings: "
        + "; ".join(f"{name}: {_options(options)}" for name, options in SETTINGS.items())
        + f". Below float64, one device and DDP have {NUM_PERTURBED_RUNS} perturbed runs, and what has none is compared with "
        "these; in bfloat16, FSDP1 on one rank stands for one device.",
        "",
        "Where batch norm takes its statistics from what a rank is fed, as in conv, another number of ranks is "
        f"*{ANOTHER}*: such pairs are called so by this rule, and not judged.",
        "",
    ]
    for dtype in dict.fromkeys(pair.dtype for pair in pairs):
        lines += [
            f"## {dtype}",
            "",
            f"| model | setting | {' | '.join(COLUMNS)} |",
            "|" + " --- |" * (len(COLUMNS) + 2),
        ]
        some = [pair for pair in pairs if pair.dtype == dtype]
        for model, setting in dict.fromkeys((pair.model, pair.setting) for pair in some):
            here = [pair for pair in some if (pair.model, pair.setting) == (model, setting)]
            cells = [counts([pair for pair in here if column_of(pair) == column]) for column in COLUMNS]
            lines.append("| " + " | ".join([model, setting, *cells]) + " |")
        lines += ["", _largest([pair for pair in some if pair.is_fine]), ""]
    if failures:
        lines += ["## Runs that failed", "", *(f"- {each}" for each in failures), ""]
    if open_:
        lines += ["## Not equal, and no rounding", ""]
        lines += [f"- {_line(pair)}" for pair in open_] + [""]
    return "\n".join(lines)


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _largest(pairs: Sequence[Judged]) -> str:
    """How far pairs that agree are apart."""
    used = [pair.used for pair in pairs if pair.used is not None]
    if used:
        return f"Pairs that agree differ by at most {max(used):.2f} of the bound from perturbed runs."
    apart = [pair.difference for pair in pairs if pair.difference is not None]
    return f"Parameters of pairs that agree differ by at most {max(apart, default=0.0):.1e}."


def _line(pair: Judged) -> str:
    said = f"{pair.model}, {pair.dtype}, {pair.setting}: {pair.a} against {pair.b}: **{pair.verdict}**: {pair.why}"
    return said + (f" It looks like {pair.signature}: {pair.evidence}" if pair.signature else "")
