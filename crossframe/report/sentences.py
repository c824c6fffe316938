"""The sentences and numbers of a report, for the page and the terminal: headline, place, diagnosis.

The reason of a verdict is written in `crossframe.verdict.conclude`, a divergence in `crossframe.verdict.divergence_text`.
"""

import math
import re
from collections.abc import Collection, Iterable
from typing import Any

from crossframe.draw.amounts import ROOT, one_line
from crossframe.recording.event_format import (
    BACKWARD,
    BUFFERS,
    FORWARD,
    NORM,
    PARAMETERS,
    REDUCE,
    STATE,
    UNSHARDED,
    UPDATE,
)
from crossframe.report.tables_and_curves import Worst
from crossframe.verdict import Bounds
from crossframe.verdict.diagnosis.diagnose import LEAVES
from crossframe.verdict.divergence_text import NOUNS
from crossframe.verdict.measure.locate import who, with_ranks

_DISPLAY = {"jax": "JAX"}
KINDS = {
    "equal": "Equal",
    "rounding": "Rounding",
    "bug": "Bug",
    "different computation": "Different computation",
    "inconclusive": "Inconclusive",
    "incomparable": "Incomparable",
}
PHASES = {
    PARAMETERS: "initial parameters",
    UNSHARDED: "unsharded parameters",
    FORWARD: "activations and losses",
    BACKWARD: "local gradients",
    REDUCE: "reduced gradients",
    NORM: "gradient norm",
    STATE: "optimizer state",
    UPDATE: "updated parameters",
    BUFFERS: "buffers",
}
SIGNATURES = {
    "constant_factor": "a constant factor",
    "transposed": "a transposed tensor",
    "padding_shift": "a shift by padding",
    "stale_copy": "a stale copy from the previous step",
    "missing_rank": "the missing contribution of a rank",
    "low_precision_reduction": "a reduction in low precision",
    "low_precision": "a module that computes in low precision",
    "tied_weight": "a tied weight whose uses are counted incorrectly",
    "mixed_parameters": "mixed-up parameters",
    "weight_decay": "a different weight decay",
    "optimizer_epsilon": "a different epsilon in the optimizer",
    "bias_correction": "a different bias correction of moments",
    "lost_step": "a lost optimizer step",
    "norm_epsilon": "a different epsilon in a norm",
    "tanh_gelu": "a GELU approximated by tanh",
    "dropout": "dropout",
    "shifted_positions": "shifted positions",
    "attention_scale": "a different scale of attention scores",
    "causal_mask": "a causal mask in one run alone",
    "padding_counted": "padding that counts as data",
    "uneven_weights": "a mean of means of unequal batches",
    "lost_microbatch": "a lost microbatch",
    "other_batches": "different batches",
}
"""The text of each diagnosis."""
_LONGEST_NAME = 80
_WORD, _RIGHT_TO_LEFT = re.compile(r"\S+"), re.compile(r"[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]")


def display(name: str) -> str:
    """The usual spelling of a framework's name."""
    return _DISPLAY.get(name, one_line(name))


def unit_name(name: str) -> str:
    """A unit's name, or "(root)".

    >>> unit_name("h.0"), unit_name("")
    ('h.0', '(root)')
    """
    return one_line(name) or ROOT


def short(name: str, most: int = _LONGEST_NAME) -> str:
    """A name for use in a sentence; a long one loses its middle.

    >>> short("w"), short("abcdefghij", 7)
    ('w', 'abc…hij')
    """
    name = one_line(name)
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-((most - 1) // 2) :]}"


def isolated(text: str) -> str:
    """A sentence without unprintable characters, with right-to-left words isolated so that they do not reorder
    the text around them.

    >>> [hex(ord(c)) for c in isolated("of \u05d0 (rank 1)")[3:6]]
    ['0x2066', '0x5d0', '0x2069']
    """

    def isolate(word: re.Match[str]) -> str:
        return f"\u2066{word[0]}\u2069" if _RIGHT_TO_LEFT.search(word[0]) else word[0]

    return _WORD.sub(isolate, one_line(text))


def decisive(report: dict[str, Any]) -> int | None:
    """The index of the first pair with the verdict of the report; None if there are no pairs."""
    return next((i for i, pair in enumerate(report["pairs"]) if pair["verdict"] == report["verdict"]), None)


def what_parted(where: dict[str, Any], name: str) -> str:
    """The first quantity that differs, as text.

    Args:
        where: a divergence as JSON.
        name: as `crossframe.verdict.result.Judged` has it: the parameter, "output of" a module, or the slot of a parameter.

    >>> where = {"phase": "reduce", "event": "all_reduce", "rank": 1, "parameter": "h.0.w", "start": 0, "stop": 1512}
    >>> what_parted(where, "h.0.w")
    'the reduced gradient of h.0.w (rank 1, elements 0:1,512)'
    >>> what_parted({**where, "event": "output", "parameter": None}, "output of h.0.mlp")
    'the output of module h.0.mlp (rank 1, elements 0:1,512)'
    >>> what_parted({"phase": "forward", "event": "loss", "rank": None, "parameter": None, "start": None}, "")
    'the mean loss over ranks'
    """
    rank, event = where["rank"], where["event"]
    ranks = where.get("ranks", ())
    off = who(rank, ranks) if rank is not None else ""
    if event == "loss":
        return with_ranks("the loss", rank, ranks) if rank is not None else "the mean loss over ranks"
    if event == "grad_norm":
        return with_ranks("the norm of all gradients", rank, ranks) if rank is not None else "the norm of all gradients"
    if event in ("input", "output"):
        module = name.removeprefix(f"{event} of ")
        what = f"the {event} of module {short(module)}" if module != event else f"the {short(name or event)}"
    elif where["phase"] == BUFFERS:
        what = f"the buffer {short(name or where['buffer'])}"
    elif where["phase"] == STATE:
        what = f"the optimizer state {short(name or where['parameter'])}"
    else:
        what = f"the {NOUNS[where['phase']]} of {short(where['parameter'])}"
    inside = [off] if off else []
    if where["start"] is not None:
        inside.append(f"elements {elements(where)}")
    return f"{what} ({', '.join(inside)})" if inside else what


def elements(where: dict[str, Any]) -> str:
    """The range of a divergence."""
    return f"{where['start']:,}:{where['stop']:,}"


def headline(report: dict[str, Any], name: str) -> str:
    """The verdict in one sentence.

    Args:
        name: name of the first quantity of the decisive pair that differs (`what_parted`); "" if there is none.

    >>> pair = {"a": "torch", "b": "jax", "verdict": "rounding", "reason": "..."}
    >>> headline({"verdict": "rounding", "pairs": [pair]}, "")
    'torch and JAX agree: the differences are rounding.'
    """
    at = decisive(report)
    if at is None:
        return "Nothing was compared."
    pair = report["pairs"][at]
    both = f"{display(pair['a'])} and {display(pair['b'])}"
    match report["verdict"]:
        case "equal":
            return f"{both} agree: all compared values are bitwise equal."
        case "rounding":
            return f"{both} agree: the differences are rounding."
        case "bug":
            return f"There is a bug: {_bug(pair, name)}."
        case "different computation":
            return f"A different computation took place: {_changed(pair, name)}."
        case "inconclusive":
            return f"Nothing can be concluded yet: {_sentence(pair['reason'])}."
        case _:
            return f"These are not recordings of the same run: {_sentence(pair['reason'])}."


def _bug(pair: dict[str, Any], name: str) -> str:
    where, diagnosis = pair["first_divergence"], pair["diagnosis"]
    if where is None or diagnosis is None:
        return _sentence(pair["reason"])
    # The rest states how well it fits, which is shown elsewhere.
    why = diagnosis["evidence"].partition(LEAVES)[0]
    return f"at step {where['step']} {what_parted(where, name)} differs: {_sentence(why)}"


def _changed(pair: dict[str, Any], name: str) -> str:
    if (where := pair["first_divergence"]) is None:
        return _sentence(pair["reason"].removeprefix("a different computation took place: "))
    what = f"at step {where['step']} {what_parted(where, name)} differs"
    if unrecorded := pair["unrecorded"]:
        return f"{what}, although everything recorded before it is equal in every bit; {unrecorded}"
    return f"{what}, although all that it depends on is equal in every bit"


def _sentence(text: str) -> str:
    """Text of a recording for use in a sentence: without unprintable characters and the full stop, with long names shortened."""
    return " ".join(short(word) for word in one_line(text).rstrip(".").split(" "))


def looks_like(pair: dict[str, Any], sketched: bool) -> str | None:
    """The diagnosis of the first difference; None if there is none, or if it may be rounding.

    Args:
        sketched: whether a recording has sketches instead of large tensors.

    >>> looks_like({"first_divergence": {}, "diagnosis": None, "verdict": "bug"}, False)
    'No known fault explains it.'
    """
    if pair["diagnosis"] is not None:
        looks = SIGNATURES[pair["diagnosis"]["signature"]]
        return f"It looks like {looks}: {_sentence(pair['diagnosis']['evidence'])}."
    if pair["first_divergence"] is None or pair["verdict"] not in ("bug", "different computation"):
        return None
    if sketched:
        return "Sketches do not allow a diagnosis: record the step in full."
    return "No known fault explains it."


_EFFECTS = {
    "slope": "a factor of 1 +- {0}",
    "size": "a change of size by {0}",
    "mean": "an offset of {0}",
    "channels": "an offset by channel of {0}",
    "gain": "a norm's factor of 1 +- {0}",
    "tanh": "{0} of the difference between GELUs by erf and by tanh",
}
_AVERAGED = {"activation": "activations", "backward": "local gradients", "reduce": "reduced gradients"}


def power_text(pair: dict[str, Any], directions: Collection[str] = tuple(_EFFECTS)) -> str:
    """The smallest effects that the tests in some directions would have found; "" if there were no tests.

    >>> power_text({"power": {"reduce": {"slope": {"least": 0.004, "half": 0.0321}}}})
    'of half of the reduced gradients a factor of 1 +- 3.2% would have been found'
    >>> power_text({"power": None})
    ''
    """
    limits = []
    for kind, effects in (pair.get("power") or {}).items():
        each = ", ".join(
            _EFFECTS[name].format(f"{100 * limit['half']:.2g}%")
            for name, limit in effects.items()
            if name in directions
        )
        limits.append(f"of half of the {_AVERAGED[kind]} {each}")
    return f"{'; '.join(limits)} would have been found" if limits else ""


def first_place(pair: dict[str, Any], name: str) -> str:
    """The first difference of a pair, in short; "-" if there is none."""
    where = pair["first_divergence"]
    return f"step {where['step']}, {what_parted(where, name)}" if where else "-"


def counted(pairs: Iterable[dict[str, Any]]) -> str:
    """The number of pairs of each verdict, as text.

    >>> counted([{"verdict": "bug"}, {"verdict": "equal"}, {"verdict": "bug"}])
    '2 bug, 1 equal'
    """
    found: dict[str, int] = {}
    for pair in pairs:
        found[pair["verdict"]] = found.get(pair["verdict"], 0) + 1
    return ", ".join(f"{count} {verdict}" for verdict, count in found.items())


def number(value: float | None) -> str:
    """A difference or a bound as text.

    >>> number(3.14159e-15), number(0.0), number(None), number(float("inf"))
    ('3.1e-15', '0', '-', '∞')
    """
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞"
    return f"{value:.1e}" if value else "0"


def used_text(used: float | None) -> str:
    """A fraction of a bound as text.

    >>> [used_text(used) for used in (None, 0.0, 0.00012, 0.123, 7.0, 456.7, 1e9, float("inf"))]
    ['-', '0', '1.2e-04', '0.12', '7', '457', '1.0e+09', '∞']
    """
    if used is None or used == 0 or not 0.005 <= used < 9999.5:
        return number(used)
    return f"{used:.2g}" if used < 99.5 else f"{used:.0f}"


def worst_of(worst: Worst) -> str:
    """A cell of the map, or a row of the table of phases, as text.

    >>> worst_of(Worst(3, 2, 0, 0.25, "w")), worst_of(Worst(3, 3, 0, 0.0, "w")), worst_of(Worst(1, 0, 0, None, "w"))
    ('at most 0.25 of the bound', 'equal bits', 'differs; no bound is known')
    >>> worst_of(Worst(3, 2, 1, 12.0, "w")), worst_of(Worst(3, 2, 1, math.inf, "w"))
    ('12 times the bound', 'differs although bits must be equal')
    """
    if worst.num_equal == worst.num:
        return "equal bits"
    if worst.used is None:
        return "differs; no bound is known"
    if not worst.num_beyond:
        return f"at most {used_text(worst.used)} of the bound"
    if math.isinf(worst.used):
        return "differs although bits must be equal"
    return f"{used_text(worst.used)} times the bound"


def measured_by(bounds: Bounds | None, perturbed_runs: tuple[tuple[str, int], ...]) -> str:
    """The source of the bounds of rounding.

    Args:
        bounds, perturbed_runs: as a `PairSeries` has them.
    """
    if perturbed_runs:
        runs = " and ".join(f"{count} perturbed runs of {display(name)}" for name, count in perturbed_runs)
        return f"measured on {runs}"
    if bounds is None or not bounds.decisive:
        return "unknown: there are no perturbed runs, and the dtype is too coarse for a derived bound"
    return f"derived: {number(bounds.loss)} for losses, {number(bounds.parameter)} for tensors"


def limits(bounds: Bounds | None) -> tuple[str, str]:
    """The bounds of losses and of parameters, as text. None: perturbed runs measured them.

    >>> limits(None)
    ('measured', 'measured')
    """
    if bounds is None:
        return ("measured", "measured")
    if not bounds.decisive:
        return ("no bound", "no bound")
    return (f"bound {number(bounds.loss)}", f"bound {number(bounds.parameter)}")


def num_bytes(value: int) -> str:
    """Bytes with a unit.

    >>> num_bytes(512), num_bytes(153600), num_bytes(3 << 20)
    ('512 B', '150.0 KiB', '3.0 MiB')
    """
    amount, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{int(amount)} B" if unit == "B" else f"{amount:.1f} {unit}"
