"""State dicts of models and of optimizers beside torch.distributed.fsdp's: random trees, refusals, and what is not the same."""

import os
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh

from crossframe.errors import AgreementError, CrossframeError, StateDictError
from crossframe.trace import ALL_GATHER
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.paired_runs import Case
from tests.on_torch.programs.departures_state import BUGS, DEPARTURES, MENDED
from tests.on_torch.programs.differential import around_departures, check, failure_of
from tests.on_torch.programs.differential_state import OPTIMIZERS, TYPES, StateOptions, described, draw_case
from torch_backend.observe import record_trace

SEED = 3
# Seeds by world size: a sample of the seeds of `python -m tests.on_torch.programs.differential --api state`.
NUM_CASES = {1: 1, 2: 4 if EXHAUSTIVE in os.environ else 2, 3: 1, 4: 1}


@pytest.mark.parametrize("world_size", list(NUM_CASES))
def test_R36_R37_random_trees_are_saved_and_loaded_as_under_torch(ranks, world_size):
    for number in range(NUM_CASES[world_size]):
        case = around_departures(draw_case(1000 * SEED + number, world_size))
        raised = check(ranks, case, named=f"state, seed {1000 * SEED + number}, {world_size} ranks", limit=30)
        assert not raised, case


@pytest.mark.parametrize(
    "departure",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.exhaustive] * (each.shows == "TimeoutError"))
        for each in DEPARTURES
    ],
)
def test_R36_what_is_excepted_differs_as_stated(ranks, departure):
    assert departure.when(departure.smallest)
    text, raised = failure_of(ranks, departure.smallest, departure_seconds(departure.shows))
    assert text and departure.shows in text + raised
    assert failure_of(ranks, around_departures(departure.smallest))[0] == ""


def departure_seconds(shows: str) -> float:
    """What hangs is not waited for long."""
    return 3 if shows == "TimeoutError" else 30


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=pytest.mark.xfail(strict=True, reason=bug.why), id=bug.name) for bug in BUGS],
)
def test_R36_known_fault(ranks, bug):
    assert failure_of(ranks, bug.smallest)[0] == ""


@pytest.mark.parametrize("case", MENDED)
def test_R36_what_differed_once_is_the_same(ranks, case):
    assert failure_of(ranks, MENDED[case])[0] == ""


@cache
def many_cases() -> list[Case]:
    return [draw_case(seed, 1 + seed % 4) for seed in range(1500)]


@pytest.mark.parametrize("departure", (*BUGS, *DEPARTURES), ids=lambda departure: departure.name)
def test_what_avoids_a_departure_leaves_none_of_it(departure):
    met = [case for case in (departure.smallest, *many_cases()) if departure.when(case)]
    assert len(met) > 1 or "all parameters are ignored" in departure.name  # as in no case but smaller ones
    for case in met:
        assert not departure.when(departure.avoid(case)), case


def test_all_that_can_be_drawn_is_drawn():
    options = [around_departures(case).options for case in many_cases()]
    assert {o.kind for o in options} == set(TYPES)
    assert {o.optimizer for o in options} == set(OPTIMIZERS)
    for field in fields(StateOptions):
        assert field.name in SAME or len({getattr(o, field.name) for o in options}) > 1, field.name


# What is about training alone, and is as by default.
SAME = {"micro", "forwards", "clip", "evals", "edits", "zero", "watches", "sees_grads"} | {
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
}


def test_values_that_differ_in_kind_are_told_apart():
    one = torch.ones(2, 1)
    others = [torch.ones(2), one.double(), nn.Parameter(one), nn.Parameter(one, requires_grad=False), 1.0, [one]]
    assert described(one) == described(torch.zeros(2, 1))
    assert all(described(one) != described(other) for other in others)


# What both refuse, and what both report


class Model(nn.Module):
    """Two units: an inner one with two parameters, the root with two and a buffer."""

    def __init__(self, api: ModuleType, *, wide: int = 3, fill: float | None = None, **arguments: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        arguments = {"device_id": torch.device("cpu"), **arguments}
        inner = api.FullyShardedDataParallel(nn.Linear(2, wide), **arguments)
        root = nn.Sequential(inner, nn.Linear(wide, 2), nn.BatchNorm1d(2))
        if fill is not None:
            with torch.no_grad():
                for param in root.parameters():
                    param.fill_(fill)
        self.fsdp = api.FullyShardedDataParallel
        self.types = api.StateDictType
        self.wrapped = self.fsdp(root, **arguments)

    def saved(self, kind: str) -> dict[str, Any]:
        """The state dict of this type."""
        with self.fsdp.state_dict_type(self.wrapped, self.types[f"{kind}_STATE_DICT"]):
            return dict(self.wrapped.state_dict())

    def load(self, kind: str, state: dict[str, Any], **arguments: Any) -> Any:
        """Load a state dict of this type."""
        with self.fsdp.state_dict_type(self.wrapped, self.types[f"{kind}_STATE_DICT"]):
            return self.wrapped.load_state_dict(state, **arguments)


def _there_and_back(rank: int, world_size: int, kind: str, orig: bool) -> list[bool]:
    """Whether a model of other values has those of the state dict once it has loaded it; plainly, and by assignment."""
    api = import_module("torch_backend")
    source = Model(api, use_orig_params=orig)
    expected, found = source.saved("FULL"), []
    for assign in (False, kind != "LOCAL"):  # a local one that is assigned is not taken over, neither by torch
        other = Model(api, use_orig_params=orig, fill=0.25)
        other.load(kind, source.saved(kind), assign=assign)
        loaded = other.saved("FULL")
        found.append(list(loaded) == list(expected) and all(torch.equal(loaded[key], expected[key]) for key in loaded))
    return found


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
def test_R36_a_state_dict_of_each_type_gives_a_model_its_values(ranks, kind, orig):
    assert ranks.run(2, _there_and_back, kind, orig) == [[True, True]] * 2


def _with_shards_of(value: Any, cuts: list[tuple[int, int]]) -> ShardedTensor:
    """A ShardedTensor of these row ranges of a full tensor on this rank."""
    shape, place = list(value.shape), f"rank:{dist.get_rank()}/cpu"
    zeros = [0] * (len(shape) - 1)
    shards = [
        Shard(value[start:stop].clone(), ShardMetadata([start, *zeros], [stop - start, *shape[1:]], place))
        for start, stop in cuts
    ]
    return init_from_local_shards(shards, *shape)


def _loaded_from_shards(rank: int, world_size: int, cuts: list[list[tuple[int, int]]]) -> str:
    """What a model has that loads a weight in shards of these row ranges, by rank."""
    api = import_module("torch_backend")
    source, other = Model(api, wide=8), Model(api, wide=8, fill=0.25)
    full, given = source.saved("FULL")["0.weight"], source.saved("SHARDED")
    try:
        other.load("SHARDED", given | {"0.weight": _with_shards_of(full, cuts[rank])})
    except StateDictError as error:
        return str(error)
    return "same" if torch.equal(other.saved("FULL")["0.weight"], full) else "other"


def test_R36_adjacent_shards_of_a_rank_are_its_rows(ranks):
    assert ranks.run(2, _loaded_from_shards, [[(0, 1), (1, 4)], [(6, 8), (4, 6)]]) == ["same"] * 2


def test_R36_shards_of_rows_of_other_ranks_are_refused(ranks):
    for said in ranks.run(2, _loaded_from_shards, [[(4, 8)], [(0, 4)]]):
        assert "0.weight' is a ShardedTensor of other shards than 2 chunks of rows" in said


def _low_buffers(rank: int, world_size: int, package: str, kind: str) -> tuple[list[Any], list[Any]]:
    """The dtypes of buffers in low precision, and in a state dict."""
    api = import_module(package)
    low = api.MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16, _module_classes_to_ignore=())
    model = Model(api, mixed_precision=low)
    model.wrapped(torch.ones(2, 2))
    state = model.saved(kind)
    names = [name for name in state if "running" in name]
    return [buffer.dtype for name, buffer in model.wrapped.named_buffers() if "running" in name], [
        state[name].dtype for name in names
    ]


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_R35_R36_buffers_in_low_precision_are_saved_in_their_own(ranks, kind):
    ours, theirs = (
        ranks.run(2, _low_buffers, package, kind) for package in ("torch_backend", "torch.distributed.fsdp")
    )
    assert ours == theirs == [([torch.bfloat16] * 2, [torch.float32] * 2)] * 2


def _without(name: str) -> Callable[[dict], dict]:
    return lambda state: {key: value for key, value in state.items() if key != name}


# Changes of a state dict that make it unfit, by name.
UNFIT: dict[str, Callable[[dict], dict]] = {
    "missing": _without("0.weight"),
    "missing buffer": _without("2.running_mean"),
    "extra": lambda state: {**state, "strange": torch.ones(1), "0.strange": torch.ones(1)},
    "misshapen": lambda state: {**state, "1.bias": torch.ones(5)},
    "transposed": lambda state: {**state, "0.weight": torch.ones(2, 3)},
    "no tensor": lambda state: {**state, "1.bias": 3.0},
}


def _load_unfit(rank: int, world_size: int, package: str, unfit: str, orig: bool, strict: bool) -> tuple[str, Any, Any]:
    """What came of loading: the kind of error or "", what it returned or said, and what the model's parameters are then."""
    api = import_module(package)
    state = UNFIT[unfit](Model(api, use_orig_params=orig).saved("FULL"))
    model = Model(api, use_orig_params=orig, fill=0.25)
    error, found = "", None
    try:
        reported = model.load("FULL", state, strict=strict)
        found = (list(reported.missing_keys), list(reported.unexpected_keys))
    except Exception as raised:
        error, found = type(raised).__name__, str(raised)
    return error, found, {name: value.tolist() for name, value in model.saved("FULL").items()}


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("unfit", list(UNFIT))
def test_R36_what_does_not_fit_is_reported_as_under_torch(ranks, unfit, orig):
    for strict in (True, False):
        theirs, ours = (
            ranks.run(2, _load_unfit, package, unfit, orig, strict)
            for package in ("torch.distributed.fsdp", "torch_backend")
        )
        for (their_error, their_found, their_params), (error, found, params) in zip(theirs, ours, strict=True):
            assert bool(error) == bool(their_error), (strict, error, their_error)
            if not error:
                assert found == their_found
                assert params == their_params
                continue
            assert error == "StateDictError"
            # torch has loaded the rest; ours has loaded nothing, and lists the names.
            assert all(value == [0.25] * 2 for name, value in params.items() if name == "1.bias")
            for name in UNFIT_NAMES[unfit]:
                assert name in found


UNFIT_NAMES = {
    "missing": ["0.weight"],
    "missing buffer": ["2.running_mean"],
    "extra": ["strange", "0.strange"],
    "misshapen": ["1.bias", "(5,)", "(2,)"],
    "transposed": ["0.weight", "(2, 3)", "(3, 2)"],
    "no tensor": ["1.bias"],
}


def _local_with_mesh(api: ModuleType) -> Any:
    return Model(api, device_mesh=init_device_mesh("cpu", (2,))).saved("LOCAL")


def _other_world_local(api: ModuleType) -> Any:
    state = Model(api, use_orig_params=False, wide=5).saved("LOCAL")
    return Model(api, use_orig_params=False).load("LOCAL", state)


def _local_without_flat(api: ModuleType) -> Any:
    state = Model(api, use_orig_params=False).saved("LOCAL")
    return Model(api, use_orig_params=False).load("LOCAL", _without("0._flat_param")(state))


def _wrong_config(api: ModuleType) -> Any:
    model = Model(api)
    return model.fsdp.set_state_dict_type(model.wrapped, model.types.SHARDED_STATE_DICT, api.FullStateDictConfig())


def _wrong_optimizer_config(api: ModuleType) -> Any:
    model = Model(api)
    wrong = api.FullOptimStateDictConfig()
    return model.fsdp.set_state_dict_type(model.wrapped, model.types.SHARDED_STATE_DICT, None, wrong)


def _no_type(api: ModuleType) -> Any:
    model = Model(api)
    return model.fsdp.set_state_dict_type(model.wrapped, "sharded")


def _types_differ(api: ModuleType) -> Any:
    model = Model(api)
    model.fsdp.set_state_dict_type(model.wrapped[0], model.types.SHARDED_STATE_DICT)
    return model.fsdp.get_state_dict_type(model.wrapped)


def _optimizer(api: ModuleType, **arguments: Any) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(api, **arguments)
    optimizer = torch.optim.Adam(model.wrapped.parameters())
    model.wrapped(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def _state_and_back(rank: int, world_size: int, strategy: str) -> list[bool]:
    """Of each parameter's state whether it is, once saved and loaded, what it was, shaped like the parameter."""
    api = import_module("torch_backend")
    model, optimizer = _optimizer(api, use_orig_params=True, sharding_strategy=api.ShardingStrategy[strategy])
    before = {param: dict(entries) for param, entries in optimizer.state.items()}
    saved = model.fsdp.optim_state_dict(model.wrapped, optimizer)
    optimizer.load_state_dict(model.fsdp.optim_state_dict_to_load(model.wrapped, optimizer, saved))
    return [
        torch.equal(optimizer.state[param][entry], value) and (entry == "step" or value.shape == param.shape)
        for param, entries in before.items()
        for entry, value in entries.items()
    ]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_R37_optimizer_state_comes_back_in_the_shape_of_what_the_optimizer_holds(ranks, strategy):
    assert all(found and all(found) for found in ranks.run(2, _state_and_back, strategy))


def _under_a_second_name(rank: int, world_size: int) -> bool:
    """Whether state under the other name of a shared parameter, with an entry of no parameter, loads as under the first."""
    fsdp = import_module("torch_backend").FullyShardedDataParallel
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    root[1].weight = root[0].weight
    model = fsdp(root, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    saved = fsdp.optim_state_dict(model, optimizer)
    first = fsdp.optim_state_dict_to_load(model, optimizer, saved)
    saved["state"]["1.weight"] = saved["state"].pop("0.weight")
    saved["state"]["note"] = 3
    saved["param_groups"][0]["params"] = ["1.weight", "0.bias", "1.bias"]
    second = fsdp.optim_state_dict_to_load(model, optimizer, saved)
    return second["state"].pop("note") == 3 and str(second) == str(first)


def test_R37_state_loads_under_any_name_of_a_parameter(ranks):
    assert ranks.run(2, _under_a_second_name) == [True, True]


def _unequal_steps(api: ModuleType) -> Any:
    model, optimizer = _optimizer(api, use_orig_params=False)
    state = model.fsdp.optim_state_dict(model.wrapped, optimizer)
    state["state"]["0.bias"]["step"] = torch.tensor(7.0)
    return model.fsdp.optim_state_dict_to_load(model.wrapped, optimizer, state)


def _misshapen_state(api: ModuleType) -> Any:
    model, optimizer = _optimizer(api, use_orig_params=False)
    state = model.fsdp.optim_state_dict(model.wrapped, optimizer)
    state["state"]["0.bias"]["exp_avg"] = torch.ones(7)
    return model.fsdp.optim_state_dict_to_load(model.wrapped, optimizer, state)


def _no_state(api: ModuleType) -> Any:
    model, optimizer = _optimizer(api)
    return model.fsdp.optim_state_dict_to_load(model.wrapped, optimizer, {"param_groups": []})


def _strange_name_in_group(api: ModuleType) -> Any:
    model, optimizer = _optimizer(api)
    state = model.fsdp.optim_state_dict(model.wrapped, optimizer)
    state["param_groups"][0]["params"].append("strange")
    return model.fsdp.optim_state_dict_to_load(model.wrapped, optimizer, state)


def _mixed_keys(api: ModuleType) -> Any:
    model, optimizer = _optimizer(api)
    mixed = {"state": {0: {}, "0.weight": {}}, "param_groups": []}
    keys = api.OptimStateKeyType
    return model.fsdp.rekey_optim_state_dict(mixed, keys.PARAM_ID, model.wrapped, optim=optimizer)


def _strange_key(api: ModuleType) -> Any:
    model, optimizer = _optimizer(api, use_orig_params=True)
    keys = api.OptimStateKeyType
    strange = {"state": {"strange": {}}, "param_groups": []}
    return model.fsdp.rekey_optim_state_dict(strange, keys.PARAM_ID, model.wrapped, optim=optimizer)


# Calls that both refuse, and a part of our message.
REFUSED: dict[Callable[[ModuleType], Any], str] = {
    _local_with_mesh: "SHARDED_STATE_DICT",
    _other_world_local: "_flat_param",
    _local_without_flat: "0._flat_param",
    _wrong_config: "ShardedStateDictConfig",
    _wrong_optimizer_config: "ShardedOptimStateDictConfig",
    _no_type: "sharded",
    _types_differ: "",
    _unequal_steps: "step",
    _misshapen_state: "0.bias",
    _no_state: "state",
    _strange_name_in_group: "strange",
    _mixed_keys: "0.weight",
    _strange_key: "strange",
}


def _refusal(rank: int, world_size: int, package: str, attempt: Callable[[ModuleType], Any]) -> tuple[str, bool]:
    try:
        attempt(import_module(package))
    except Exception as error:
        return str(error), isinstance(error, CrossframeError)
    return "nothing was refused", False


@pytest.mark.parametrize("attempt", list(REFUSED), ids=lambda attempt: attempt.__name__)
def test_R36_R37_what_torch_refuses_is_refused(ranks, attempt):
    for text, _ in ranks.run(2, _refusal, "torch.distributed.fsdp", attempt):
        assert text != "nothing was refused"
    for text, named in ranks.run(2, _refusal, "torch_backend", attempt):
        assert named and REFUSED[attempt] in text, text


def _misshapen_on_one_rank(rank: int, world_size: int) -> str:
    model, optimizer = _optimizer(import_module("torch_backend"), use_orig_params=True)
    saved = model.fsdp.optim_state_dict(model.wrapped, optimizer)
    if rank == 1:
        saved["state"]["0.bias"] = {"exp_avg": torch.zeros(99)}
    try:
        model.fsdp.optim_state_dict_to_load(model.wrapped, optimizer, saved)
    except (StateDictError, AgreementError) as error:
        return str(error)
    return "nothing was refused"


def test_R37_what_one_rank_alone_refuses_all_refuse(ranks):
    assert all("0.bias" in text for text in ranks.run(2, _misshapen_on_one_rank, seconds=20))


def _names_for_libraries(rank: int, world_size: int, api: str) -> list[Any]:
    package, found = import_module(api), []
    for use_orig_params in (True, False):
        wrap = partial(package.FullyShardedDataParallel, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
        outer = wrap(nn.Sequential(wrap(nn.Linear(3, 2))))
        inner = outer.module[0]
        found += [outer._has_params, outer._flat_param, inner._has_params, inner._flat_param.numel()]
    return found


def test_a_unit_without_parameters_has_no_flat_parameter(ranks):
    """Libraries ask for it (transformers, accelerate)."""
    told = [ranks.run(2, _names_for_libraries, api)[0] for api in ("torch.distributed.fsdp", "torch_backend")]
    assert told[0] == told[1] and told[1][:2] == [False, None]


def _full_tensors(rank: int, world_size: int) -> list[bool]:
    """Whether each tensor of a full state dict is a storage of its own, and each of the optimizer's."""
    api = import_module("torch_backend")
    model = Model(api, wide=40, use_orig_params=True)
    optimizer = torch.optim.Adam(model.wrapped.parameters())
    model.wrapped(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    params = [value for name, value in model.saved("FULL").items() if "num_batches" not in name]
    state = model.fsdp.optim_state_dict(model.wrapped, optimizer)["state"].values()
    moments = [entries[entry] for entries in state for entry in ("exp_avg", "exp_avg_sq")]
    alone = [
        all(value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.nbytes for value in values)
        for values in (params, moments)
    ]
    return alone


def test_R36_full_tensors_are_saved_without_their_unit(ranks):
    """They alias the gathered memory of their unit. torch.save writes the whole storage of a tensor."""
    for params, moments in ranks.run(2, _full_tensors):
        assert params and moments


def _gathers(rank: int, world_size: int) -> list[str]:
    api = import_module("torch_backend")
    wrap = partial(api.FullyShardedDataParallel, device_id=torch.device("cpu"))
    model = wrap(nn.Sequential(wrap(nn.Linear(2, 3)), wrap(nn.Linear(3, 90)), nn.Linear(90, 2)))
    model(torch.ones(1, 2))
    with record_trace() as events:
        model.state_dict()
    return [event.unit for event in events if event.kind == ALL_GATHER]


def test_R36_a_full_state_dict_gathers_the_largest_unit_first(ranks):
    assert ranks.run(2, _gathers) == [["1", "", "0"]] * 2


def _averaged_after_an_evaluation(rank: int, world_size: int, fsdp: str) -> list[float]:
    api = import_module(fsdp)
    inner, strategy = nn.Linear(3, 4), api.ShardingStrategy.SHARD_GRAD_OP
    inner = api.FullyShardedDataParallel(inner, sharding_strategy=strategy, device_id=torch.device("cpu"))
    model = api.FullyShardedDataParallel(
        nn.Sequential(inner), sharding_strategy=strategy, device_id=torch.device("cpu")
    )
    with torch.no_grad():
        model(torch.ones(2, 3))
        for wrapper in api.FullyShardedDataParallel.fsdp_modules(model):
            for param in wrapper.params:
                param.zero_()
    return [value.abs().max().item() for value in model.state_dict().values()]


def test_a_state_dict_has_shards_that_were_written_after_an_evaluation(ranks):
    """Such as those of an average of weights. torch has gathered the parameters before, and saves these."""
    assert ranks.run(2, _averaged_after_an_evaluation, "torch_backend") == [[0, 0]] * 2
    assert all(all(found) for found in ranks.run(2, _averaged_after_an_evaluation, "torch.distributed.fsdp"))
