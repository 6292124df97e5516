"""A detector made of plain functions; see `Detector.from_function`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from advdet import functions
from advdet.detectors.base import Detector
from advdet.types import Classifier, FitData, InputError, PyTree

_SCORE_GETS = ("classifier", "fitted", "key")
_FIT_GETS = ("key", "seed", "classifier", "data")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """An object that is no pytree of arrays, carried through JAX as it is."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionDetector(Detector):
    """Scores by a function; equal where name and functions are.

    Attributes:
      name: what results are filed under.
      differentiable: whether the score has useful gradients.
      random: whether it draws random numbers.
      functions: (score_fn, fit or None); no field, since records list fields as JSON.
    """

    name: str = ""
    differentiable: bool = True
    random: bool = False
    functions: dataclasses.InitVar[tuple[Callable, Callable | None]] = None

    def __post_init__(self, functions):
        object.__setattr__(self, "functions", functions)

    @classmethod
    def of(cls, score_fn, differentiable, random, fit, name) -> FunctionDetector:
        """As `Detector.from_function`, of which these are the arguments."""
        functions.asked_for(score_fn, "score_fn", ("images",), _SCORE_GETS)
        if fit is not None:
            functions.asked_for(fit, "fit", ("images", "labels"), _FIT_GETS)
        if differentiable is None:
            differentiable = getattr(score_fn, "differentiable", True)
        if random is None:
            random = getattr(score_fn, "random", functions.takes(score_fn, "key"))
        if name is None:
            name = getattr(score_fn, "name", None) or getattr(score_fn, "__name__", "")
            name = name if re.fullmatch(r"\w+", name) else "own_detector"
        if not re.fullmatch(r"[\w-]+", name):
            raise InputError(f"name {name!r} must be one word: results are filed under it")
        return cls(
            name=name, differentiable=bool(differentiable), random=bool(random),
            functions=(score_fn, fit),
        )  # fmt: skip

    @property
    def learns(self) -> bool:
        return self.functions[1] is not None

    def fit(self, key: jax.Array, classifier: Classifier, data: FitData) -> PyTree:
        score_fn, fit = self.functions
        if fit is None:
            return ()
        key, seed_key = jax.random.split(key)
        seed = int(jax.random.randint(seed_key, (), 0, 2**31 - 1))
        ours = {"images": np.asarray(data.train.images), "labels": np.asarray(data.train.labels)}
        others = {"key": key, "seed": seed, "classifier": classifier, "data": data}
        with functions.foreign_code():
            found = functions.call(fit, "fit", ours, others)
        # What a callback works with is handed to it as it is: an argument of a compiled program
        # would be copied at each call.
        if getattr(score_fn, "on_host", False) or not all(map(_is_array, jax.tree.leaves(found))):
            return Held(found)
        return jax.tree.map(jnp.asarray, found)

    def score(self, key, fitted, classifier, images):
        given = {"classifier": classifier, "key": key,
                 "fitted": fitted.value if isinstance(fitted, Held) else fitted}  # fmt: skip
        ask = lambda x: functions.call(self.functions[0], "score_fn", {"images": x}, given)
        try:
            found = functions.traced("score_fn", ask, images)
        except InputError:
            raise
        except Exception as error:  # foreign code can raise anything
            raise InputError(
                f"score_fn cannot be called on images of shape {images.shape}: "
                f"{functions.first_line(error)} (torch code belongs in "
                "advdet.bridges.torch_detector)"
            ) from error
        return functions.as_rows("score_fn", found, (len(images),))

    def _identity(self):
        return self.name, self.differentiable, self.random, self.functions

    def __eq__(self, other):
        return type(other) is type(self) and other._identity() == self._identity()

    def __hash__(self):
        return hash(self._identity())


def _is_array(leaf) -> bool:
    if isinstance(leaf, jax.Array):
        return True
    numbers = isinstance(leaf, (np.ndarray, np.generic, float, int))
    return numbers and np.asarray(leaf).dtype.kind in "biuf"
