"""What scripts do around a step, and hand to it: other optimizers, autocast, inner units alone, compile, checkpointed segments,
inputs that last, inputs in containers of any kind, torch's own enums."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import collections
import copy
import dataclasses
import types
from collections.abc import MutableMapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

import torch_backend
from crossframe.errors import LayoutError, UsageError
from tests.on_torch.helpers.chains import MODES, Chain, Part, shard
from tests.on_torch.helpers.interfaces import local_tensor
from torch_backend.engine._unit import unit_of
from torch_backend.modules._nested_tensors import cast_floating, moved

FSDP = torch_backend.FullyShardedDataParallel
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")
BF16 = torch_backend.MixedPrecision(param_dtype=torch.bfloat16)


def _plain(make=Chain, dtype=torch.float64):
    torch.manual_seed(0)
    return make().to(dtype)


def _inputs(dtype=torch.float64):
    """The same on every rank, so that the mean of the ranks' gradients is a plain model's gradient."""
    return torch.linspace(-1, 1, 8, dtype=dtype).view(2, 4)


def _grads(model):
    return [None if p.grad is None else local_tensor(p.grad) for p in model.parameters()]


def _same(a, b):
    return len(a) == len(b) and all(
        (x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(a, b, strict=True)
    )


def _close(a, b):
    return torch.allclose(a, b, rtol=1e-12, atol=1e-14)


@torch.no_grad()
def _evaluate(module):
    return module(_inputs())


def _with_grads(mode, strategy):
    """A plain model and the same one sharded, both after a backward, and an optimizer of each."""
    plain = _plain()
    model = shard(copy.deepcopy(plain), mode, strategy)
    for m in (plain, model):
        m(_inputs()).square().sum().backward()
    return plain, model, [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]


def _steps_between_evaluations(rank, world_size):
    for mode in MODES:
        for strategy in STRATEGIES:
            where = (mode, strategy)
            plain, model, optimizers = _with_grads(mode, strategy)
            assert _close(_evaluate(model), _evaluate(plain)), where
            if rank == 0:
                other = nn.Parameter(torch.ones(1))
                other.grad = torch.ones(1)
                torch.optim.SGD([other], lr=0.1).step()
            before = _evaluate(model)
            assert _close(before, _evaluate(plain)), where
            for optimizer in optimizers:
                optimizer.step()
            assert _close(_evaluate(model), _evaluate(plain)), where
            assert not _close(_evaluate(model), before), where


def test_R12_another_models_optimizer_on_one_rank_changes_nothing_and_the_models_own_is_noticed(ranks):
    """What is gathered anew must be so on every rank: else the ranks wait for each other."""
    ranks.run(2, _steps_between_evaluations)


def _inner_unit_alone(rank, world_size):
    for mode in MODES:
        for strategy in STRATEGIES:
            plain, model, optimizers = _with_grads(mode, strategy)
            _evaluate(model)
            for optimizer in optimizers:
                optimizer.step()
            assert _close(_evaluate(model.u), _evaluate(plain.u)), (mode, strategy)


def test_R12_an_inner_unit_used_by_itself_sees_the_step_before(ranks):
    ranks.run(2, _inner_unit_alone)


def _under_autocast(rank, world_size):
    """Evaluations around a step, within one context and after it, of a plain model and of ours."""
    x = _inputs(torch.float32)
    for strategy in STRATEGIES:
        for mode in MODES:
            plain = _plain(dtype=torch.float32)
            model = shard(copy.deepcopy(plain), mode, strategy)
            for m in (plain, model):
                m(x).square().sum().backward()
                optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=m is model), torch.no_grad():
                    outputs = [m(x)]
                    optimizer.step()
                    outputs.append(m(x))
                if m is plain:
                    expected = outputs
            assert not torch.equal(*expected)
            assert _same(outputs, expected), (strategy, mode)


def _trained_under_autocast(rank, world_size):
    """Evaluations and steps by turns within one context; torch would not see a step between evaluation and forward."""
    for strategy in STRATEGIES:
        for use_orig_params in (False, True):
            found = []
            for api, options in ((torch_fsdp, {"device_id": torch.device("cpu")}), (torch_backend, {})):
                options = options | {
                    "sharding_strategy": api.ShardingStrategy[strategy],
                    "use_orig_params": use_orig_params,
                }
                model = _plain(dtype=torch.float32)
                model.u = api.FullyShardedDataParallel(model.u, **options)
                model = api.FullyShardedDataParallel(model, **options)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                x, history = _inputs(torch.float32) + rank, []
                with torch.autocast("cpu", torch.bfloat16):
                    for _ in range(3):
                        with torch.no_grad():
                            history.append(model(x))
                        loss = model(x).float().square().sum()
                        loss.backward()
                        history += [loss.detach(), *_grads(model)]
                        optimizer.step()
                        optimizer.zero_grad()
                found.append(history)
            assert _same(*found), (strategy, use_orig_params)


def test_R12_one_autocast_context_around_steps_keeps_no_copies_of_old_parameters(ranks):
    ranks.run(2, _under_autocast)
    ranks.run(2, _trained_under_autocast)


def _compiled(rank, world_size):
    def build(how):
        model = _plain()
        for name in ("u", "v"):
            unit = getattr(model, name)
            if how == "inside":
                unit = FSDP(torch.compile(unit, backend="eager"), use_orig_params=True)
            else:
                unit = FSDP(unit, use_orig_params=True)
                unit = torch.compile(unit, backend="eager") if how == "units" else unit
            setattr(model, name, unit)
        model = FSDP(model, use_orig_params=True)
        return torch.compile(model, backend="eager") if how == "model" else model

    histories = {}
    for how in ("never", "inside", "units", "model"):
        torch._dynamo.reset()
        model, history = build(how), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(_inputs() + rank).square().sum()
            loss.backward()
            history += [loss.detach(), *_grads(model)]
            optimizer.step()
            optimizer.zero_grad()
        histories[how] = history
    return [how for how, history in histories.items() if not _same(history, histories["never"])]


@pytest.mark.exhaustive
def test_compiled_units_models_and_insides_of_units_train_as_uncompiled_ones(ranks):
    assert ranks.run(2, _compiled) == [[], []]


class _Two(nn.Module):
    """Two units, the first one or the second frozen, under a root without parameters."""

    def __init__(self, frozen):
        super().__init__()
        self.u, self.v = Part(), Part()
        getattr(self, frozen).requires_grad_(False)

    def forward(self, x):
        return self.v(self.u(x))


def _prompt(rank, world_size, steps):
    """The most hooks that any of so many steps left on the input."""
    nums_hooks = []
    for mode in MODES:
        for frozen in ("u", "v"):
            plain = _plain(lambda frozen=frozen: _Two(frozen))
            wanted_x = _inputs().requires_grad_()
            wanted = torch.autograd.grad(plain(wanted_x).square().sum(), wanted_x)[0]
            model = shard(plain, mode)
            x = _inputs().requires_grad_()
            for step in range(steps):
                model(x).square().sum().backward()
                nums_hooks.append(len(x._backward_hooks or {}))
                assert _close(x.grad, wanted), (mode, frozen, step)
                x.grad = None
            if frozen == "v":  # the leaf comes to the root, which has no parameters, and to a trained unit
                assert _close(torch.autograd.grad(model(x).square().sum(), x)[0], wanted), mode
    return max(nums_hooks)


def test_hooks_do_not_gather_on_an_input_that_outlives_its_step(ranks):
    assert max(ranks.run(2, _prompt, 4)) <= 1


def test_a_step_leaves_no_hook_on_its_input(ranks):
    assert ranks.run(2, _prompt, 1) == [0, 0]


class _Segments(nn.Module):
    """A trained layer, and three segments of two units each."""

    def __init__(self, checkpointed):
        super().__init__()
        self.first, self.checkpointed = nn.Linear(4, 4), checkpointed
        for i in range(6):
            self.add_module(f"unit{i}", Part())

    def _segment(self, i, x):
        return getattr(self, f"unit{i + 1}")(getattr(self, f"unit{i}")(x))

    def forward(self, x):
        x = self.first(x)
        for i in range(0, 6, 2):
            if self.checkpointed:
                x = checkpoint(self._segment, i, x, use_reentrant=False)
            else:
                x = self._segment(i, x)
        return x


def _segments(rank, world_size):
    for mode in MODES:
        found = []
        for checkpointed in (False, True):
            model = shard(_plain(lambda c=checkpointed: _Segments(c)), mode)
            units = [unit_of(getattr(model, f"unit{i}")) for i in range(6)]
            nums_full = []
            x = (_inputs() + rank).requires_grad_()
            x.register_hook(lambda _, n=nums_full, u=units: n.append(sum(unit.is_full for unit in u)))
            for _ in range(2):
                model.zero_grad()
                model(x).square().sum().backward()
            assert len(nums_full) == 2 and max(nums_full) <= 2, (mode, checkpointed, nums_full)
            assert not any(unit.is_full for unit in units)
            found.append(_grads(model))
        assert _same(*found), mode


def test_R14_recomputed_segments_hold_no_more_units_than_they_have(ranks):
    ranks.run(2, _segments)


def _root_checkpointed(rank, world_size):
    for use_orig_params in (False, True):
        found = []
        for use_reentrant in (None, False, True):
            model = _plain(dtype=torch.float32)
            options = {"use_orig_params": use_orig_params, "mixed_precision": BF16}
            model.u = FSDP(model.u, **options)
            model = FSDP(model, **options)
            x = (_inputs(torch.float32) + rank).requires_grad_()
            y = model(x) if use_reentrant is None else checkpoint(model, x, use_reentrant=use_reentrant)
            y.float().square().sum().backward()
            found.append([x.grad, *_grads(model)])
        assert _same(found[0], found[1]) and _same(found[0], found[2]), use_orig_params


def test_R35_a_root_computed_again_casts_its_inputs_again(ranks):
    ranks.run(2, _root_checkpointed)


class _Quantised(nn.Module):
    """A trained layer beside integers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.levels = nn.Parameter(torch.arange(4, dtype=torch.int8), requires_grad=False)

    def forward(self, x):
        return self.inner(x) * self.inner.levels


def _integers(rank, world_size):
    for use_orig_params in (False, True):
        with pytest.raises(LayoutError, match=r"'inner\.levels' is 'int8'.*ignored_states"):
            FSDP(_Quantised(), use_orig_params=use_orig_params)
        plain, inputs = _plain(_Quantised, torch.float32), _inputs(torch.float32)
        expected = plain(inputs)
        model = FSDP(plain, use_orig_params=use_orig_params, ignored_states=[plain.inner.levels])
        output = model(inputs)
        output.sum().backward()
        assert torch.equal(output, expected)
        assert model.inner.levels.dtype == torch.int8


def test_integer_parameters_are_refused_by_name_unless_ignored(ranks):
    ranks.run(2, _integers)


class _Pair(tuple):
    """A tuple that cannot be built from its items."""

    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


_Named = collections.namedtuple("_Named", ["x", "n"])


@dataclasses.dataclass
class _Record:
    x: Any
    n: Any


class _Receiver(nn.Module):
    """Keeps what it was given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, given):
        self.given = given
        return self.layer(x)


def _containers():
    """Containers by name, and how to take what was floating and what was an integer out of them."""
    x, n = torch.ones(3), torch.arange(2)
    return {
        "OrderedDict": (collections.OrderedDict(x=x, n=n), lambda c: (c["x"], c["n"])),
        "namedtuple": (_Named(x, n), lambda c: (c.x, c.n)),
        "dataclass": (_Record(x, n), lambda c: (c.x, c.n)),
        "list in a dict": ({"a": [x, (n,)]}, lambda c: (c["a"][0], c["a"][1][0])),
        "PackedSequence": (pack_sequence([torch.ones(2, 3), torch.ones(1, 3)]), lambda c: (c.data, c.batch_sizes)),
    }


def _whatever_holds_them(rank, world_size):
    inputs = _inputs(torch.float32)
    for precision, dtype in ((None, torch.float32), (BF16, torch.bfloat16)):
        model = FSDP(_Receiver(), mixed_precision=precision)
        for name, (given, parts) in _containers().items():
            model(inputs, given)
            got = model.module.given
            assert type(got) is type(given), (name, precision)
            floating, integer = parts(got)
            assert floating.dtype == dtype and integer.dtype == torch.int64, (name, precision)
            assert torch.equal(floating.float(), parts(given)[0]) and torch.equal(integer, parts(given)[1]), name
        views = {"a": torch.arange(2)}
        for given in (
            views.keys(),
            views.values(),
            views.items(),
            _Pair(1, torch.arange(2)),
            _Named(1, 2),
            torch.Size([3]),
        ):
            model(inputs, given)
            assert model.module.given is given, (type(given), precision)
        assert isinstance(got, PackedSequence)


def test_R35_inputs_pass_in_containers_of_any_kind(ranks):
    """What holds nothing to cast is handed on as it is: not every kind can be built from its items."""
    ranks.run(2, _whatever_holds_them)


def _pair_of_floats():
    return _Pair(1, torch.ones(2))


def _default_dict():
    return collections.defaultdict(list, x=torch.ones(2))


def test_R35_containers_that_cannot_be_built_from_their_items():
    assert all(value.dtype == torch.bfloat16 for value in cast_floating(_default_dict(), torch.bfloat16).values())
    with pytest.raises(UsageError, match="cannot be rebuilt"):
        cast_floating(_pair_of_floats(), torch.bfloat16)


@dataclasses.dataclass
class _Scaled:
    x: Any
    factor: dataclasses.InitVar[int]


def test_R35_containers_keep_their_class():
    """Attributes of a Hugging Face output are those of its items."""
    from transformers import BatchFeature
    from transformers.modeling_outputs import CausalLMOutput

    floats = torch.ones(2)
    output = cast_floating(CausalLMOutput(loss=floats.sum(), logits=floats), torch.bfloat16)
    assert isinstance(output, CausalLMOutput) and output["loss"] is output.loss
    assert output.loss.dtype == output.logits.dtype == torch.bfloat16
    batch = cast_floating(BatchFeature({"x": floats, "n": torch.arange(2)}), torch.bfloat16)
    assert isinstance(batch, BatchFeature) and batch.x.dtype == torch.bfloat16 and batch.n.dtype == torch.int64
    factors = cast_floating(collections.defaultdict(list, x=floats), torch.bfloat16)
    assert factors["x"].dtype == torch.bfloat16 and factors["others"] == []
    scaled = cast_floating(_Scaled(floats, factor=2), torch.bfloat16)
    assert isinstance(scaled, _Scaled) and scaled.x.dtype == torch.bfloat16
    assert cast_floating(types.MappingProxyType({"x": floats}), torch.bfloat16)["x"].dtype == torch.bfloat16
    assert floats.dtype == torch.float32


class _Batch(MutableMapping):
    """Has its items in an attribute."""

    def __init__(self, items):
        self.items_ = items

    def __getitem__(self, key):
        return self.items_[key]

    def __setitem__(self, key, value):
        self.items_[key] = value

    def __delitem__(self, key):
        del self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


def test_R35_mappings_of_the_user_are_not_changed():
    batch = _Batch({"x": torch.ones(2), "n": torch.arange(2)})
    cast = cast_floating(batch, torch.bfloat16)
    assert {name: value.dtype for name, value in cast.items()} == {"x": torch.bfloat16, "n": torch.int64}
    assert batch["x"].dtype == torch.float32


def test_R35_indices_of_packed_sequences_move_with_them():
    packed = pack_sequence([torch.ones(1, 3), torch.ones(2, 3)], enforce_sorted=False)
    result = moved(packed, torch.device("meta"))
    assert result.data.is_meta and result.sorted_indices.is_meta and result.unsorted_indices.is_meta
    assert result.batch_sizes.device.type == "cpu"


def _torchs_own_names(rank, world_size):
    found = []
    for api in (torch_backend, torch_fsdp):
        model = _plain(dtype=torch.float32)
        model = FSDP(
            model,
            auto_wrap_policy=torch_backend.ModuleWrapPolicy({Part}),
            sharding_strategy=api.ShardingStrategy.SHARD_GRAD_OP,
            cpu_offload=api.CPUOffload(offload_params=True),
            mixed_precision=api.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            backward_prefetch=api.BackwardPrefetch.BACKWARD_POST,
        )
        for unit in FSDP.fsdp_modules(model):
            assert unit.sharding_strategy is torch_backend.ShardingStrategy.SHARD_GRAD_OP
            assert unit.cpu_offload == torch_backend.CPUOffload(offload_params=True)
            assert unit.mixed_precision == torch_backend.MixedPrecision(torch.bfloat16, torch.float32)
            assert unit.backward_prefetch is torch_backend.BackwardPrefetch.BACKWARD_POST
        output = model(_inputs(torch.float32) + dist.get_rank())
        output.float().sum().backward()
        found.append([output.detach(), *_grads(model)])
    assert _same(*found) and found[0][0].dtype == torch.bfloat16


def test_torchs_own_enums_and_records_are_taken(ranks):
    """Scripts mix their imports."""
    ranks.run(2, _torchs_own_names)
