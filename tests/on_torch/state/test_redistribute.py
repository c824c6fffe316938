"""From flat and ragged shards to DTensors and back, and state dicts that go this way (state/_redistribute.py)."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportPrivateImportUsage=false

import copy
import math
import random
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from crossframe.errors import AgreementError, StateDictError
from crossframe.layout import Layout
from crossframe.params import ParamSpec
from crossframe.trace import ALL_TO_ALL, summary
from tests.on_torch.helpers.layouts import LAYOUTS, locations_of, mesh_of, shard
from tests.on_torch.helpers.models import build_net, loss_of
from torch_backend.compat._dtypes import dtype_name
from torch_backend.observe import record_trace
from torch_backend.pieces._fill_from_state_dict import fill
from torch_backend.pieces._piece_moves import as_sharded
from torch_backend.pieces._piece_tensor import PieceTensor

PIECES = LAYOUTS[1:]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, 1).view(torch.uint8)


def _random_full(seed: int) -> list[Tensor]:
    """Parameters of random shapes, empty ones among them, of random bits."""
    drawn = random.Random(seed)
    dtype = drawn.choice(DTYPES)
    shapes = [
        tuple(drawn.choice([0, 1, 1, 2, 3, 5, 8, 13]) for _ in range(drawn.randint(1, 3)))
        for _ in range(drawn.randint(1, 5))
    ]
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        .view(dtype)
        .view(shape)
        for shape in shapes
    ]


def _num_moved(layout: Layout, rank: int) -> int:
    """How many elements of a rank's rows lie on other ranks. Plain loops."""
    num_moved = 0
    for i, spec in enumerate(layout.params):
        width = spec.numel // spec.shape[0] if spec.shape[0] else 0
        num_rows = -(-spec.shape[0] // layout.world_size)
        for element in range(width * num_rows * rank, min(width * num_rows * (rank + 1), spec.numel)):
            (held,) = layout.find(i, element, element + 1)
            num_moved += held.rank != rank
    return num_moved


def _there_and_back(rank: int, world_size: int, kind: str, sizes: tuple[int, ...], seeds: range) -> None:
    mesh = mesh_of(*sizes)
    placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    for seed in seeds:
        full = _random_full(seed)
        specs = [ParamSpec(f"p{i}", tuple(t.shape), dtype_name(t.dtype)) for i, t in enumerate(full)]
        store, places = locations_of(kind, specs, full, mesh)
        for run in store.layout.padding(rank % sizes[-1]):
            store.buffer[run.start : run.stop] = math.nan  # poison, which reaches nothing
        with CommDebugMode() as seen, record_trace() as events:
            dtensors = as_sharded(places, store.buffer, unit="blocks.0")
        assert seen.get_total_counts() == len(events) == (1 if sizes[-1] > 1 else 0), seed
        for event in events:
            assert (event.kind, event.unit, event.phase) == (ALL_TO_ALL, "blocks.0", "state")
            assert event.num_bytes == _num_moved(store.layout, rank % sizes[-1]) * store.buffer.itemsize, seed
        for dtensor, value in zip(dtensors, full, strict=True):
            expected = distribute_tensor(value, mesh, placements, src_data_rank=None)
            assert dtensor.placements == placements and dtensor.device_mesh == mesh and dtensor.shape == value.shape
            assert dtensor.to_local().shape == expected.to_local().shape, seed
            assert dtensor.dtype == value.dtype and dtensor.stride() == expected.stride(), seed
            assert torch.equal(_bits(dtensor.to_local()), _bits(expected.to_local())), seed
        back = torch.full_like(store.buffer, 7)
        with CommDebugMode() as seen:
            fill(back, store, zip(map(str, places), places, dtensors, strict=True))
        assert seen.get_total_counts() == (1 if sizes[-1] > 1 else 0), seed
        for a, b in zip(store.split(back), store.pieces, strict=True):
            assert torch.equal(_bits(a), _bits(b)), seed
        for run in store.layout.padding(rank % sizes[-1]):
            assert (back[run.start : run.stop] == 7).all(), seed
        # One of them alone, and some left out.
        i = seed % len(full)
        alone = PieceTensor(store.pieces[i], places[i]).to_dtensor()
        assert torch.equal(_bits(alone.to_local()), _bits(dtensors[i].to_local())), seed
        back = torch.full_like(store.buffer, 7)
        fill(back, store, [("alone", places[i], dtensors[i])])
        for k, (a, b) in enumerate(zip(store.split(back), store.pieces, strict=True)):
            assert torch.equal(_bits(a), _bits(b)) if k == i else (a == 7).all(), seed


@pytest.mark.parametrize("kind", PIECES)
@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (4,), (2, 2)])
def test_R36_pieces_become_dtensors_and_come_back_bit_for_bit(ranks, kind, sizes):
    ranks.run(math.prod(sizes), _there_and_back, kind, sizes, range(12))


# State dicts


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _shows(rank: int, world_size: int, kind: str, tied: bool) -> None:
    model, plain = shard(build_net(torch.float64, tied=tied), kind), build_net(torch.float64, tied=tied)
    for before_first_use in (True, False):
        with record_trace() as events:
            state = model.state_dict()
        assert [event.kind for event in events] == [ALL_TO_ALL] * 4  # one a unit
        assert not summary(events)["all_gather"]["count"]
        expected = plain.state_dict()
        assert list(state) == list(expected)
        for name, value in expected.items():
            found = state[name]
            assert isinstance(found, DTensor) == (name != "scale"), name
            assert torch.equal(_whole(found), value), name
        if tied:
            assert state["head.weight"] is state["embedding.weight"]
        kept = model.state_dict(keep_vars=True)
        assert all(kept[name] is param for name, param in model.named_parameters())
        if before_first_use:
            loss_of(model, 0, rank).backward()
            model.zero_grad()
    # Data that the user replaced is shown too.
    model.head.bias.data = model.head.bias.data + 1
    assert torch.equal(model.state_dict()["head.bias"].full_tensor(), plain.head.bias.detach() + 1)
    # As scripts do that keep their best state.
    state = model.state_dict()
    for name, value in copy.deepcopy(state).items():
        assert value is not state[name] and torch.equal(_whole(value), _whole(state[name]))
    state = model.blocks[0].state_dict(prefix="mine.")
    assert list(state) == [f"mine.{name}" for name in plain.blocks[0].state_dict()]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", PIECES)
def test_R36_a_state_dict_holds_dtensors_under_the_plain_models_names(ranks, kind, tied):
    ranks.run(2, _shows, kind, tied)


def _takes(rank: int, world_size: int, kind: str) -> None:
    values = {name: value.clone() for name, value in build_net(torch.float64, seed=8).state_dict().items()}
    mesh = mesh_of(world_size)

    def given(how: str) -> dict[str, Any]:
        if how == "full":
            return dict(values)
        if how in ("dtensors", "float32"):
            dtype = torch.float32 if how == "float32" else torch.float64
            return {
                n: v if n == "scale" else distribute_tensor(v.to(dtype), mesh, [Shard(0)]) for n, v in values.items()
            }
        if how == "replicated":
            return {n: distribute_tensor(v, mesh, [Replicate()]) if v.dim() > 1 else v for n, v in values.items()}
        if how == "pieces":
            other = shard(build_net(torch.float64, seed=8), kind)
            return {n: v.detach() for n, v in other.state_dict(keep_vars=True).items()}
        other = shard(build_net(torch.float64, seed=8), how)
        return other.state_dict()

    for how in ("full", "dtensors", "float32", "replicated", "pieces", *LAYOUTS):
        for assign in (False, True):
            model = shard(build_net(torch.float64), kind)
            params = dict(model.named_parameters())
            found = model.load_state_dict(given(how), assign=assign)
            assert not found.missing_keys and not found.unexpected_keys
            for name, value in model.state_dict().items():
                expected = values[name].float().double() if how == "float32" and name != "scale" else values[name]
                assert torch.equal(_whole(value), expected), (how, name)
            assert assign or all(a is params[n] for n, a in model.named_parameters()), how
            assert all(isinstance(param, PieceTensor) for param in model.parameters())
            loss_of(model, 0, rank).backward()
            if assign:
                continue
            # Some alone.
            model = shard(build_net(torch.float64), kind)
            before = {n: v.full_tensor() for n, v in model.state_dict().items() if n != "scale"}
            some = {n: v for n, v in given(how).items() if n.endswith("up.weight")}
            found = model.load_state_dict(some, strict=False)
            assert set(found.missing_keys) == set(values) - set(some)
            after = model.state_dict()
            for name, value in before.items():
                assert torch.equal(after[name].full_tensor(), value) == (name not in some), (how, name)


@pytest.mark.parametrize("kind", [pytest.param("flat", marks=pytest.mark.exhaustive), "ragged"])
def test_R36_a_state_dict_of_full_tensors_dtensors_or_pieces_is_loaded(ranks, kind):
    ranks.run(2, _takes, kind)


def _takes_tied(rank: int, world_size: int) -> None:
    """Of the names of a shared parameter the last one counts, as it does for the plain model."""
    plain, model = build_net(tied=True), shard(build_net(tied=True), "flat")
    state = build_net(seed=8).state_dict()
    plain.load_state_dict(state)
    model.load_state_dict(
        {n: distribute_tensor(v, mesh_of(2), [Shard(0)]) if v.dim() > 1 else v for n, v in state.items()}
    )
    assert torch.equal(model.state_dict()["embedding.weight"].full_tensor(), plain.embedding.weight)
    assert torch.equal(plain.embedding.weight, state["head.weight"])


def _refuses(rank: int, world_size: int) -> None:
    model = shard(build_net(), "flat")
    state = dict(model.state_dict())
    elsewhere = mesh_of(2, 1)
    value = state["head.weight"].full_tensor()
    state["head.weight"] = distribute_tensor(value, elsewhere, [Shard(0), Replicate()])
    with pytest.raises(StateDictError, match=r"nothing was loaded: 'head.weight' is on .*full_tensor\(\)"):
        model.load_state_dict(state)
    other = shard(build_net(), "ragged")
    with pytest.raises(StateDictError, match=r"'embedding.weight' is .*ragged layout.*another layout"):
        model.load_state_dict({n: v.detach() for n, v in other.state_dict(keep_vars=True).items()})
    state["head.weight"] = value[:3]
    with pytest.raises(RuntimeError, match=r"nothing was loaded.*head.weight.*\(3, 7\).*\(11, 7\)"):
        model.load_state_dict(state)
    state["head.weight"] = 3
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        model.load_state_dict(state)
    del state["head.weight"]
    with pytest.raises(RuntimeError, match=r"nothing was loaded: missing .head.weight"):
        model.load_state_dict(state)


def test_R36_what_does_not_fit_is_refused_by_name(ranks):
    ranks.run(2, _takes_tied)
    ranks.run(2, _refuses)


def _wrapped(rank: int, world_size: int) -> None:
    """Activation checkpointing puts its name into those of parameters, and takes it out of state dicts."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = build_net()
    for block in model.blocks:
        block.up = checkpoint_wrapper(block.up)  # type: ignore[assignment]
    shard(model, "ragged")
    state, values = model.state_dict(), build_net(seed=8).state_dict()
    assert list(state) == list(values)
    model.load_state_dict(
        {n: distribute_tensor(v, mesh_of(2), [Shard(0)]) if v.dim() > 1 else v for n, v in values.items()}
    )
    for name, value in model.state_dict().items():
        assert torch.equal(_whole(value), values[name]), name


def test_R36_names_do_not_show_activation_checkpointing(ranks):
    ranks.run(2, _wrapped)


def _saved(rank: int, world_size: int, layout: str, path: str) -> None:
    model = shard(build_net(torch.float64, seed=8), layout)
    state = get_model_state_dict(model)
    assert list(state) == list(build_net().state_dict())
    dcp.save({"model": state}, checkpoint_id=path)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for name, value in build_net(torch.float64, seed=8).state_dict().items():
        assert rank or torch.equal(full[name], value)


def _assert_loaded(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(_whole(value), values[name]), name


def _loaded(rank: int, world_size: int, layout: str, path: str) -> None:
    model = shard(build_net(torch.float64), layout)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    _assert_loaded(model, build_net(torch.float64, seed=8).state_dict())


def _loaded_from_rank0(rank: int, world_size: int, layout: str) -> None:
    values = build_net(torch.float64, seed=8).state_dict()
    model = shard(build_net(torch.float64), layout)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(values) if rank == 0 else {}, options=options)
    _assert_loaded(model, values)


@pytest.mark.filterwarnings("ignore")
def test_R36_checkpoints_go_from_any_layout_to_any_other(ranks, tmp_path):
    for saving in LAYOUTS:
        path = str(tmp_path / saving)
        ranks.run(2, _saved, saving, path)
        for loading in LAYOUTS:
            ranks.run(2, _loaded, loading, path)
    ranks.run(3, _loaded, "ragged", path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_R36_full_state_of_rank0_is_broadcast(ranks, layout):
    ranks.run(2, _loaded_from_rank0, layout)


# Optimizer state


def _stepped(layout: str, rank: int, num_steps: int, lr: float = 0.01) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = shard(build_net(torch.float64), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(num_steps):
        _step(model, optimizer, rank, step)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    loss_of(model, step, rank).backward()
    optimizer.step()
    optimizer.zero_grad()


def _full(state: dict[str, Any]) -> dict[str, Any]:
    return {name: _whole(value) for name, value in state.items()}


def _state_is_taken(rank: int, world_size: int, path: str) -> None:
    expected = _full(_stepped("per_param", rank, 3)[0].state_dict())
    _, per_param = _stepped("per_param", rank, 2)
    for layout in PIECES:
        model, optimizer = _stepped(layout, rank, 2)
        with record_trace() as events:
            state = optimizer.state_dict()
        # One for each unit and moment; what the optimizer holds stays.
        assert [event.kind for event in events] == [ALL_TO_ALL] * 8
        assert all(isinstance(values["exp_avg"], PieceTensor) for values in optimizer.state.values())
        for values, other in zip(state["state"].values(), per_param.state_dict()["state"].values(), strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                a, b = values[name], other[name]
                assert (
                    isinstance(a, DTensor) and a.placements == b.placements and torch.equal(a.to_local(), b.to_local())
                )
            assert values["step"] == other["step"] == 2
        # Into an optimizer that has stepped, one that has not, and one of another layout, also as full tensors.
        full = {**state, "state": {key: _full(values) for key, values in state["state"].items()}}
        for into, num_steps in ((layout, 1), (layout, 0), ("per_param", 0)):
            for given in (state, full) if num_steps else (state,):
                other, restored = _stepped(into, rank, num_steps)
                other.load_state_dict(model.state_dict())
                # Clones, since torch would share the steps.
                cloned = {
                    key: {n: value.clone() for n, value in values.items()} for key, values in given["state"].items()
                }
                restored.load_state_dict({**given, "state": cloned})
                _step(other, restored, rank, 2)
                for name, value in _full(other.state_dict()).items():
                    assert torch.equal(value, expected[name]), (layout, into, name)
        # By torch's own functions, through a checkpoint.
        saved = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(saved, checkpoint_id=f"{path}/{layout}")
        other, restored = _stepped("ragged", rank, 0)
        other.load_state_dict(model.state_dict())
        loaded = {"optimizer": get_optimizer_state_dict(other, restored)}
        dcp.load(loaded, checkpoint_id=f"{path}/{layout}")
        set_optimizer_state_dict(other, restored, loaded["optimizer"])
        _step(other, restored, rank, 2)
        for name, value in _full(other.state_dict()).items():
            assert torch.equal(value, expected[name]), (layout, name)
    elsewhere = distribute_tensor(torch.zeros(7), mesh_of(2, 1), [Shard(0), Replicate()])
    state["state"][next(k for k, v in state["state"].items() if v["exp_avg"].shape == (7,))]["exp_avg"] = elsewhere
    with pytest.raises(StateDictError, match=r"norm.*'exp_avg' is on .*full tensor"):
        optimizer.load_state_dict(state)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_R37_optimizer_state_goes_from_layout_to_layout(ranks, tmp_path):
    ranks.run(2, _state_is_taken, str(tmp_path))


def _differs(rank: int, world_size: int, layout: str) -> list[str]:
    """What each rank is told where rank 1 was given other optimizer state; its optimizer is as it was."""
    model, optimizer = _stepped(layout, rank, 1)
    elsewhere = distribute_tensor(torch.zeros(7), mesh_of(2, 1), [Shard(0), Replicate()])
    given = optimizer.state_dict()["state"]
    name = next(key for key, values in given.items() if values["exp_avg"].shape == (7,))
    before = {key: values["exp_avg"].local.clone() for key, values in optimizer.state.items()}
    told = []
    # One entry lacks; it is full; its mesh is another.
    for odd in (None, given[name]["exp_avg"].full_tensor(), elsewhere):
        state = optimizer.state_dict()
        if rank == 1:
            entries = {key: value for key, value in state["state"][name].items() if key != "exp_avg"}
            state["state"][name] = entries if odd is None else {**entries, "exp_avg": odd}
        with pytest.raises((AgreementError, StateDictError)) as caught:
            optimizer.load_state_dict(state)
        told.append(str(caught.value))
    assert all(torch.equal(values["exp_avg"].local, before[key]) for key, values in optimizer.state.items())
    # The ranks are together still.
    optimizer.load_state_dict(optimizer.state_dict())
    _step(model, optimizer, rank, 1)
    return told


@pytest.mark.parametrize("layout", PIECES)
def test_R37_optimizer_state_that_one_rank_lacks_is_refused_on_all(ranks, layout):
    """The exchange of rows would mix up entries, or wait for ever."""
    for told in ranks.run(2, _differs, layout, seconds=60):
        lacks, full, elsewhere = told
        assert "state 'exp_avg' of 'blocks.0.norm.weight'; rank 1: state 'exp_avg_sq'" in lacks
        assert "the kind of state 'exp_avg' of 'blocks.0.norm.weight'" in full and "DTensor" in full
        assert "its state 'exp_avg' is on" in elsewhere
