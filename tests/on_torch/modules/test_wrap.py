"""Policies and what they make units, module for module beside torch.distributed.fsdp.wrap, on random module trees."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import inspect
import random
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp._wrap_utils import _auto_wrap

from crossframe.errors import UnitError, UnsupportedError, UsageError
from torch_backend import FullyShardedDataParallel
from torch_backend import wrap as our_wrap
from torch_backend.fsdp1._wrap_units import units_to_wrap, wrap_modules

TREES = 100


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


def ours(kind, seed, shares=False, api=our_wrap):
    root, policy, ignored, ignored_params, kwargs, ignores, known, calls = setting(api, kind, seed, shares=shares)
    before = dict(kwargs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "ModuleWrapPolicy: no module")  # torch says nothing
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


def has_param_of_two_units(kind, seed, unit_names):
    """Whether a parameter is reached through different units, along every path of the tree."""
    root, _, _, ignored_params, _, _, known, _ = setting(our_wrap, kind, seed, shares=True)
    units = {module for module, name in known.items() if name in unit_names}
    owners = {}

    def walk(module, unit):
        unit = module if module in units else unit
        for param in module.parameters(recurse=False):
            owners.setdefault(param, set()).add(unit)
        for child in module._modules.values():
            if child is not None:
                walk(child, unit)

    walk(root, root)
    return any(len(units) > 1 for param, units in owners.items() if param not in ignored_params)


def shape(root):
    return [(name, type(module).__name__.replace("Logged", "Recorder")) for name, module in root.named_modules()]


@pytest.mark.parametrize("kind", OBJECTS + FUNCTIONS)
def test_R01_the_same_units_with_the_same_arguments_in_the_same_order_as_torch(kind):
    wrapped = warned = 0
    for seed in range(TREES):
        api = torch_wrap if kind in OBJECTS and seed % 2 else our_wrap  # policies of torch are taken too
        root, units, calls, warns, exempt = ours(kind, seed, api=api)
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
    shared = refused = 0
    for seed in range(TREES):
        _, torch_units, torch_calls, _ = torchs(kind, seed, shares=True)
        if has_param_of_two_units(kind, seed, [name for name, _ in torch_units]):
            refused += 1
            with pytest.raises(UnitError, match="shared with"):
                ours(kind, seed, shares=True)
            continue
        root, units, calls, _, _ = ours(kind, seed, shares=True)
        assert (units, calls) == (torch_units, torch_calls), (kind, seed)
        wrappers = {module.inner for module in root.modules() if isinstance(module, Recorder)}
        assert len(wrappers) == len(units)
        for name, module in root.named_modules(remove_duplicate=False):
            assert module not in wrappers or name.endswith("inner"), (kind, seed)
        every = [module for _, module in root.named_modules(remove_duplicate=False) if isinstance(module, Recorder)]
        shared += len(every) > len(wrappers)
    assert min(shared, refused) > 5, (shared, refused)


class Pair(nn.Module):
    """Two children, each with the module `shared` inside, if there is one."""

    def __init__(self, shared=None):
        super().__init__()
        self.one = nn.Sequential(nn.Linear(2, 2), *([shared] if shared else []))
        self.two = nn.Sequential(*([shared] if shared else []), nn.Linear(2, 2))


def select(root, policy, **options):
    known = names(root)
    defaults = {
        "ignored_modules": set(),
        "ignored_params": set(),
        "root_kwargs": {"size": 1},
        "is_wrapped": lambda _: False,
    }
    return {known[module]: kwargs for module, kwargs in units_to_wrap(root, policy, **defaults | options).items()}


def test_R01_under_a_policy_function_a_shared_module_is_one_unit_and_counts_once():
    """torch wraps it twice, the second time without its parameters, and counts it twice."""
    root = nn.Sequential(Pair(shared := nn.Linear(3, 3)))
    policy = partial(our_wrap.size_based_auto_wrap_policy, min_num_params=12)
    asked = []
    select(root, lambda module, recurse, nonwrapped_numel: asked.append((module, recurse)) or recurse)
    assert len(set(asked)) == len(asked) == 13
    # 24 elements below the pair, 12 of them shared: what is left after the shared module is wrapped is enough for a unit.
    assert list(select(root, policy)) == ["0.one.1", "0"]
    wrap_modules(root, units_to_wrap(root, policy, ignored_modules=set(), ignored_params=set(), root_kwargs={},
                                     is_wrapped=lambda module: False), Recorder)  # fmt: skip
    pair = root[0].inner
    assert pair.one[1] is pair.two[0] and pair.one[1].inner is shared

    root, made = nn.Sequential(Pair(shared)), []
    _auto_wrap(root, partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=12), set(), set(),
               {"mixed_precision": None}, lambda module, **_: made.append(module) or Recorder(module))  # fmt: skip
    assert made == [shared, shared]


def test_R31_a_parameter_of_two_units_is_refused_before_anything_is_wrapped():
    """torch wraps both modules, and each goes on with a parameter of its own."""
    root = Pair()
    root.two[0].weight = root.one[0].weight
    for policy in (our_wrap.ModuleWrapPolicy({nn.Linear}), our_wrap.always_wrap_policy):
        with pytest.raises(
            UnitError, match=r"'one\.0\.weight' of unit 'one\.0' is shared with 'two\.0\.weight' of unit"
        ):
            select(root, policy)
    with pytest.raises(UnitError, match=r"'one\.0\.weight' of unit 'one' is shared with 'two\.0\.weight' of unit ''"):
        select(root, our_wrap.CustomPolicy(lambda module: module is root.one))
    assert not any(isinstance(module, Recorder) for module in root.modules())
    inside = nn.Sequential(root)
    assert list(select(inside, our_wrap.ModuleWrapPolicy({Pair}))) == ["0"]
    assert list(select(root, our_wrap.ModuleWrapPolicy({nn.Linear}), ignored_params={root.one[0].weight})) != []
    # Two units that reach one module which is none: its parameters are shared between them.
    with pytest.raises(
        UnitError, match=r"'one\.1\.weight' of unit 'one' is shared with 'two\.0\.weight' of unit 'two'"
    ):
        select(Pair(nn.Linear(2, 2)), our_wrap.ModuleWrapPolicy({nn.Sequential}))


def test_R01_a_parameter_that_two_modules_of_one_unit_share_counts_once():
    root = nn.Sequential(Pair())
    root[0].two[0].weight = root[0].one[0].weight
    seen = {}

    def policy(module, recurse, nonwrapped_numel):
        seen[names(root)[module], recurse] = nonwrapped_numel
        return recurse

    assert select(root, policy) == {}
    assert seen["0", True] == seen["0", False] == 8 and seen["0.one", True] == 6


def test_a_unit_takes_its_own_arguments_before_the_roots():
    root = Pair()
    policy = our_wrap.CustomPolicy(lambda module: {"size": 2} if module is root.one else module is root.two)
    assert select(root, policy) == {"one": {"size": 2}, "two": {"size": 1}}
    with pytest.raises(UsageError, match=r"CustomPolicy: a Pair .* arguments \['sise'\]; expected some of \['size'\]"):
        select(root, our_wrap.CustomPolicy(lambda module: {"sise": 2}))


def test_R35_a_mixed_precision_of_the_root_gives_ignored_classes_units_in_full_precision_and_says_so():
    root = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    options = {"mixed_precision_ignores": (nn.BatchNorm1d,)}
    policy = our_wrap.ModuleWrapPolicy({nn.Linear})
    assert list(select(root, policy, root_kwargs={"mixed_precision": None}, **options)) == ["1"]
    with pytest.warns(UserWarning, match=r"classes \['BatchNorm1d'\] become units") as caught:
        units = select(root, policy, root_kwargs={"mixed_precision": "half"}, **options)
    assert units == {"0": {"mixed_precision": None}, "1": {"mixed_precision": "half"}}
    assert len(caught) == 1
    select(
        nn.BatchNorm1d(2), policy, root_kwargs={"mixed_precision": "half"}, **options
    )  # the root is none: no warning


def test_R11_trained_and_frozen_in_a_unit_that_keeps_its_parameters_is_warned_of_by_name():
    root = nn.Sequential(nn.Linear(2, 3))
    root[0].bias.requires_grad_(False)
    policy = our_wrap.ModuleWrapPolicy({nn.Linear})
    with pytest.warns(UserWarning, match=r"unit '0' .* \['0.weight'\] .* \['0.bias'\].* 9 elements where 6 would do"):
        select(root, policy, root_kwargs={"use_orig_params": True})
    select(root, policy, root_kwargs={"use_orig_params": False})  # no warning: the layout refuses
    # torch asks the root alone whether parameters are kept.
    own = our_wrap.CustomPolicy(lambda module: {"use_orig_params": True} if module is root[0] else False)
    with pytest.warns(UserWarning, match="unit '0'"):
        select(root, own, root_kwargs={"use_orig_params": False})


def test_classes_that_the_model_lacks_are_warned_of():
    """As in torch, no unit but the root is made."""
    root = Pair(nn.ReLU())
    with pytest.warns(UserWarning) as caught:
        assert select(root, our_wrap.ModuleWrapPolicy([Mixin, nn.Conv1d])) == {}
    (told,) = (str(warning.message) for warning in caught)
    assert "Pair is a tests.on_torch.modules.test_wrap.Mixin or torch.nn.modules.conv.Conv1d, so" in told
    assert told.endswith(
        "it has: torch.nn.modules.container.Sequential, torch.nn.modules.linear.Linear, torch.nn.modules.activation.ReLU"
    )


@pytest.mark.parametrize(
    ("root", "classes", "ignored"),
    [
        pytest.param(Pair(), {Pair}, False, id="the root's"),
        pytest.param(Pair(), (), False, id="none"),
        pytest.param(Pair(), {nn.Linear}, True, id="those of ignored modules"),
        pytest.param(nn.Linear(2, 2), {nn.Conv1d}, False, id="a model without submodules"),
    ],
)
def test_classes_that_select_nothing_on_purpose_are_not_warned_of(root, classes, ignored):
    left_out = set(root.modules()) if ignored else set()
    assert select(root, our_wrap.ModuleWrapPolicy(classes), ignored_modules=left_out) == {}


def _warned_at(rank, world_size):
    with pytest.warns(UserWarning, match="ModuleWrapPolicy") as caught:
        FullyShardedDataParallel(Pair(), auto_wrap_policy=our_wrap.ModuleWrapPolicy({nn.Conv1d}))
    return [warning.filename for warning in caught]


def test_warnings_of_a_policy_point_at_the_users_line(ranks):
    assert ranks.run(1, _warned_at) == [[__file__]]


class Mixin:
    """A class that is no module, and marks some."""


class Mixed(Mixin, nn.Linear):
    """A module so marked."""


def test_classes_that_are_no_modules_can_mark_them():
    for api in (our_wrap, torch_wrap):
        assert api.ModuleWrapPolicy([Mixin])(Mixed(1, 1), recurse=False)
    assert list(select(nn.Sequential(Mixed(1, 1)), our_wrap.ModuleWrapPolicy([Mixin]))) == ["0"]
    assert select(Pair(), our_wrap.ModuleWrapPolicy([])) == {}


def _no_answer(module, recurse, nonwrapped_numel):
    return None


def _short(module, recurse):
    return True


class Silent:
    """Something without a truth value."""

    def __bool__(self):
        raise ValueError("neither")


REFUSED = [
    (3, "expected a ModuleWrapPolicy, .* got 3"),
    ("blocks", "got 'blocks'"),
    (our_wrap.ModuleWrapPolicy, "got <class"),
    (nn.Linear(1, 1), "got Linear"),
    (lambda module: True, r"<lambda>\(module\): got an unexpected"),
    (_short, "_short.*'nonwrapped_numel'"),
    (our_wrap.transformer_auto_wrap_policy, "transformer_auto_wrap_policy.*'transformer_layer_cls'"),
    (lambda module, recurse, nonwrapped_numel: {"size": 2}, "return a bool, got {'size': 2} for a Pair.*CustomPolicy"),
    (lambda module, recurse, nonwrapped_numel: {}, "return a bool, got {}"),
    (lambda module, recurse, nonwrapped_numel: _short, "return a bool, got <function _short"),
    (lambda module, recurse, nonwrapped_numel: torch.zeros(2), "return a bool, got tensor"),
    (lambda module, recurse, nonwrapped_numel: Silent(), "return a bool, got .*Silent"),
    (partial(our_wrap.lambda_auto_wrap_policy, lambda_fn=3), "lambda_fn: expected a function of a module, got 3"),
    (
        partial(our_wrap.transformer_auto_wrap_policy, transformer_layer_cls=Pair),
        "iterable of classes of modules, got <cl",
    ),
    (partial(our_wrap.size_based_auto_wrap_policy, min_num_params="5"), "min_num_params, got '5'"),
    (partial(our_wrap.size_based_auto_wrap_policy, force_leaf_modules={"a"}), "force_leaf_modules: .* got {'a'}"),
    (
        partial(our_wrap.size_based_auto_wrap_policy, min_num_params=0, exclude_wrap_modules=3),
        "exclude_wrap_modules: .* got 3",
    ),
    (our_wrap.CustomPolicy(lambda module: None), "True, False or a dict of arguments, got None for a Pair"),
    (our_wrap.CustomPolicy(lambda module: 1), "got 1 for a Pair"),
]


@pytest.mark.parametrize(("policy", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_policy_or_no_answer_is_refused(policy, message):
    with pytest.raises(UsageError, match=f"(?s){message}"):
        select(Pair(), policy)


@pytest.mark.parametrize("make", [our_wrap.ModuleWrapPolicy, our_wrap.CustomPolicy])
@pytest.mark.parametrize("value", [3, "Block", None])
def test_policies_of_nothing_are_refused_when_they_are_made(make, value):
    with pytest.raises(UsageError, match=make.__name__):
        make(value)
    for value in (nn.Linear, {"Block"}, [3]):
        with pytest.raises(UsageError, match="ModuleWrapPolicy: module_classes: expected an iterable of classes"):
            our_wrap.ModuleWrapPolicy(value)


def test_what_python_takes_for_no_is_no():
    """Policies that end without a return, as users of torch write them."""
    assert select(Pair(), _no_answer) == {}
    assert list(
        select(Pair(), lambda module, recurse, nonwrapped_numel: recurse or int(isinstance(module, nn.Linear)))
    ) == [
        "one.0",
        "two.0",
    ]


def test_policy_and_wrapping_by_hand_are_not_mixed():
    root = Pair()
    root.two[0] = Recorder(root.two[0])
    for module, name in ((root, "two.0"), (root.two[0], "")):
        with pytest.raises(UsageError, match=f"wrapped yet, but '{name}' is"):
            select(
                module,
                _no_answer,
                is_wrapped=lambda module: isinstance(module, Recorder),
                ignored_modules=set(root.two),
            )


def test_public_names_and_arguments_are_torchs():
    assert sorted(our_wrap.__all__) == sorted(torch_wrap.__all__)
    for name in torch_wrap.__all__:
        ours, theirs = inspect.signature(getattr(our_wrap, name)), inspect.signature(getattr(torch_wrap, name))
        assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
            (p.name, p.kind, p.default) for p in theirs.parameters.values()
        ], name
    for name in ("FORCE_LEAF_MODULES", "EXCLUDE_WRAP_MODULES"):
        assert getattr(our_wrap.size_based_auto_wrap_policy, name) == getattr(
            torch_wrap.size_based_auto_wrap_policy, name
        )


def test_the_sets_of_the_size_based_policy_can_be_changed(monkeypatch):
    policy = our_wrap.size_based_auto_wrap_policy
    ask = partial(policy, nonwrapped_numel=10, min_num_params=10)
    pair = Pair()
    assert ask(pair, recurse=True) and ask(pair, recurse=False) and not ask(nn.ModuleList(), recurse=False)
    monkeypatch.setattr(policy, "FORCE_LEAF_MODULES", {Pair})
    assert not ask(pair, recurse=True) and ask(nn.MultiheadAttention(2, 1), recurse=True)
    monkeypatch.setattr(policy, "EXCLUDE_WRAP_MODULES", {Pair})
    assert not ask(pair, recurse=False) and ask(nn.ModuleList(), recurse=False)
    assert ask(pair, recurse=True, force_leaf_modules=set())  # none is not the default
    assert not policy(nn.Linear(2, 2), False, 10**8 - 1) and policy(nn.Linear(2, 2), False, 10**8)


@pytest.mark.parametrize("api", [our_wrap, torch_wrap])
def test_wrap_wraps_inside_enable_wrap_alone_and_its_own_arguments_go_first(api):
    module = nn.Linear(1, 1)
    assert api.wrap(module, size=3) is module
    with api.enable_wrap(wrapper_cls=Recorder, size=1, depth=2):
        wrapped, own = api.wrap(module), api.wrap(module, size=3, width=4)
        assert api.wrap(module).kwargs == {"size": 1, "depth": 2}  # what one call overrides, the next does not see
    assert wrapped.inner is module and wrapped.kwargs == {"size": 1, "depth": 2}
    assert own.kwargs == {"size": 3, "depth": 2, "width": 4}
    assert api.wrap(module) is module
    with pytest.raises(KeyError), api.enable_wrap(wrapper_cls=Recorder):
        raise KeyError
    assert api.wrap(module) is module
    with api.enable_wrap(wrapper_cls=Recorder, size=1):
        with pytest.raises(NotImplementedError), api.enable_wrap(wrapper_cls=Recorder, size=2):
            pass
        assert api.wrap(module).kwargs == {"size": 1}
    with api.enable_wrap(wrapper_cls=lambda module, **kwargs: Recorder(module)):
        assert api.wrap(module).inner is module


def test_wrap_and_enable_wrap_refuse_by_name():
    with pytest.raises(UsageError, match="wrapper_cls, got None"), our_wrap.enable_wrap(wrapper_cls=None):
        pass
    with our_wrap.enable_wrap(wrapper_cls=Recorder):
        with pytest.raises(UnsupportedError, match=r"inside enable_wrap\(wrapper_cls=Recorder"):
            our_wrap.enable_wrap(wrapper_cls=nn.Sequential).__enter__()
        with pytest.raises(UsageError, match="wrapper_cls is an argument of enable_wrap"):
            our_wrap.wrap(nn.Linear(1, 1), wrapper_cls=nn.Sequential)
