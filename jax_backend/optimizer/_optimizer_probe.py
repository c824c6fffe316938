"""Rejects transformations of optax that give other results on buckets than on parameters, by trying them on small arrays.

Under the flat and ragged layouts a leaf is a bucket in one line, with padding between parameters. So before the first update the
transformation takes some steps on small parameters twice: as *lines* like those of the layout, and *whole*, with one array for
each parameter. Updates and state must agree up to the rounding of sums, padding must stay 0, and a NaN in some elements of the
gradient must reach the same elements both ways. A transformation of single elements passes, and so does one that depends on a sum
over all leaves, such as clipping by the global norm. One that depends on a leaf's norm, rows, ndim or name fails. The shapes of
the state are compared for the parameters' true sizes too.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.errors import UnsupportedError
from jax_backend.shards._bucket import Bucket
from jax_backend.shards._param_tree import ParamTree
from jax_backend.shards._sharded_params import ShardedParams

STEPS = 2
SEED = 20
# Zeros between parameters and at the end of a line.
PADDING = 2
# With more buckets than this, two of each kind are tried: the blocks of a deep model are alike.
MOST_BUCKETS = 8


class _Differs(Exception):
    """The results differ; the message says where."""


def check_init(tx: Any, tree: ParamTree) -> None:
    """Raise UnsupportedError unless the state of `tx` has the same shapes for buckets as for parameters."""
    _refuse(tx, tree, lambda: _compare_shapes(tx, tree))


def check_update(tx: Any, tree: ParamTree, extra: Mapping[str, Any], with_params: bool) -> None:
    """Raise UnsupportedError unless `tx` gives the same results on buckets as on parameters, as far as small examples show.

    A transformation that depends on leaves only above some size, after several steps, or by names that few buckets have, passes.

    Args:
        tx: a transformation that accepts extra arguments.
        tree: the tree of the buckets.
        extra: extra arguments of update; numbers are tried as 1.
        with_params: whether update is called with parameters.
    """
    extra = {key: 1.0 if jnp.ndim(value) == 0 else value for key, value in extra.items() if not callable(value)}

    def compare() -> None:
        try:
            _compare_values(tx, tree, _representative(tree.trainable), extra, with_params)
        except _Differs:
            raise
        except Exception:  # a mask made for all buckets does not fit some of them
            _compare_values(tx, tree, tree.trainable, extra, with_params)

    _refuse(tx, tree, compare)


def _refuse(tx: Any, tree: ParamTree, compare: Callable[[], None]) -> None:
    try:
        compare()
        return
    except _Differs as differs:
        found = str(differs)
    except Exception as error:  # any error of the transformation
        found = f"it cannot be tried on both ({type(error).__name__}: {str(error)[:200]})"
    raise UnsupportedError(
        f"{_name(tx)}: under layout {tree.trainable[0].layout.kind!r}, where a leaf is a whole unit in one line, it gives other "
        f'results than on parameters: {found}. Shard the parameters with layout="per_param", where it takes each in its true '
        "shape, or use a transformation that treats elements one by one; for clipping, optax.clip_by_global_norm or "
        "jax_backend.clip_grad_norm"
    )


def _representative(buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    if len(buckets) <= MOST_BUCKETS:
        return buckets
    kinds: dict[Any, list[Bucket]] = {}
    for bucket in buckets:
        kind = tuple((spec.name.rpartition(".")[2], len(spec.shape)) for spec in bucket.layout.params)
        kinds.setdefault((kind, bool(bucket.lead), bucket.layout.dtype), []).append(bucket)
    return tuple(bucket for alike in kinds.values() for bucket in alike[:2])


# Small parameters, whole and in lines


def _small_shapes(bucket: Bucket) -> dict[str, tuple[int, ...]]:
    lead = (2,) * len(bucket.lead)
    return {
        spec.name: (*lead, *(min(size, 3 + i) for i, size in enumerate(spec.shape))) for spec in bucket.layout.params
    }


def _line(bucket: Bucket, whole: Mapping[str, Any]) -> jax.Array:
    """Concatenated parameters, of shape (numel,) or (layers, numel), each followed by padding of 0."""
    parts = []
    for spec in bucket.layout.params:  # jit sorts dicts
        value = whole[spec.name]
        flat = value.reshape(*value.shape[: len(bucket.lead)], -1)
        parts += [flat, jnp.zeros((*flat.shape[:-1], PADDING), flat.dtype)]
    return jnp.concatenate(parts, axis=-1)


def _drawn(buckets: Iterable[Bucket], seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Random values whose sizes, and so whose norms, differ much between parameters."""
    rng, found, count = np.random.default_rng(seed), {}, 0
    for bucket in buckets:
        found[bucket.name] = {}
        for name, shape in _small_shapes(bucket).items():
            drawn = rng.normal(size=shape) * 10.0 ** (count % 3 - 1)
            found[bucket.name][name] = drawn.astype(numpy_dtype(bucket.layout.dtype))
            count += 1
    return found


def _with_nan(grads: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, np.ndarray]]:
    """The gradients with a NaN in the last element of the first parameter of each bucket."""
    found = {name: {key: value.copy() for key, value in each.items()} for name, each in grads.items()}
    for each in found.values():
        next(iter(each.values())).reshape(-1)[-1] = np.nan
    return found


def _compare_values(
    tx: Any, tree: ParamTree, buckets: tuple[Bucket, ...], extra: Mapping[str, Any], with_params: bool
) -> None:
    def steps(params: Any, all_grads: Any) -> Any:
        """All updates and the last state, of parameters as lines and whole."""

        def run(form: Any) -> Any:
            own = form(params)
            state, made = tx.init(own), []
            for grads in all_grads:
                updates, state = tx.update(form(grads), state, own if with_params else None, **extra)
                made.append(updates)
            return made, state

        by_name = {bucket.name: bucket for bucket in buckets}
        lines = run(lambda v: ShardedParams({name: _line(by_name[name], each) for name, each in v.items()}, tree))
        whole = run(lambda v: ShardedParams({name: dict(each) for name, each in v.items()}, tree))
        return lines, whole

    params = _drawn(buckets, SEED)
    all_grads = [_drawn(buckets, SEED + 1 + step) for step in range(STEPS)]
    # Compiled, since inside the caller's jit a call of a jitted function would only be traced.
    compiled = jax.jit(steps).lower(params, all_grads).compile()
    clean, spoiled = (jax.device_get(compiled(params, each)) for each in (all_grads, [*map(_with_nan, all_grads)]))
    _compare(tree, *clean, names=("its updates", "its state"), close=_close)
    spread = "a NaN in one element of the gradient spreads over other elements: the NaNs in the"
    _compare(tree, *spoiled, names=(f"{spread} updates", f"{spread} state"), close=_same_nans)


def _compare_shapes(tx: Any, tree: ParamTree) -> None:
    """Compare the shapes of the state for the parameters' true sizes."""
    lines, whole = {}, {}
    for bucket in tree.trainable:
        dtype = numpy_dtype(bucket.layout.dtype)
        lines[bucket.name] = jax.ShapeDtypeStruct(bucket.shapes(), dtype)
        whole[bucket.name] = {
            s.name: jax.ShapeDtypeStruct((*bucket.lead, *s.shape), numpy_dtype(s.dtype)) for s in bucket.layout.params
        }
    of_lines, of_whole = (jax.eval_shape(tx.init, ShardedParams(each, tree)) for each in (lines, whole))
    true = {name: {key: leaf.shape for key, leaf in each.items()} for name, each in whole.items()}
    for a, b in _pairs(of_lines, of_whole):
        if isinstance(a, ShardedParams):
            for name in a.shards:
                line, parts = lines[name], b.shards[name]
                for key, part in parts.items() if isinstance(parts, dict) else ():
                    mirrors = getattr(a.shards[name], "shape", None) == line.shape
                    if mirrors != (getattr(part, "shape", None) == true[name][key]) and line.shape != true[name][key]:
                        raise _Differs(f"its state of {key!r} has another shape than the parameter")


# Comparison


def _pairs(lines: Any, whole: Any) -> list[tuple[Any, Any]]:
    def is_shards(node: Any) -> bool:
        return isinstance(node, ShardedParams)

    a, structure = jax.tree.flatten(lines, is_leaf=is_shards)
    b, other = jax.tree.flatten(whole, is_leaf=is_shards)
    if structure != other:
        raise _Differs("its state has another structure")
    return list(zip(a, b, strict=True))


def _compare(tree: ParamTree, lines: Any, whole: Any, names: tuple[str, str], close: Any) -> None:
    for what, a_tree, b_tree in zip(names, lines, whole, strict=True):
        for a, b in _pairs(a_tree, b_tree):
            if not isinstance(a, ShardedParams):
                if jnp.shape(a) != jnp.shape(b) or not np.all(close(np.asarray(a), np.asarray(b))):
                    raise _Differs(f"{what} differ")
                continue
            for name, line in a.shards.items():
                _compare_bucket(tree.by_name[name], line, b.shards[name], what, close)


def _compare_bucket(bucket: Bucket, line: Any, parts: Any, what: str, close: Any) -> None:
    small, at = _small_shapes(bucket), 0
    for key, shape in small.items():
        numel = int(np.prod(shape[len(bucket.lead) :]))
        part = parts[key] if isinstance(parts, dict) else parts
        if not hasattr(line, "shape") or not hasattr(part, "shape"):  # masked by optax
            if type(line) is not type(part):
                raise _Differs(f"{what} of {key!r} differ")
            continue
        if part.shape == shape and line.shape != shape:
            piece, padding = line[..., at : at + numel], line[..., at + numel : at + numel + PADDING]
            at += numel + PADDING
            if close is _close and np.any(np.asarray(padding, np.float64)):
                raise _Differs(f"{what} in the padding after {key!r} are not 0")
            piece = piece.reshape(shape)
        else:
            piece = line
        if piece.shape != part.shape or not np.all(close(np.asarray(piece), np.asarray(part))):
            raise _Differs(f"{what} of {key!r} differ")


def _close(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Equal up to some tens of roundings, as of sums in another order."""
    a, b, eps = a.astype(np.float64), b.astype(np.float64), float(jnp.finfo(b.dtype).eps if _floats(b) else 0)
    return np.isclose(a, b, rtol=64 * eps, atol=64 * eps * float(np.max(np.abs(b), initial=0)), equal_nan=True)


def _same_nans(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a.astype(np.float64)) == np.isnan(b.astype(np.float64))


def _floats(array: np.ndarray) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def _name(tx: Any) -> str:
    """The names of optax's functions that made the transformation, as far as its closures show them."""
    found: dict[str, None] = {}

    def walk(value: Any, depth: int) -> None:
        if depth > 6:
            return
        if isinstance(value, tuple | list):
            for each in value:
                walk(each, depth + 1)
        elif callable(value) and hasattr(value, "__closure__"):
            maker = value.__qualname__.partition(".<locals>")[0]
            if ".<locals>" in value.__qualname__ and maker not in ("chain", "with_extra_args_support", "<lambda>"):
                found[maker] = None
            if maker in ("chain", "with_extra_args_support", "named_chain", "masked"):
                for cell in value.__closure__ or ():
                    walk(cell.cell_contents, depth + 1)

    walk(tx.update, 0)
    return " + ".join(found) or "the transformation"
