"""Flags that name what is looked at: a defence, and the classifier that it defends."""

from __future__ import annotations

from absl import flags

from experiments import common, path_flags

DEFENSE = flags.DEFINE_string(
    "defense",
    None,
    "Which defence: a name (`dropout`; `none` is the undefended baseline; `all` runs the paper's "
    "ten in turn), or package.module:name for one of your own, a class or a detector that is made. "
    "Hyperparameters follow a colon: dropout:num_samples=50,tau=0.02.",
)
CLASSIFIER = path_flags.define(
    "classifier",
    None,
    "package.module:name of an advdet.Classifier of your own to defend, or the .npz that "
    "`python -m experiments.train --out=...` wrote; default: advdet's network for the data set.",
)


def classifier():
    """The user's own classifier; None where the flags name none.

    Raises:
      InputError: there is none by that name, or the weights are for another network.
    """
    from advdet import Classifier, named, training

    if CLASSIFIER.value is None:
        return None
    if CLASSIFIER.value.endswith(".npz"):
        return training.load_classifier(CLASSIFIER.value, common.splits())
    return named.instance(CLASSIFIER.value, "the classifier", Classifier)
