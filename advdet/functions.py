"""Plain functions as parts of advdet: what they are called with, and under which settings of JAX.

A function says by its parameters' names what it wants. `images` may have any name; others are given
only where a parameter asks for them:

    def score(images): ...                      # [B, H, W, C] -> [B]
    def score(images, classifier): ...          # calls the classifier that is defended
    def score(key, images, fitted): ...         # random, and with what `fit` returned
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from advdet.types import InputError, Outputs, PyTree

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call(
    function: Callable,
    what: str,
    ours: dict[str, Any],
    others: dict[str, Any],
) -> Any:
    """Calls a function with what its parameters ask for.

    Args:
      function: any callable.
      what: its name in messages.
      ours: name -> value; each goes to the parameter of that name, else to the first parameter
        that nothing else fits.
      others: name -> value; given to parameters of that name only.

    Raises:
      InputError: a parameter that nothing fits.
    """
    wanted = asked_for(function, what, tuple(ours), tuple(others))
    values = ours | others
    if wanted is None:
        return function(*ours.values())
    first = [values[source] for source, by_name in wanted.values() if not by_name]
    rest = {name: values[source] for name, (source, by_name) in wanted.items() if by_name}
    return function(*first, **rest)


def asked_for(
    function: Callable, what: str, ours: tuple[str, ...], others: tuple[str, ...]
) -> dict[str, tuple[str, bool]] | None:
    """Parameter -> (which value it gets, whether by name); None where the function tells nothing.

    Args: as those of `call`, names alone.

    Raises:
      InputError: it is no function, or has a parameter that nothing fits.
    """
    if not callable(function):
        raise InputError(f"{what} must be a function, not {type(function).__name__}")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions
        return None
    plain = {n: p for n, p in parameters.items() if p.kind in _NAMED or _is_first(p)}
    if not plain and any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return None
    left = [name for name in ours if name not in plain]
    wanted = {}
    for name, parameter in plain.items():
        if name in ours or name in others:
            wanted[name] = name, not _is_first(parameter)
        elif parameter.default is not inspect.Parameter.empty:
            continue
        elif not left:
            known = ", ".join([*ours, *others])
            raise InputError(
                f"{what} has a parameter {name!r} that nothing is known for; it may ask for "
                f"{known}; bind others beforehand (functools.partial)"
            )
        else:
            wanted[name] = left.pop(0), not _is_first(parameter)
    if ours and ours[0] not in {source for source, _ in wanted.values()}:
        raise InputError(f"{what} takes no {ours[0]}: its first parameter must be for them")
    return wanted


def _is_first(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.POSITIONAL_ONLY


def takes(function: Callable, name: str) -> bool:
    """Whether a function has a parameter of that name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


@contextlib.contextmanager
def foreign_code():
    """JAX as foreign code expects it: its usual promotions, and products in full float32.

    TF32, which accelerators use by default, flips success tests.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.default_matmul_precision("highest"))
        yield


def as_rows(what: str, values: Any, shape: tuple[int | None, ...]) -> jax.Array:
    """Values as float32 of a shape whose None are free.

    Raises:
      InputError: they have another shape, or are no numbers.
    """
    found = jnp.shape(values)
    if len(shape) == 1 and found == (shape[0], 1):  # as the last layer of a network gives it
        values, found = jnp.reshape(values, shape), shape
    if len(found) != len(shape) or any(s is not None and s != f for s, f in zip(shape, found)):
        wanted = ", ".join("K" if size is None else str(size) for size in shape)
        two = len(shape) == 1 and found == (shape[0], 2)
        hint = " (of two logits z, z[:, 1] - z[:, 0] is a score)" if two else ""
        raise InputError(f"{what} gives an array of shape {found} for {shape[0]} images; wanted "
                         f"[{wanted}]{hint}")  # fmt: skip
    values = jnp.asarray(values)
    if jnp.issubdtype(values.dtype, jnp.complexfloating):
        raise InputError(f"{what} gives complex numbers")
    return values.astype(jnp.float32)


def traced(what: str, function: Callable, *arguments) -> Any:
    """Calls `function(*arguments)`, a user's code under JAX; says what to do where it is not JAX.

    Raises:
      InputError: the function is none that JAX can trace.
    """
    try:
        with foreign_code():
            return function(*arguments)
    except jax.errors.JAXTypeError as error:
        raise InputError(
            f"{what} is no JAX function ({first_line(error)}): wrap NumPy and scikit-learn code "
            "with advdet.bridges.numpy_score, torch code with advdet.bridges.torch_classifier or "
            "torch_detector"
        ) from error


def first_line(error: Exception) -> str:
    """What an error says, on one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclasses.dataclass(frozen=True)
class FunctionApply:
    """A classifier's `apply` from a function images -> logits; equal where the function is.

    Attributes:
      function: images [B, H, W, C] in [0, 1] -> logits [B, K] (or `Outputs`, with features); its
        parameter `key`, where it has one, switches its dropout on.
      differentiable: whether it has useful gradients.
      bounded_logits: whether its logits lie in [0, 1] by their nature, and are no probabilities.
    """

    function: Callable
    differentiable: bool = True
    bounded_logits: bool = False

    def __post_init__(self):
        asked_for(self.function, "logits_fn", ("images",), ("key",))

    def __call__(self, variables: PyTree, images: jax.Array, key: jax.Array | None) -> Outputs:
        del variables
        if key is not None and not getattr(self.function, "random", takes(self.function, "key")):
            raise InputError(
                "this defence switches the classifier's dropout on by a key, and logits_fn has no "
                "parameter `key`"
            )
        given = {"key": key} if takes(self.function, "key") else {}
        ask = lambda x: call(self.function, "logits_fn", {"images": x}, given)
        found = traced("logits_fn", ask, images)
        found = found if isinstance(found, Outputs) else Outputs(found, {})
        return found._replace(logits=as_rows("logits_fn", found.logits, (len(images), None)))
