"""The contract for gradients: finite, and equal to finite differences, or declared as missing."""

from __future__ import annotations

import jax
import numpy as np

from advdet.contract import FAULT, OK, WARNING, Finding, hard_images, said_by
from advdet.defenses import Defense, image_keys, in_batches
from advdet.slopes import FLAT, RIGHT, STAND_IN, WRONG, Compared, compare, off_kinks

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

    Of the score; for a defence that flags nothing, of the first logit. How they are compared, and
    what is told apart, is said in `advdet.slopes`.

    Args:
      defense: to be looked at.
      images: [N, H, W, C], a few clean ones.
      ids: [N].
    """
    flags_images = defense.detector.kind == "score"
    name = "score: gradient" if flags_images else "logits: gradient"
    declared, stand_in = defense.detector.differentiable, defense.detector.surrogate_gradient
    look = lambda x, i: slopes(jax.random.key(0), defense, x, i)
    inner, hard = off_kinks(images), hard_images(images.shape[1:])
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
    if stand_in:
        return Finding(name, OK, "a stand-in's, as declared; not compared", value=0)
    seen = compare(lambda moved, rows: look(moved, ids[rows])[0], inner, found[: len(images)])
    return _said_of(name, seen, declared)


def _said_of(name: str, seen: Compared, declared: bool) -> Finding:
    """What is made of the comparison; `declared` says that there are gradients."""
    counts, total = seen.counts(), len(seen.kinds)
    right = sum(counts.get(kind, 0) for kind in RIGHT)
    wrong = total - right
    said = f"right on {right} of {total} images by finite differences"
    flat = sum(counts.get(kind, 0) for kind in (*FLAT, "still"))
    if flat:
        said += f", zero on {flat}"
    others = [f"{kind} on {counts[kind]}" for kind in (*WRONG, STAND_IN) if kind in counts]
    said = ", ".join([said, *others])
    useless = flat == total or wrong > total / 4
    if not declared:
        if useless:
            return Finding(name, OK, f"none, as declared ({said})", value=wrong)
        change = "leave `differentiable` True: attacks can use it"
        return Finding(name, WARNING, said, change, wrong)
    if useless and STAND_IN in counts:
        change = (
            "it is not the score's own: set `differentiable: ClassVar[bool] = False` and "
            "`surrogate_gradient: ClassVar[bool] = True`"
        )
        return Finding(name, FAULT, said, change, wrong)
    if useless and seen.wrong.any():
        change = (
            "it is not the slope of the score: look at custom gradients, stop_gradient and signs, "
            'or attack without gradients (attack="square")'
        )
        return Finding(name, FAULT, said, change, wrong)
    if useless:
        change = (
            "no rounding, sorting into bins, argmax or stop_gradient on the way; else set "
            "`differentiable: ClassVar[bool] = False` and say how it is to be attacked"
        )
        return Finding(name, FAULT, said, change, wrong)
    if wrong or flat:
        change = "saturated or kinked there? attacks lose sight of it on such images"
        return Finding(name, WARNING, said, change, wrong)
    return Finding(name, OK, said, value=wrong)
