"""The records that the parts of advdet hand to each other.

Shapes in docstrings: `B` or `N` images, `H, W, C` height, width, channels, `K` classes, `D` draws
of a random score. Images are float32 in [0, 1], channels last. Distances are plain L2 norms over
all pixels and channels in that range. Keys are typed (`jax.random.key`) and are consumed by the
function that receives them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

PyTree = Any


def pytree(cls: type) -> type:
    """Registers a dataclass as a pytree whose structure knows its class.

    Fields are leaves or subtrees, but for those with metadata {"static": True}, which are hashed
    and compared by value. In place of `jax.tree_util.register_dataclass`: structures of its classes
    are equal if their fields are alike in number and static values, whatever the classes, so a
    compiled function that meets two attacks or objectives can take one for the other (jax 0.10).
    """
    fields = dataclasses.fields(cls)
    leaves = [field.name for field in fields if not field.metadata.get("static")]
    statics = [field.name for field in fields if field.metadata.get("static")]

    def flatten(value):
        return tuple(getattr(value, name) for name in leaves), static_part(value)

    def flatten_with_keys(value):
        keyed = ((jax.tree_util.GetAttrKey(name), getattr(value, name)) for name in leaves)
        return tuple(keyed), static_part(value)

    def static_part(value):
        return cls, tuple(getattr(value, name) for name in statics)

    def unflatten(static, values):
        return cls(**dict(zip(leaves, values)), **dict(zip(statics, static[1])))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


class Outputs(NamedTuple):
    """What a classifier says about images.

    Attributes:
      logits: [B, K] unnormalised log-probabilities.
      features: name -> [B, ...] hidden activations, by the names that detectors rely on.
    """

    logits: jax.Array
    features: dict[str, jax.Array]


@pytree
@dataclasses.dataclass(frozen=True)
class Classifier:
    """Images to logits and named hidden features.

    Attributes:
      variables: the learned arrays (pytree leaves).
      apply: `apply(variables, images, key) -> Outputs`; static, equal by value. A key switches
        dropout on, None leaves it off. Batch statistics are never updated here.
    """

    variables: PyTree
    apply: Callable[[PyTree, jax.Array, jax.Array | None], Outputs] = dataclasses.field(
        metadata={"static": True}
    )

    def __call__(self, images: jax.Array, key: jax.Array | None = None) -> Outputs:
        """Classifies images [B, H, W, C] in [0, 1]; with a key, dropout is on."""
        return self.apply(self.variables, images, key)

    @property
    def differentiable(self) -> bool:
        """Whether it says that it has useful gradients."""
        return getattr(self.apply, "differentiable", True)

    @property
    def bounded_logits(self) -> bool:
        """Whether it says that its logits lie in [0, 1] by their nature, and are no sigmoids."""
        return bool(getattr(self.apply, "bounded_logits", False))

    @staticmethod
    def from_function(
        logits_fn: Callable,
        *,
        differentiable: bool | None = None,
        bounded_logits: bool | None = None,
    ) -> Classifier:
        """A classifier from a plain JAX function; `advdet.bridges` makes one of other code.

        Args:
          logits_fn: images [B, H, W, C] in [0, 1] -> logits [B, K], which is what goes into a
            softmax; it may return `Outputs`, with features. A parameter `key` gets None, or a key
            that switches dropout on.
          differentiable: whether it has useful gradients (None: what it says of itself, else yes).
          bounded_logits: whether its logits lie in [0, 1] by their nature, as cosines can, and are
            no probabilities, for which such logits are taken (None: what it says of itself, else
            no). Records keep it.

        Raises:
          InputError: it has a parameter that nothing is known for.
        """
        from advdet.functions import FunctionApply  # which needs this module

        if differentiable is None:
            differentiable = getattr(logits_fn, "differentiable", True)
        if bounded_logits is None:
            bounded_logits = getattr(logits_fn, "bounded_logits", False)
        return Classifier({}, FunctionApply(logits_fn, differentiable, bool(bounded_logits)))


class Batch(NamedTuple):
    """Labelled images.

    Attributes:
      images: [N, H, W, C] float32 in [0, 1].
      labels: [N] int32 true labels.
      ids: [N] int32, one for each source image, the same in every load of the set. An adversarial
        row keeps the id of the image that it was made from.
    """

    images: jax.Array
    labels: jax.Array
    ids: jax.Array

    def take(self, rows) -> Batch:
        """The given rows (slice or indices), in that order."""
        return Batch(self.images[rows], self.labels[rows], self.ids[rows])


class FitData(NamedTuple):
    """What a detector may learn from.

    Attributes:
      train: clean training images.
      select: clean images for choosing hyperparameters (bandwidths, early stopping).
      adversarial_train: made from rows of `train`, or None where the detector needs none.
      adversarial_select: made from rows of `select`, or None.
      work: folder for the state of unfinished trainings, from which a stopped one goes on; None
        keeps nothing.
      progress: whether a training shows its progress on stderr.
    """

    train: Batch
    select: Batch
    adversarial_train: Batch | None = None
    adversarial_select: Batch | None = None
    work: Path | None = None
    progress: bool = False


class InputError(ValueError):
    """Something that the user gave cannot be used; the message says what was found and what to do.

    The entry points print it as one line and end with status 2.
    """
