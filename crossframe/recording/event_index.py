"""Reads the `events.jsonl` of a rank and checks it against the manifest."""

import functools
import hashlib
import math
from dataclasses import dataclass, field, replace
from io import BufferedIOBase, BufferedReader, BytesIO
from pathlib import Path
from typing import Any

from crossframe.dtypes import itemsize, numpy_dtype
from crossframe.errors import CrossframeError, RecordingError
from crossframe.files import FileError, open_regular
from crossframe.params import OVERFLOW
from crossframe.quoting import quote, quote_path
from crossframe.recording import event_format
from crossframe.recording.batches import Batch
from crossframe.recording.dims import LEAST_DIMS, Order
from crossframe.recording.event_format import INPUT, OUTPUT, expect
from crossframe.recording.manifest import Manifest
from crossframe.recording.sketch import ROW_BYTES
from crossframe.tensor_file import MOST_DIMS
from crossframe.trace import Event

LARGEST_EVENTS = 1 << 30
LONGEST_LINE = 1 << 24
"""Maximum bytes of the file of a rank, and of one line: the ids of a million samples take about 10 MB."""
_PHASES = f"a phase among {list(event_format.TENSOR_USES)}"


@dataclass
class StepLines:
    """The structure of a step in the lines of one rank. Steps of equal structure share one object.

    Attributes:
        tensors: the "tensor" lines by (phase, parameter, entry); the entry is that of the optimizer state, and "" otherwise.
        activations: the "activation" lines by (microbatch, module, use), in order.
        buffers: the "buffer" lines by (name, use), in order.
        collectives: the collectives in order.
        counted: the index of each parameter in the step's counts of optimizer steps.
        num_sketches: number of rows of sketches in the tensor file.
        num_sample_items: number of items of samples in the tensor file.
        most_bytes: an upper bound of the bytes of the tensor file.
    """

    tensors: dict[tuple[str, str, str], dict[str, Any]] = field(default_factory=dict)
    activations: dict[tuple[int, str, str], dict[str, Any]] = field(default_factory=dict)
    buffers: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    collectives: list[Event] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    num_sketches: int = 0
    num_sample_items: int = 0
    most_bytes: int = 1 << 12

    @functools.cached_property
    def has_tensors(self) -> bool:
        """Whether the step has tensors beside initial parameters, once all lines are known."""
        return any(phase != event_format.PARAMETERS for phase, _, _ in self.tensors)

    def add_bytes(self, key: str, numel: int, line: dict[str, Any]) -> None:
        """Add the bytes of a tensor and of its entry in the header."""
        sketched = line.get("sketch") is not None
        size = ROW_BYTES if sketched else numel * itemsize(line["dtype"])
        if (sample := line.get("sample")) is not None:
            self.most_bytes += 8 * (sample[1] - sample[0]) + 512
            self.num_sample_items = max(self.num_sample_items, sample[1])
        both = 2 if line.get("channels_first") is not None else 1
        self.most_bytes += both * (size + 6 * len(key) + 512)
        rows = [row for row in (line.get("sketch"), line.get("channels_first")) if type(row) is int]
        self.num_sketches = max(self.num_sketches, *(row + 1 for row in rows), 0)


@dataclass(frozen=True)
class UnequalRanks:
    """A tensor of which the ranks that compute one replica together must have the same values, and have not.

    Attributes:
        name: the parameter; in forward the module, whose `use` is INPUT or OUTPUT, and "" for the batch.
        use: of tensors in that phase, or the entry of the optimizer state.
        difference: the largest norm(other - first) / norm(first).
        axis: the mesh axis along which the ranks lie.
        ranks: those whose values are not those of the first one.
    """

    step: int
    phase: str
    unit: str
    name: str
    use: str
    difference: float
    axis: str
    ranks: tuple[int, ...]

    def with_those_of(self, other: "UnequalRanks") -> "UnequalRanks":
        """Of both, which are those of two shards of one tensor."""
        largest = max(self.difference, other.difference)
        return replace(self, difference=largest, ranks=tuple(sorted({*self.ranks, *other.ranks})))


@dataclass
class RankIndex:
    """The complete steps that one rank recorded. Tensors are represented by their lines.

    Attributes:
        lines: the structure of each step.
        backwards: (number of forwards before it, loss) of each backward, by step, where optimizers take turns.
        num_losses: the number of losses of which that of a step is the sum, if it is more than 1, by step.
        norms: the gradient norm, by step.
        counts: the counts of optimizer steps, by step: one number if it is the same for all parameters, otherwise one for each
            of `StepLines.counted`.
        rates: the learning rates of the parameter groups, by step.
        sha256: the sha256 of the tensor file, by step.
        with_buffers: the steps whose lines have all buffers that have changed.
        changed: the first step after which each buffer has changed.
        disagreements: in the order of the lines.
    """

    num_steps: int = 0
    ended: bool = False
    lines: list[StepLines] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    backwards: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    num_losses: dict[int, int] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    counts: dict[int, float | tuple[float, ...]] = field(default_factory=dict)
    rates: dict[int, tuple[float, ...]] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    sha256: dict[int, str] = field(default_factory=dict)
    with_buffers: set[int] = field(default_factory=set)
    changed: dict[str, int] = field(default_factory=dict)
    disagreements: list[UnequalRanks] = field(default_factory=list)

    def count(self, step: int, name: str) -> float:
        """The optimizer's count of its steps for a parameter that is counted."""
        count = self.counts[step]
        return count[self.lines[step].counted[name]] if isinstance(count, tuple) else count


class IndexReader:
    """Reads the lines of a rank, also while they are being written.

    Lines after the last "step" line belong to a step that has not ended, and a last line without a line feed is incomplete: they
    are left for later. Any other line that cannot be read raises RecordingError.

    Attributes:
        index: the complete steps that were read so far.
    """

    def __init__(self, path: Path, manifest: Manifest, rank: int) -> None:
        self.index = RankIndex()
        self._path, self._manifest, self._rank = path, manifest, rank
        self._open_step: list[tuple[dict[str, Any], str]] = []
        self._digest = hashlib.sha256()
        self._num_lines = self._offset = 0

    def read(self) -> RankIndex:
        """Read what was written since the previous call; nothing if the file does not exist yet."""
        try:
            file, size = open_regular(self._path, LARGEST_EVENTS)
        except FileError as error:
            if error.missing:
                return self.index
            raise RecordingError(f"{error}; copy the recording again, or record the run again") from None
        with file, BufferedReader(file) as reader:  # type: ignore[arg-type]
            reader.seek(self._offset)
            self.feed(reader, size - self._offset)
        return self.index

    def feed(self, reader: BufferedIOBase, size: int) -> None:
        """Read lines up to `size` bytes, since a run may be appending to its file."""
        index, manifest = self.index, self._manifest
        while size > 0:
            line = reader.readline(min(LONGEST_LINE, size))
            size -= len(line)
            where = f"{quote_path(self._path)}, line {self._num_lines + 1}"
            if not line.endswith(b"\n"):
                if len(line) == LONGEST_LINE:
                    raise RecordingError(
                        f"{where}: expected a line of at most {LONGEST_LINE} bytes; damaged, record again"
                    )
                if line and index.ended:
                    raise RecordingError(
                        f"{quote_path(self._path)}: text after the end; two runs wrote here, record the run again"
                    )
                return  # incomplete
            fields = event_format.decode(
                line, self._rank, where, manifest.framework if manifest.states_no_order else ""
            )
            if index.ended:
                raise RecordingError(f"{where}: a line after the end; two runs wrote here, record the run again")
            if (self._num_lines == 0) != (fields["event"] == "begin"):
                raise RecordingError(f"{where}: expected one 'begin' line, as the first; cut, record the run again")
            match fields["event"]:
                case "begin":
                    if fields["manifest"] != manifest.sha256:
                        raise RecordingError(
                            f"{where}: written by another manifest: it was changed, or is of another run; copy the recording "
                            "again, or record the run again"
                        )
                case "end":
                    _check_end(fields, index, self._open_step, manifest, self._digest.hexdigest(), where)
                    index.ended = True
                case "step":
                    _close_step(index, self._open_step, fields, manifest, where)
                    self._open_step = []
                case _:
                    self._open_step.append((fields, where))
            self._digest.update(line)
            self._num_lines += 1
            self._offset += len(line)


def read_index(path: Path, manifest: Manifest, rank: int) -> RankIndex:
    """The index of a rank up to its last complete step; a missing file has none. RecordingError as for `IndexReader`."""
    return IndexReader(path, manifest, rank).read()


def parse_index(content: bytes, path: Path, manifest: Manifest, rank: int) -> RankIndex:
    """The index from the content of a rank's file; RecordingError as for `IndexReader`."""
    reader = IndexReader(path, manifest, rank)
    reader.feed(BytesIO(content), len(content))
    return reader.index


def _check_end(fields: dict, index: RankIndex, open_step: list, manifest: Manifest, before: str, where: str) -> None:
    if open_step or fields["steps"] != index.num_steps or manifest.steps not in (None, index.num_steps):
        steps = fields["steps"] if manifest.steps in (None, index.num_steps) else manifest.steps
        raise RecordingError(
            f"{where}: expected the end after {quote(steps)} whole steps, got it after {index.num_steps}"
        )
    if before != fields["sha256"]:
        raise RecordingError(
            f"{where}: the lines before it were changed since they were written (their sha256 is another); copy the recording "
            "again, or record the run again"
        )


def _close_step(index: RankIndex, members: list, fields: dict, manifest: Manifest, where: str) -> None:
    step = fields["step"]
    is_next = step == index.num_steps and (manifest.steps is None or step < manifest.steps)
    expect(is_next, where, f"step {index.num_steps} of {manifest.steps}", step)
    own, counts = StepLines(), []
    for line, place in members:
        if line["step"] != step:
            raise RecordingError(
                f"{place}: a line of step {quote(line['step'])} inside step {step}; record the run again"
            )
        _file(index, own, line, step, manifest, place)
        if line["event"] == "count" and "value" in line:  # up to format 4
            counts.append(line["value"])
    if (other := fields.get("as")) is not None:
        if not 0 <= other < step or own != StepLines():
            raise RecordingError(
                f"{where}: expected lines of step {step} or those of an earlier one, got both or step {quote(other)}; record "
                "again"
            )
        own = index.lines[other]
    stated: Any = fields.get("counts", counts)
    if isinstance(stated, list):
        num = len(own.counted)
        expect(len(stated) == num, where, f"{num} counts of optimizer steps", len(stated))
        stated = tuple(stated)
    if own.counted:
        index.counts[step] = stated
    index.lines.append(own)
    if step not in index.losses or step not in index.batches:
        raise RecordingError(f"{where}: step {step} has no loss or no batch; record the run again")
    index.sha256[step] = fields["sha256"]
    if fields.get("buffers"):
        index.with_buffers.add(step)
    for name, use in own.buffers:
        if use == event_format.CHANGED:
            index.changed.setdefault(name, step)
    if rates := fields.get("rates"):
        index.rates[step] = tuple(rates)
    index.num_steps += 1


def _file(index: RankIndex, own: StepLines, fields: dict[str, Any], step: int, manifest: Manifest, where: str) -> None:
    match fields["event"]:
        case "loss":
            index.losses[step] = fields["value"]
            if (number := fields.get("num_losses", 1)) > 1:
                index.num_losses[step] = number
            if backwards := fields.get("backwards"):
                index.backwards[step] = tuple((forwards, loss) for forwards, loss in backwards)
        case "batch":
            ids, inputs = fields["sample_ids"], fields.get("inputs", [])
            expect(all(type(i) is int for i in ids), where, "sample ids that are ints", ids)
            are_pairs = type(inputs) is list and all(
                type(each) is list and list(map(type, each)) == [int, int] for each in inputs
            )
            expect(are_pairs, where, "two ints for each array of the batch", inputs)
            index.batches[step] = Batch(fields["digest"], tuple(ids), tuple((rows, order) for rows, order in inputs))
        case "collective":
            own.collectives.append(_event(fields["collective"], where))
        case "norm":
            index.norms[step] = fields["value"]
        case "disagreement":
            if fields["phase"] in event_format.TENSOR_USES:
                _check_param(fields, manifest, where)
            else:
                is_activation = fields["phase"] == event_format.FORWARD and fields["use"] in (INPUT, OUTPUT)
                expect(is_activation, where, "the phase of a tensor or an activation", fields["phase"])
            stated = ("step", "phase", "unit", "name", "use", "difference", "axis")
            found = UnequalRanks(**{name: fields[name] for name in stated}, ranks=tuple(fields["ranks"]))
            index.disagreements.append(found)
        case "count":
            _check_param(fields, manifest, where)
            _add(own.counted, fields["name"], len(own.counted), f"the count of {quote(fields['name'])}", step, where)
        case "activation":
            _check_activation(fields, manifest, where)
            at = (fields["microbatch"], fields["name"], fields["use"])
            _add(own.activations, at, fields, f"the {at[2]} of {quote(at[1])}", step, where)
            own.add_bytes(event_format.activation_key(at[2], at[0], at[1]), math.prod(fields["shape"]), fields)
        case "buffer":
            _check_buffer(fields, manifest, step, where)
            of = (fields["name"], fields["use"])
            _add(own.buffers, of, fields, f"buffer {quote(of[0])}", step, where)
            own.add_bytes(event_format.tensor_key(event_format.BUFFERS, *of), math.prod(fields["shape"]), fields)
        case "tensor":
            _check_tensor(fields, manifest, where)
            slot = fields["use"] if fields["phase"] == event_format.STATE else ""
            key = (fields["phase"], fields["name"], slot)
            _add(own.tensors, key, fields, f"{key[0]!r} of {quote(key[1])}", step, where)
            own.add_bytes(event_format.tensor_key(*key), fields["stop"] - fields["start"], fields)


def _add(found: dict[Any, Any], key: Any, value: Any, what: str, step: int, where: str) -> None:
    """Add what a step has once."""
    if key in found:
        raise RecordingError(f"{where}: {what} occurs twice in step {step}; record again")
    found[key] = value


def _event(fields: dict[str, Any], where: str) -> Event:
    expected = {"kind": str, "unit": str, "phase": str, "dtype": str, "num_bytes": int, "group": list}
    for name, kind in expected.items():
        if type(fields.get(name)) is not kind:
            raise RecordingError(
                f"{where}: field {name!r} of a collective: expected {kind.__name__}, got {quote(fields.get(name))}"
            )
    numbers = [fields["num_bytes"], *fields["group"], fields.get("microbatch", 0), fields.get("bucket", 0)]
    are_sizes = all(type(number) is int and 0 <= number < OVERFLOW for number in numbers)
    expect(are_sizes, where, "bytes and ranks as ints of at least 0", fields)
    return Event.from_json(fields)


def _check_param(fields: dict[str, Any], manifest: Manifest, where: str) -> None:
    if fields["name"] not in manifest.params or manifest.unit_of[fields["name"]] != fields["unit"]:
        raise RecordingError(
            f"{where}: the manifest has no parameter {quote(fields['name'])} in unit {quote(fields['unit'])}"
        )


def _check_tensor(fields: dict[str, Any], manifest: Manifest, where: str) -> None:
    name, phase, start, stop = fields["name"], fields["phase"], fields["start"], fields["stop"]
    _check_param(fields, manifest, where)
    expect(phase in event_format.TENSOR_USES, where, _PHASES, phase)
    numel = manifest.params[name].numel
    whole = phase in event_format.WHOLE_ON_RANK
    if not 0 <= start < stop <= numel or (whole and stop - start != numel):
        raise RecordingError(
            f"{where}: expected a range of the {numel} elements of {quote(name)}, got {quote(start)}:{quote(stop)}"
        )
    _check_dtype(fields, where)


def _check_activation(fields: dict[str, Any], manifest: Manifest, where: str) -> None:
    use = fields["use"]
    if use not in (INPUT, OUTPUT) or fields["unit"] != manifest.maker(fields["name"], use):
        raise RecordingError(
            f"{where}: an activation {quote(use)} of unit {quote(fields['unit'])}: the manifest has no such activation"
        )
    shape, order = fields["shape"], fields["order"]
    expect(_is_shape(shape) and fields["microbatch"] >= 0, where, "a shape and a microbatch", shape)
    if order not in list(Order) or (order != Order.TORCH and len(shape) < LEAST_DIMS):
        raise RecordingError(
            f"{where}: expected an order among {[each.value for each in Order]}, and {Order.TORCH.value!r} below {LEAST_DIMS} "
            f"dims, got {quote(order)} of shape {quote(shape)}; record again"
        )
    _check_dtype(fields, where)


def _check_buffer(fields: dict[str, Any], manifest: Manifest, step: int, where: str) -> None:
    uses = (event_format.CHANGED, event_format.INITIAL)[: 2 if step == 0 else 1]
    if fields["use"] not in uses or fields["unit"] != manifest.maker(fields["name"], INPUT):
        raise RecordingError(
            f"{where}: a buffer {quote(fields['use'])} of unit {quote(fields['unit'])}: expected one of {list(uses)}, of the "
            f"unit that has {quote(fields['name'])}; record again"
        )
    expect(_is_shape(fields["shape"]), where, "the shape of a buffer", fields["shape"])
    _check_dtype(fields, where)


def _is_shape(shape: list) -> bool:
    sizes = len(shape) <= MOST_DIMS and all(type(size) is int and size >= 0 for size in shape)
    return sizes and math.prod(shape) < OVERFLOW


def _check_dtype(fields: dict[str, Any], where: str) -> None:
    try:
        numpy_dtype(fields["dtype"])
    except CrossframeError as error:
        raise RecordingError(f"{where}: {error}; record the run again") from None
