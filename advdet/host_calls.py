"""Calls from compiled programs into Python code that is no JAX: torch, NumPy, scikit-learn.

`jax.pure_callback` with three things settled:

- Batch axes of any number of vmaps become one, so the function sees one batch of rows.
- On CPU its arguments travel in small pieces. JAX copies a larger one on the thread pool that runs
  the compiled programs; where each thread of it waits in a callback (as many devices as cores, the
  usual case here) nobody is left to copy, and the process stands still for good.
- One lock for all: foreign code may keep global state, such as torch's random numbers.

The function gets NumPy arrays and must not call JAX: that waits for the same threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

_PIECE_BYTES = 102_000  # JAX copies what is below 100 KiB at once, on the spot
_LOCK = threading.RLock()


def call(
    function: Callable[..., tuple[np.ndarray, ...]],
    results: Sequence[tuple[tuple[int, ...], np.dtype]],
    *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    """Calls a Python function from JAX; it has no gradient.

    Args:
      function: arrays [N, ...] -> arrays [N, ...], row by row independent; it owns what it gets.
      results: (shape of a row, type) of each array that it returns.
      *arrays: [N, ...].
    """

    @jax.custom_batching.custom_vmap
    def on_rows(*arrays):
        shapes = [(array.shape, array.dtype) for array in arrays]
        pieces = [_in_pieces(array) for array in arrays]
        rows = arrays[0].shape[0]
        wanted = tuple(jax.ShapeDtypeStruct((rows, *shape), dtype) for shape, dtype in results)

        def on_host(*pieces_of_all):
            with _LOCK:
                found = function(*(_whole(parts, *s) for parts, s in zip(pieces_of_all, shapes)))
            return tuple(
                np.ascontiguousarray(a, w.dtype).reshape(w.shape) for a, w in zip(found, wanted)
            )

        return jax.pure_callback(on_host, wanted, *pieces, vmap_method="sequential")

    @on_rows.def_vmap
    def over_an_axis(axis_size, batched, *arrays):
        wide = [
            array if has else jnp.broadcast_to(array[None], (axis_size, *array.shape))
            for array, has in zip(arrays, batched)
        ]
        found = on_rows(*(array.reshape(-1, *array.shape[2:]) for array in wide))
        found = tuple(a.reshape(axis_size, -1, *a.shape[1:]) for a in found)
        return found, tuple(True for _ in found)

    return on_rows(*arrays)


def _in_pieces(array: jax.Array) -> list[jax.Array]:
    flat = array.reshape(-1)
    if jax.default_backend() != "cpu":
        return [flat]
    size = _PIECE_BYTES // array.dtype.itemsize
    return [flat[start : start + size] for start in range(0, max(1, flat.size), size)]


def _whole(pieces: Sequence[jax.Array], shape: tuple[int, ...], dtype) -> np.ndarray:
    """The pieces as one array that may be written to."""
    array = np.concatenate([np.asarray(piece) for piece in pieces])
    return array.astype(dtype, copy=False).reshape(shape)
