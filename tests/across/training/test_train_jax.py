"""The JAX training script: the same run in one process and in two, on any mesh, interrupted or not, is plain training. It goes on
where torch's stopped, and torch's where it did. What several processes do together besides is asked of the same two processes.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from typer.testing import CliRunner

from crossframe.checkpoint import MODEL, STATE, CheckpointError, read
from crossframe.errors import UsageError
from crossframe.layout import Sharding
from crossframe.mesh import MeshSpec
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from experiments import train_jax
from experiments.data import text_batch
from experiments.models.load_flax import nnx_params
from experiments.train import loop
from experiments.train.settings import TrainSettings
from experiments.train_jax import train
from jax_backend.nnx import split, with_params
from tests.on_jax.helpers.recorded_loops import record
from tests.on_jax.helpers.small import small_map

WHAT: dict[str, Any] = {
    "model": "gpt-tiny",
    "steps": 4,
    "batch_size": 12,
    "warmup_steps": 2,
    "clip": 0.5,
    "seed": 3,
    "checkpoint_every": 2,
}
HOW: dict[str, Any] = {"precision": "float64", "layout": "flat"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run on two devices of this process, from its beginning to its end."""
    settings = TrainSettings(tmp_path_factory.mktemp("whole"), **WHAT, **HOW)
    assert train(settings, jax.devices("cpu")[:2])
    return settings


def in_two_processes(folder, *checks):
    """What each of two processes found, and what it printed; see tests.across.programs.two_processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # A test of arithmetic: that XLA optimises its machine code would cost more than all the rest.
    environment = {"XLA_FLAGS": "--xla_backend_optimization_level=0"} | os.environ | {"JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.across.programs.two_processes", str(rank), port, str(folder), *checks],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in started]
    except subprocess.TimeoutExpired:
        for process in started:
            process.kill()
        said = [process.communicate()[0] for process in started]
        pytest.fail("two processes did not end within 120 s; they printed\n" + "\n".join(said))
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)], said


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    return in_two_processes(tmp_path_factory.mktemp("processes"), "checkpoints", "summons", "orbax")[0]


def lines(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in found]


def content(path):
    """All parameters and moments of a checkpoint, in full, and its values."""
    saved, found = read(path), {}
    for section, sharding in saved.sections.items():
        alone = Sharding(tuple((unit, layout.over(1)) for unit, layout in sharding.units), MeshSpec(1))
        for (_, layout), line in zip(alone.units, saved.lines(section, alone, 0), strict=True):
            found |= {piece.name: line[piece.shard_start : piece.shard_stop] for piece in layout.pieces(0)}
    return found | {key: saved.value(key) for key in saved.values}


def near(got, expected, first):
    """The steps behind `first` are those of the other run, to what rounding of float64 may do."""
    bounds = bounds_for("float64")
    assert [step for step, *_ in got] == [step for step, *_ in expected if step > first]
    for (step, loss, norm), (_, other_loss, other_norm) in zip(got, expected[first:], strict=True):
        assert abs(loss - other_loss) <= bounds.loss * other_loss, step
        assert abs(norm - other_norm) <= bounds.parameter * other_norm, step


@pytest.mark.exhaustive
def test_two_processes_go_on_where_one_was_killed_and_stop_when_asked(whole, tmp_path):
    # What a run leaves that is killed while it writes its second checkpoint, and a third one that rotted on its disk.
    folder = tmp_path
    shutil.copytree(whole.output, folder / "run")
    checkpoints = folder / "run" / "checkpoints"
    rotten = checkpoints / "step-00000004" / "rank00001.safetensors"
    rotten.write_bytes(rotten.read_bytes()[:-1] + bytes([rotten.read_bytes()[-1] ^ 1]))
    (checkpoints / "writing-step-00000003-0123456789abcdef").mkdir()
    with (folder / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    (folder / "settings.json").write_text(json.dumps(asdict(whole), default=str))
    found, said = in_two_processes(folder, "training")
    # The second process was asked to stop in the third step; the first one, which was not asked, stopped after that step too.
    names = ["damaged-step-00000004", "step-00000002", "step-00000003"]
    assert [each["training"] for each in found] == [[True, names, True, True]] * 2
    assert "DAMAGED" in said[0] and "rank00001.safetensors has other content" in said[0]
    assert "asked to stop: stopped at step 3 of 4" in said[0] and "step-00000003, step 3" in said[0]
    assert "step 3" not in said[1]  # the first process alone speaks
    # Two ranks: a sum of two terms has one order (R32), in one process or over gloo.
    assert lines(folder / "run") == lines(whole.output)
    a, b = (content(each / "checkpoints" / "step-00000004") for each in (whole.output, folder / "run"))
    assert a.keys() == b.keys() and len(a) == 3 * 37 + 1 and a["step"] == 4
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_R36_R37_checkpoints_of_two_processes_load_on_another_mesh_and_what_is_damaged_is_told_to_both(processes):
    found = [each["checkpoints"] for each in processes]
    assert [same for same, _ in found] == [[True] * 3] * 2
    lost, there, failed = zip(*(errors for _, errors in found), strict=True)
    words = "rank00002.safetensors is missing; with it is lost what rank 2 held of"
    assert lost[1].startswith("CheckpointError") and words in lost[1] and "'inp.weight'" in lost[1]
    assert lost[0].startswith("AgreementError: process 1 failed in the reading of a checkpoint") and words in lost[0]
    assert there[0].startswith("CheckpointError") and "expected nothing there" in there[0]
    assert there[1].startswith("AgreementError: process 0 failed in the beginning of a checkpoint")
    assert failed[0].startswith("AgreementError: process 1 failed in the writing of a checkpoint: CheckpointError")
    assert failed[1].startswith("CheckpointError") and "rank00002.safetensors: cannot be written" in failed[1]


def test_R18_R20_full_parameters_are_shown_to_and_edited_by_two_processes(processes):
    for each in processes:
        assert each["summons"] == [True] * 10


@pytest.mark.exhaustive
def test_two_processes_record_into_one_directory_what_one_process_records(tmp_path):
    folder = tmp_path / "two"
    folder.mkdir()
    found, _ = in_two_processes(folder, "recordings")
    refused = [each["recordings"] for each in found]
    assert refused[0].startswith("RecordingError") and "not empty" in refused[0]
    assert refused[1].startswith("AgreementError: process 0 failed in the beginning of a recording")
    alone = record(tmp_path / "alone", param_map=small_map())  # on one device
    for name in ("by-hand", "sharded"):
        verdict = compare(alone, Recording.open(folder / name))
        assert verdict.verdict is Verdict.ROUNDING, verdict.reason
    inside = Recording.open(folder / "sharded")
    for rank in range(4):
        for name in inside.manifest.params:
            np.testing.assert_array_equal(inside.unsharded(0, rank, name), inside.full("parameters", 0, name))
            assert inside.has("backward", 0, name, rank)


def test_R36_R37_orbax_restores_on_another_mesh_in_two_processes(processes):
    assert [each["orbax"] for each in processes] == [[True]] * 2


ELSEWHERE = [
    (3, {"layout": "ragged", "strategy": "shard_grad_op", "micro_batch_size": 2}),
    (4, {"layout": "per_param", "strategy": "hybrid_shard", "shard": 2}),
    (1, {"layout": "flat"}),
    (4, {"layout": "ragged"}),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("num_devices", "how"), ELSEWHERE)
def test_R36_R37_a_run_goes_on_on_other_devices_with_the_losses_that_it_would_have_had(
    whole, tmp_path, num_devices, how
):
    resume = whole.output / "checkpoints" / "step-00000002"
    there = replace(whole, output=tmp_path, resume=str(resume), **how)
    assert train(there, jax.devices("cpu")[:num_devices])
    near(lines(tmp_path), lines(whole.output), 2)


def train_in_torch(rank, world_size, settings):
    import torch

    from experiments import train_torch

    return train_torch.train(settings, torch.device("cpu"))


@pytest.mark.exhaustive
def test_R36_R37_torch_goes_on_where_jax_stopped_and_jax_where_torch_did(ranks, whole, tmp_path):
    common: dict[str, Any] = {**WHAT, "precision": "float64", "device": "cpu"}
    at_2 = whole.output / "checkpoints" / "step-00000002"
    for i, (world_size, how) in enumerate([(3, {"api": "fsdp1", "checkpoint_every": 1}), (2, {"layout": "ragged"})]):
        settings = TrainSettings(tmp_path / str(i), **{**common, **how}, resume=str(at_2))
        assert all(ranks.run(world_size, train_in_torch, settings))
        near(lines(settings.output), lines(whole.output), 2)

    # On the mesh of replicas besides, 2 x 2.
    at_3 = tmp_path / "0" / "checkpoints" / "step-00000003"
    how = {"layout": "per_param", "strategy": "hybrid_shard", "shard": 2}
    settings = replace(whole, output=tmp_path / "jax", resume=str(at_3), **how)
    mesh = train_jax.make_mesh(MeshSpec(shard=2, replicate=2), jax.devices("cpu")[:4])
    trainer = train_jax.JaxTrainer(settings, mesh)
    assert loop.run(settings, train_jax.JaxProcesses(), lambda: trainer)
    near(lines(settings.output), lines(whole.output), 3)
    # What one has written the other writes again, bit for bit: nothing is lost or rounded on the way.
    trainer.load(at_3)
    trainer.save(tmp_path / "again", {})
    with pytest.raises(CheckpointError, match="it is of no training run"):  # since nothing was told of a step
        train(replace(settings, output=tmp_path / "c", resume=str(tmp_path / "again")), jax.devices("cpu")[:4])
    a, b = content(at_3), content(tmp_path / "again")
    assert a.keys() == b.keys() and len(a) == 3 * 37 + 1 and a["step"] == 3
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def plainly(settings):
    """Losses and norms of the gradient of the same run without any sharding: optax's AdamW on the whole batch."""
    definition = settings.definition
    graphdef, params, state = split(definition.make_flax("float64"))
    params = jax.tree.map(
        jnp.asarray, nnx_params(definition, params, definition.initial_params(settings.seed, "float64"))
    )
    rates = jnp.asarray([settings.learning_rate_at(step) for step in range(settings.steps)])
    optimizer = optax.adamw(lambda count: rates[count], weight_decay=settings.weight_decay)

    @jax.jit
    def step(params, opt_state, tokens, targets):
        def loss_of(params):
            logits = with_params(graphdef, params, state)(tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        norm = jnp.sqrt(sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda grad: grad * jnp.minimum(1.0, settings.clip / (norm + 1e-6)), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, norm

    opt_state, found = optimizer.init(params), []
    for i in range(settings.steps):
        batch = text_batch(settings.seed, i, 0, 1, settings.batch_size, definition.context)
        params, opt_state, loss, norm = step(params, opt_state, batch.tokens, batch.targets)
        found.append((i + 1, float(loss), float(norm)))
    return found


@pytest.mark.exhaustive
def test_a_run_is_plain_training_and_bfloat16_computes_near_it(whole, tmp_path):
    expected = plainly(whole)
    assert len(expected) == 4 and expected[0][2] > 2 * whole.clip  # or nothing was clipped
    np.testing.assert_allclose(lines(whole.output), expected, rtol=1e-11)

    low = TrainSettings(tmp_path, **{**WHAT, "steps": 2}, precision="bfloat16", layout="flat")
    train(low, jax.devices("cpu")[:2])
    # bfloat16 has 8 bits: logits of order 1 are off by some 2 ** -8, and must be, or nothing was computed in it.
    difference = np.abs(np.subtract(lines(low.output), expected[:2]))[:, 1]
    assert 1e-6 < difference.max() < 0.02
    for settings, dtype in ((whole, "float64"), (low, "float32")):
        saved = read(settings.output / "checkpoints" / "step-00000002")
        stored = {spec.dtype for section in (MODEL, STATE) for spec in saved.sections[section].params}
        assert stored == {dtype} and saved.about["step"] == 2


def test_the_command_passes_on_every_option_and_says_wrong_use_in_one_line(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(train_jax, "train", lambda settings: seen.append(settings) or True)
    monkeypatch.setattr(train_jax, "_start", lambda *where: seen.append(where))
    options = asdict(
        TrainSettings(
            tmp_path, **WHAT, layout="flat", precision="float64", micro_batch_size=3, shard=None, async_save=True
        )
    )
    mine = {name: value for name, value in options.items() if name not in ("api", "dropout", "device")}
    mine.pop("async_save")
    words = [
        w for name, value in mine.items() if value is not None for w in (f"--{name.replace('_', '-')}", str(value))
    ]
    words.append("--async-save")
    runner = CliRunner()
    assert runner.invoke(train_jax.app, [*words, "--cpu-devices", "3"]).exit_code == 0
    assert seen[0] == (3, None, None, None) and asdict(seen[1]) == options
    monkeypatch.setattr(train_jax, "train", lambda settings: False)
    assert runner.invoke(train_jax.app, words).exit_code == 1
    result = runner.invoke(train_jax.app, [*words, "--steps", "0"])
    assert result.exit_code == 2 and result.output.startswith("train_jax: --steps: expected an integer of at least 1")


def test_another_model_and_a_folder_without_a_checkpoint_are_refused(whole, tmp_path):
    with pytest.raises(UsageError, match="'gpt-tiny' in float64, and this run of 'gpt-tiny' in float32"):
        train(replace(whole, precision="float32"), jax.devices("cpu")[:2])
    with pytest.raises(CheckpointError, match=r"--resume .*: expected a checkpoint, got no index.json there"):
        train(replace(whole, output=tmp_path, resume=str(tmp_path)), jax.devices("cpu")[:2])
    with pytest.raises(UsageError, match="over which a run from step 0 would write"):
        train(replace(whole, resume="none"), jax.devices("cpu")[:2])
    with pytest.raises(UsageError, match=r"dropout: expected 0, got 0\.1; experiments\.train_torch alone has it"):
        train(replace(whole, dropout=0.1), jax.devices("cpu")[:2])
    with pytest.raises(UsageError, match="--batch-size: expected a multiple of the 4 ranks, got 6"):
        train(replace(whole, batch_size=6), jax.devices("cpu")[:4])
