"""A model on a mesh with model axes: the part that each rank computes with, and which rank holds which elements (R39)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from crossframe.errors import LayoutError, UnitError, UsageError
from crossframe.layout import Layout, PerParamLayout, Piece, Sharding
from crossframe.layout.division import Division, in_part, in_whole, local_part
from crossframe.mesh import EXPERT, MODEL_AXES, PIPELINE, TENSOR, DataRanks, MeshSpec, ParallelMesh
from crossframe.parallel.stages import StageRules, stages_of
from crossframe.parallel.styles import Rules, Style, Styled, known_rules, styled
from crossframe.params import ParamSpec
from crossframe.quoting import quote
from crossframe.shapes import ModelShapes
from crossframe.unit_assignment import enclosing_unit


@dataclass(frozen=True)
class ParallelModel:
    """A model whose parameters the model axes of a mesh divide.

    Attributes:
        shapes: the whole model.
        mesh: the ranks.
        rules: the styles of modules, for the axes "tp" and "ep"; None: those of KNOWN_STYLES.
        stage_rules: units and parameters of the root whose stage is another than `stages_of` gives them.

    Raises:
        UsageError: an axis without parameters to divide, or invalid rules.
        LayoutError: a parameter that an axis cannot divide.
        UnitError: a unit that mixes experts and other parameters.

    >>> params = (ParamSpec("up.weight", (6, 4)), ParamSpec("down.weight", (4, 6)), ParamSpec("down.bias", (4,)))
    >>> rules = [("up", Style.COLWISE), ("down", Style.ROWWISE)]
    >>> model = ParallelModel(ModelShapes("mlp", params), ParallelMesh.of(dp=2, tp=2), rules)
    >>> [param.shape for param in model.part(1).params]
    [(3, 4), (4, 3), (4,)]
    """

    shapes: ModelShapes
    mesh: ParallelMesh
    rules: Rules | None = None
    stage_rules: StageRules = ()

    def __post_init__(self) -> None:
        for axis in (TENSOR, EXPERT):
            if self.mesh.size(axis) > 1 and not any(each.style.axis == axis for each in self._styled.values()):
                raise UsageError(
                    f"axis {axis!r} of size {self.mesh.size(axis)}: no known style matches a module of model "
                    f"{self.shapes.name!r}; state the styles of its modules"
                )
        for param in self.shapes.params:
            local_part(param, self.divisions(param, {}))
        _ = self.stages, self.num_experts, self._whole  # each checks what it is made of

    @cached_property
    def stages(self) -> Mapping[str, int]:
        """The stage of each parameter."""
        return stages_of(self.shapes, self.mesh.size(PIPELINE), self.stage_rules)

    @cached_property
    def _styled(self) -> Mapping[str, Styled]:
        """The style of each parameter whose axis has more than one rank."""
        rules = known_rules(self.shapes.params) if self.rules is None else self.rules
        rules = [rule for rule in rules if rule[1].axis is None or self.mesh.size(rule[1].axis) > 1]
        return {name: each for name, each in styled(self.shapes.params, rules).items() if each.style.axis}

    def is_expert(self, name: str) -> bool:
        """Whether the axis "ep" divides a parameter, so that it is not sharded over this axis."""
        return name in self._styled and self._styled[name].style.axis == EXPERT

    def styles(self) -> Mapping[str, Styled]:
        """The style of each parameter that an axis of more than one rank concerns."""
        return self._styled

    @cached_property
    def num_experts(self) -> Mapping[str, int]:
        """The number of experts of each module of numbered experts.

        Raises:
            LayoutError: numbers that are not 0, 1, 2 ..., or that the axis does not divide.
        """
        numbers: dict[str, set[int]] = {}
        for param in self.shapes.params:
            if (each := self._styled.get(param.name)) and (number := each.expert_of(param)) is not None:
                numbers.setdefault(each.module, set()).add(number)
        for module, found in numbers.items():
            if found != set(range(len(found))) or len(found) % self.mesh.size(EXPERT):
                raise LayoutError(
                    f"module {module!r}, axis 'ep' of size {self.mesh.size(EXPERT)}: expected experts numbered from 0 on, a "
                    f"multiple of this size, got {quote(sorted(found))}; choose another size of the axis"
                )
        return {module: len(found) for module, found in numbers.items()}

    def total_experts(self, name: str) -> int:
        """The number of experts of the module of a parameter that the axis "ep" divides."""
        return self.num_experts.get(self._styled[name].module) or self._by_name[name].shape[0]

    @cached_property
    def _by_name(self) -> Mapping[str, ParamSpec]:
        return {param.name: param for param in self.shapes.params}

    @cached_property
    def width(self) -> int | None:
        """The width of the residual stream: of a vocabulary's rows, or of the output of a rowwise module; None if unknown."""
        rules = known_rules(self.shapes.params) if self.rules is None else self.rules
        for style, dim in ((Style.VOCAB, 1), (Style.ROWWISE, 0)):
            for name, each in styled(self.shapes.params, rules).items():
                if each.style is style and len(shape := self._by_name[name].shape) > 1:
                    return shape[dim]
        return None

    @property
    def has_sequence(self) -> bool:
        """Whether activations between modules are divided over "tp" by positions."""
        return any(each.style is Style.SEQUENCE for each in self._styled.values())

    def unit_of(self, name: str) -> str:
        """The unit of a parameter, where modules of experts are units of their own."""
        return self._whole.unit_of(name)

    def divisions(self, param: ParamSpec, coordinate: Mapping[str, int]) -> tuple[Division, ...]:
        """The divisions of a parameter at a coordinate of the mesh."""
        each = self._styled.get(param.name)
        if each is None or each.style.axis is None or each.expert_of(param) is not None:
            return ()
        dim = each.style.dim(len(param.shape))
        axis = each.style.axis
        return () if dim is None else (Division(axis, dim, self.mesh.size(axis), coordinate.get(axis, 0)),)

    def expert_index(self, param: ParamSpec) -> int | None:
        """The index on the axis "ep" of the ranks that have a parameter of a numbered expert; None for other parameters."""
        each = self._styled.get(param.name)
        number = each.expert_of(param) if each else None
        if each is None or number is None:
            return None
        return number * self.mesh.size(EXPERT) // self.num_experts[each.module]

    @cached_property
    def _whole(self) -> ModelShapes:
        """The whole model, in which modules of experts that the axis "ep" divides are units of their own."""
        units = list(self.shapes.units)
        modules = dict.fromkeys(self._styled[p.name].module for p in self.shapes.params if self.is_expert(p.name))
        first: dict[str, int] = {}  # the position of the first parameter in each of these
        for at, param in enumerate(self.shapes.params):
            module = param.name
            while module := module.rpartition(".")[0]:
                first.setdefault(module, at)
        for module in modules:
            if module in units or not module:
                continue
            around = enclosing_unit(module, frozenset({"", *units}))
            later = (at for at, unit in enumerate(units) if first[unit] > first[module])
            units.insert(units.index(around) + 1 if around else next(later, len(units)), module)
        shapes = replace(self.shapes, units=tuple(units))
        for unit, params in shapes.unit_params():
            mixed = {self.is_expert(param.name): param.name for param in params}
            if len(mixed) > 1:
                raise UnitError(
                    f"unit {unit!r}: axis 'ep' divides {mixed[True]!r} and not {mixed[False]!r}; expected modules of experts "
                    "alone in a unit, since they are sharded over other ranks"
                )
        return shapes

    def part(self, rank: int) -> ModelShapes:
        """The part of the model that a rank computes with: its stage, its experts, and the local parts of divided parameters."""
        return self._part(self.mesh.coordinate(rank))

    def _part(self, coordinate: Mapping[str, int]) -> ModelShapes:
        at: dict[str, int] = {axis: coordinate.get(axis, 0) for axis in MODEL_AXES}
        params = tuple(
            local_part(param, self.divisions(param, at))
            for param in self._whole.params
            if self.stages[param.name] == at[PIPELINE] and self.expert_index(param) in (None, at[EXPERT])
        )
        present = {self._whole.unit_of(param.name) for param in params}
        return replace(self._whole, params=params, units=tuple(unit for unit in self._whole.units if unit in present))

    @cached_property
    def expert_units(self) -> frozenset[str]:
        """The units whose parameters the axis "ep" divides."""
        return frozenset(self._whole.unit_of(p.name) for p in self.shapes.params if self.is_expert(p.name))

    @property
    def part_axes(self) -> tuple[str, ...]:
        """The axes along which parts have other shapes or names: "pp", and "ep" if experts are numbered."""
        axes = (PIPELINE, *([EXPERT] if self.num_experts else []))
        return tuple(axis for axis in axes if self.mesh.size(axis) > 1)

    def distinct_parts(self) -> list[int]:
        """A rank of each part with other shapes or names."""
        indices = product(*(range(self.mesh.size(axis)) for axis in self.part_axes))
        return [self.mesh.rank(dict(zip(self.part_axes, index, strict=True))) for index in indices]

    def data_ranks(self, rank: int, unit: str) -> DataRanks:
        """The data-parallel ranks over which a rank's part of a unit is replicated and sharded."""
        return self.mesh.data_ranks(rank, experts=unit in self.expert_units)


@dataclass(frozen=True)
class ParallelSharding:
    """Which rank of a mesh with model axes holds which element of a model: the data-parallel ranks of each model rank shard its
    part.

    Attributes:
        model: the model on its mesh.
        kind, keep_original, compute_dtype: the layouts, as in `ModelShapes.layouts`.
        dims: the dim on which a per-parameter layout shards a parameter, by name; 0 for the others.

    >>> params = (ParamSpec("up.weight", (6, 4)), ParamSpec("down.weight", (4, 6)))
    >>> rules = [("up", Style.COLWISE), ("down", Style.ROWWISE)]
    >>> model = ParallelModel(ModelShapes("mlp", params), ParallelMesh.of(dp=2, tp=2), rules)
    >>> sharding = ParallelSharding(model, "per_param")
    >>> [(piece.name, [tuple(run) for run in piece.runs()]) for _, piece in sharding.pieces(3)]
    [('up.weight', [(0, 20, 4)]), ('down.weight', [(8, 15, 3), (11, 21, 3)])]
    >>> sharding.where("down.weight", 16)
    ((3, '', 9),)
    """

    model: ParallelModel
    kind: str
    keep_original: bool = True
    compute_dtype: str | None = None
    dims: Mapping[str, int] = field(default_factory=dict)

    def layouts(self, rank: int) -> tuple[tuple[str, Layout], ...]:
        """The layouts of a rank's part over its data-parallel ranks, as `ModelShapes.layouts` gives them."""
        coordinate = self.model.mesh.coordinate(rank)
        return self._layouts(tuple((axis, coordinate.get(axis, 0)) for axis in MODEL_AXES))

    def data_sharding(self, rank: int, *, experts: bool = False) -> Sharding:
        """The sharding of a rank's part over its data-parallel ranks, without replicas if axes divide the model.

        Args:
            experts: of the units that the axis "ep" divides; else of the others.
        """
        mesh = self.model.mesh.data_ranks(rank, experts=experts).mesh
        units = [each for each in self.layouts(rank) if (each[0] in self.model.expert_units) == experts]
        divided = any(self.model.mesh.size(axis) > 1 for axis in MODEL_AXES)
        return Sharding(tuple(units), MeshSpec(mesh.shard) if divided else mesh)

    def _layouts(self, at: tuple[tuple[str, int], ...]) -> tuple[tuple[str, Layout], ...]:
        if at not in self._known:
            rank = self.model.mesh.rank(dict(at))
            part = self.model.part(rank)
            sizes = {unit: self.model.data_ranks(rank, unit).mesh.shard for unit in ("", *part.units)}
            layouts = part.layouts(self.kind, sizes, keep_original=self.keep_original, compute_dtype=self.compute_dtype)
            self._known[at] = tuple((unit, self._on_dims(layout)) for unit, layout in layouts)
        return self._known[at]

    @cached_property
    def _known(self) -> dict[tuple[tuple[str, int], ...], tuple[tuple[str, Layout], ...]]:
        return {}

    def _on_dims(self, layout: Layout) -> Layout:
        if not isinstance(layout, PerParamLayout):
            return layout
        return replace(layout, dims=tuple(self.dims.get(param.name, 0) for param in layout.params))

    def param(self, name: str) -> ParamSpec | None:
        """The whole parameter of this name or alias; None if there is none."""
        return self._params.get(name)

    @cached_property
    def _params(self) -> dict[str, ParamSpec]:
        """Every parameter by name and by alias."""
        return {name: param for param in self.model.shapes.params for name in (param.name, *param.aliases)}

    def pieces(self, rank: int) -> Iterator[tuple[str, Piece]]:
        """The (unit, piece) pairs that a rank holds, in order. Pieces are of whole parameters, and `Piece.rank` is the rank."""
        coordinate = self.model.mesh.coordinate(rank)
        for unit, layout in self.layouts(rank):
            data = self.model.data_ranks(rank, unit)
            for piece in layout.pieces(data.mesh.coordinate(data.index(rank))[1]):
                param = self._params[piece.name]
                for each in in_whole(piece, param, self.model.divisions(param, coordinate)):
                    yield unit, replace(each, rank=rank)

    def where(self, name: str, element: int) -> tuple[tuple[int, str, int], ...]:
        """The places of an element: (rank, unit, offset in the shard of the parameter's bucket), by rank.

        Args:
            name: the parameter's name or one of its aliases.
            element: index in the flattened parameter.

        Raises:
            LayoutError: no such parameter, or no such element.
        """
        param = self.param(name) if isinstance(name, str) else None
        if param is None:
            raise LayoutError(f"no parameter is named {quote(name)}: expected one of {quote(sorted(self._params))}")
        if type(element) is not int or not 0 <= element < param.numel:
            raise LayoutError(
                f"parameter {name!r}: expected an element from 0 to {param.numel - 1}, got {quote(element)}"
            )
        mesh = self.model.mesh
        expert = self.model.expert_index(param)
        indices: list[Sequence[int]] = [[self.model.stages[param.name]], [0], range(mesh.size(TENSOR))]
        if self.model.is_expert(param.name):
            indices[1] = range(mesh.size(EXPERT)) if expert is None else [expert]
        places = []
        for index in product(*indices):
            at: dict[str, int] = dict(zip(MODEL_AXES, index, strict=True))
            local = in_part(element, param, self.model.divisions(param, at))
            if local is not None:
                places += self._places(at, param.name, local)
        return tuple(sorted(places))

    def _places(self, at: Mapping[str, int], name: str, local: int) -> Iterator[tuple[int, str, int]]:
        """The places of an element of the part at a model coordinate."""
        rank = self.model.mesh.rank(at)
        for unit, layout in self._layouts(tuple(at.items())):
            i = next((i for i, param in enumerate(layout.params) if param.name == name), None)
            if i is not None:
                (piece,) = layout.find(i, local, local + 1)
                data = self.model.data_ranks(rank, unit)
                for held in data.of(data.mesh.replicate_group(piece.rank)):
                    yield held, unit, piece.shard_start
