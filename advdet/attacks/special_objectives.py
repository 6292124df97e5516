"""Objectives made for one defence: the paper's own, and stronger ones where there are some."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from advdet.attacks.goals import Goals, Objective, margin
from advdet.densities import squared_distances
from advdet.nets import without_rescaling
from advdet.statistics import rbf_kernel
from advdet.types import InputError, pytree


@pytree
@dataclasses.dataclass(frozen=True)
class DropoutNetworks(Objective):
    """K networks thinned by dropout, all to be fooled; the detector is not looked at.

    The loss is the mean of the networks' hinges; success is counted when a share of them gives the
    wanted label with the confidence. One set of masks for all images where fixed.

    Attributes:
      mask_seed: seed of the fixed masks.
      share: networks that must be fooled, of all.
      num_networks: K in the paper.
      fresh: new masks at each step (expectation over transformation) instead of fixed ones.
      rescale: kept units are divided by 1 - rate, as in the defence; the paper's script leaves that
        out (0), and so attacks networks of half the activation.

    Source: Carlini & Wagner 2017, section 6.1; Athalye et al. 2018 for `fresh`.
    """

    defended_label: ClassVar[bool] = False

    mask_seed: int = 0
    share: float = 0.7
    num_networks: int = dataclasses.field(default=20, metadata={"static": True})
    fresh: bool = dataclasses.field(default=False, metadata={"static": True})
    rescale: int = dataclasses.field(default=1, metadata={"static": True})

    def __call__(self, key, defense, image, target):
        keys = jax.random.split(
            key if self.fresh else jax.random.key(self.mask_seed), self.num_networks
        )
        thinned = defense.classifier if self.rescale else without_rescaling(defense.classifier)
        one = lambda k: margin(thinned(image[None], k).logits[0], target, self.targeted)
        margins = jax.vmap(one)(keys) + self.confidence
        needed = jnp.ceil(self.share * self.num_networks - 1e-4).astype(jnp.int32)
        decisive = jnp.sort(margins)[needed - 1]
        hinge = jnp.mean(jnp.maximum(margins, 0.0))
        return Goals(decisive[None], jnp.zeros((0,)), hinge[None])

    def is_random(self, defense):
        return self.fresh


@pytree
@dataclasses.dataclass(frozen=True)
class Combined(Objective):
    """Classifier and detector as one network of K + 1 logits.

    With Z the classifier's logits and Z_D the score minus the threshold, the extra logit is

        paper    (Z_D + 1) max_j Z_j: where max Z < 0 its sign is the wrong way round
        code     2 (Z_D + 1) max(0, max_j Z_j), as in the released code: "natural" starts at
                 Z_D = -0.5 there, which the attacker must reach; an ablation
        shift    max_j Z_j + Z_D / scale: the same whatever is added to all logits
        network  max_j Z_j + Z_D: for the N+1 class defence this is the network itself

    An image counts once the label is the wanted one and Z_D <= 0 (for `code`: once its extra logit
    is below the target's, too). With a score made of probabilities, such as dropout's, no one
    constant c is right all the way: the paper's first attempt there, which left 60 % detected.

    Attributes:
      form: see above.

    Source: Carlini & Wagner 2017, sections 3.1 and 6.1.
    """

    form: str = dataclasses.field(default="paper", metadata={"static": True})

    def __call__(self, key, defense, image, target):
        key_logits, key_score = jax.random.split(key)
        logits = defense.logits(key_logits, image[None])[0]
        excess = self.excess(key_score, defense, image, target) + self.detector_margin
        extra = self._extra(jnp.max(logits), excess, defense.scale)
        if self.targeted:
            value = margin(jnp.concatenate([logits, extra[None]]), target, True)
            beaten_by = logits[target]
        else:  # the extra class is no escape: some wrong class must beat both it and the true one
            wrong = jnp.where(jnp.arange(logits.shape[0]) == target, -jnp.inf, logits)
            beaten_by = jnp.max(wrong)
            value = jnp.maximum(logits[target], extra) - beaten_by
        classifier = margin(logits, target, self.targeted)[None] + self.confidence
        detector = excess[None]
        if self.form == "code":
            detector = jnp.stack([excess, extra - beaten_by])
        return Goals(classifier, detector, value[None] + self.confidence)

    def _extra(self, largest, excess, scale):
        if self.form == "paper":
            return (excess + 1.0) * largest
        if self.form == "code":
            return 2.0 * (excess + 1.0) * jnp.maximum(largest, 0.0)
        return largest + (excess / scale if self.form == "shift" else excess)


@pytree
@dataclasses.dataclass(frozen=True)
class TargetDensity(Objective):
    """For kernel density: the density under the class aimed at, over all centres.

    The judge looks at the class that is predicted, which is the target once that goal is reached;
    on the way there its density would lead back to the true class.

    A small bandwidth makes the density a landscape of many hills, in which a way from a clean image
    can end on a low one. So attacks also come from the other side, from a natural image on a hill
    that is high enough.

    Source: Carlini & Wagner 2017, section 5.2; the second start is this project's.
    """

    natural: int = dataclasses.field(default=1, metadata={"static": True}, kw_only=True)

    def excess(self, key, defense, image, target):
        if not self.targeted:
            return super().excess(key, defense, image, target)
        score = defense.detector.class_score(
            defense.fitted, defense.classifier, image[None], target
        )
        return score[0] - defense.threshold


@pytree
@dataclasses.dataclass(frozen=True)
class TwoStages(TargetDensity):
    """For kernel density: the paper's attack, from an adversarial image and with few centres.

    It starts at what the same attack finds on the bare classifier, estimates the density from a
    random hundred of each class's training images, and weighs label and density by one constant.

    Attributes:
      mask_seed: of the choice of centres.
      num_centres: of each class.

    Source: Carlini & Wagner 2017, section 5.2 (random centres; the released code takes the first).
    """

    origin: ClassVar[str] = "undefended"

    mask_seed: int = 0
    natural: int = dataclasses.field(default=0, metadata={"static": True}, kw_only=True)
    num_centres: int = dataclasses.field(default=100, metadata={"static": True})

    def view(self, defense, first, clean):
        del first, clean
        labels = np.asarray(defense.fitted["labels"])
        order = np.random.RandomState(int(self.mask_seed)).permutation(len(labels))
        of_class = [order[labels[order] == c][: self.num_centres] for c in np.unique(labels)]
        rows = np.concatenate(of_class)
        chosen = {name: jnp.asarray(np.asarray(defense.fitted[name])[rows])
                  for name in ("centres", "labels")}  # fmt: skip
        return dataclasses.replace(defense, fitted={**defense.fitted, **chosen})

    def __call__(self, key, defense, image, target):
        goals = super().__call__(key, defense, image, target)
        return goals._replace(losses=jnp.concatenate([goals.classifier, goals.detector]))


@pytree
@dataclasses.dataclass(frozen=True)
class FrozenPixels(Objective):
    """For input PCA: pixels that hardly vary over the training images are left alone.

    The tail of the whitened coefficients is, on MNIST, a test of whether such a pixel was touched.

    Attributes:
      cut: pixels of a smaller standard deviation are frozen; 0 tries several cuts.

    Source: Carlini & Wagner 2017, section 4.1 for the reason; the cuts are this project's.
    """

    CUTS: ClassVar[tuple[float, ...]] = (0.05, 0.1, 0.2)

    cut: float = 0.0

    def variants(self):
        starts, cuts = super().variants(), (self.cut,) if self.cut else self.CUTS
        return tuple(dataclasses.replace(one, cut=cut) for cut in cuts for one in starts)

    def free(self, defense):
        return np.asarray(defense.fitted["std"]) >= self.cut


@pytree
@dataclasses.dataclass(frozen=True)
class Stages(Objective):
    """For hidden PCA: each stage of the cascade is a goal of its own.

    Source: Carlini & Wagner 2017, section 4.3; the paper did not attack this defence.
    """

    def __call__(self, key, defense, image, target):
        logits = defense.logits(key, image[None])[0]
        classifier = margin(logits, target, self.targeted)[None] + self.confidence
        margins = defense.detector.margins(defense.fitted, defense.classifier, image[None])[0]
        excess = margins - defense.threshold + self.detector_margin
        return Goals(classifier, excess, jnp.concatenate([classifier, excess / defense.scale]))


@pytree
@dataclasses.dataclass(frozen=True)
class JointlyOverSet(Objective):
    """For MMD: the images are to be as little suspicious as a set as the clean ones are.

    The squared MMD of a set is the mean over it of the witness, mean k(., set) - mean k(., training
    images), less the same mean over the training images. The set is what the attack finds against
    the bare classifier. With it fixed each image stands for itself: its witness is to come down to
    that of its clean original, which is the nearest of the clean images. So all images give up the
    little that they have in common, and what is left of their changes differs from one to the next
    and goes under in the mean. To move the few that stick out most does worse: it takes more
    distance, and the moved ones stick out anew.

    Source: this project's; the paper needed no attack here (section 5.1).
    """

    origin: ClassVar[str] = "undefended"

    def __post_init__(self):
        if self.natural:
            raise InputError("the set that images hide in is the plain attack's: natural must be 0")

    def view(self, defense, first, clean):
        others, originals = (jnp.asarray(a).reshape(len(a), -1) for a in (first, clean))
        levels = _witness(defense, others, originals)
        added = {"others": others, "originals": originals, "levels": levels}
        scale = jnp.maximum(jnp.std(levels), 1e-6)
        return dataclasses.replace(defense, fitted={**defense.fitted, **added}, scale=scale)

    def __call__(self, key, defense, image, target):
        logits = defense.logits(key, image[None])[0]
        classifier = margin(logits, target, self.targeted)[None] + self.confidence
        fitted, point = defense.fitted, image.reshape(-1)
        own = jnp.argmin(squared_distances(jax.lax.stop_gradient(point), fitted["originals"]))
        witness = _witness(defense, fitted["others"], point[None])
        excess = witness - fitted["levels"][own][None] + self.detector_margin
        return Goals(classifier, excess, jnp.concatenate([classifier, excess / defense.scale]))


def _witness(defense, others: jax.Array, points: jax.Array) -> jax.Array:
    """[N] by how much points [N, D] are nearer, by the kernel, to a set than to training images."""
    near = lambda rows: jnp.mean(rbf_kernel(points, rows, defense.detector.sigma2), axis=1)
    return near(others) - near(defense.fitted["reference"])
