"""FSDP1 over tensor parallelism: FullyShardedDataParallel around modules whose parameters are DTensors, beside torch's own."""

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torch_backend
from crossframe.errors import ReplacedError
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers import scripts
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.scripts import difference, outcomes
from tests.on_torch.helpers.tensor_parallel import Block, Side, mesh_of

THEIRS, OURS = scripts.PACKAGES
SGD = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2"}


def trained(side: Side, model: Any, *, max_norm: float | None = None, steps: int = 2) -> dict[str, Any]:
    """Losses, gradients on this rank after each step, what parameters were in forward, and full parameters."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
    losses, grads, norms = [], [], []
    for step in range(steps):
        loss = model(side.batch(step)).square().mean()
        loss.backward()
        if max_norm is not None:
            norms.append(model.clip_grad_norm_(max_norm))
        losses.append(loss.detach())
        grads.append([None if param.grad is None else param.grad.clone() for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    seen = [module.seen for module in model.modules() if isinstance(module, Block)]
    return {"losses": losses, "grads": grads, "norms": norms, "seen": seen, "full": side.full(model)}


def _compare(rank: int, world_size: int, shape: tuple[int, ...], how: str, options: dict[str, Any]) -> str:
    def scenario(side: Side) -> Any:
        made = dict(options)
        if "mixed_precision" in made:
            made["mixed_precision"] = side.MixedPrecision(**made["mixed_precision"])
        return SCENARIOS[how](side, made)

    theirs, ours = outcomes(scenario, [Side(name, rank, world_size, shape) for name in (THEIRS, OURS)])
    assert not isinstance(theirs, scripts.Raised), theirs
    return difference(theirs, ours)


def _trained(side: Side, options: dict[str, Any]) -> Any:
    return trained(side, side.model(**options))


def _named(side: Side, options: dict[str, Any]) -> Any:
    """Names, classes and shapes outside, before and after a step; what a rank holds."""
    model = side.model(**options)
    seen = []
    for _ in range(2):
        seen.append(
            [
                (name, isinstance(p, nn.Parameter), p.detach().clone(), p.requires_grad)
                for name, p in model.named_parameters()
            ]
        )
        model(side.batch(0)).sum().backward()
    return seen


def _edited(side: Side, options: dict[str, Any]) -> Any:
    """Edits of full parameters, kept and lost; full gradients where these are parameters of their own."""
    model, summon = side.model(**options), side.FullyShardedDataParallel.summon_full_params
    for factor, writeback in ((2.0, True), (3.0, False)):
        with summon(model, writeback=writeback), torch.no_grad():
            for param in model.parameters():
                param.mul_(factor)
    model(side.batch(0)).sum().backward()
    return [side.full(model), side.full(model, with_grads=True) if options["use_orig_params"] else None]


SCENARIOS = {"trained": _trained, "named": _named, "edited": _edited}
LOW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
BOTH = [pytest.param(True, id="original"), pytest.param(False, id="flat")]


def _cases(*cases: tuple[str, tuple[int, ...], dict[str, Any], str]) -> list[Any]:
    """Each with original parameters ("o"), flat ones ("f") or both; all with both in `pytest --exhaustive`."""
    found = []
    for name, shape, options, kinds in cases:
        for kind, use_orig_params in {"o": True, "f": False}.items():
            if kind in kinds or EXHAUSTIVE in os.environ:
                label = f"{name}-{'original' if use_orig_params else 'flat'}"
                found.append(pytest.param(shape, options | {"use_orig_params": use_orig_params}, id=label))
    return found


# Both kinds of parameters with each strategy that keeps them unsharded and that does not, replicated or not, in full and in
# mixed precision.
@pytest.mark.parametrize(
    ("shape", "options"),
    _cases(
        ("full", (2, 2), {}, "of"),
        ("grad_op", (2, 2), {"strategy": "SHARD_GRAD_OP"}, "o"),
        ("hybrid", (1, 2, 2), {"strategy": "HYBRID_SHARD"}, "o"),
        ("hybrid_zero2", (1, 2, 2), {"strategy": "_HYBRID_SHARD_ZERO2"}, "f"),
        ("low", (2, 2), {"mixed_precision": LOW}, "o"),
        ("lower", (2, 2), {"mixed_precision": {"param_dtype": torch.bfloat16}, "strategy": "SHARD_GRAD_OP"}, "f"),
        ("sequence", (2, 2), {"sequence": True}, "f"),
        ("prefetch", (2, 2), {"backward_prefetch": None, "forward_prefetch": True}, "o"),
        ("data_parallel_alone", (2, 1), {}, "f"),
    ),
)
def test_R32_tensor_parallel_training_equals_torch(ranks, shape, options):
    size = torch.Size(shape).numel()
    assert ranks.run(size, _compare, shape, "trained", options) == [""] * size


@pytest.mark.parametrize("use_orig_params", BOTH)
@pytest.mark.parametrize("how", ["named", "edited"])
def test_R19_tensor_parallel_parameters_show_as_in_torch(ranks, how, use_orig_params):
    assert ranks.run(4, _compare, (2, 2), how, {"use_orig_params": use_orig_params}) == [""] * 4


def _train_all(rank, world_size, shape, options):
    """Training by each of several options, the first of which is torch's."""
    results = []
    for name, each in options:
        side = Side(name, rank, world_size, shape)
        [result] = outcomes(lambda side, each=each: trained(side, side.model(**each)), [side])
        assert not isinstance(result, scripts.Raised), (name, each, result.text)
        results.append({key: result[key] for key in ("losses", "full")})
    return [difference(results[0], other) for other in results[1:]]


@pytest.mark.parametrize("use_orig_params", BOTH)
def test_R14_tensor_parallel_strategies_train_alike(ranks, use_orig_params):
    """torch cannot train NO_SHARD with original parameters, nor over a process group, and not with one data parallel rank."""
    plain = {"use_orig_params": use_orig_params}
    options = [
        (THEIRS, {"use_orig_params": False}),
        *((OURS, plain | {"strategy": name}) for name in ("NO_SHARD", "SHARD_GRAD_OP")),
    ]
    options.append((OURS, plain | {"cpu_offload": torch_backend.CPUOffload(True)}))
    assert ranks.run(4, _train_all, (2, 2), options) == [[""] * 3] * 4
    options = [(THEIRS, {"use_orig_params": False}), (OURS, plain)]
    assert ranks.run(2, _train_all, (1, 2), options) == [[""]] * 2


@pytest.mark.parametrize(
    ("shape", "options"),
    _cases(("inside", (2, 2), {"checkpointed": "inside"}, "o"), ("outside", (2, 2), {"checkpointed": "outside"}, "f")),
)
def test_R32_checkpointed_tensor_parallel_training_equals_torch(ranks, shape, options):
    assert ranks.run(4, _compare, shape, "trained", options) == [""] * 4


def _over_group(rank, world_size):
    mesh = mesh_of((2, 2))
    side = Side(OURS, rank, world_size, (2, 2))
    over_mesh = side.model(use_orig_params=True, device_mesh=mesh["dp"])
    over_group = side.model(use_orig_params=True, process_group=mesh["dp"].get_group())
    results = [trained(side, over_mesh), trained(side, over_group)]
    return difference(results[0], results[1])


def test_tensor_parallel_trains_over_a_process_group(ranks):
    assert ranks.run(4, _over_group) == [""] * 4


def _frozen(rank, world_size, use_orig_params):
    side = Side(OURS, rank, world_size, (2, 2))
    before = side.full(side.model(use_orig_params=use_orig_params))
    frozen = "" if use_orig_params else "0."
    model = side.model(use_orig_params=use_orig_params, frozen=frozen or "up")
    after = trained(side, model)["full"]
    return {name: difference(before[name], after[name]) == "" for name in before}


def test_frozen_tensor_parallel_parameters_stay(ranks):
    """torch trains them: it turns the gradient of their local parts on."""
    for result in ranks.run(4, _frozen, True):
        assert [name for name, same in result.items() if same] == [
            f"{i}.up.{kind}" for i in (0, 1) for kind in ("weight", "bias")
        ]
    for result in ranks.run(4, _frozen, False):
        assert [name for name, same in result.items() if same] == [name for name in result if name.startswith("0.")]


def _synced(rank, world_size, use_orig_params):
    side = Side(OURS, rank, world_size, (2, 2))
    # Data parallel ranks begin with different values, ranks of one tensor parallel group with the same.
    model = side.model(use_orig_params=use_orig_params, sync_module_states=True, seed=3 + rank // 2)
    return difference(side.full(side.model(use_orig_params=use_orig_params)), side.full(model))


@pytest.mark.parametrize("use_orig_params", BOTH)
def test_sync_module_states_sends_tensor_parallel_parts(ranks, use_orig_params):
    assert ranks.run(4, _synced, use_orig_params) == [""] * 4


def _replaced(rank, world_size):
    side = Side(OURS, rank, world_size, (2, 2))
    model = side.model(use_orig_params=True)

    reverse = DeviceMesh(DEVICE.type, [[1, 0], [3, 2]], mesh_dim_names=("dp", "tp"))["tp"]

    def replace(new):
        with side.FullyShardedDataParallel.summon_full_params(model):
            up = model[0].module.up
            up.weight = nn.Parameter(new(up.weight))

    before = side.full(model)
    replace(lambda weight: weight.detach() * 2)
    after = side.full(model)
    for name, (value, _) in after.items():
        assert difference(before[name][0] * (2 if name == "0.up.weight" else 1), value) == ""
    said = []
    for new in (
        lambda weight: weight.full_tensor(),
        lambda weight: distribute_tensor(weight.full_tensor().detach(), reverse, weight.placements),
    ):
        said.append(scripts.raised(lambda new=new: replace(new)))
        assert difference(after, side.full(model)) == ""
    return said


def test_R20_replaced_tensor_parallel_parameters_are_written_back(ranks):
    for rank, (plain, elsewhere) in enumerate(ranks.run(4, _replaced)):
        for said in (plain, elsewhere):
            assert said.kind is ReplacedError and "'up.weight'" in said.text and "expected a DTensor" in said.text
        first = rank // 2 * 2
        assert f"ranks [{first + 1}, {first}]" in elsewhere.text and f"ranks [{first}, {first + 1}]" in elsewhere.text


def _states(rank, world_size, use_orig_params):
    """Full and sharded state dicts of a trained model and its optimizer, and what they load into."""
    side = Side(OURS, rank, world_size, (2, 2))
    wrapper, found = side.FullyShardedDataParallel, {}
    model = side.model(use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(side.batch(0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    full = {name: value for name, (value, _) in side.full(model).items()}
    moments = {}
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        kind = side.StateDictType[kind]
        with wrapper.state_dict_type(model, kind):
            state, optim_state = model.state_dict(), wrapper.optim_state_dict(model, optimizer)
            found[kind.name] = {
                name: value.placements if isinstance(value, DTensor) else None for name, value in state.items()
            }
            for name, value in state.items():
                assert difference(whole(full[name]), whole(value)) == "", name
            # The same whole moments either way, those of plain parameters too.
            told = {
                name: [whole(entry[key]) for key in ("exp_avg", "exp_avg_sq", "step")]
                for name, entry in optim_state["state"].items()
            }
            assert difference(moments.setdefault("all", told), told) == ""
            fresh = side.model(use_orig_params=use_orig_params, seed=4)
            after = torch.optim.AdamW(fresh.parameters(), lr=0.1)
            with wrapper.state_dict_type(fresh, kind):
                fresh.load_state_dict(state)
                after.load_state_dict(wrapper.optim_state_dict_to_load(fresh, after, optim_state))
        for each, its in ((model, optimizer), (fresh, after)):
            each(side.batch(1)).square().mean().backward()
            its.step()
            its.zero_grad()
        assert difference(side.full(model), side.full(fresh)) == ""
        full = {name: value for name, (value, _) in side.full(model).items()}
        moments.clear()
    return found


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("use_orig_params", BOTH)
def test_R36_tensor_parallel_states_hold_dtensors_and_load(ranks, use_orig_params):
    for found in ranks.run(4, _states, use_orig_params):
        full, sharded = found["FULL_STATE_DICT"], found["SHARDED_STATE_DICT"]
        assert full["0.norm.weight"] is None and sharded["0.norm.weight"] == (Shard(0),)
        assert full["0.up.weight"] == (Shard(0),) and full["0.down.weight"] == (Shard(1),)
        # Tensor parallelism cuts the rows first, as under FSDP2; torch's FSDP1 lets data parallelism cut them first.
        assert "_StridedShard(dim=0, sf=2)" in repr(sharded["0.up.weight"])
        assert sharded["0.down.weight"] == (Shard(0), Shard(1)) and sharded["0.down.bias"] == (Shard(0), Replicate())


def _states_of_torch(rank, world_size):
    """Full and sharded state dicts beside torch's: the same whole tensors."""
    results = []
    for name in (THEIRS, OURS):
        side = Side(name, rank, world_size, (2, 2))
        model, seen = side.model(use_orig_params=True), []
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            with side.FullyShardedDataParallel.state_dict_type(model, side.StateDictType[kind]):
                seen.append({key: whole(value) for key, value in model.state_dict().items()})
        results.append(seen)
    return difference(results[0], results[1])


def test_R36_tensor_parallel_state_dicts_are_torchs_as_a_whole(ranks):
    assert ranks.run(4, _states_of_torch) == [""] * 4


def _refused(rank, world_size, folder):
    mesh = mesh_of((2, 2))
    side = Side(OURS, rank, world_size, (2, 2))
    wrapper = side.FullyShardedDataParallel
    model = side.model(use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(side.batch(0)).sum().backward()
    optimizer.step()
    over_group = side.model(use_orig_params=True, process_group=mesh["dp"].get_group())
    before = side.full(model)

    with torch.no_grad():
        plain = {name: whole(value) for name, value in model.state_dict().items()}
    said = {
        "plain": scripts.raised(lambda: model.load_state_dict(plain)),
        "first": scripts.raised(lambda: wrapper.full_optim_state_dict(model, optimizer)),
        "checkpoint": scripts.raised(lambda: side.save_checkpoint(folder / "made", model)),
        "load": scripts.raised(lambda: side.load_checkpoint(folder / "made", model)),
    }
    with wrapper.state_dict_type(over_group, side.StateDictType.SHARDED_STATE_DICT):
        said["group"] = scripts.raised(over_group.state_dict)
    two = nn.Sequential(Block())
    parallelize_module(two[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    side.fully_shard(two, mesh=mesh["dp"])
    said["fully_shard"] = scripts.raised(lambda: side.save_checkpoint(folder / "made", two))
    assert difference(before, side.full(model)) == ""
    return {name: None if error is None else error.text for name, error in said.items()}


def test_tensor_parallelism_is_refused_where_it_is_not_supported(ranks, tmp_path):
    for said in ranks.run(4, _refused, tmp_path):
        assert "'0.up.weight' is a Tensor and the parameter a DTensor" in said["plain"]
        assert "rank0_only=False" in said["first"]
        assert "device_mesh=mesh['dp']" in said["group"]
        for name in ("checkpoint", "load", "fully_shard"):
            assert "tensor parallel" in said[name] and "torch.distributed.checkpoint" in said[name]
    assert not list(tmp_path.iterdir())
