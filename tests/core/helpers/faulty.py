"""Small runs with one fault each: a norm, a GELU, a residual branch, square kernels, a tied embedding, under AdamW or SGD.

What modules give is computed; gradients are drawn, with what is true of real ones: that of the embedding is nonzero in the rows
of tokens that occur, and that of the head sums to zero over the vocabulary. Everything is computed in float64, moved by `noise`
as rounding in another order would, and kept in the dtype of the run.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.dtypes import numpy_dtype, unit_roundoff
from crossframe.layout import FlatLayout
from crossframe.mesh import MeshSpec
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Manifest, Recording, RecordingWriter, Schedule, create_recording

VOCABULARY, WIDTH, TOKENS = 24, 8, 10
UNITS = {
    "": {"embed.weight": (VOCABULARY, WIDTH), "norm.weight": (WIDTH,), "norm.bias": (WIDTH,)},
    "block": {
        "block.up.weight": (2 * WIDTH, WIDTH),
        "block.up.bias": (2 * WIDTH,),
        "block.down.weight": (WIDTH, 2 * WIDTH),
        "block.query.weight": (WIDTH, WIDTH),
        "block.key.weight": (WIDTH, WIDTH),
    },
}
SHAPES = {name: shape for params in UNITS.values() for name, shape in params.items()}
ALIASES = {"embed.weight": ("head.weight",)}
RATE, DECAY, CLIP, MOMENTUM = 0.01, 0.1, 2.0, 0.9


def erf_gelu(x: np.ndarray) -> np.ndarray:
    """x Phi(x)."""
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


@dataclass
class Faults:
    """What a run does; a fault replaces one of these. Each gets what it would do anyway and a place to do otherwise."""

    gathered: Callable[[int, int, str, np.ndarray, dict[str, list[np.ndarray]]], np.ndarray] = (
        lambda s, r, n, now, old: now
    )
    epsilon: float = 1e-5
    gelu: Callable[[np.ndarray], np.ndarray] = erf_gelu
    branch: Callable[[int, int, np.ndarray], np.ndarray] = lambda s, r, x: x
    output: Callable[[int, int, np.ndarray], np.ndarray] = lambda s, r, x: x
    query: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda x, w: x @ w.T
    loss: Callable[[int, float], float] = lambda s, x: x
    uses: tuple[float, float] = (1.0, 1.0)
    local: Callable[[int, int, dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda s, r, grads: grads
    mean: Callable[[int, str, list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]], np.ndarray] = (
        lambda s, n, grads, old: np.mean([grad[n] for grad in grads], axis=0)
    )
    norm: Callable[[int, int, float, dict[str, np.ndarray]], float] = lambda s, r, x, grads: x
    clips: bool = True
    by_hand: float | None = None
    """The norm to which the loop itself clips; nobody records the norm, and gradients are recorded after it."""
    step: Callable[..., None] | None = None
    rate: float = RATE
    decay: float = DECAY
    decays: Callable[[str], bool] = lambda n: True
    coupled: float = 0.0
    unscaled: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    adam_epsilon: float = 1e-8
    in_root: bool = False
    corrected: Callable[[int], tuple[int | None, int | None]] = lambda t: (t, t)
    counted: Callable[[int], int] = lambda t: t
    skips: Callable[[int, str], bool] = lambda s, n: False
    moments: Callable[[int, str, dict[str, dict[str, np.ndarray]]], np.ndarray | None] = lambda s, n, state: None
    sample_ids: Callable[[int, int, list[int]], list[int]] = lambda s, r, ids: ids
    extra: Mapping[str, int] = field(default_factory=dict)
    """"labels" and "tokens": what a batch is fed besides."""


def manifest(
    world_size: int,
    dtype: str,
    optimizer: str,
    clip: float | None,
    replicate: int = 1,
    detail: str = "full",
    other: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of a run of three steps, all of them dense."""
    shard = world_size // replicate
    units = tuple(
        (
            unit,
            FlatLayout(
                tuple(ParamSpec(name, shape, dtype, ALIASES.get(name, ())) for name, shape in params.items()),
                shard,
                True,
            ),
        )
        for unit, params in UNITS.items()
    )
    settings = {"optimizer": optimizer, "weight_decay": DECAY, "batch_size": 5}
    settings |= {"clip": clip} if clip is not None else {}
    settings |= {"momentum": MOMENTUM} if optimizer == "SGD" else {}
    settings |= other or {}
    settings = {name: value for name, value in settings.items() if value is not ...}  # left out
    return Manifest(
        framework="torch",
        model="toy",
        dtype=dtype,
        mesh=MeshSpec(shard=shard, replicate=replicate),
        steps=3,
        learning_rate=RATE,
        seed=0,
        terms=TOKENS,
        schedule=Schedule(dense=3, every=1),
        param_map=identity_map(SHAPES),
        units=units,
        settings=settings,
        detail=detail,
    )


def record(
    directory: Path,
    faults: Faults | None = None,
    *,
    noise: int = 0,
    world_size: int = 2,
    dtype: str = "float64",
    optimizer: str = "AdamW",
    clip: float | None = CLIP,
    replicate: int = 1,
    detail: str = "full",
    other: Mapping[str, Any] | None = None,
) -> Recording:
    """A finished recording of a run with these faults, opened. Another `noise` is other rounding."""
    made = manifest(world_size, dtype, optimizer, clip, replicate, detail, other)
    create_recording(directory, made)
    run = _Run(made, faults or Faults(), noise)
    writers = [RecordingWriter(directory, made, rank) for rank in range(world_size)]
    for step in range(3):
        run.step(step, writers)
    for writer in writers:
        writer.finish()
    return Recording.open(directory)


OWN_ADAM, OWN_SLOTS = "OwnAdam", {"exp_avg": "m", "exp_avg_sq": "v"}
"""An optimizer that follows AdamW's rule, and its names of moments."""


def started(name: str) -> np.ndarray:
    """A weight before the first step, before rounding."""
    return _draw(SHAPES[name], 1, name) * 0.5


class _Run:
    def __init__(self, made: Manifest, faults: Faults, noise: int) -> None:
        self.made, self.faults, self.dtype = made, faults, numpy_dtype(made.dtype)
        self.rounding = np.random.default_rng(noise + 99)
        self.roundoff = unit_roundoff(made.dtype)
        self.params = {name: self.kept(started(name), exact=True) for name in SHAPES}
        self.params["norm.weight"] = np.ones(WIDTH, self.dtype)
        self.past: dict[str, list[np.ndarray]] = {name: [] for name in SHAPES}
        slots = (
            ("exp_avg", "exp_avg_sq")
            if not made.settings.get("optimizer", "").endswith("SGD")
            else ("momentum_buffer",)
        )
        self.state = {name: {slot: np.zeros(SHAPES[name], self.dtype) for slot in slots} for name in SHAPES}
        self.reduced_before: list[dict[str, np.ndarray]] = []

    def kept(self, array: np.ndarray, *, exact: bool = False) -> np.ndarray:
        """As it is stored, a rounding or two away from what it is."""
        array = np.asarray(array, np.float64)
        moved = array if exact else array * (1 + self.roundoff * self.rounding.uniform(-1, 1, array.shape))
        return moved.astype(self.dtype)

    def step(self, step: int, writers: list[RecordingWriter]) -> None:
        faults, world = self.faults, range(self.made.world_size)
        local = []
        for rank, writer in zip(world, writers, strict=True):
            seen = {
                name: np.asarray(faults.gathered(step, rank, name, value, self.past), self.dtype)
                for name, value in self.params.items()
            }
            tokens = (_tokens(step, rank) + faults.extra.get("tokens", 0)) % VOCABULARY
            ids = faults.sample_ids(step, rank, [100 * step + 10 * rank + i for i in range(3)])
            writer.batch(step, hashlib.sha256(f"{ids} {faults.extra.get('labels')}".encode()).hexdigest(), ids)
            self.forward(step, rank, writer, tokens, {n: v.astype(np.float64) for n, v in seen.items()})
            writer.loss(step, float(faults.loss(step, 1 + abs(float(_draw((), 7, str((step, rank))))))))
            grads = {name: _draw(SHAPES[name], 2, f"{step} {rank} {name}") for name in SHAPES}
            looked_up, head = np.zeros(SHAPES["embed.weight"]), _draw(SHAPES["embed.weight"], 3, f"{step} {rank}")
            looked_up[tokens] = _draw((TOKENS, WIDTH), 4, f"{step} {rank}")
            grads["embed.weight"] = faults.uses[0] * looked_up + faults.uses[1] * (head - head.mean(axis=0))
            local.append({n: self.kept(g) for n, g in faults.local(step, rank, grads).items()})
            for unit, params in UNITS.items():
                writer.unsharded(step, unit, {name: seen[name] for name in params})
                writer.local_grads(step, unit, {name: local[rank][name] for name in params})
        self.past = {name: [*old, self.params[name]] for name, old in self.past.items()}
        reduced = {name: self.kept(faults.mean(step, name, local, self.reduced_before)) for name in SHAPES}
        self.reduced_before.append(reduced)
        before = self.params
        scale = self.update(step, reduced, writers)
        if faults.by_hand is not None:
            reduced = {name: self.kept(scale * grad.astype(np.float64)) for name, grad in reduced.items()}
        for rank, writer in zip(world, writers, strict=True):
            for unit, layout in self.made.units:
                at = self.made.mesh.coordinate(rank)[1]

                def pieces(arrays: Mapping[str, np.ndarray], layout=layout, at=at) -> dict[str, Any]:
                    return {
                        p.name: (p.param_start, p.param_stop, arrays[p.name].reshape(-1)[p.param_start : p.param_stop])
                        for p in layout.pieces(at)
                    }

                if step == 0:
                    writer.parameters(step, unit, pieces(before))
                writer.reduced_grads(step, unit, pieces(reduced))
                for slot in next(iter(self.state.values())):
                    called = OWN_SLOTS.get(slot, slot) if self.made.settings.get("optimizer") == OWN_ADAM else slot
                    writer.state(step, unit, called, pieces({name: self.state[name][slot] for name in SHAPES}))
                writer.counts(step, {p.name: float(faults.counted(step + 1)) for p in layout.params})
                writer.updated(step, unit, pieces(self.params))
            writer.end_step(step)

    def forward(
        self, step: int, rank: int, writer: RecordingWriter, tokens: np.ndarray, params: dict[str, Any]
    ) -> None:
        def tell(module: str, use: str, value: np.ndarray, *, exact: bool = False) -> np.ndarray:
            kept = self.kept(value, exact=exact)
            writer.activation(step, 0, module, use, kept)
            return kept.astype(np.float64)

        faults = self.faults
        x = tell("embed", "output", params["embed.weight"][tokens], exact=True)
        x = tell("norm", "input", x, exact=True)
        centred = x - x.mean(axis=-1, keepdims=True)
        below = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + faults.epsilon)
        h = tell("norm", "output", centred / below * params["norm.weight"] + params["norm.bias"])
        up = tell("block.up", "output", h @ params["block.up.weight"].T + params["block.up.bias"])
        g = tell("block.down", "input", faults.gelu(up))
        down = tell("block.down", "output", g @ params["block.down.weight"].T)
        y = tell("block.query", "input", x + faults.branch(step, rank, down))
        query = tell("block.query", "output", faults.query(y, params["block.query.weight"]))
        tell("block.key", "output", y @ params["block.key.weight"].T)
        tell("", "output", faults.output(step, rank, query))

    def update(self, step: int, reduced: dict[str, np.ndarray], writers: list[RecordingWriter]) -> float:
        """Make a step of the optimizer; returns what clipping multiplied gradients by."""
        faults, clip = self.faults, self.faults.by_hand or self.made.settings.get("clip")
        wide = {name: grad.astype(np.float64) for name, grad in reduced.items()}
        norm = math.sqrt(sum(np.square(grad).sum() for grad in wide.values()))
        for rank, writer in enumerate(writers if faults.by_hand is None else ()):
            writer.grad_norm(step, float(faults.norm(step, rank, norm, wide)))
        scale = min(1.0, clip / (norm + 1e-6)) if clip and faults.clips else 1.0
        adam, t = not self.made.settings.get("optimizer", "").endswith("SGD"), step + 1
        new_params, new_state = {}, {}
        for name, param in self.params.items():
            p, g, old = param.astype(np.float64), scale * wide[name], self.state[name]
            if faults.skips(step, name):
                new_params[name], new_state[name] = param, old
                continue
            taken = faults.moments(step, name, self.state)
            if adam:
                g = g + faults.coupled * p
                m = faults.beta1 * (old["exp_avg"].astype(float) if taken is None else taken) + (1 - faults.beta1) * g
                v = faults.beta2 * old["exp_avg_sq"].astype(float) + (1 - faults.beta2) * g * g
                moments = {"exp_avg": self.kept(m), "exp_avg_sq": self.kept(v)}
                m, v = (each.astype(np.float64) for each in moments.values())
                counts = faults.corrected(t)
                m = m / (1 - faults.beta1 ** counts[0]) if counts[0] else m
                v = v / (1 - faults.beta2 ** counts[1]) if counts[1] else v
                below = np.sqrt(v + faults.adam_epsilon) if faults.in_root else np.sqrt(v) + faults.adam_epsilon
                decay = faults.decay / faults.rate if faults.unscaled else faults.decay
                decay *= faults.decays(name)
                moved = -faults.rate * (m / below + decay * p)
            else:
                g = g + faults.decay * p
                buffer = (MOMENTUM * old["momentum_buffer"].astype(float) if taken is None else taken) + g
                moments = {"momentum_buffer": self.kept(buffer)}
                moved = -faults.rate * moments["momentum_buffer"].astype(np.float64)
            new_params[name], new_state[name] = self.kept(p + moved, exact=True), moments
        self.params, self.state = new_params, new_state
        return scale


def _tokens(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng((5, step, rank)).integers(0, VOCABULARY, TOKENS)


def _draw(shape: tuple[int, ...], kind: int, text: str) -> np.ndarray:
    return np.random.default_rng((kind, *text.encode())).standard_normal(shape)
