"""Joins the ShardedParams of several models of a script to those of one, as they are recorded."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from crossframe.checkpoint import state_layout
from crossframe.layout import Layout
from crossframe.param_map import ParamMap
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._local_grads import LocalGrads
from jax_backend.shards._param_tree import ParamTree
from jax_backend.shards._sharded_params import ShardedParams


def joined(models: Mapping[str, ShardedParams]) -> ShardedParams:
    """The shards of all models, under names that begin with the model's. Their tree has no structure of full parameters: it
    describes shards alone.

    Args:
        models: by name, the parameters of each model, or their gradients or updates.
    """
    parts = [named(name, sharded) for name, sharded in models.items()]
    arrays = {name: each for part in parts for name, each in part.buckets.items()}
    return ShardedParams.of(_joined_trees(tuple(part.tree for part in parts)), arrays)


def joined_local_grads(models: Mapping[str, LocalGrads]) -> LocalGrads:
    """The same of each rank's own gradients."""
    lines = {_rename(name)(bucket): line for name, own in models.items() for bucket, line in own.lines.items()}
    return LocalGrads(lines, _joined_trees(tuple(_named_tree(name, own.tree) for name, own in models.items())))


def named(model: str, sharded: ShardedParams) -> ShardedParams:
    """The shards of a model under names that begin with that of the model."""
    rename = _rename(model)

    def renamed(arrays: Any) -> Any:
        return {rename(name): array for name, array in arrays.items()} if isinstance(arrays, Mapping) else arrays

    return ShardedParams.of(
        _named_tree(model, sharded.tree), {rename(name): renamed(arrays) for name, arrays in sharded.buckets.items()}
    )


def named_state(model: str, state: Any) -> Any:
    """The state of a model's optimizer, with the shards in it under names that begin with that of the model."""
    return jax.tree.map(
        lambda node: named(model, node) if isinstance(node, ShardedParams) else node,
        state,
        is_leaf=lambda node: isinstance(node, ShardedParams),
    )


def _rename(model: str) -> Callable[[str], str]:
    return lambda name: f"{model}.{name}" if name else model


@functools.lru_cache(maxsize=16)
def _named_tree(model: str, tree: ParamTree) -> ParamTree:
    rename = _rename(model)

    def layout_of(layout: Layout) -> Layout:
        return state_layout(layout, "", layout.dtype, rename)

    def bucket_of(bucket: Bucket) -> Bucket:
        unit, name = rename(bucket.unit), rename(bucket.name)
        return replace(bucket, name=name, unit=unit, layout=layout_of(bucket.layout))

    entries = (
        replace(
            entry,
            name=rename(entry.name),
            path=tuple(map(rename, entry.path)) if isinstance(entry.path, tuple) else rename(entry.path),
        )
        for entry in tree.param_map.entries
    )
    return replace(
        tree,
        buckets=tuple(map(bucket_of, tree.buckets)),
        param_map=ParamMap(tuple(entries)),
        paths=tuple(map(rename, tree.paths)),
        shared=tuple((rename(path), rename(owner)) for path, owner in tree.shared),
    )


@functools.lru_cache(maxsize=16)
def _joined_trees(trees: tuple[ParamTree, ...]) -> ParamTree:
    return replace(
        trees[0],
        buckets=tuple(bucket for tree in trees for bucket in tree.buckets),
        param_map=ParamMap(tuple(entry for tree in trees for entry in tree.param_map.entries)),
        paths=tuple(path for tree in trees for path in tree.paths),
        shared=tuple(pair for tree in trees for pair in tree.shared),
    )
