"""Objects of a user's own modules, by the words that name them: `package.module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from advdet.types import InputError


def is_own(spec: str) -> bool:
    """Whether a word names something in a module."""
    module, _, name = spec.partition(":")
    return bool(module and name)


def imported(spec: str, what: str) -> Any:
    """The object that a word names.

    Args:
      spec: `package.module:name`.
      what: it is wanted for, in messages.

    Raises:
      InputError: the module cannot be imported, or has no such name.
    """
    module, _, name = spec.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module does on import
        raise InputError(f"{what} {spec} cannot be imported: {error}") from error


def instance(spec: str, what: str, kind: type) -> Any:
    """The same, and it must be an object of a class of advdet's.

    Raises:
      InputError: it is not.
    """
    found = imported(spec, what)
    if isinstance(found, kind):
        return found
    said = f"class {found.__name__}" if isinstance(found, type) else type(found).__name__
    raise InputError(f"{what} {spec} must be an advdet.{kind.__name__}, not a {said}")
