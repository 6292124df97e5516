"""For the tests of the command line: quickly trained weights, and ways to run a command.

PYTEST_DONT_REWRITE (both a plugin and imported by name)
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest

from advdet import checkpoints, datasets, training

ROOT = pathlib.Path(__file__).parents[1]
_EPOCHS = 4


class Ran(NamedTuple):
    """A command that has ended."""

    status: int
    out: str
    err: str


class Cli:
    """Runs entry points in processes of their own, forked from one that has all imports done."""

    def __init__(self, cache, folder):
        self.env = {"ADVDET_CACHE": str(cache), "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
        self._folder, self._count = folder, 0
        self._context = multiprocessing.get_context("forkserver")
        # Not the entry points' modules: their flags, once made, would be there for every command.
        self._context.set_forkserver_preload(["advdet", "matplotlib"])

    def __call__(self, *words: str, module="perfect_knowledge", env=None) -> Ran:
        """Runs `python -m experiments.<module> <words>` to its end."""
        self._count += 1
        paths = [self._folder / f"{self._count}.{name}" for name in ("out", "err")]
        arguments = (f"experiments.{module}", words, self.env | (env or {}), *map(str, paths))
        process = self._context.Process(target=_child, args=arguments)
        process.start()
        process.join()
        return Ran(process.exitcode, *(path.read_text() for path in paths))

    def popen(self, *words: str, module="perfect_knowledge", stderr=subprocess.PIPE, **options):
        """A real process, to be killed; strict JAX settings of the tests do not reach it."""
        command = [sys.executable, "-m", f"experiments.{module}", *words]
        # Tests that a shell runs in the background were told to ignore Ctrl-C, and hand that on.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return subprocess.Popen(
            command, cwd=ROOT, env=os.environ | self.env, text=True, stdout=subprocess.PIPE,
            stderr=stderr, **options,
        )  # fmt: skip


def _child(module, words, env, out, err):
    os.chdir(ROOT)
    os.environ.update(env)
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
    )
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@pytest.fixture(scope="session")
def weights(session_cache):
    """The cache folder, with weights for mnist_5k trained for seconds where advdet looks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADVDET_CACHE", str(session_cache))
        _train_briefly("full")
    return session_cache


@pytest.fixture(scope="session")
def halves(weights):
    """The cache folder with weights for both halves of mnist_5k, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADVDET_CACHE", str(weights))
        _train_briefly("defender")
        _train_briefly("attacker")
    return weights


def _train_briefly(half):
    splits = datasets.load("mnist_5k")
    wanted = dict(half=half, schedule="fast", seed=0)
    path = training.cached_path(splits, **wanted, epochs=None, cache=None)
    if not path.exists():
        classifier, manifest = training.train_classifier(
            splits, **wanted, epochs=_EPOCHS, progress=False, say=lambda line: None
        )
        checkpoints.save(path, classifier.variables, manifest)


@pytest.fixture(scope="session")
def splits(weights):
    """mnist_5k."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADVDET_CACHE", str(weights))
        return datasets.load("mnist_5k")


@pytest.fixture(scope="session")
def classifier(weights, splits):
    """Its quickly trained classifier."""
    return training.classifier_for(splits, cache=weights)


@pytest.fixture(scope="session")
def cli(weights, tmp_path_factory):
    """Runs commands; see `Cli`."""
    return Cli(weights, tmp_path_factory.mktemp("cli"))


def files_in(folder) -> dict[str, bytes]:
    """All files below a folder with their contents."""
    found = sorted(pathlib.Path(folder).rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() for p in found if p.is_file()}


def read_record(path) -> tuple[dict, dict[str, np.ndarray]]:
    """A stored record as plain JSON (NaN and Infinity refused), and its arrays."""

    def refuse(token):
        raise AssertionError(f"{path} holds the token {token}")

    record = json.loads(pathlib.Path(path).read_text(), parse_constant=refuse)
    with np.load(pathlib.Path(path).with_suffix(".npz"), allow_pickle=False) as stored:
        return record, {name: stored[name] for name in stored.files}
