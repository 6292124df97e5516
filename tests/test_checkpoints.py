"""Checkpoints: round trip, repeatable bytes, and refusals that say what is wrong."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from advdet import checkpoints
from advdet.types import InputError


def tree():
    return {
        "params": {"dense": {"kernel": jnp.arange(6.0).reshape(2, 3), "bias": jnp.zeros(3)}},
        "pair": (jnp.int32(3), [jnp.ones((1, 2), jnp.bool_)]),
    }


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.fixture
def saved(tmp_path):
    return checkpoints.save(tmp_path / "folder" / "weights.npz", tree(), {"seed": 3})


def test_round_trip(saved):
    found, manifest = checkpoints.load(saved, shapes(tree()))
    assert jax.tree.structure(found) == jax.tree.structure(tree())
    jax.tree.map(np.testing.assert_array_equal, found, tree())
    assert manifest["seed"] == 3 and manifest["versions"]["jax"] == jax.__version__
    assert {p.name for p in saved.parent.iterdir()} == {"weights.npz", "weights.json"}
    assert np.load(saved, allow_pickle=False)["params/dense/bias"].shape == (3,)


def test_equal_arrays_give_equal_bytes(tmp_path):
    one = checkpoints.save(tmp_path / "a.npz", tree(), {})
    backwards = dict(reversed(tree().items()))
    backwards["params"] = {
        "dense": {
            "kernel": np.asfortranarray(np.arange(6.0, dtype=np.float32).reshape(2, 3)),
            "bias": np.zeros(3, np.float32),
        }
    }
    other = checkpoints.save(tmp_path / "b.npz", backwards, {})
    assert one.read_bytes() == other.read_bytes()


def test_a_failed_save_leaves_the_old_file_whole(saved):
    with pytest.raises(TypeError, match="plain array"):
        checkpoints.save(saved, {"a": np.array([object()])}, {})
    checkpoints.load(saved, tree())
    assert len(list(saved.parent.iterdir())) == 2


def refused(path, like=None):
    with pytest.raises(InputError) as caught:
        checkpoints.load(path, shapes(tree()) if like is None else like)
    return str(caught.value)


def test_refuses_a_missing_file(tmp_path):
    assert "no checkpoint at" in refused(tmp_path / "none.npz")


def test_refuses_a_web_page_and_says_what_it_begins_with(saved):
    saved.write_text("<!DOCTYPE html><html>Not Found</html>")
    message = refused(saved)
    assert "not an npz" in message and "<!DOCTYPE html>" in message


def test_refuses_an_empty_file(saved):
    saved.write_bytes(b"")
    assert "the file is empty" in refused(saved)


def test_refuses_a_changed_or_cut_file(saved):
    content = saved.read_bytes()
    saved.write_bytes(content[:-20])
    assert "sha256" in refused(saved)
    saved.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    assert "sha256" in refused(saved)


def test_refuses_a_damaged_archive_whose_hash_is_right(saved):
    import hashlib

    content = saved.read_bytes()[:-20]
    saved.write_bytes(content)
    beside = checkpoints.manifest_path(saved)
    manifest = json.loads(beside.read_text())
    beside.write_text(json.dumps(manifest | {"sha256": hashlib.sha256(content).hexdigest()}))
    assert "cannot be read as arrays" in refused(saved)


def test_never_unpickles(saved):
    import hashlib

    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    np.savez(saved, **{"params": np.array([Trap()], dtype=object)})
    beside = checkpoints.manifest_path(saved)
    digest = hashlib.sha256(saved.read_bytes()).hexdigest()
    beside.write_text(json.dumps({"sha256": digest}))
    assert "cannot be read as arrays" in refused(saved)
    saved.write_bytes(pickle.dumps({"a": 1}))
    assert "not an npz" in refused(saved)


def test_refuses_a_missing_or_broken_manifest(saved):
    beside = checkpoints.manifest_path(saved)
    beside.write_text("{")
    assert "not a readable JSON" in refused(saved)
    beside.write_text("[]")
    assert "not a manifest" in refused(saved)
    beside.unlink()
    assert "no manifest" in refused(saved)


def test_refuses_other_keys(saved):
    smaller, larger = tree(), tree()
    del smaller["params"]["dense"]["bias"]
    larger["params"]["other"] = jnp.zeros(2)
    message = refused(saved, smaller)
    assert "another network" in message and "params/dense/bias" in message
    assert "lacks params/other" in refused(saved, larger)


def test_refuses_other_shapes_and_dtypes(saved):
    other = tree()
    other["params"]["dense"]["bias"] = jnp.zeros(4)
    assert "float32[3], expected float32[4]" in refused(saved, other)
    other["params"]["dense"]["bias"] = jnp.zeros(3, jnp.int32)
    assert "float32[3], expected int32[3]" in refused(saved, other)


def test_shipped_knows_what_is_there():
    assert checkpoints.shipped("no_such_set") is None
