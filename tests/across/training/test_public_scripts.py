"""Scripts of public repositories: how they are prepared, and how answers are judged."""

import subprocess

import pytest

from crossframe.errors import UsageError
from experiments.public_scripts import run as subject
from experiments.public_scripts.run import Mistake, Pair, Script, Work, judge, scripts_of, table_of


@pytest.mark.parametrize("name", subject.SETS)
def test_cases_are_complete(name):
    scripts = scripts_of(name)
    assert len({script.name for script in scripts}) == len(scripts)
    assert all(len(script.commit) == 40 and script.repository.count("/") == 1 for script in scripts)
    assert all(script.steps for script in scripts if script.mistake)


@pytest.fixture
def clone(tmp_path):
    """A repository whose script imports from its root and reads data beside it."""
    folder = tmp_path / "clones" / "owner+name"
    (folder / "package").mkdir(parents=True)
    (folder / "scripts").mkdir()
    (folder / "package" / "of_the_root.py").write_text("WORD = 'here'\n")
    (folder / "scripts" / "train.py").write_text(
        "import sys\nfrom package.of_the_root import WORD\nprint(WORD, open('data.txt').read(), sys.argv[1:], 'loss: 1.5')\n"
    )
    (folder / "scripts" / "ranks.py").write_text(
        "import os\nprint(f\"of {os.environ['WORLD_SIZE']} ranks, {os.environ.get('WORD', '')!r}\\n\", end='')\n"
    )
    subprocess.run(["git", "-C", folder, "init", "--quiet"], check=True)
    return _committed(folder)


def _committed(folder):
    """Commit all files of a repository; returns the commit."""
    for command in (
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "one"],
    ):
        subprocess.run(["git", "-C", folder, *command], check=True)
    return subprocess.run(
        ["git", "-C", folder, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_script_runs_where_it_lies_with_its_data_and_replacements(tmp_path, clone):
    script = Script(
        "one", "owner/name", clone, "scripts/train.py", take=("scripts", "package"), root=".", options="--a 1",
        before="open('data.txt', 'w').write('data')", replace=(("package/of_the_root.py", "here", "there"),),
    )  # fmt: skip
    work = Work(script, tmp_path / "clones", tmp_path, tmp_path / "work")
    assert work.run("plain", script.replace) == (0, "there data ['--a', '1'] loss: 1.5\n")
    with pytest.raises(UsageError, match=r"one: expected a text of train.py to replace, got 'absent'"):
        work.run("edited", [("absent", "")])
    with pytest.raises(UsageError, match=r"expected a clone at .*git clone https://github.com/owner/other"):
        Work(Script("two", "owner/other", clone, "a.py"), tmp_path, tmp_path, tmp_path).run("plain", ())


class _Said(Work):
    """Answers instead of runs."""

    def __init__(self, script, runs, verdicts, folder):
        super().__init__(script, folder, folder, folder)
        self._runs, self._verdicts = iter(runs), iter(verdicts)

    def run(self, name, replace, *, recorded=False, pair=None):
        return next(self._runs)

    def compare(self, a, b):
        return next(self._verdicts)


@pytest.mark.parametrize(
    ("steps", "runs", "verdicts", "wrong"),
    [
        (2, [(0, "loss 1"), (0, "loss 1"), (0, ""), (0, "")], ["equal", "bug"], []),
        (3, [(0, "loss 1"), (0, "loss 2"), (0, ""), (0, "")], ["rounding", "rounding"], [
            "recorded, 2 steps instead of recorded, 3 steps", "the script prints other losses than without recording",
            "the same run again is rounding, ", "the mistake is rounding, "]),
        (2, [(1, "")], [], ["the script itself ends with 1"]),
        (2, [(0, ""), (2, "crossframe: not recorded: Recorder")], [], ["refused instead of recorded, 2 steps"]),
        (0, [(0, ""), (2, "crossframe: not recorded: Recorder")], [], []),
        (0, [(0, ""), (1, "Traceback")], [], ["crashed instead of refused"]),
    ],
)  # fmt: skip
def test_answers_are_judged(tmp_path, monkeypatch, steps, runs, verdicts, wrong):
    monkeypatch.setattr(subject.Recording, "open", lambda path: type("Found", (), {"num_steps": 2}))
    mistake = Mistake("wrong", (), 1, ("reduce/*",)) if steps else None
    script = Script("one", "owner/name", "", "a.py", steps=steps, mistake=mistake)
    where = {"phase": "reduce", "event": "reduce", "step": 1, "parameter": "w"}
    said = [{"verdict": each, **({"first_divergence": where} if each == "bug" else {})} for each in verdicts]
    found = judge(_Said(script, runs, said, tmp_path))
    assert found["wrong"] == wrong
    row = {"case": "one", "expected": script.expected, **found, "first": found}
    assert ("(wrong)" in table_of([row])) is bool(wrong)


@pytest.mark.parametrize(("replaced", "wrong"), [(False, []), (True, ["the pair (other) is rounding"])])
def test_a_run_with_another_fsdp_must_be_equal(tmp_path, monkeypatch, replaced, wrong):
    monkeypatch.setattr(subject.Recording, "open", lambda path: type("Found", (), {"num_steps": 2}))
    script = Script("one", "owner/name", "", "a.py", steps=2, pairs=(Pair("other", replaced=replaced),))
    said = [{"verdict": each} for each in ("equal", "rounding")]
    assert judge(_Said(script, [(0, "")] * 4, said, tmp_path))["wrong"] == wrong


_DDP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
    loss = model(batch.chunk(ranks)[rank]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach() / ranks
    dist.all_reduce(total)
    if rank == 0:
        print(f"loss: {total.item():.5f}")
dist.destroy_process_group()
"""


@pytest.fixture
def ddp_clone(tmp_path, clone):
    """(clones, commit) of a repository whose script trains on as many ranks as torchrun starts."""
    folder = tmp_path / "clones" / "owner+name"
    (folder / "scripts" / "ddp.py").write_text(_DDP)
    return _committed(folder)


def test_pairs_run_on_their_own_ranks_and_environment(tmp_path, clone):
    script = Script("ranks", "owner/name", clone, "scripts/ranks.py", ranks=2)
    work = Work(script, tmp_path / "clones", tmp_path, tmp_path / "work")
    found = work.run("pair", (), pair=Pair("three ranks", ranks=3, environment={"WORD": "here"}))
    assert found[0] == 0 and found[1].count("of 3 ranks, 'here'") == 3, found


def test_torch_backend_stands_for_fsdp_in_a_pair(tmp_path, clone):
    (tmp_path / "clones" / "owner+name" / "scripts" / "fsdp.py").write_text(
        "from torch.distributed.fsdp import fully_shard\nprint(fully_shard.__module__)\n"
    )
    script = Script("fsdp", "owner/name", _committed(tmp_path / "clones" / "owner+name"), "scripts/fsdp.py")
    work = Work(script, tmp_path / "clones", tmp_path, tmp_path / "work")
    assert work.run("as it is", ())[1] == "torch.distributed.fsdp\n"
    assert work.run("pair", (), pair=Pair("crossframe's FSDP", replaced=True))[1] == "torch_backend.fully_shard\n"


@pytest.mark.exhaustive
def test_a_script_on_two_ranks_is_judged_with_pairs(tmp_path, ddp_clone):
    """A pair on one rank agrees, one with another learning rate does not, and a forgotten reduction is found."""
    pairs = (Pair("one rank", ranks=1), Pair("another learning rate", replace=(("lr=0.1", "lr=0.2"),)))
    local = (("torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))", "torch.nn.Linear(4, 2)"),)
    mistake = Mistake("gradients are not reduced", local, 0, ("reduce/*",))
    script = Script("ddp", "owner/name", ddp_clone, "scripts/ddp.py", 3, ranks=2, pairs=pairs, mistake=mistake)
    found = judge(Work(script, tmp_path / "clones", tmp_path, tmp_path / "work"))
    assert found["wrong"] == [f"the pair (another learning rate) is {found['pairs'][1]}"]
    assert found["again"] == "equal" and found["pairs"][0] == "rounding"
    row = {"case": "ddp", "expected": script.expected, **found, "first": found}
    assert f"| {'; '.join(found['pairs'])} |" in table_of([row])
    without = {key: value for key, value in row.items() if key != "pairs"}
    assert "pairs" not in table_of([without]).splitlines()[0]
