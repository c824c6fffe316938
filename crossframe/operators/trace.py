"""Traces: the operators of a part of a run in the order in which they ran, and their file format."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossframe.errors import RecordingError
from crossframe.files import parse_json
from crossframe.operators.signature import Signature
from crossframe.quoting import quote_path

COMPILED = "compiled."
"""Prefix of the names of operators inside compiled graphs."""
MOST_OPERATORS = 20_000
"""Operators of a trace; further ones are left out."""
WHOLE_GRAPH = f"{COMPILED}graph"
"""Name of an operator that represents a whole compiled graph."""


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's code."""

    file: str
    number: int
    function: str
    code: str

    def describe(self) -> str:
        """The line as "file:number: code", which editors can open."""
        return f"{self.file}:{self.number}: {self.code}"


@dataclass(frozen=True)
class Judged:
    """The error of an operator's output relative to the same operator in float64 on the same inputs.

    Attributes:
        error: norm(output - exact) / norm(exact).
        bound: the bound of the error due to rounding in the operator's dtype.
    """

    error: float
    bound: float

    @property
    def inside(self) -> bool:
        """Whether rounding explains the error."""
        return self.error <= self.bound


def worst(judged: Iterable[Judged | None]) -> Judged | None:
    """The error that is largest relative to its bound; None if there is none.

    >>> worst([Judged(4.0, 3.0), None, Judged(2.0, 1.0)]), worst([None])
    (Judged(error=2.0, bound=1.0), None)
    """
    return max(filter(None, judged), key=lambda each: each.error / each.bound, default=None)


@dataclass(frozen=True)
class Operator:
    """One operator that ran.

    Attributes:
        index: position in the trace.
        name: the framework's name, such as "aten.mm".
        arguments: the arguments that are not tensors, as text.
        phase: "forward", "backward", "clip", "optimizer", or "between" for operators outside of these.
        module: canonical name of the innermost module in which it ran; for a backward operator, that of its forward operator.
        line: line of the user's code; for a backward operator, that of its forward operator.
        inputs, outputs: signatures of the tensors.
        judged: the test of its output; None if it cannot be repeated or has no floating output.
        interior: intermediate values of a fused operator, as if it were computed step by step.
    """

    index: int
    name: str
    arguments: str
    phase: str
    module: str
    line: SourceLine | None
    inputs: tuple[Signature, ...]
    outputs: tuple[Signature, ...]
    judged: Judged | None = None
    interior: tuple[Signature, ...] = ()

    def to_json(self) -> dict:
        """The operator as a JSON object."""
        return {
            "name": self.name,
            "arguments": self.arguments,
            "phase": self.phase,
            "module": self.module,
            "line": [self.line.file, self.line.number, self.line.function, self.line.code] if self.line else None,
            "inputs": [each.to_json() for each in self.inputs],
            "outputs": [each.to_json() for each in self.outputs],
            "judged": [repr(self.judged.error), repr(self.judged.bound)] if self.judged else None,
            "interior": [each.to_json() for each in self.interior],
        }

    @classmethod
    def from_json(cls, index: int, fields: dict[str, Any]) -> "Operator":
        """The operator that `to_json` wrote."""
        return cls(
            index,
            fields["name"],
            fields["arguments"],
            fields["phase"],
            fields["module"],
            SourceLine(*fields["line"]) if fields["line"] else None,
            tuple(map(Signature.from_json, fields["inputs"])),
            tuple(map(Signature.from_json, fields["outputs"])),
            Judged(*map(float, fields["judged"])) if fields["judged"] else None,
            tuple(map(Signature.from_json, fields["interior"])),
        )


@dataclass(frozen=True)
class Trace:
    """A trace of a part of a run.

    Attributes:
        operators: the operators in the order in which they ran.
        results: the inputs and outputs of the part's modules, and the loss.
    """

    operators: Sequence[Operator]
    results: Sequence[Signature]

    def judged(self) -> list[Operator]:
        """The operators that were repeated in float64."""
        return [op for op in self.operators if op.judged is not None]

    def outside(self) -> list[Operator]:
        """The judged operators whose error rounding does not explain, in order; whole compiled graphs last."""
        found = [op for op in self.judged() if op.judged is not None and not op.judged.inside]
        return sorted(found, key=lambda op: op.name == WHOLE_GRAPH)

    def write(self, path: Path) -> None:
        """Write one JSON object on each line: the operators, then the results."""
        with open(path, "w") as file:
            for operator in self.operators:
                file.write(json.dumps(operator.to_json()) + "\n")
            file.write(json.dumps({"results": [each.to_json() for each in self.results]}) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Trace":
        """Read a trace from its file.

        Raises:
            RecordingError: the file does not exist or is not a trace.
        """
        operators: list[Operator] = []
        try:
            with open(path, "rb") as file:
                for line in file:
                    fields = parse_json(line)
                    if "results" in fields:
                        return cls(operators, [Signature.from_json(each) for each in fields["results"]])
                    operators.append(Operator.from_json(len(operators), fields))
            raise ValueError("it has no results, so it was cut off")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordingError(
                f"{quote_path(path)}: expected a trace of operators, but {error}; trace again"
            ) from None
