"""Adds parameters that are joined, that are rows of an array, or that have padding, by their values."""

from collections.abc import Iterator, Sequence

from crossframe.alignment.matching import Matching
from crossframe.alignment.portions import Rows, cut_text, joined_text, padded_text, rows_of
from crossframe.alignment.solve import solve
from crossframe.alignment.summary import varies
from crossframe.param_map import MapEntry
from crossframe.rearrange import Rearrangement


def join_and_pad(matching: Matching) -> None:
    """Add parameters that consist of several arrays, arrays that consist of several parameters, then padded ones."""
    for name in matching.open_names():
        _join_paths(matching, name)
    for path in matching.open_paths():
        _split_path(matching, path)
    for name in matching.open_names():
        _pad(matching, name)
    for path in matching.open_paths():
        _pad_path(matching, path)


def _join_paths(matching: Matching, name: str) -> None:
    """Add a parameter whose rows are arrays of the second model."""
    array = matching.first[name]
    for members in _covers(matching, 0, name):
        forms = [solve(rows.of(array), matching.second[path]) for rows, path in members]
        if None in forms:
            continue
        paths = tuple(path for _, path in members)
        if not _is_stated_together(matching, paths):
            continue
        counts = tuple(rows.total for rows, _ in members)
        texts = [
            joined_text(form, matching.second[path].shape, rows, apart=apart)
            for apart in (False, True)
            for form, (rows, path) in zip(forms, members, strict=True)
            if form is not None
        ]
        # That of one array may be too special for the others, for instance if it has one head.
        for text in dict.fromkeys(texts):
            identity = text == Rearrangement.transposing(tuple(range(array.ndim))).text
            rows = None if len(set(counts)) == 1 else counts
            if text and matching.add_verified([MapEntry(name, paths, None if identity else text, rows)]):
                return


def _is_stated_together(matching: Matching, paths: Sequence[str]) -> bool:
    """Whether one pattern can state these paths: all are arrays, or slices at the same place."""
    return len({matching.slices[path].indices if path in matching.slices else () for path in paths}) == 1


def _split_path(matching: Matching, path: str) -> None:
    """Add parameters that are the rows of an array of the second model."""
    for members in _covers(matching, 1, path):
        texts = [_cut(matching, name, path, rows) for rows, name in members]
        entries = [
            MapEntry(name, path, text) for (_, name), text in zip(members, texts, strict=True) if text is not None
        ]
        if len(entries) == len(members) and matching.add_verified(entries):
            return


def _cut(matching: Matching, name: str, path: str, rows: Rows) -> str | None:
    """The pattern of a parameter that is rows of an array."""
    part = rows.of(matching.second[path])
    form = solve(matching.first[name], part)
    return None if form is None else cut_text(form, part.shape, rows)


def _covers(matching: Matching, side: int, whole: str) -> Iterator[list[tuple[Rows, str]]]:
    """Ways to cover the rows of an array of one model by arrays of the other one, for each of its dims."""
    found = _portions(matching, side, whole)
    for dim, blocks in dict.fromkeys((rows.dim, rows.blocks) for rows, _ in found):
        starts = {rows.start: (rows, part) for rows, part in found if (rows.dim, rows.blocks) == (dim, blocks)}
        at, members, period = 0, [], matching.sides()[side][whole].shape[dim] // blocks
        while at in starts:
            members.append(starts[at])
            at = starts[at][0].stop
        if at == period:
            yield members


def _portions(matching: Matching, side: int, whole: str) -> list[tuple[Rows, str]]:
    """The open arrays of the other model that are rows of an array."""
    array, others = matching.sides()[side][whole], matching.sides()[1 - side]
    if not varies(array):
        return []
    parts = matching.open_paths() if side == 0 else matching.open_names()
    parts = [part for part in parts if varies(others[part])]
    found = []
    for dim in range(array.ndim):
        rows = matching.signatures(side, whole).get((dim,))
        if rows is not None:  # those of a large vector are its elements
            runs = (
                rows_of(dim, rows, array.size, others[each].shape, matching.signatures(1 - side, each))
                for each in parts
            )
            found += [(run, part) for run, part in zip(runs, parts, strict=True) if run is not None]
    return found


def _pad(matching: Matching, name: str) -> None:
    """Add a parameter whose first rows are an array, and whose other rows are padding."""
    found = _portions(matching, 0, name)
    if len(found) == 1 and _is_padded(found[0][0]):
        (rows, path), array = found[0], matching.first[name]
        form = solve(rows.of(array), matching.second[path])
        text = None if form is None else padded_text(form, rows, array.shape[rows.dim])
        if text is not None:
            matching.add_verified([MapEntry(name, path, text)])


def _pad_path(matching: Matching, path: str) -> None:
    """Add a parameter that is the first rows of an array, whose other rows are padding."""
    found = _portions(matching, 1, path)
    if len(found) == 1 and _is_padded(found[0][0]):
        rows, name = found[0]
        if (text := _cut(matching, name, path, rows)) is not None:
            matching.add_verified([MapEntry(name, path, text)])


def inside(matching: Matching, path: str) -> tuple[str, ...]:
    """The parameters of the first model that an array consists of, which no pattern states."""
    return tuple(name for _, name in next(_covers(matching, 1, path), ()))


def _is_padded(rows: Rows) -> bool:
    """Whether rows are the first ones of an array, and most of them."""
    return rows.blocks == 1 and rows.start == 0 and 2 * rows.count > rows.period
