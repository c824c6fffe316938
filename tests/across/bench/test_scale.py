"""The simulation of scale: its figures are those of the files, and made-up recordings and traces are read as real ones."""

from collections import Counter

from crossframe.alignment import SAMPLES, VALUES, align
from crossframe.alignment.models import read_models
from crossframe.operators import Trace, find
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from experiments.bench.explain_cost import TOLERANCE, write_traces
from experiments.bench.scale import RENAMED, SMALL, TRANSPOSED, rank_section
from experiments.bench.verdict_cost import AS_IT_IS, write_sketched


def test_figures_are_those_of_the_files_of_a_rank(tmp_path):
    section = rank_section(tmp_path / "one", SMALL)
    figures = {figure.what: figure.value for figure in section.figures}
    recording = Recording.open(tmp_path / "one", partial=True)
    assert len(recording.manifest.params) == len(SMALL.model.shapes)
    of_step_1 = (tmp_path / "one" / "rank00000" / "step00001.safetensors").stat().st_size / 1e6
    written = figures["a recorded step of one rank: written"]
    assert of_step_1 < written < 2 * of_step_1
    assert figures["a recorded step of all ranks: written"] == SMALL.world_size * written


def test_made_up_recordings_in_other_forms_are_mapped(tmp_path):
    paths = [tmp_path / name for name in ("a", "renamed", "transposed")]
    for path, form in zip(paths, (AS_IT_IS, RENAMED, TRANSPOSED), strict=True):
        write_sketched(path, SMALL, noise=1e-9 if form.prefix else 0.0, form=form)
    for path, by in ((paths[1], VALUES), (paths[2], SAMPLES)):
        (values, gradients), (others, other_gradients) = read_models((paths[0], path))
        found = align(values, others, (gradients, other_gradients))
        assert all(entry.paths == (f"net.{entry.name}",) for entry in found.param_map.entries)
        sizes = Counter(found.evidence[name] for name, each in values.items() if each.ndim > 1)
        assert sizes[by] == len([each for each in values.values() if each.ndim > 1]) and not found.undecided
    found = compare(*map(Recording.open, paths[:2]))
    assert found.verdict is not Verdict.BUG and "with other names were matched" in found.notes[0]


def test_made_up_traces_differ_from_the_middle_of_forward_on(tmp_path):
    a, b = map(Trace.read, write_traces(tmp_path, SMALL.model))
    found = find(a, b, TOLERANCE)
    assert found.a is not None and found.b is not None and found.a.index == found.b.index
    assert found.num_matched == (found.a.index, found.b.index) and found.a.phase == "forward"
