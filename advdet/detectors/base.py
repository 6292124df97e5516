"""What every detector is: a frozen dataclass of hyperparameters with pure methods.

Nothing learned lives on a detector; `fit` returns it as a pytree, which the other methods receive
as `fitted`. Detectors are equal by value, so two defences of one kind share one compiled attack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax

from advdet.types import Classifier, FitData, PyTree


@dataclasses.dataclass(frozen=True)
class Detector:
    """Base of all detectors; a detector of kind "score" must define `score`.

    Class attributes:
      kind: "score" (flags an image whose score exceeds the threshold), "corrector" (changes the
        answer, flags nothing), "set" (judges sets of images) or "none" (the undefended classifier).
      needs_adversarial: whether `fit` wants adversarial training images.
      differentiable: whether `score` and `logits` have useful gradients. Where they have none only
        attacks by values alone make sense, and only they are run.
      surrogate_gradient: of one that is not differentiable, whether `score` and `logits` hand
        gradients a differentiable stand-in (by `jax.custom_vjp`, say), so that others can be run.
      random: whether `score` uses its key; the judge then draws several times.
      logit_score: whether the score is a logit, so that a margin in it means what one in the
        classifier's logits does.
      revision: raised where the same hyperparameters learn something else than before; fits and
        records kept from before are then not taken up.

    A detector of kind "set" defines `p_value(key, fitted, classifier, images) -> []` and
    `set_size`, the number of images in a tested set.
    """

    kind: ClassVar[str] = "score"
    needs_adversarial: ClassVar[bool] = False
    differentiable: ClassVar[bool] = True
    surrogate_gradient: ClassVar[bool] = False
    random: ClassVar[bool] = False
    logit_score: ClassVar[bool] = False
    revision: ClassVar[int] = 0

    def fit(self, key: jax.Array, classifier: Classifier, data: FitData) -> PyTree:
        """Learns what the detector needs from clean (and adversarial) images.

        Args:
          key: consumed.
          classifier: the classifier to be defended.
          data: images to learn from; never those that set thresholds or are attacked.

        Returns:
          A pytree whose array shapes follow from the hyperparameters.
        """
        del key, classifier, data
        return ()

    def logits(
        self, key: jax.Array, fitted: PyTree, classifier: Classifier, images: jax.Array
    ) -> jax.Array:
        """The defended classifier's logits [B, K] for images [B, H, W, C]."""
        del key, fitted
        return classifier(images).logits

    def native_threshold(self, fitted: PyTree) -> float | None:
        """The threshold that the detector's paper gives, None where it gives none."""
        del fitted
        return None

    @property
    def learns(self) -> bool:
        """Whether it has a `fit` of its own."""
        return type(self).fit is not Detector.fit

    @staticmethod
    def from_function(
        score_fn: Callable,
        *,
        differentiable: bool | None = None,
        random: bool | None = None,
        fit: Callable | None = None,
        name: str | None = None,
    ) -> Detector:
        """A detector from a plain JAX function; `advdet.bridges` makes one of other code.

        Args:
          score_fn: images [B, H, W, C] in [0, 1] -> suspicion [B], higher is more suspicious. By
            parameters of these names it also gets `classifier` (the defended one), `fitted` (what
            `fit` returned) and `key` (for its random draws).
          differentiable: whether it has useful gradients (None: what it says of itself, else yes).
          random: whether it draws random numbers (None: whether it takes a key).
          fit: training images [N, H, W, C], labels [N] -> what the score needs: a pytree of arrays,
            or any object. By name it also gets `key`, `seed` (a whole number from it), `classifier`
            and `data` (the whole `FitData`). None where nothing is to be fitted, or all is.
          name: what results are filed under (default: the function's own).

        Raises:
          InputError: a parameter that nothing is known for, or a name that is no word.
        """
        from advdet.detectors.function import FunctionDetector  # a subclass

        return FunctionDetector.of(score_fn, differentiable, random, fit, name)


@dataclasses.dataclass(frozen=True)
class NoDetector(Detector):
    """No defence at all: the baseline, and what a zero-knowledge attacker sees."""

    kind: ClassVar[str] = "none"


def require_at_least_one(detector: Detector, *names: str) -> None:
    """Refuses a hyperparameter below 1, of those named.

    Raises:
      ValueError: one is.
    """
    for name in names:
        if not getattr(detector, name) >= 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(detector, name)}")
