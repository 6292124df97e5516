"""Dataclasses as pytrees: their structures must know what they are."""

import dataclasses
import importlib
import itertools
import pathlib
import pkgutil
import re

import jax
import jax.numpy as jnp

import advdet
from advdet.types import pytree


@pytree
@dataclasses.dataclass(frozen=True)
class One:
    x: float = 1.0
    y: float = 2.0
    how: str = dataclasses.field(default="a", metadata={"static": True})


@pytree
@dataclasses.dataclass(frozen=True)
class Other(One):
    pass


def test_a_value_comes_back_and_only_what_is_not_static_is_a_leaf():
    value = One(jnp.float32(3.0), {"z": jnp.arange(2)}, "b")
    leaves, structure = jax.tree.flatten(value)
    assert len(leaves) == 2 and structure.unflatten(leaves) == value
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    assert paths == [".x", ".y['z']"]
    doubled = jax.tree.map(lambda leaf: 2 * leaf, One())
    assert doubled == One(2.0, 4.0) and hash(structure) == hash(jax.tree.structure(value))


def test_structures_differ_where_classes_or_static_values_do():
    structures = [jax.tree.structure(v) for v in (One(), Other(), One(how="b"), Other(how="b"))]
    assert all(a != b for a, b in itertools.combinations(structures, 2))
    assert jax.tree.structure(One(5.0)) == structures[0]


def registered():
    """All pytree dataclasses of the package."""
    folder = pathlib.Path(advdet.__file__).parent
    found = set()
    for module in pkgutil.walk_packages([str(folder)], "advdet."):
        path = folder.parent.joinpath(*module.name.split(".")).with_suffix(".py")
        names = re.findall(r"^@pytree\n@dataclasses.dataclass\(frozen=True\)\nclass (\w+)",
                           path.read_text() if path.exists() else "", re.MULTILINE)  # fmt: skip
        found |= {getattr(importlib.import_module(module.name), name) for name in names}
    return sorted(found, key=lambda cls: cls.__name__)


def structure_of(cls):
    """With the same leaves and static values for all classes, as far as they can be alike."""
    value = object.__new__(cls)
    for field in dataclasses.fields(cls):
        static = field.metadata.get("static")
        object.__setattr__(value, field.name, "static" if static else 0.0)
    return jax.tree.structure(value)


def test_no_two_classes_of_the_package_are_taken_for_each_other():
    for one, other in itertools.combinations(registered(), 2):
        assert structure_of(one) != structure_of(other), (one, other)


def test_no_dataclass_of_the_package_is_registered_otherwise():
    folder = pathlib.Path(advdet.__file__).parent
    assert len(registered()) > 10
    other = re.compile(r"^@?jax.tree_util.register_dataclass", re.MULTILINE)
    assert not [path for path in folder.rglob("*.py") if other.search(path.read_text())]
