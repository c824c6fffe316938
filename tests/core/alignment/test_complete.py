"""Parameters whose values differ, matched by structure to compare them."""

import numpy as np

from crossframe.alignment import align, complete
from tests.core.alignment import test_portions as models


def broken(params, *names):
    return {name: value + 0.5 if name in names else value for name, value in params.items()}


def completed(first, second):
    return complete(align(first, second), first, second)


def test_wrong_parameters_correspond_as_in_other_layers():
    params, shadow = (dict(models.model(seed)) for seed in (0, 1))
    wrong = ("h.1.attn.k.weight", "h.2.mlp.up.weight", "h.2.norm.weight")
    for second in (models.separate, lambda p: models.stacked(models.separate(p))):
        found, added = completed(broken(params, *wrong), second(params))
        assert set(wrong) <= set(added) and len(found.entries) == len(params)
        for entry in found.entries:
            assert np.array_equal(
                entry.to_canonical(*(second(shadow)[path] for path in entry.paths)), shadow[entry.name]
            )


def test_joined_parameters_correspond_as_in_other_layers():
    params, shadow = (dict(models.model(seed)) for seed in (0, 1))
    how = models.in_groups(0)
    first = broken(models.joined(params, *models.QKV, how), "h.1.attn.qkv.weight")
    found, added = completed(first, models.separate(params))
    assert "h.1.attn.qkv.weight" in added and len(found.entries) == len(first)
    second, wanted = models.separate(shadow), models.joined(shadow, *models.QKV, how)
    for entry in found.entries:
        assert np.array_equal(entry.to_canonical(*(second[path] for path in entry.paths)), wanted[entry.name])


def test_the_only_parameter_that_is_left_is_matched_and_two_are_not():
    params = dict(models.model(0))
    found, added = completed(broken(params, "embed.weight"), models.separate(params))
    assert added == ("embed.weight",) and found.by_name["embed.weight"].path == "embed.kernel"
    found, added = completed(broken(params, "embed.weight", "norm.weight"), models.separate(params))
    assert "embed.weight" not in added and "embed.weight" not in found.by_name
    # Of another shape it is another parameter.
    other = models.separate(params) | {"embed.kernel": np.ones((7, 3))}
    assert completed(broken(params, "embed.weight"), other)[1] == ()
