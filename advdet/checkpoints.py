"""Learned arrays on disk: one npz and a JSON manifest that says how they came about.

Only arrays are stored (`allow_pickle=False`), equal arrays give equal bytes, and both files are put
in place whole. `load` compares the file with what the caller expects and says what differs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from advdet import paths
from advdet.types import InputError, PyTree

SCHEMA = 1
_ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
_RETRAIN = "delete it and train again (python -m experiments.train)"


def shipped(dataset: str, half: str = "full") -> Path | None:
    """The classifier weights that come with advdet for this data set, or None."""
    path = Path(__file__).parent / "weights" / dataset / f"classifier-{half}.npz"
    return path if path.exists() else None


def manifest_path(path: str | Path) -> Path:
    """The manifest beside the npz."""
    return paths.given(path).with_suffix(".json")


def versions() -> dict[str, str]:
    """Versions of the libraries that decide what training gives."""
    names = ("advdet", "jax", "jaxlib", "flax", "optax", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def save(path: str | Path, tree: PyTree, manifest: dict[str, Any]) -> Path:
    """Writes `tree` to the npz at `path` and the manifest beside it, each of them atomically.

    Args:
      path: ends in .npz; folders are made.
      tree: pytree of arrays.
      manifest: JSON-able; schema, library versions and the npz's sha256 are added.

    Returns:
      The path of the npz.
    """
    path = paths.given(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = _npz_bytes(_flatten(tree))
    added = {"schema": SCHEMA, "sha256": hashlib.sha256(content).hexdigest()}
    full = added | {"versions": versions()} | manifest
    # The sha256 ties the two files together: a crash between the writes is noticed on loading.
    _write(path, content)
    _write(manifest_path(path), (json.dumps(full, indent=2) + "\n").encode())
    return path


def load_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of the npz at `path`.

    Raises:
      InputError: if it is missing or not a JSON object.
    """
    beside = manifest_path(path)
    try:
        manifest = json.loads(beside.read_text())
    except FileNotFoundError:
        raise InputError(f"no manifest at {beside}; it belongs beside {Path(path).name}") from None
    except (ValueError, OSError) as error:
        raise InputError(f"{beside} is not a readable JSON manifest ({error})") from None
    if not isinstance(manifest, dict):
        raise InputError(f"{beside} holds a JSON {type(manifest).__name__}, not a manifest")
    return manifest


def load(path: str | Path, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """Reads a checkpoint into the structure of `like`.

    Args:
      path: of the npz.
      like: pytree of arrays or `jax.ShapeDtypeStruct`s with the keys, shapes and dtypes expected.

    Returns:
      (tree of NumPy arrays, manifest).

    Raises:
      InputError: missing file, not an npz, changed since it was written, or made for something
        with other keys, shapes or dtypes; the message says which.
    """
    arrays = load_arrays(path)
    return _unflatten(Path(path), arrays, like), load_manifest(path)


def load_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by their path names, as in "params/dense/kernel".

    Raises:
      InputError: missing file, not an npz, or changed since it was written.
    """
    path = paths.given(path)
    if not path.is_file():
        raise InputError(f"no checkpoint at {path}")
    content = path.read_bytes()
    if not content.startswith(b"PK"):
        raise InputError(
            f"{path} is not an npz file: it begins with {_shown(content)}; "
            "fetch the file itself rather than a web page or a pointer to it"
        )
    manifest = load_manifest(path)
    found_hash = hashlib.sha256(content).hexdigest()
    if manifest.get("sha256") != found_hash:
        raise InputError(
            f"{path} has sha256 {found_hash[:12]}..., its manifest says "
            f"{str(manifest.get('sha256'))[:12]}...: file and manifest do not belong together, or "
            f"the file was cut short; {_RETRAIN}"
        )
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read as arrays ({error}); {_RETRAIN}") from None


def _flatten(tree: PyTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(at, simple=True, separator="/"): leaf for at, leaf in leaves}


def _unflatten(path, arrays, like):
    expected = _flatten(like)
    missing, other = sorted(expected.keys() - arrays), sorted(arrays.keys() - expected)
    if missing or other:
        parts = [f"lacks {_listed(missing)}"] if missing else []
        parts += [f"holds {_listed(other)}, which is not expected"] if other else []
        raise InputError(f"{path} is for another network or recipe: it {' and '.join(parts)}")
    for name, leaf in expected.items():
        found = arrays[name]
        if found.shape != tuple(leaf.shape) or found.dtype != leaf.dtype:
            raise InputError(
                f"{path} is for another network or data set: {name} is {found.dtype}"
                f"{list(found.shape)}, expected {leaf.dtype}{list(leaf.shape)}"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in expected])


def _npz_bytes(arrays: dict[str, Any]) -> bytes:
    """An npz as np.savez writes it, but with a fixed date and order, so that bytes repeat."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(arrays):
            array = np.asarray(arrays[name])
            if array.dtype.hasobject:
                raise TypeError(f"{name} is not a plain array but {array.dtype}")
            entry = io.BytesIO()
            contiguous = np.asarray(array, order="C")
            np.lib.format.write_array(entry, contiguous, allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", _ZIP_EPOCH)
            info.external_attr = 0o644 << 16
            archive.writestr(info, entry.getvalue())
    return out.getvalue()


def _write(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _shown(content: bytes) -> str:
    start = content[:40].decode("ascii", "replace").replace("\ufffd", "?")
    return repr(start) if content else "nothing (the file is empty)"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
