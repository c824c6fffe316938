"""The simulated rank: what it writes is a recording, and the figures are those of its files."""

from crossframe.recording import Recording
from experiments.bench.scale import SMALL, rank_section


def test_figures_are_those_of_the_files_of_a_rank(tmp_path):
    section = rank_section(tmp_path / "one", SMALL)
    figures = {figure.what: figure.value for figure in section.figures}
    recording = Recording.open(tmp_path / "one", partial=True)
    assert len(recording.manifest.params) == len(SMALL.model.shapes)
    of_step_1 = (tmp_path / "one" / "rank00000" / "step00001.safetensors").stat().st_size / 1e6
    written = figures["a recorded step of one rank: written"]
    assert of_step_1 < written < 2 * of_step_1
    assert figures["a recorded step of all ranks: written"] == SMALL.world_size * written
