"""Paths as users give them: a leading ~ is home, also where no shell has replaced it."""

from __future__ import annotations

from pathlib import Path

from advdet.types import InputError


def given(path: str | Path) -> Path:
    """The path, with ~ and ~user replaced.

    Raises:
      InputError: there is no such home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path}: {error}; give the whole path") from None
