"""What the scripts of all pairs share: options, random batches, initial values, and two loops of plain SGD.

Pairs of sets 3 and 4 have loops of their own.

A script of torch is run by `crossframe record`, and writes its initial values. A script of JAX converts them and records itself.
Frameworks are imported where they are used: each script has an environment of its own.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

STEPS, RATE = 4, 1e-2
Arrays = dict[str, np.ndarray]
Batches = Callable[[int], Arrays]


def options() -> argparse.Namespace:
    """The options of every script."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--values", type=Path, required=True, help="folder of initial values: a.safetensors, b.safetensors"
    )
    parser.add_argument("--fault", action="store_true", help="plant the fault of this side")
    parser.add_argument("--record", help="folder of a recording (JAX)")
    parser.add_argument("--convert", type=Path, help="only convert this file of side a to side b")
    return parser.parse_args()


def tokens_of(step: int, *shape: int, vocabulary: int) -> np.ndarray:
    """Random tokens."""
    return np.random.default_rng((17, step)).integers(1, vocabulary, shape)


def padded_tokens_of(step: int, batch: int, length: int, vocabulary: int, labels: int) -> Arrays:
    """Random tokens and labels of sentences of different lengths: what pads them is token 0, with label -100 and mask 0."""
    rng = np.random.default_rng((20, step))
    is_there = np.arange(length) < rng.integers(length // 2, length + 1, batch)[:, None]
    return {
        "tokens": np.where(is_there, rng.integers(1, vocabulary, (batch, length)), 0),
        "labels": np.where(is_there, rng.integers(0, labels, (batch, length)), -100),
        "mask": is_there.astype(int),
    }


def images_of(step: int, *shape: int) -> np.ndarray:
    """Random images (batch, channels, height, width), whose values float32 can hold: some models convert them to it."""
    return np.random.default_rng((18, step)).standard_normal(shape, np.float32)


def graph_of(step: int) -> Arrays:
    """A random directed graph of 24 nodes without loops, whose first half of nodes has labels."""
    rng, edges = np.random.default_rng((19, step)), np.argwhere(~np.eye(24, dtype=bool))
    return {
        "nodes": rng.standard_normal((24, 6), np.float32),
        "edges": rng.permutation(edges)[:90].T.copy(),
        "labels": rng.integers(0, 4, 24),
        "is_train": np.arange(24) < 12,
    }


def without_init(*names: str) -> None:
    """Make modules of packages importable without running their `__init__.py`, which import far more than a model needs.

    Args:
        names: packages, a parent before what it contains.
    """
    from importlib.machinery import PathFinder

    for name in names:
        parent = name.rpartition(".")[0]
        spec = PathFinder.find_spec(name, sys.modules[parent].__path__ if parent else None)
        assert spec is not None and spec.submodule_search_locations
        package = ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package


def declare_torchvision_operators() -> Any:
    """Make torchvision importable: its wheel is built for CUDA, so that its operators are missing in a torch for CPUs.

    Returns:
        What must be kept while torchvision is in use.
    """
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def halves_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Two microbatches: the first half of the rows, and the second."""
    half = len(next(iter(batch.values()))) // 2
    return [{name: value[rows] for name, value in batch.items()} for rows in (slice(half), slice(half, None))]


def tensors_of(batch: Arrays) -> dict[str, Any]:
    """A batch in torch."""
    import torch

    return {name: torch.from_numpy(value) for name, value in batch.items()}


def start_torch(given: argparse.Namespace, model: Any) -> None:
    """Write the initial values of side a."""
    arrays = {name: value.detach().numpy().copy() for name, value in unique_state(model).items()}
    given.values.mkdir(parents=True, exist_ok=True)
    save_file(arrays, given.values / "a.safetensors")


def unique_state(model: Any) -> dict[str, Any]:
    """Parameters, tied ones once, and buffers that a checkpoint holds."""
    kept = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: value for name, value in model.named_buffers() if name in kept}


def write_converted(given: argparse.Namespace, convert: Callable[[Arrays], Arrays]) -> None:
    """Write the values of side b for the file `--convert` of side a."""
    found = convert(load_file(given.convert))
    # safetensors writes the memory of an array as it lies: that of a transposed one would be read in another order.
    save_file({name: np.array(value, order="C") for name, value in found.items()}, given.values / "b.safetensors")


def load_converted(given: argparse.Namespace, model: Any, convert: Callable[[Arrays], Arrays]) -> None:
    """Give a torch model of side b the values of side a. The converted file has parameters alone: maps have no buffers."""
    import torch

    if given.convert:
        trained = dict(model.named_parameters())
        write_converted(
            given, lambda arrays: {name: value for name, value in convert(arrays).items() if name in trained}
        )
        sys.exit()
    values = convert(load_file(given.values / "a.safetensors"))
    own = unique_state(model)
    assert own.keys() == values.keys(), own.keys() ^ values.keys()
    with torch.no_grad():
        for name, value in own.items():
            assert value.shape == values[name].shape, (name, value.shape, values[name].shape)
            value.copy_(torch.from_numpy(np.array(values[name])))


def train_torch(model: Any, batches: Batches, loss_of: Callable[[Any, dict[str, Any]], Any]) -> None:
    """A loop of plain SGD."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model.train()
    for step in range(STEPS):
        loss = loss_of(model, tensors_of(batches(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.12f}")


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The mean over tokens, in torch."""
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def flat(tree: Any) -> Arrays:
    """A pytree as arrays by path."""
    import jax

    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in pairs}


def filled(tree: Any, values: Mapping[str, np.ndarray]) -> Any:
    """A pytree of this structure with these values, which must have its shapes.

    The dtype is that of the values: transformers makes some parameters in float32 in a flax model of float64.
    """
    import jax

    own = flat(tree)
    assert own.keys() == values.keys(), sorted(own.keys() ^ values.keys())
    for path, leaf in own.items():
        assert leaf.shape == values[path].shape, (path, leaf.shape, values[path].shape)
    return jax.tree.map_with_path(
        lambda path, leaf: np.asarray(values[jax.tree_util.keystr(path, simple=True, separator=".")]), tree
    )


def start_jax(given: argparse.Namespace, params: Any, convert: Callable[[Arrays], Arrays]) -> Any:
    """The values of side a, converted and sharded over one device.

    Args:
        params: parameters of the model, of any values.
    """
    from crossframe import MeshSpec
    from jax_backend import make_mesh, shard

    if given.convert:
        write_converted(given, convert)
        sys.exit()
    values = filled(params, convert(load_file(given.values / "a.safetensors")))
    return shard(values, make_mesh(MeshSpec(shard=1)))


def train_jax(
    given: argparse.Namespace,
    params: Any,
    convert: Callable[[Arrays], Arrays],
    batches: Batches,
    loss_fn: Callable[..., Any],
    *,
    name: str,
    samples: Callable[[Arrays], Any],
    state: Any = None,
) -> None:
    """Convert the values of side a, and train by optax's SGD, recorded as docs/guides/torch_and_jax.md shows.

    Args:
        params: parameters of the model, of any values.
        loss_fn: of `jax_backend.value_and_grad`; with `state`, it takes and returns one.
        name: the class of the model of side a.
        samples: (batch) -> what the model of side a is called with.
    """
    import jax
    import optax

    from crossframe import MeshSpec
    from jax_backend import Recorder, apply_updates, make_mesh, per_rank, sharded_optimizer

    sharded = start_jax(given, params, convert)
    states = () if state is None else (per_rank(state, make_mesh(MeshSpec(shard=1))),)
    optimizer = sharded_optimizer(optax.sgd(RATE))
    opt_state, update = optimizer.init(sharded), jax.jit(optimizer.update)
    with Recorder(
        given.record, sharded, name=name, samples=samples, learning_rate=RATE, settings={"optimizer": "SGD"}
    ) as recorder:
        step = recorder.value_and_grad(loss_fn)
        for i in range(STEPS):
            batch = batches(i)
            result = step(sharded, batch, *states)
            updates, opt_state = update(result.grads, opt_state, sharded)
            sharded = apply_updates(sharded, updates)
            states = (result.state,) if states else ()
            recorder.step(loss=result.loss, params=sharded, grads=result.grads, opt_state=opt_state, batch=batch)
            print(f"step {i} loss {float(result.loss):.12f}")


def watch_all(model: Any) -> None:
    """Make all modules of an nnx model tell the recorder their inputs and outputs, by their own paths."""
    from flax import nnx

    from jax_backend.nnx import watch

    paths = [".".join(map(str, path)) for path, module in nnx.iter_modules(model) if callable(module)]
    watch(model, {path: path for path in paths})


def linen_modules(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function whose modules of flax.linen tell the recorder their inputs and outputs."""

    def told(*args: Any, **given: Any) -> Any:
        from jax_backend.activations import INPUT, OUTPUT, module_scope, tell
        from jax_backend.recorder._module_calls import reporting_linen

        def report(name: str, call: Any, args: Any, kwargs: Any, _: Any) -> Any:
            tell(name, INPUT, (args, kwargs))
            with module_scope(name):
                output = call(*args, **kwargs)
            tell(name, OUTPUT, output)
            return output

        with reporting_linen(report):
            return loss_fn(*args, **given)

    return told
