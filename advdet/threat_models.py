"""What the attacker is shown; the only thing in which the three threat models differ.

The judge is always the true defence. Source: Carlini & Wagner 2017, section 2; the threat models
are those of Biggio et al. 2013.
"""

from __future__ import annotations

from advdet.defenses import Defense, undefended
from advdet.types import InputError

THREAT_MODELS = ("zero_knowledge", "perfect_knowledge", "limited_knowledge")
NO_SURROGATE = (
    "limited knowledge needs a surrogate: a detector with a `fit`, or "
    "surrogate=(classifier, detector)"
)


def attacker_view(threat_model: str, defense: Defense, surrogate: Defense | None = None) -> Defense:
    """The defence that the attacker optimises against.

    Args:
      threat_model: zero_knowledge (does not know that there is a detector), perfect_knowledge
        (knows all but the random draws to come) or limited_knowledge (knows the scheme and trains
        a copy).
      defense: the true defence.
      surrogate: the attacker's own copy, for limited knowledge.

    Raises:
      InputError: unknown threat model, or limited knowledge without a surrogate.
    """
    if threat_model == "zero_knowledge":
        return undefended(defense.classifier)
    if threat_model == "perfect_knowledge":
        return defense
    if threat_model == "limited_knowledge":
        if surrogate is None:
            raise InputError(NO_SURROGATE)
        return surrogate
    raise InputError(f"unknown threat model {threat_model!r}; known: {', '.join(THREAT_MODELS)}")
