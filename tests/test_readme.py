"""The README's blocks for one's own detector run as they stand, at smoke size."""

import os
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import own_data
import pytest

import advdet

_TEXT = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
_SECTION = _TEXT.split("## Your own detector")[1].split("\n## ")[0]
BLOCKS = re.findall(r"```python\n(.*?)```", _SECTION, re.DOTALL)


def _jax():
    weights, bias = map(jnp.asarray, own_data.linear())
    return {"logits": lambda x: x.reshape(len(x), -1) @ weights + bias}


def _torch():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    weights, bias = own_data.linear()
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    net[1].weight.data = 0.4 * torch.tensor(weights.T.copy())  # undoes mean=0.3, std=0.4
    net[1].bias.data = torch.tensor(bias + 0.3 * weights.sum(0))
    return {"net": net, "autoencoder": torch.nn.AvgPool2d(3, 1, 1).eval()}


def _keras():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    flat = [keras.layers.Input(own_data.SHAPE), keras.layers.Flatten(), keras.layers.Dense(10)]
    model = keras.Sequential(flat)
    model.layers[-1].set_weights(own_data.linear())
    blur = [keras.layers.Input(own_data.SHAPE), keras.layers.AveragePooling2D(3, 1, "same")]
    return {"model": model, "autoencoder": keras.Sequential(blur)}


def _small(detector, **given):
    """`advdet.evaluate` at smoke size, one attack in place of both."""
    given |= dict(preset="smoke", num_images=8, attack="ddn", progress=False)
    done = _EVALUATE(detector, **given)
    return done._replace(records=done.records | {"best": done.records["ddn"]})


_EVALUATE = advdet.evaluate


@pytest.mark.parametrize("number, yours", list(enumerate([_jax, _torch, _keras, _jax])))
def test_a_quickstart_runs(number, yours, tmp_path, monkeypatch, capsys):
    arrays = {f"{axis}_{what}": values for what, pair in own_data.arrays().items()
              for axis, values in zip("xy", pair)}  # fmt: skip
    np.savez(tmp_path / "digits.npz", **arrays)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(advdet, "evaluate", _small)
    assert sum(line.strip() != "" for line in BLOCKS[number].splitlines()) <= 15
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), yours() | arrays)
    said = capsys.readouterr().out.strip()
    assert said.startswith(("broken", "not broken", "evaluation invalid")), said


def test_there_is_one_quickstart_for_each_framework():
    assert len(BLOCKS) == 4
