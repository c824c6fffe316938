"""Policies and what they make units, module for module beside torch.distributed.fsdp.wrap, on random module trees."""

import random
import threading
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp._wrap_utils import _auto_wrap

from crossframe.errors import UnitError, UnsupportedError, UsageError
from torch_backend import wrap as our_wrap
from torch_backend.wrap import units_to_wrap, wrap_modules

TREES = 300


class Marked(nn.Linear):
    """A leaf of its own class."""


class Node(nn.Module):
    """A module with a parameter, a missing child, and children."""

    def __init__(self, rng, children):
        super().__init__()
        self.own = nn.Parameter(torch.zeros(rng.randrange(1, 6)))
        self.missing = None
        for i, child in enumerate(children):
            self.add_module(f"child{i}", child)


class Special(Node):
    """The same, of another class."""


LEAVES = [
    lambda rng: nn.Linear(rng.randrange(1, 5), rng.randrange(1, 5)),
    lambda rng: Marked(rng.randrange(1, 5), 2, bias=False),
    lambda rng: nn.BatchNorm1d(rng.randrange(1, 5)),
    lambda rng: nn.LayerNorm(3, elementwise_affine=rng.random() < 0.5),
    lambda rng: nn.MultiheadAttention(2, 1),
    lambda rng: nn.Identity(),
]
NODES = [
    Node,
    Special,
    lambda rng, children: nn.Sequential(*children),
    lambda rng, children: nn.ModuleList(children),
    lambda rng, children: nn.ModuleDict({f"key{i}": child for i, child in enumerate(children)}),
]
CLASSES = [nn.Linear, Marked, nn.BatchNorm1d, nn.MultiheadAttention, Node, Special, nn.Sequential, nn.ModuleList]


def build_tree(seed, shares=False, frozen=False):
    """The same tree for the same arguments, its modules with a random `tag`."""
    rng = random.Random(seed)
    made = []

    def build(depth):
        if shares and made and rng.random() < 0.2:
            return rng.choice(made)
        if depth == 0 or rng.random() < 0.2:
            module = rng.choice(LEAVES)(rng)
        else:
            module = rng.choice(NODES)(rng, [build(depth - 1) for _ in range(rng.randrange(4))])
        made.append(module)
        return module

    # Its children exist before a node does, so that no module comes to lie below itself.
    root = Node(rng, [build(3) for _ in range(rng.randrange(1, 5))])
    for module in root.modules():
        module.tag = rng.random()
    for param in root.parameters():
        param.requires_grad = not (frozen and rng.random() < 0.3)
    return root


def names(root):
    return {module: name for name, module in root.named_modules()}


def pick(rng, classes):
    return set(rng.sample(classes, rng.randrange(1, 4)))


def build_policy(api, kind, rng, calls, names):
    """A policy of `api`, torch's or ours; every call to a user's function goes to `calls`."""

    def logged(policy):
        def asked(module, recurse, nonwrapped_numel):
            calls.append((names[module], recurse, nonwrapped_numel))
            return policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)

        return asked

    if kind == "classes":
        return api.ModuleWrapPolicy(pick(rng, CLASSES))
    if kind == "called classes":
        return logged(api.ModuleWrapPolicy(pick(rng, CLASSES)))
    if kind == "custom":
        no, yes = sorted((rng.random(), rng.random()))

        def choose(module):
            calls.append(names[module])
            if module.tag < no:
                return rng.choice([False, {}])
            return (
                True if module.tag < yes else {"sharding": module.tag, **({"mixed_precision": 3} if yes > 0.8 else {})}
            )

        return api.CustomPolicy(choose)
    if kind == "always":
        return logged(api.always_wrap_policy)
    if kind == "lambda":
        part = rng.random()
        return logged(partial(api.lambda_auto_wrap_policy, lambda_fn=lambda module: module.tag < part))
    if kind == "transformer":
        return logged(partial(api.transformer_auto_wrap_policy, transformer_layer_cls=pick(rng, CLASSES)))
    if kind == "size":
        options = {"min_num_params": rng.choice([0, 1, 5, 10, 20, 40.0])}
        if rng.random() < 0.5:
            options["force_leaf_modules"] = pick(rng, CLASSES)
        if rng.random() < 0.5:
            options["exclude_wrap_modules"] = pick(rng, CLASSES)
        return logged(partial(api.size_based_auto_wrap_policy, **options))
    assert kind == "own"
    deep, much = rng.random(), rng.randrange(30)
    return logged(
        lambda module, recurse, nonwrapped_numel: module.tag < deep if recurse else nonwrapped_numel % 30 < much
    )


OBJECTS = ["classes", "custom"]
FUNCTIONS = ["called classes", "always", "lambda", "transformer", "size", "own"]


class Recorder(nn.Module):
    """A wrapper that remembers what it was given."""

    def __init__(self, module, **kwargs):
        super().__init__()
        self.inner, self.kwargs = module, kwargs
        self.name = None


def setting(api, kind, seed, *, shares):
    """One random tree, policy and arguments, the same for both APIs; and the calls of the policy."""
    rng = random.Random(f"{kind} {seed}")
    keeps_original = rng.random() < 0.5
    root = build_tree(f"{kind} {seed}", shares, frozen=keeps_original or kind in FUNCTIONS)
    known, calls = names(root), []
    heads = [module for module in root.modules() if module is not root and rng.random() < 0.05]
    ignored = {below for module in heads for below in module.modules()}
    ignored_params = {param for module in ignored for param in module.parameters()}
    ignored_params |= {param for param in root.parameters() if rng.random() < 0.05}
    ignores = rng.choice([None, (), (nn.BatchNorm1d,), (nn.LayerNorm, Special)])
    mixed = None if ignores is None else MixedPrecision(torch.float16, _module_classes_to_ignore=ignores)
    kwargs = {"mixed_precision": mixed, "use_orig_params": keeps_original, "sharding": 0}
    policy = build_policy(api, kind, rng, calls, known)
    return root, policy, ignored, ignored_params, kwargs, ignores, known, calls


def torchs(kind, seed, shares=False):
    root, policy, ignored, ignored_params, kwargs, _, known, calls = setting(torch_wrap, kind, seed, shares=shares)
    units = []

    class Logged(Recorder):
        def __init__(self, module, auto_wrap_policy=None, **kwargs):
            assert auto_wrap_policy is None
            super().__init__(module, **kwargs)
            units.append((known[module], kwargs))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _auto_wrap(root, policy, ignored, ignored_params, kwargs, Logged)
    frozen = sum("requires_grad=True and False" in str(warning.message) for warning in caught)
    return root, units, calls, (frozen, len(caught) - frozen)


def ours(kind, seed, shares=False):
    root, policy, ignored, ignored_params, kwargs, ignores, known, calls = setting(our_wrap, kind, seed, shares=shares)
    before = dict(kwargs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        units = units_to_wrap(
            root,
            policy,
            ignored_modules=ignored,
            ignored_params=ignored_params,
            root_kwargs=kwargs,
            is_wrapped=lambda module: isinstance(module, Recorder),
            mixed_precision_ignores=(nn.Linear,) if ignores is None else ignores,
        )
    assert kwargs == before and names(root) == known
    assert len({id(kwargs) for kwargs in units.values()}) == len(units)
    wrap_modules(root, units, Recorder)
    frozen = sum("trained" in str(warning.message) for warning in caught)
    in_full = [module for module in known if isinstance(module, ignores or ()) and module in units]
    assert len(caught) - frozen == bool(in_full)
    others = [m for m in known if isinstance(m, ignores or ()) and (m in ignored or m is root)]
    return (
        root,
        [(known[module], kwargs) for module, kwargs in units.items()],
        calls,
        (frozen, len(caught) - frozen),
        others,
    )


def shape(root):
    return [(name, type(module).__name__.replace("Logged", "Recorder")) for name, module in root.named_modules()]


@pytest.mark.parametrize("kind", OBJECTS + FUNCTIONS)
def test_R01_the_same_units_with_the_same_arguments_in_the_same_order_as_torch(kind):
    wrapped = warned = 0
    for seed in range(TREES):
        root, units, calls, warns, exempt = ours(kind, seed)
        torch_root, torch_units, torch_calls, torch_warns = torchs(kind, seed)
        assert units == torch_units, (kind, seed)
        assert calls == torch_calls, (kind, seed)
        assert shape(root) == shape(torch_root), (kind, seed)
        # torch also warns of ignored modules and of the root, which become no units of their own.
        assert warns == torch_warns or (exempt and warns == (torch_warns[0], 0)), (kind, seed)
        wrapped, warned = wrapped + len(units), warned + sum(warns)
    assert wrapped > TREES / 2 and warned


@pytest.mark.parametrize("kind", OBJECTS)
def test_R01_shared_modules_are_one_unit_as_in_torch_and_wherever_they_are_registered(kind):
    shared = 0
    for seed in range(TREES):
        try:
            root, units, calls, _, _ = ours(kind, seed, shares=True)
        except UnitError:
            continue
        _, torch_units, torch_calls, _ = torchs(kind, seed, shares=True)
        assert (units, calls) == (torch_units, torch_calls), (kind, seed)
        wrappers = {module.inner for module in root.modules() if isinstance(module, Recorder)}
        assert len(wrappers) == len(units)
        for name, module in root.named_modules(remove_duplicate=False):
            assert module not in wrappers or name.endswith("inner"), (kind, seed)
        every = [module for _, module in root.named_modules(remove_duplicate=False) if isinstance(module, Recorder)]
        shared += len(every) > len(wrappers)
    assert shared > 10
