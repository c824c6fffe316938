"""`crossframe layout`: which rank holds which elements of a model."""

import json
import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from crossframe.cli.option_values import put, refused, width_of, write_svg
from crossframe.cli.parallel import ParallelOptions
from crossframe.draw import layout_svg, layout_text
from crossframe.draw.amounts import ROOT, bytes_text, percent_text, ranks_text
from crossframe.draw.table import aligned
from crossframe.errors import LayoutError, UsageError
from crossframe.explorer import dtype_choices, explorer_data, explorer_page
from crossframe.layout import LAYOUT_KINDS, Sharding
from crossframe.mesh import PIPELINE, MeshSpec, check_rank, check_world_size
from crossframe.parallel import ParallelModel, ParallelSharding, Style
from crossframe.quoting import quote
from crossframe.shapes import ModelShapes, model_shapes


@dataclass(frozen=True)
class LayoutOptions:
    """The options of the command.

    Attributes:
        kind: of LAYOUT_KINDS.
        keep_original, compute_dtype: of the flat layout alone.
        replicate: copies of the model.
        dims: "PATTERN=DIM" each: on which dim the per-parameter layout cuts the parameters whose name matches; else on dim 0.
        parallel: the axes that divide the model.

    Raises:
        UsageError: an unknown kind, an option of another kind, replicas or axes that do not divide the world, or no such dim.
        MeshError: no such world size.
    """

    world_size: int
    kind: str = "flat"
    keep_original: bool = True
    compute_dtype: str | None = None
    replicate: int = 1
    dims: Sequence[str] = ()
    parallel: ParallelOptions = field(default_factory=ParallelOptions)

    def __post_init__(self) -> None:
        check_world_size(self.world_size)
        if self.kind not in LAYOUT_KINDS:
            raise refused("layout", LAYOUT_KINDS, self.kind)
        data_ranks = self.parallel.num_data_ranks(self.world_size)
        if self.replicate < 1 or data_ranks % self.replicate:
            raise UsageError(f"replicate: expected a divisor of {data_ranks} ranks, got {self.replicate}")
        if self.kind != "flat" and not self.keep_original:
            raise UsageError(f"no-keep-original: only the flat layout can do without originals, not {self.kind}")
        if self.kind != "flat" and self.compute_dtype is not None:
            raise UsageError(f"compute-dtype: only the flat layout is aligned to it, not {self.kind}")
        if self.kind != "per_param" and self.dims:
            raise UsageError(f"dim: only the per_param layout cuts on a dim, not {self.kind}")

    def sharding(self, shapes: ModelShapes) -> ParallelSharding:
        """The sharding of a model with these options.

        Raises:
            UsageError: a dim that is not "PATTERN=DIM", or whose pattern matches nothing.
        """
        data_ranks = self.parallel.num_data_ranks(self.world_size)
        model = self.parallel.model(shapes, MeshSpec(data_ranks // self.replicate, self.replicate))
        return ParallelSharding(model, self.kind, self.keep_original, self.compute_dtype, self._dims(shapes))

    def _dims(self, shapes: ModelShapes) -> dict[str, int]:
        """The dim of each parameter that an option names."""
        dims: dict[str, int] = {}
        names = [param.name for _, params in shapes.unit_params() for param in params]
        for asked in self.dims:
            found = re.fullmatch(r"(.+)=(-?\d{1,9})", asked)
            if not found:
                raise UsageError(f"dim: expected PATTERN=DIM, for instance '*.weight=1', got {quote(asked)}")
            matching = [name for name in names if fnmatchcase(name, found[1])]
            if not matching:
                raise UsageError(f"dim: no parameter matches {quote(found[1])}: expected names like {quote(names[0])}")
            dims |= dict.fromkeys(matching, int(found[2]))
        return dims


def show_layout(
    model: str,
    dtype: str,
    options: LayoutOptions,
    *,
    unit: str | None,
    rank: int | None,
    where: Sequence[str],
    svg: Path | None,
    as_json: bool = False,
    console: Console,
) -> None:
    """Print which ranks hold which elements of a model, or of the given elements; write the drawing.

    Args:
        model: a name or a file, as `model_shapes` takes it.
        unit, rank: only these. The root is "" or, as tables print it, "(root)".
        where: elements as "NAME[INDEX]"; then the table is not printed.
        svg: where the drawing goes; None: nowhere.
        as_json: print `layout_json` instead of a table, or a list of `where_json` for `where`.

    Raises:
        CrossframeError: a model, an option or an element that does not exist.
        OSError: a drawing that cannot be written.
    """
    shapes = model_shapes(model, dtype)
    sharding = options.sharding(shapes)
    if rank is not None:
        check_rank(rank, options.world_size)
    unit = "" if unit == ROOT else unit
    width = width_of(console)
    if options.parallel.is_plain:
        plain = sharding.data_sharding(0)
        text = layout_text(plain, unit=unit, rank=rank, width=width)  # refuses an unknown unit
        if svg is not None:
            write_svg(svg, layout_svg(plain, unit=unit, rank=rank))
    else:
        if svg is not None:
            raise UsageError("svg: draws the ranks of one shard group, which --tp, --ep and --pp divide; use --json")
        text = parts_text(sharding, unit=unit, rank=rank, width=width)
    output = "\n".join(where_text(sharding, each) for each in where) or text
    if as_json:
        elements = [where_json(sharding, each) for each in where]
        found = layout_json if options.parallel.is_plain else parts_json
        print(json.dumps(elements or found(sharding, unit=unit, rank=rank), indent=1))
        return
    put(console, output)
    if not where and (scalars := [param.name for param in shapes.params if not param.shape]):
        put(console, f"\ntorch refuses parameters without dims, and only jax_backend shards them: {', '.join(scalars)}")
    if svg is not None:
        put(console, f"\ndrawing: {svg}")


def write_explorer(
    model: str,
    dtype: str,
    options: LayoutOptions,
    file: Path,
    *,
    where: Sequence[str] = (),
    others: Mapping[str, object] = MappingProxyType({}),
    console: Console,
) -> None:
    """Write the layout explorer, a page for all world sizes up to that of the options, layouts, strategies and dtypes.

    Args:
        model, dtype: as in `show_layout`; the page starts with this dtype.
        options: its world size, and the layout that the page starts with. The page has no other options.
        where: at most one element, which the page points at.
        others: options of the command that the page does not have, by name; each must be None.

    Raises:
        UsageError: an option that the page does not have, or a model that is too large for one page.
        CrossframeError: a model that does not exist.
        OSError: the page cannot be written.
    """
    known = LayoutOptions(options.world_size, options.kind)
    given = [
        each.name.replace("_", "-")
        for each in fields(known)
        if getattr(options, each.name) != getattr(known, each.name)
    ]
    given += [name for name, value in others.items() if value is not None]
    given = ["tp, ep, pp" if name == "parallel" else name for name in given]
    if given:
        raise UsageError(
            f"{given[0].replace('dims', 'dim')}: the page of --html has no such choice; use one of the two"
        )
    if len(where) > 1:
        raise UsageError(f"where: the page of --html points at one element, got {len(where)}")
    choices = dtype_choices(partial(model_shapes, model), dtype)
    for each in where:
        where_text(options.sharding(choices[0].shapes), each)  # refuses an unknown element
    start = {
        "world": str(options.world_size),
        "layout": options.kind,
        "dtype": choices[0].name,
        "element": "".join(where),
    }
    page = explorer_page(explorer_data(choices, options.world_size), model=shlex.quote(model), start=start)
    file.write_text(page, encoding="utf-8")
    put(console, f"page: {file} ({bytes_text(len(page.encode()))})")


def layout_json(sharding: ParallelSharding, *, unit: str | None = None, rank: int | None = None) -> dict[str, Any]:
    """The layout of a model that no axis divides, as a JSON object.

    Its "units" have "unit", "layout", "padded_shard_numel" (elements of a rank's shard with padding), "parameters" and "padding".
    The "pieces" of a parameter and the padding are listed for each rank of the shard group, with the fields of
    `crossframe.layout.Piece` and `crossframe.layout.padding.Padding`.

    Args:
        unit, rank: only these; rank is a rank of the mesh.
    """
    plain = sharding.data_sharding(0)
    ranks = range(plain.mesh.shard) if rank is None else [plain.mesh.coordinate(rank)[1]]
    units: list[dict[str, Any]] = []
    for name, layout in plain.units:
        if unit is not None and name != unit:
            continue
        pieces: dict[str, list[dict[str, Any]]] = {param.name: [] for param in layout.params}
        for piece in (piece for each in ranks for piece in layout.pieces(each)):
            held = asdict(piece)
            pieces[held.pop("name")].append(held)
        units.append(
            {
                "unit": name,
                "layout": layout.kind,
                "padded_shard_numel": layout.padded_shard_numel,
                "parameters": [
                    {"name": param.name, "shape": list(param.shape), "dtype": param.dtype, "pieces": pieces[param.name]}
                    for param in layout.params
                ],
                "padding": [{"rank": each} | asdict(padding) for each in ranks for padding in layout.padding(each)],
            }
        )
    return {"world_size": plain.mesh.world_size, "replicas": plain.mesh.replicate, "units": units}


def parts_json(sharding: ParallelSharding, *, unit: str | None = None, rank: int | None = None) -> dict[str, Any]:
    """The layout of a model that model axes divide, as a JSON object.

    It has "world_size", "axes" (sizes by name, the outermost first) and "ranks". Each rank has "rank", "coordinate" and "units"
    with "unit", "layout", "padded_shard_numel" and "parameters". A parameter has the whole "shape", the "part" (shape) of it that
    the data parallel ranks shard, "dtype" and the "pieces" of the whole parameter that this rank holds, with the fields of
    `crossframe.layout.Piece`.

    Args:
        unit, rank: only these.
    """
    mesh = sharding.model.mesh
    whole = {param.name: list(param.shape) for param in sharding.model.shapes.params}
    ranks = []
    for each in range(mesh.world_size) if rank is None else [rank]:
        pieces: dict[str, list[dict[str, Any]]] = {}
        for _, piece in sharding.pieces(each):
            held = asdict(piece)
            pieces.setdefault(held.pop("name"), []).append(held)
        units = [
            {
                "unit": name,
                "layout": layout.kind,
                "padded_shard_numel": layout.padded_shard_numel,
                "parameters": [
                    {
                        "name": param.name,
                        "shape": whole[param.name],
                        "part": list(param.shape),
                        "dtype": param.dtype,
                        "pieces": pieces.get(param.name, []),
                    }
                    for param in layout.params
                ],
            }
            for name, layout in sharding.layouts(each)
            if unit is None or name == unit
        ]
        ranks.append({"rank": each, "coordinate": mesh.coordinate(each), "units": units})
    return {"world_size": mesh.world_size, "axes": dict(mesh.items()), "ranks": ranks}


def parts_text(sharding: ParallelSharding, *, unit: str | None, rank: int | None, width: int) -> str:
    """Tables of the parts of a model that model axes divide: which axis divides which parameters, and the shards of each part.

    Ranges are of the part; with a rank, a table states the slice of the whole parameter that the part is.

    Args:
        unit, rank: only these. Without a rank, ranks whose parts have equal shapes are one part.
        width: characters per line.

    Raises:
        LayoutError: no such unit.
    """
    model = sharding.model
    known = [name for each in model.distinct_parts() for name, _ in sharding.layouts(each)]
    if unit is not None and unit not in known:
        raise LayoutError(f"no unit is named {quote(unit)}: expected one of {quote(list(dict.fromkeys(known)))}")
    found = [_divisions_text(model)]
    for first in model.distinct_parts() if rank is None else [rank]:
        if unit is not None and unit not in [name for name, _ in sharding.layouts(first)]:
            continue
        found.append(_part_title(model, first, alone=rank is not None))
        if rank is not None:
            names = [p.name for name, layout in sharding.layouts(rank) if unit in (None, name) for p in layout.params]
            found += filter(None, [_slices_text(model, rank, names)])
        for has_experts in (False, True):
            plain = sharding.data_sharding(first, experts=has_experts)
            shown = [name for name, _ in plain.units if unit is None or name == unit]
            if shown:
                data = model.mesh.data_ranks(first, experts=has_experts)
                shard = None if rank is None else data.mesh.coordinate(data.index(rank))[1]
                found.append(layout_text(plain, unit=unit, rank=shard, width=width, noun="shard"))
    return "\n\n".join(found)


def _divisions_text(model: ParallelModel) -> str:
    """A line for each style, with the modules that have it."""
    lines = []
    for style in Style:
        names = [name for name, each in model.styles().items() if each.style is style]
        if names:
            axis = style.axis
            numel = sum(param.numel for param in model.shapes.params if param.name in names)
            share = percent_text(numel, model.shapes.numel)
            count = f"{len(names):,} parameter{'s' * (len(names) > 1)}"
            lines.append(f"{axis} {model.mesh.size(axis or '')}, {style}: {count}, {share} of all elements")
    return "\n".join(lines) or "no parameter is divided: each stage has whole ones"


def _slices_text(model: ParallelModel, rank: int, shown: Collection[str]) -> str:
    """A table of the part of each divided parameter that a rank computes with, as a slice; "" if none is divided."""
    lines = [["parameter", "shape", "part"]]
    coordinate = model.mesh.coordinate(rank)
    for param in model.shapes.params:
        divisions = {each.dim: each for each in model.divisions(param, coordinate)}
        if param.name in shown and divisions:
            slices = [":"] * len(param.shape)
            for dim, division in divisions.items():
                size = param.shape[dim] // division.parts
                slices[dim] = f"{division.index * size:,}:{(division.index + 1) * size:,}"
            lines.append([param.name, str(param.shape), f"[{', '.join(slices)}]"])
    return aligned(lines, left=3) if len(lines) > 1 else ""


def _part_title(model: ParallelModel, rank: int, *, alone: bool) -> str:
    coordinate = model.mesh.coordinate(rank)
    if alone:
        at = ", ".join(f"{axis} {index}" for axis, index in coordinate.items() if model.mesh.size(axis) > 1)
        return f"rank {rank:,}: {at}"
    same = [axis for axis in model.mesh.names if axis not in model.part_axes]
    at = ", ".join(
        f"stage {coordinate[axis]} of {model.mesh.size(axis)}" if axis == PIPELINE else f"{axis} {coordinate[axis]}"
        for axis in model.part_axes
    )
    ranks = ranks_text(model.mesh.group(rank, *same))
    numel = sum(param.numel for param in model.part(rank).params)
    return f"{at or 'every rank'} (ranks {ranks}): the part of one rank, {numel:,} elements"


def where_json(sharding: Sharding | ParallelSharding, asked: str) -> dict[str, Any]:
    """The place of an element as a JSON object.

    Its fields: "asked"; "element", the index in the flattened parameter of "numel" elements; "unit"; "ranks" that hold it, one
    for each replica and for each rank of an axis that does not divide it; "offset" in the shard of these ranks.

    Args:
        asked: "NAME[INDEX]" with an index for each dim, or with one for the parameter as a row-major line.

    Raises:
        UsageError: another form, or an index out of range.
        LayoutError: no such parameter.
    """
    parts = re.fullmatch(r"(.+?)(?:\[([^\[\]]*)\])?", asked)
    name, inside = (parts[1], parts[2]) if parts else (asked, None)
    param = sharding.param(name)
    if param is None:
        raise LayoutError(
            f"where: no parameter is named {quote(name)}: expected NAME[INDEX], the name as the table has it"
        )
    shape = param.shape
    element = _element(asked, shape, inside)
    places = sharding.where(name, element)
    _, unit, offset = places[0]
    ranks = [rank for rank, _, _ in places]
    return {
        "asked": asked,
        "element": element,
        "numel": math.prod(shape),
        "unit": unit,
        "ranks": ranks,
        "offset": offset,
    }


def where_text(sharding: Sharding | ParallelSharding, asked: str) -> str:
    """Which ranks hold an element, and at which offset of their shards: `where_json` as a sentence.

    >>> from crossframe.layout import FlatLayout
    >>> from crossframe.params import ParamSpec
    >>> layout = FlatLayout((ParamSpec("w", (5, 3)),), world_size=4, keep_original=True)
    >>> where_text(Sharding((("", layout),), MeshSpec(4)), "w[4,1]")
    "w[4,1]: element 13 of 15, in unit '', on rank 3 at offset 1 of its shard"
    """
    place = where_json(sharding, asked)
    several = len(place["ranks"]) > 1
    return (
        f"{asked}: element {place['element']:,} of {place['numel']:,}, in unit {place['unit']!r}, on rank{'s' * several} "
        f"{ranks_text(place['ranks'])} at offset {place['offset']:,} of {'their shards' if several else 'its shard'}"
    )


def _element(asked: str, shape: tuple[int, ...], inside: str | None) -> int:
    """The index of an element in the flattened parameter."""
    try:
        index = [int(each) for each in (inside or "").split(",") if each.strip()]
    except ValueError:
        index = None
    sizes = [math.prod(shape)] if index is not None and len(index) == 1 else list(shape)
    if index is None or len(index) != len(sizes) or not all(0 <= at < n for at, n in zip(index, sizes, strict=True)):
        raise UsageError(
            f"where: {quote(asked)}: expected an index for each dim of shape {shape}, or one below {math.prod(shape)}, each "
            "from 0 on"
        )
    element = 0
    for at, size in zip(index, sizes, strict=True):
        element = element * size + at
    return element
