"""Flags that hold paths."""

from __future__ import annotations

from absl import flags

flags.disclaim_key_flags()  # a flag belongs to the module that asks for it


class _PathParser(flags.ArgumentParser):
    """A path; a leading ~ is home also where no shell replaces it, as in --out=~/x."""

    syntactic_help = "a path"

    def parse(self, argument):
        from advdet import paths
        from advdet.types import InputError

        try:
            return str(paths.given(argument))
        except InputError as error:
            raise ValueError(str(error)) from None

    def flag_type(self):
        return "path"


def define(name: str, default: str | None, said: str, required: bool = False):
    """A flag that holds a path; all of them are made here.

    Args: as those of `flags.DEFINE_string`.
    """
    return flags.DEFINE(
        _PathParser(), name, default, said, serializer=flags.ArgumentSerializer(),
        required=required,
    )  # fmt: skip
