"""Results of cases in a file, which keeps the first answer to each case beside the answers of later code."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


class Results:
    """A JSON list of rows, one of a name, and beside it the same as Markdown.

    Rows of other names that the file has are kept. A row is a case, or has several under "cases"; what was first found of a case
    is its "first".
    """

    def __init__(self, path: Path, key: str, markdown: Callable[[list[Row]], str], order: Sequence[str] = ()) -> None:
        """Read the file, if there is one.

        Args:
            path: of the JSON.
            key: of a row's name.
            markdown: of all rows.
            order: names in the order of their rows, without those that are no more. Empty: all, sorted.
        """
        self._path, self._key, self._markdown, self._order = path, key, markdown, order
        self._rows: dict[str, Row] = {}
        if path.is_file():
            self._rows = {row[key]: row for row in json.loads(path.read_text())}

    def add(self, row: Row) -> Row:
        """Write a row, with the first answers that its name has; returns it."""
        name = row[self._key]
        self._rows[name] = with_first_answers(row, self._rows.get(name, {}))
        rows = self.of(self._order or sorted(self._rows))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(rows, indent=1) + "\n")
        self._path.with_suffix(".md").write_text(self._markdown(rows))
        return self._rows[name]

    def of(self, names: Iterable[str]) -> list[Row]:
        """The rows of these names, without names that have none."""
        return [self._rows[name] for name in names if name in self._rows]


def with_first_answers(row: Row, known: Row) -> Row:
    """A row with the first answer to each of its cases: that of the known row, or else its own."""
    if "cases" not in row:
        return {**row, "first": known.get("first", row)}
    first = {case["case"]: case["first"] for case in known.get("cases", ())}
    return {**row, "cases": [{**case, "first": first.get(case["case"], case)} for case in row["cases"]]}
