"""What an attacker must reach, as numbers that are negative once it is reached.

An objective is called for one image and gives its `Goals`. How goals are combined is the attack's
business. Leaves of an objective are its continuous settings, so that a sweep over them costs one
compilation; what changes the program is static.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from advdet.defenses import Defense
from advdet.types import pytree


class Goals(NamedTuple):
    """How far one image is from what the attacker wants.

    Attributes:
      classifier: [M] margins to the wanted label plus confidence; reached below 0, strictly, or a
        classifier that gives all classes the same logit would be "broken" at distance 0.
      detector: [S] scores minus threshold plus detector margin; reached at or below 0.
      losses: [G] what to descend: at or below 0 where nothing is left to do.
    """

    classifier: jax.Array
    detector: jax.Array
    losses: jax.Array

    def met(self) -> jax.Array:
        """Whether all goals are reached; [] bool."""
        return self.classifier_met() & jnp.all(self.detector <= 0)

    def classifier_met(self) -> jax.Array:
        """Whether the classifier's goals are reached; [] bool."""
        return jnp.all(self.classifier < 0)

    def violation(self) -> jax.Array:
        """The detector goal that is missed by most; [] float, -inf where there is no detector."""
        return jnp.max(self.detector, initial=-jnp.inf)


def margin(logits: jax.Array, target: jax.Array, targeted: bool) -> jax.Array:
    """The logit margin that an attacker brings below zero.

    Args:
      logits: [K] of one image; a constant added to all of them changes nothing.
      target: [] int, the wanted class, or the true one where not targeted.
      targeted: towards `target`, or away from it.

    Returns:
      [] best other logit minus the target's (targeted), or the reverse.

    Source: Carlini & Wagner 2017 (S&P), section V-A, f6; the best other class is masked with -inf,
    not with 0, so that negative logits are compared rightly.
    """
    is_target = jnp.arange(logits.shape[0]) == target
    other = jnp.max(jnp.where(is_target, -jnp.inf, logits))
    own = jnp.max(jnp.where(is_target, logits, -jnp.inf))
    return other - own if targeted else own - other


@pytree
@dataclasses.dataclass(frozen=True)
class Objective:
    """Base of all objectives.

    Attributes:
      confidence: logit margin asked for beyond the decision.
      detector_margin: how far below the threshold the score must come, in the score's own units.
      targeted: towards the target class, or away from the true one.
      natural: where attacks begin. 0: where this objective does; 1: there, and a second time at the
        nearest natural image that reaches all goals already; 2: at the latter alone.
    """

    confidence: float = 0.0
    detector_margin: float = 0.0
    targeted: bool = dataclasses.field(default=True, metadata={"static": True})
    natural: int = dataclasses.field(default=0, metadata={"static": True}, kw_only=True)

    # Where attacks begin unless at natural images: at the "image", or at what the same attack finds
    # against the bare classifier ("undefended").
    origin: ClassVar[str] = "image"
    # Whether the classifier's goal is the margin of the defended classifier itself.
    defended_label: ClassVar[bool] = True

    @property
    def begins(self) -> str:
        """Where attacks begin: at the "image", at an "undefended" success, or a "natural" image."""
        return "natural" if self.natural == 2 else self.origin

    def variants(self) -> tuple[Objective, ...]:
        """The objectives to try in turn; the nearest success of each image counts."""
        if self.natural != 1:
            return (self,)
        return tuple(dataclasses.replace(self, natural=where) for where in (0, 2))

    def view(self, defense: Defense, first: np.ndarray | None, clean: np.ndarray) -> Defense:
        """What the attacker works with of the defence that he is shown.

        Args:
          defense: the one shown.
          first: [N, H, W, C] where it begins; None where that is the clean image.
          clean: [N, H, W, C] the images under attack.
        """
        del first, clean
        return defense

    def free(self, defense: Defense) -> np.ndarray | None:
        """[H, W, C] bool, the pixels that the attacker may touch; None for all."""
        del defense
        return None

    def __call__(
        self, key: jax.Array, defense: Defense, image: jax.Array, target: jax.Array
    ) -> Goals:
        """Goals of one image [H, W, C] in [0, 1] with its target [] int32."""
        key_logits, key_score = jax.random.split(key)
        logits = defense.logits(key_logits, image[None])[0]
        classifier = margin(logits, target, self.targeted)[None] + self.confidence
        if defense.detector.kind != "score":
            return Goals(classifier, jnp.zeros((0,)), classifier)
        excess = self.excess(key_score, defense, image, target)[None] + self.detector_margin
        return Goals(classifier, excess, jnp.concatenate([classifier, excess / defense.scale]))

    def excess(self, key, defense: Defense, image: jax.Array, target: jax.Array) -> jax.Array:
        """How far the score of one image is above the threshold; []."""
        del target
        return defense.score(key, image[None])[0] - defense.threshold

    def is_random(self, defense: Defense) -> bool:
        """Whether two calls on one image can differ."""
        return defense.detector.random

    def accept(
        self, key: jax.Array, defense: Defense, image: jax.Array, target: jax.Array, goals: Goals
    ) -> tuple[Goals, jax.Array]:
        """Decides whether an image is a success.

        Of many noisy looks an attack keeps the nearest success, hence a lucky one; so where goals
        are random they must be met again by draws that chose nothing.

        Args:
          key: consumed; not the one of `goals`.
          defense, image, target: as in a call.
          goals: what the call that gave the gradient said.

        Returns:
          The goals that decide, and [] bool.
        """
        if not self.is_random(defense):
            return goals, goals.met()
        again = self(key, defense, image, target)
        return again, goals.met() & again.met()
