"""The contract for gradients: finite, and equal to finite differences, or declared as missing."""

from __future__ import annotations

import jax
import numpy as np

from advdet.contract import FAULT, OK, WARNING, Finding, hard_images, noise, said_by
from advdet.defenses import Defense, image_keys, in_batches

_SLOPE_ERROR = 0.05  # float32 leaves a percent or so, the best of several step lengths less
_STEPS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)  # L2, of finite differences
_AT_ONCE = 40  # gradients in one compiled program


def slopes(key: jax.Array, defense: Defense, images, ids) -> tuple[np.ndarray, np.ndarray]:
    """Values [N] and gradients [N, H, W, C]: of the score, else of the first logit."""
    look = lambda *rows: _slopes(key, defense, *rows)
    return in_batches(look, np.float32(images), np.int32(ids), size=_AT_ONCE)


@jax.jit
def _slopes(key, defense, images, ids):
    def one(key, image):
        if defense.detector.kind == "score":
            return defense.score(key, image[None])[0]
        return defense.logits(key, image[None])[0, 0]

    return jax.vmap(jax.value_and_grad(one, argnums=1))(image_keys(key, ids), images)


def gradient(defense: Defense, images: np.ndarray, ids: np.ndarray) -> Finding:
    """The gradient is finite and equals finite differences; where there is none, that is declared.

    Of the score; for a defence that flags nothing, of the first logit. Each image is moved along
    its gradient, over several lengths of which the best counts: short ones drown in float32's
    rounding, long ones cross kinks.

    Args:
      defense: to be looked at.
      images: [N, H, W, C], a few clean ones.
      ids: [N].
    """
    flags_images = defense.detector.kind == "score"
    name = "score: gradient" if flags_images else "logits: gradient"
    declared = defense.detector.differentiable
    look = lambda x, i: slopes(jax.random.key(0), defense, x, i)
    inner = np.asarray(images * 0.8 + 0.1, np.float32)  # off the edges of the box
    hard = hard_images(images.shape[1:])
    stacked = np.concatenate([inner, hard])
    stacked_ids = np.concatenate([ids, np.arange(len(hard), dtype=np.int32)])
    try:
        _, found = look(stacked, stacked_ids)
    except Exception as error:  # what a foreign score raises under a gradient
        if not declared:
            return Finding(name, OK, "none, as declared")
        change = "write it in jax.numpy, or set `differentiable: ClassVar[bool] = False`"
        return Finding(name, FAULT, said_by(error), change)
    if bad := int(np.sum(~np.isfinite(found).all(axis=(1, 2, 3)))):
        said = f"not finite on {bad} of {len(found)} images"
        if np.isfinite(found[: len(images)]).all():
            said += " (on a black, a white or a noise image)"
        change = "where sqrt, log or a norm meets 0, use the double `jnp.where`"
        return Finding(name, FAULT if declared else OK, said, change if declared else "", bad)
    right, flat = _as_numerical(look, inner, ids, found[: len(images)])
    wrong = int(np.sum(~right))
    said = f"right on {len(right) - wrong} of {len(right)} images by finite differences"
    if flat.any():
        said += f", zero on {flat.sum()}"
    useless = flat.all() or wrong > len(right) / 4
    if not declared:
        if useless:
            return Finding(name, OK, f"none, as declared ({said})", value=wrong)
        change = "leave `differentiable` True: attacks can use it"
        return Finding(name, WARNING, said, change, wrong)
    if useless:
        change = (
            "no rounding, sorting into bins, argmax or stop_gradient on the way; else set "
            "`differentiable: ClassVar[bool] = False` and say how it is to be attacked"
        )
        return Finding(name, FAULT, said, change, wrong)
    if wrong or flat.any():
        change = "saturated or kinked there? attacks lose sight of it on such images"
        return Finding(name, WARNING, said, change, wrong)
    return Finding(name, OK, said, value=wrong)


def _as_numerical(look, images, ids, found) -> tuple[np.ndarray, np.ndarray]:
    """[N] bool, the gradient is right; [N] bool, it is zero (right where nothing moves, either)."""
    norms = np.sqrt(np.sum(np.square(found, dtype=np.float64), axis=(1, 2, 3)))
    flat = norms == 0
    along = np.where(flat[:, None, None, None], noise(found.shape) - 0.5, found)
    along /= np.sqrt(np.sum(np.square(along), axis=(1, 2, 3), keepdims=True))
    moved = [images + sign * step * along for step in _STEPS for sign in (1, -1)]
    values, _ = look(np.concatenate(moved).astype(np.float32), np.tile(ids, len(moved)))
    values = values.astype(np.float64).reshape(len(_STEPS), 2, len(images))
    rise = (values[:, 0] - values[:, 1]) / (2 * np.array(_STEPS)[:, None])
    error = np.abs(rise - norms) / np.where(flat, 1.0, norms)
    # Where the gradient is zero the value must not move, beyond rounding.
    rounding = 16 * np.finfo(np.float32).eps * np.abs(values).max(axis=(0, 1))
    still = np.abs(values[:, 0] - values[:, 1]).max(axis=0) <= rounding
    return np.where(flat, still, error.min(axis=0) < _SLOPE_ERROR), flat
