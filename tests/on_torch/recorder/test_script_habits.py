"""What training scripts do besides a plain step: schedules, clipping by hand, optimizers of one's own, and other habits."""

import copy
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from tests.core.helpers.random_layouts import QUICK
from tests.on_torch.helpers.recorded_loops import WORDS, Net, batches
from torch_backend.recorder import Recorder, script

CLIP = 0.05


class MyAdam(torch.optim.AdamW):
    """AdamW under another name."""


def by_torch(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def by_hand(model: nn.Module) -> None:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    total = torch.sqrt(sum((grad**2).sum() for grad in grads))  # type: ignore[arg-type]
    for grad in grads:
        grad.mul_(min(1.0, CLIP / (float(total) + 1e-6)))


def train(directory, *, clip=by_torch, optimizer=torch.optim.AdamW, warmup=4) -> Recording:
    torch.manual_seed(0)
    model = Net().double()
    made = optimizer(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, (step + 1) / warmup))
    with Recorder(directory, model=model, optimizer=made, name="net") as recorder:
        for step in range(4):
            tokens = batches(step, 0, 1)[0]
            logits = model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            clip(model)
            made.step()
            schedule.step()
            made.zero_grad()
            recorder.step()
    return Recording.open(directory)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Recording:
    return train(tmp_path_factory.mktemp("plain") / "plain")


def test_clipping_by_hand_in_a_script_is_rounding(plain, tmp_path):
    found = compare(plain, train(tmp_path / "hand", clip=by_hand))
    assert found.verdict is Verdict.ROUNDING, found.reason
    assert any("after clipping by" in note and "in hand" in note for note in found.notes)


def test_a_subclass_under_another_name_is_equal(plain, tmp_path):
    found = compare(plain, train(tmp_path / "mine", optimizer=MyAdam))
    assert found.verdict is Verdict.EQUAL and not found.settings


def test_rates_are_recorded_at_every_step(plain, tmp_path):
    assert [plain.learning_rates(step) for step in range(4)] == [(2.5e-3,), (5e-3,), (7.5e-3,), (1e-2,)]
    found = compare(plain, train(tmp_path / "longer", warmup=8))
    assert found.verdict is Verdict.INCOMPARABLE
    assert found.reason.startswith("learning rate differs: 0.0025 in plain, 0.00125 in longer")


CONTRASTIVE = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def loss_of(vectors):
    return nn.functional.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))

def loss_with_cache(x):
    \"\"\"Parts of the batch go on from the cached gradients of all vectors.\"\"\"
    parts = x.split(2)
    with torch.no_grad():
        vectors = torch.cat([model(part) for part in parts])
    vectors.requires_grad_()
    loss = loss_of(vectors)
    loss.backward()
    copied = loss.detach().requires_grad_()

    def go_on(scale):
        with torch.enable_grad():
            for part, grad in zip(parts, vectors.grad.split(2)):
                (scale * (model(part) * grad).sum()).backward()

    copied.register_hook(go_on)
    return copied

for step in range(3):
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    loss = loss_of(model(x))
    (loss / 2 * 2).backward()  # as trainers that accumulate gradients divide it
    optimizer.step()
    optimizer.zero_grad()
"""
CACHED = CONTRASTIVE.replace("loss = loss_of(model(x))", "loss = loss_with_cache(x)")


def test_a_loss_with_cached_gradients_counts_once(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    wrong = CACHED.replace("return nn.functional", "return 1.01 * nn.functional")
    recordings = []
    for i, text in enumerate((CONTRASTIVE, CACHED, wrong)):
        path = tmp_path / f"{i}.py"
        path.write_text(text)
        assert script.run([str(path)], directory=str(tmp_path / str(i)), every=1, dense=1) == 0
        recordings.append(Recording.open(tmp_path / str(i)))
    plain, cached, wrong = recordings
    assert cached.losses() == pytest.approx(plain.losses())
    assert compare(plain, cached).verdict is Verdict.ROUNDING
    found = compare(cached, wrong)
    assert found.verdict is Verdict.BUG and found.first_divergence.step == 0, found.reason


HABITS = (
    "accumulation",
    "averaged weights in evaluation",
    "clipping by hand",
    "edits between steps",
    "evaluation without no_grad",
    "evaluation",
    "generators",
    "gradients by hand",
    "reused modules",
    "scaler",
    "schedule",
    "skipped step",
    "two optimizers",
)


def with_habits(directory: Path, habits: frozenset[str]) -> Recording:
    """A run of a script that has these habits."""
    torch.manual_seed(0)
    model = Net().double()
    if "reused modules" in habits:
        model.blocks[1] = model.blocks[0]
    parts = [list(model.blocks.parameters()), [p for n, p in model.named_parameters() if not n.startswith("blocks")]]
    parts = parts if "two optimizers" in habits else [parts[0] + parts[1]]
    optimizers = [torch.optim.AdamW(parts[0], 1e-2), *(torch.optim.SGD(part, 0.1) for part in parts[1:])]
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in optimizers if "schedule" in habits]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled="scaler" in habits)
    averaged = copy.deepcopy(model.state_dict())

    def evaluate(step: int) -> None:
        model.eval()
        with torch.set_grad_enabled("evaluation without no_grad" in habits):
            model(batches(step + 50, 0, 1)[0])
        model.train()

    with Recorder(directory, model=model, name="net", dense=3) as recorder:
        for step in range(3):
            fed = batches(step, 0, 1, 2 if "accumulation" in habits else 1)
            for tokens in (each for each in fed) if "generators" in habits else fed:
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / len(fed)
                scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            if "gradients by hand" in habits:
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad.add_(0.01 * torch.sign(param.detach()))
            if "clipping by hand" in habits:
                by_hand(model)
            if step != 1 or "skipped step" not in habits:
                for optimizer in optimizers:
                    scaler.step(optimizer)
            scaler.update()
            for schedule in schedules:
                schedule.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            recorder.step()
            if "edits between steps" in habits:
                with torch.no_grad():
                    model.scale.mul_(0.5)
            if "averaged weights in evaluation" in habits:
                kept = copy.deepcopy(model.state_dict())
                averaged = {name: 0.9 * averaged[name] + 0.1 * value for name, value in kept.items()}
                model.load_state_dict(averaged)
                evaluate(step)
                model.load_state_dict(kept)
            if "evaluation" in habits or "evaluation without no_grad" in habits:
                evaluate(step)
    return Recording.open(directory)


@settings(QUICK, max_examples=5)
@given(st.frozensets(st.sampled_from(HABITS), max_size=5))
def test_a_script_run_twice_is_equal_whatever_its_habits(habits):
    with tempfile.TemporaryDirectory() as folder:
        a, b = (with_habits(Path(folder) / name, habits) for name in "ab")
        for pair in ((a, a), (a, b), (b, a)):
            assert compare(*pair).verdict is Verdict.EQUAL


def test_habits_without_effect_are_equal(tmp_path):
    plain = with_habits(tmp_path / "plain", frozenset())
    for habit in ("evaluation", "averaged weights in evaluation", "generators", "evaluation without no_grad", "scaler"):
        found = compare(plain, with_habits(tmp_path / habit.replace(" ", "_"), frozenset({habit})))
        assert found.verdict is Verdict.EQUAL, (habit, found.reason)


def test_training_that_goes_on_in_eval_mode_is_recorded(tmp_path):
    def run(name: str, *, stays_in_eval: bool) -> Recording:
        torch.manual_seed(0)
        model = Net().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Recorder(tmp_path / name, model=model, optimizer=optimizer, name="net", dense=3) as recorder:
            for step in range(3):
                model.train(not (stays_in_eval and step))
                for tokens in batches(step, 0, 1, 2):
                    logits = model(tokens[:, :-1])
                    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step()
                model.eval()
                model(batches(step + 50, 0, 1)[0])
        return Recording.open(tmp_path / name)

    usual, changed = run("usual", stays_in_eval=False), run("changed", stays_in_eval=True)
    assert changed.activations(2) == usual.activations(2)
    assert compare(usual, changed).verdict is Verdict.EQUAL  # no module of the model asks for the mode


class Recurrent(nn.Module):
    """A recurrent net that is given the state that it returned."""

    def __init__(self, *, reordered: bool) -> None:
        super().__init__()
        self.embed, self.gates, self.head = nn.Embedding(WORDS, 8), nn.Linear(16, 8), nn.Linear(8, WORDS)
        self.reordered = reordered

    def forward(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for x in self.embed(tokens).unbind(1):
            both = torch.cat([x, state], -1)
            if self.reordered:  # sums in another order
                state = torch.tanh((both.flip(-1) @ self.gates.weight.flip(-1).T) + self.gates.bias)
            else:
                state = torch.tanh(self.gates(both))
            found.append(state)
        return self.head(torch.stack(found, 1)), state


@pytest.fixture
def run_recurrent(tmp_path):
    def run(name: str, given, *, reordered: bool = False) -> Recording:
        """Three steps of two microbatches, each with the state of its last step.

        Args:
            given: the state, of shape (samples, width), that the model is given instead of that which it returned.
        """
        torch.manual_seed(0)
        model = Recurrent(reordered=reordered).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Recorder(tmp_path / name, model=model, optimizer=optimizer, name="net", dense=3) as recorder:
            tokens = batches(0, 0, 1)[0]
            states = [torch.zeros(len(tokens), 8, dtype=torch.float64)] * 2
            for step in range(3):
                for i, tokens in enumerate(batches(step, 0, 1, 2)):
                    logits, states[i] = model(tokens[:, :-1], given(states[i][: len(tokens)]).detach())
                    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step()
        return Recording.open(tmp_path / name)

    return run


def reset_first(state: Tensor) -> Tensor:
    """The first sample begins another sequence."""
    return torch.cat([torch.zeros_like(state[:1]), state[1:]])


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(lambda state: state, id="shared"),
        pytest.param(lambda state: torch.cat([state]), id="copied"),
        pytest.param(reset_first, id="reset"),
    ],
)
def test_a_state_that_goes_from_step_to_step_is_no_batch(run_recurrent, given):
    a, b = run_recurrent("a", given), run_recurrent("b", given, reordered=True)
    assert a.batch(2, 0).digest == b.batch(2, 0).digest
    assert compare(a, b).verdict is Verdict.ROUNDING, compare(a, b).reason


def test_a_state_that_begins_anew_each_time_is_in_every_batch(run_recurrent):
    """Whatever came before, so that samples do not depend on the number of microbatches."""
    found = run_recurrent("a", torch.zeros_like)
    assert [len(found.batch(step, 0).inputs) for step in range(3)] == [2, 2, 2]


def test_a_state_that_is_not_reset_is_a_bug(run_recurrent):
    found = compare(run_recurrent("a", reset_first), run_recurrent("b", lambda state: state))
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and where is not None
    assert (where.step, where.event) == (1, "input")


class Masked(nn.Module):
    """Sums the embeddings of the tokens that are no padding, as models of transformers are called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, num_items: Tensor) -> Tensor:
        found = self.head(torch.tanh((self.embed(input_ids) * attention_mask[..., None]).sum(1)))
        return nn.functional.cross_entropy(found, input_ids[:, 0], reduction="sum") / num_items


LENGTHS = (5, 2, 3, 1)


@pytest.fixture(scope="module")
def run_padded(tmp_path_factory):
    def run(*microbatches, num_items=4) -> Recording:
        """Two steps; a microbatch, which is a range of samples, is padded to its longest one."""
        torch.manual_seed(0)
        model = Masked().double()
        made = torch.optim.AdamW(model.parameters(), 1e-2)
        texts = [torch.randint(WORDS, (length,)) for length in LENGTHS]
        directory = tmp_path_factory.mktemp("padded") / "run"
        with Recorder(directory, model=model, optimizer=made, name="net") as recorder:
            for _ in range(2):
                for start, stop in microbatches:
                    tokens = nn.utils.rnn.pad_sequence(texts[start:stop], batch_first=True)
                    lengths = torch.tensor(LENGTHS[start:stop])[:, None]
                    mask = (torch.arange(tokens.shape[1]) < lengths).long()
                    model(input_ids=tokens, attention_mask=mask, num_items=torch.tensor(num_items)).backward()
                made.step()
                made.zero_grad()
                recorder.step()
        return Recording.open(directory)

    return run


def test_padding_by_microbatch_is_rounding(run_padded):
    whole, halves = run_padded((0, 4)), run_padded((0, 2), (2, 4))
    one, other = (recording.batch(0, 0) for recording in (whole, halves))
    assert one.digest != other.digest and one.sample_ids == other.sample_ids and one.has_samples_of(other)
    found = compare(whole, halves)
    assert found.verdict in (Verdict.EQUAL, Verdict.ROUNDING), found.reason


def test_another_number_of_items_is_a_bug_in_the_loss(run_padded):
    found = compare(run_padded((0, 4)), run_padded((0, 4), num_items=2))
    assert found.verdict is Verdict.BUG and found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.event) == (0, "loss")


PAST_MODULES = """
class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.softplus = nn.Parameter(torch.ones(4)), nn.Softplus()
    def forward(self, x):
        return self.softplus(self.weight * x)
model = Bare()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(3, 4):
    model.softplus(model.weight * x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_only_modules_without_parameters_are_called(run, tmp_path):
    """As by Gaussian processes of GPyTorch, whose own modules do not go through nn.Module.__call__."""
    assert run(PAST_MODULES) == 0
    found = Recording.open(tmp_path / "out")
    assert found.num_steps == 3 and set(found.manifest.params) == {"weight"}


PARTS = """
from torch.utils.checkpoint import checkpoint
class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2)
model = Parts()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for xs in torch.randn(3, 2, 5, 4).requires_grad_():
    for x in xs:
        hidden = checkpoint(model.first, x, use_reentrant=True) if "--again" in sys.argv else model.first(x)
        model.second(hidden).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_part_that_backward_runs_again_is_recorded_once(run, tmp_path):
    """Reentrant checkpointing runs it without autograd history first."""
    plain, again = (tmp_path / name for name in ("plain", "again"))
    assert run(PARTS, directory=str(plain)) == 0 and run(PARTS, "--again", directory=str(again)) == 0
    plain, again = Recording.open(plain), Recording.open(again)
    assert [len(again.batch(step, 0).sample_ids) for step in range(3)] == [10, 10, 10]
    assert again.activations(0) == plain.activations(0)
    assert compare(plain, again).verdict is Verdict.EQUAL
