"""The sketches of `crossframe.recording.sketch`, computed by XLA in a tenth of numpy's time.

Hashes have 64 bits, so it is compiled with 64-bit numbers whatever the loop has chosen, and runs on the CPU, from where arrays
are written. A parameter is processed in runs of few sizes, so that few programs are compiled.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossframe.recording.hashing import GOLDEN, MULTIPLIERS, name_key
from crossframe.recording.sketch import NUM_SUMS, ODD, SUM_SHIFT, Sketch, sketches_of

_RUNS = (1 << 12, 1 << 15, 1 << 18)


def sketch_of(values: np.ndarray, start: int = 0) -> Sketch:
    """The sketch of elements `start:start + size` of a parameter. Its fingerprint equals the core's bit for bit, and its sums up
    to `Sketch.resolution`.

    >>> values = np.linspace(-1, 1, 5)
    >>> sketch_of(values, 3).equals(sketches_of([values], 3)[0])
    True
    """
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX has no CPU backend
        return sketches_of([values], start)[0]
    flat, key = np.ascontiguousarray(values).reshape(-1), np.uint64(name_key(""))
    sums, squares = np.zeros(NUM_SUMS), 0.0
    fingerprint, lost, first = 0, 0, 0
    with jax.enable_x64(True), jax.default_device(device):
        while first < flat.size:
            run = next((run for run in _RUNS if run >= flat.size - first), _RUNS[-1])
            part = flat[first : first + run]
            padded = part if part.size == run else np.concatenate([part, np.zeros(run - part.size, flat.dtype)])
            hashed, places, signed, length, num_lost = _summed(
                padded, key, np.uint64(start + first), np.uint64(part.size)
            )
            fingerprint += int(hashed)
            sums += np.bincount(np.asarray(places), np.asarray(signed), NUM_SUMS)
            squares, lost, first = squares + float(length), lost + int(num_lost), first + run
    return Sketch(flat.size, flat.dtype.name, fingerprint % 2**64, sums, squares, lost)


@jax.jit
def _summed(values: Any, key: Any, start: Any, size: Any) -> tuple[jax.Array, ...]:
    """(fingerprint, index of each element's sum, its addend, sum of squares, number of non-finite) of a run's first `size`."""
    places = jnp.arange(values.shape[0], dtype=jnp.uint64)
    there = places < size
    keys = _mixed((places + start + np.uint64(1)) * np.uint64(GOLDEN) + key)
    values = jnp.where(
        jnp.isnan(values), jnp.array(jnp.nan, values.dtype), values
    )  # as crossframe.recording.hashing.one_nan
    bits = jax.lax.bitcast_convert_type(values, f"uint{8 * values.dtype.itemsize}").astype(jnp.uint64)
    hashed = jnp.where(there, _mixed(keys + bits * np.uint64(ODD)), np.uint64(0))
    wide = values.astype(jnp.float64)
    finite = jnp.isfinite(wide)
    wide = jnp.where(finite & there, wide, 0.0)
    signs = 1.0 - 2.0 * (keys & np.uint64(1)).astype(jnp.float64)
    return (
        hashed.sum(dtype=jnp.uint64),
        (keys >> np.uint64(SUM_SHIFT)).astype(jnp.int32),
        wide * signs,
        (wide * wide).sum(),
        (there & ~finite).sum(),
    )


def _mixed(keys: jax.Array) -> jax.Array:
    """`crossframe.recording.hashing.mix`."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
    return keys ^ (keys >> np.uint64(31))
