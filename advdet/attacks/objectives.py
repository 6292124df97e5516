"""What an attacker must reach, as numbers that are negative once it is reached.

An objective is called for one image and gives its `Goals`. How goals are combined is the attack's
business. Leaves of an objective are its continuous settings, so that a sweep over them costs one
compilation; what changes the program is static.

    generic    the wanted label, and the score below the threshold: any differentiable detector
    quantile   for random scores: an upper quantile of the score as the judge draws it
    paper      the objective of the paper for this defence (for dropout: 20 networks, fixed masks)
    eot        for dropout: as `paper`, with new masks at every step
    combined   classifier and detector joined as logits of one network (the paper's section 3.1)
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from advdet.defenses import Defense
from advdet.types import InputError


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Objective:
    """Base of all objectives.

    Attributes:
      confidence: logit margin asked for beyond the decision.
      detector_margin: how far below the threshold the score must come, in the score's own units.
      targeted: towards the target class, or away from the true one.
    """

    confidence: float = 0.0
    detector_margin: float = 0.0
    targeted: bool = dataclasses.field(default=True, metadata={"static": True})

    def __call__(
        self, key: jax.Array, defense: Defense, image: jax.Array, target: jax.Array
    ) -> Goals:
        """Goals of one image [H, W, C] in [0, 1] with its target [] int32."""
        key_logits, key_score = jax.random.split(key)
        logits = defense.logits(key_logits, image[None])[0]
        classifier = margin(logits, target, self.targeted)[None] + self.confidence
        if defense.detector.kind != "score":
            return Goals(classifier, jnp.zeros((0,)), classifier)
        excess = self.excess(key_score, defense, image)[None] + self.detector_margin
        return Goals(classifier, excess, jnp.concatenate([classifier, excess / defense.scale]))

    def excess(self, key: jax.Array, defense: Defense, image: jax.Array) -> jax.Array:
        """How far the score of one image is above the threshold; []."""
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


Generic = Objective


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantile(Objective):
    """For a random score: an upper quantile of it, as the judge will draw it.

    Among many noisy looks at a detector that draws random numbers the nearest accepted image is
    one with lucky draws. So the goal is the mean over groups of draws plus z standard deviations;
    each group is as large as the judge's own, and all are fresh at each step. A few groups give the
    gradient, many more decide whether the image is a success.

    Attributes:
      z: standard deviations added to the mean.
      num_groups: groups that decide.
      gradient_groups: groups that the gradient is taken through.
    """

    z: float = 3.0
    num_groups: int = dataclasses.field(default=60, metadata={"static": True})
    gradient_groups: int = dataclasses.field(default=5, metadata={"static": True})

    def __post_init__(self):
        if min(self.num_groups, self.gradient_groups) < 2:
            raise InputError(
                "num_groups and gradient_groups must be at least 2: a spread needs two"
            )

    def excess(self, key, defense, image):
        return self._upper(key, defense, image, self.gradient_groups)

    def accept(self, key, defense, image, target, goals):
        del target
        excess = self._upper(key, defense, image, self.num_groups)[None] + self.detector_margin
        decisive = goals._replace(detector=excess)
        return decisive, decisive.met()

    def _upper(self, key, defense, image, num_groups):
        keys = jax.random.split(key, num_groups)
        scores = jax.vmap(lambda k: defense.score(k, image[None])[0])(keys)
        mean = jnp.mean(scores)
        variance = jnp.sum(jnp.square(scores - mean)) / (num_groups - 1)
        # The square root has no slope at 0, where all groups agree and nothing needs to be done.
        spread = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1.0)), 0.0)
        return mean + self.z * spread - defense.threshold


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DropoutNetworks(Objective):
    """K networks thinned by dropout, all to be fooled; the detector is not looked at.

    The loss is the mean of the networks' hinges; success is counted when a share of them gives the
    wanted label with the confidence. Masks are inverted dropout's (divided by 1 - rate), as in the
    defence; the paper's script leaves that out. One set of masks for all images where fixed.

    Attributes:
      mask_seed: seed of the fixed masks.
      share: networks that must be fooled, of all.
      num_networks: K in the paper.
      fresh: new masks at each step (expectation over transformation) instead of fixed ones.

    Source: Carlini & Wagner 2017, section 6.1; Athalye et al. 2018 for `fresh`.
    """

    mask_seed: int = 0
    share: float = 0.7
    num_networks: int = dataclasses.field(default=20, metadata={"static": True})
    fresh: bool = dataclasses.field(default=False, metadata={"static": True})

    def __call__(self, key, defense, image, target):
        keys = jax.random.split(
            key if self.fresh else jax.random.key(self.mask_seed), self.num_networks
        )
        one = lambda k: margin(defense.classifier(image[None], k).logits[0], target, self.targeted)
        margins = jax.vmap(one)(keys) + self.confidence
        needed = jnp.ceil(self.share * self.num_networks - 1e-4).astype(jnp.int32)
        decisive = jnp.sort(margins)[needed - 1]
        hinge = jnp.mean(jnp.maximum(margins, 0.0))
        return Goals(decisive[None], jnp.zeros((0,)), hinge[None])

    def is_random(self, defense):
        return self.fresh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Combined(Objective):
    """Classifier and detector as one network of K + 1 logits, in the paper's form.

    G(x)_i = Z(x)_i for the K classes, G(x)_{K+1} = (Z_D(x) + 1) max_j Z(x)_j with Z_D the score
    minus the threshold. With a score made of probabilities, such as dropout's, no one constant c is
    right all the way: the paper's first attempt at dropout, which left 60 % detected.

    Source: Carlini & Wagner 2017, sections 3.1 and 6.1.
    """

    def __call__(self, key, defense, image, target):
        key_logits, key_score = jax.random.split(key)
        logits = defense.logits(key_logits, image[None])[0]
        excess = self.excess(key_score, defense, image) + self.detector_margin
        extra = (excess + 1.0) * jnp.max(logits)
        joined = jnp.concatenate([logits, extra[None]])
        if self.targeted:
            value = margin(joined, target, True)
        else:  # the extra class is no escape: some wrong class must beat both it and the true one
            wrong = jnp.where(jnp.arange(logits.shape[0]) == target, -jnp.inf, logits)
            value = jnp.maximum(logits[target], extra) - jnp.max(wrong)
        value = value[None] + self.confidence
        classifier = margin(logits, target, self.targeted)[None] + self.confidence
        return Goals(classifier, excess[None], value)


OBJECTIVES: dict[str, type[Objective]] = {
    "generic": Generic,
    "quantile": Quantile,
    "networks": DropoutNetworks,
    "eot": DropoutNetworks,
    "combined": Combined,
}
# By the detector's name in `detectors.DETECTORS`; every other detector gets `generic`.
STRONGEST = {"dropout": "quantile"}
PAPER = {"dropout": "networks", "none": "generic"}


def resolve(name: str, defense_name: str, detector) -> str:
    """The objective meant by `auto` for a defence; checks that any other one fits it.

    Args:
      name: a name in `OBJECTIVES`, "paper" or "auto".
      defense_name: the defence's name in `detectors.DETECTORS`, or a foreign one.
      detector: its hyperparameters.

    Returns:
      A name in `OBJECTIVES`, or "paper".

    Raises:
      InputError: unknown, or made for another kind of defence.
    """
    if name == "auto":
        default = "quantile" if detector.random else "generic"
        return STRONGEST.get(defense_name, default)
    fitting = ["generic"]
    if detector.random:
        fitting.append("quantile")
    if detector.kind == "score":
        fitting.append("combined")
    if defense_name == "dropout":
        fitting.append("eot")
    if defense_name in PAPER:
        fitting.append("paper")
    if name not in fitting:
        raise InputError(
            f"objective {name!r} is none for defence {defense_name}; for it there are: "
            f"auto, {', '.join(fitting)}"
        )
    return name


def make(name: str, defense_name: str, *, seed: int, targeted: bool, **settings) -> Objective:
    """The objective of that name (already resolved), with its settings.

    Args:
      name: from `resolve`.
      defense_name: as there.
      seed: of fixed masks.
      targeted: towards the target class, or away from the true one.
      **settings: `confidence`, `detector_margin`, and fields of the objective.

    Raises:
      InputError: a setting that this objective does not have.
    """
    plain = PAPER[defense_name] if name == "paper" else name
    kind = OBJECTIVES[plain]
    known = {field.name for field in dataclasses.fields(kind)}
    if "mask_seed" in known:
        settings.setdefault("mask_seed", seed)
    if plain == "eot":
        settings["fresh"] = True
    if strange := sorted(set(settings) - known):
        raise InputError(f"objective {name} has no setting {strange[0]!r}; it has: {sorted(known)}")
    for setting, value in settings.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{setting} must be a finite number, not {value}")
    return kind(targeted=targeted, **settings)
