"""Records on disk: JSON beside npz, written whole or not at all, and partial ones to go on with.

    <results_dir>/<dataset>/<threat_model>/<defense>/<attack>.<objective>/
        <targets>-<operating_point>-k<confidence>-<8 hex of all settings>-seed<k>.json

A run that is not finished keeps its finished images in `<same name>.partial.npz`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from advdet.types import InputError

SCHEMA = 1


def settings_hash(settings: dict[str, Any]) -> str:
    """Eight hex digits of everything that could change a result."""
    return hashlib.sha256(_json(settings).encode()).hexdigest()[:8]


def record_path(results_dir: str | Path, run: dict[str, Any]) -> Path:
    """Where a record of this `run` part belongs.

    Args:
      results_dir: the folder of all results.
      run: the record's `run` part; `settings_hash` in it covers the rest.
    """
    stem = (
        f"{run['targets']}-{run['operating_point']}-k{run['settings']['confidence']:g}-"
        f"{run['settings_hash']}-seed{run['seed']}"
    )
    cell = Path(results_dir, run["dataset"], run["threat_model"], run["defense"])
    return cell / f"{run['attack']}.{run['objective']}" / f"{stem}.json"


def check_writable(results_dir: str | Path) -> None:
    """Proves that files can be written in this folder, or in what exists of the path to it.

    Raises:
      InputError: they cannot.
    """
    folder = Path(results_dir).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"results folder {results_dir} cannot be written ({error.strerror or error}); "
            "choose another with --results_dir"
        ) from None


def save(path: Path, record: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Writes a finished record; its JSON last, so that a record that is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_sealed(path.with_suffix(".npz"), arrays)
    write_json(path, record)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """A JSON file, written whole or not at all; its folder must exist."""
    _write(path, lambda file: file.write((_json(value, indent=1) + "\n").encode()))


def sealed(record: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The record with the digest of its arrays, so that neither can be exchanged alone."""
    return {**record, "arrays_sha256": digest(arrays)}


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
      InputError: it cannot be read.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {_said(error)}") from None


def load(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """A finished record and its arrays; None where there is none.

    Raises:
      InputError: it is there and cannot be read.
    """
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        if record["schema"] != SCHEMA:
            raise ValueError(f"its schema is {record['schema']}, this version reads {SCHEMA}")
        arrays = _read_sealed(path.with_suffix(".npz"))
        if record.get("arrays_sha256", digest(arrays)) != digest(arrays):
            raise ValueError(f"{path.with_suffix('.npz').name} is not the one that the JSON names")
        return record, arrays
    except Exception as error:  # a damaged file can raise anything
        raise InputError(
            f"the result {path} cannot be read ({_said(error)}); move it and its .npz away to run "
            "again"
        ) from None


def partial_path(path: Path) -> Path:
    """Where the finished images of an unfinished record are kept."""
    return path.with_suffix(".partial.npz")


def save_partial(path: Path, finished: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
    """Keeps what is finished, with a hash of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_sealed(partial_path(path), {"finished": finished, **arrays})


def load_partial(path: Path, like: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """The arrays of an unfinished record with `finished` [N] bool; None where there is none.

    Args:
      path: the record's.
      like: arrays of the names, shapes and types expected.

    Raises:
      InputError: it is damaged, or not of this run.
    """
    partial = partial_path(path)
    if not partial.exists():
        return None
    try:
        arrays = _read_sealed(partial)
        for name, value in like.items():
            if arrays[name].shape != value.shape or arrays[name].dtype != value.dtype:
                raise ValueError(f"{name} has shape {arrays[name].shape}, wanted {value.shape}")
    except Exception as error:  # a damaged file can raise anything
        raise InputError(
            f"the partial result {partial} is damaged ({_said(error)}); delete it, or run without "
            "--resume"
        ) from None
    return arrays


def drop_partial(path: Path) -> None:
    """Removes the partial file of a record that is finished."""
    partial_path(path).unlink(missing_ok=True)


def copy_compressed(path: Path, target: Path) -> None:
    """A copy of a record's arrays that takes less room; still the arrays that were sealed.

    Raises:
      InputError: they are damaged.
    """
    try:
        arrays = _read_sealed(path)
    except Exception as error:
        raise InputError(f"{path} cannot be copied ({_said(error)})") from None
    sealed = {**arrays, "sha256": np.array(digest(arrays))}
    _write(target, lambda file: np.savez_compressed(file, **sealed))


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """An uncompressed npz, the same bytes for the same arrays, written whole or not at all."""
    _write(path, lambda file: np.savez(file, **arrays))


def _write_sealed(path: Path, arrays: dict[str, np.ndarray]) -> None:
    write_npz(path, {**arrays, "sha256": np.array(digest(arrays))})


def _read_sealed(path: Path) -> dict[str, np.ndarray]:
    """The arrays, once they are proved to be those that were written."""
    with path.open("rb") as file:
        if file.read(2) != b"PK":  # np.load would take it for a pickle, and say so
            raise ValueError(f"{path.name} is not an npz file")
        file.seek(0)
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    if "sha256" not in arrays or str(arrays.pop("sha256")) != digest(arrays):
        raise ValueError(f"the contents of {path.name} do not match its sha256")
    return arrays


def _said(error: Exception) -> str:
    """An error in words, on one line."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return " ".join(str(error).split()) or type(error).__name__


def digest(arrays: dict[str, np.ndarray]) -> str:
    """sha256 over names, types, shapes and bytes of arrays; hex."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {value.dtype.str} {value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, sort_keys=indent is None, indent=indent, allow_nan=False)


def _write(path: Path, fill) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:  # Ctrl-C can come when the file stands in its place already
        Path(temporary).unlink(missing_ok=True)
        raise
