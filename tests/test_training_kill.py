"""A training that is killed and resumed ends in the bits of one that was not."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

CHILD = pathlib.Path(__file__).with_name("training_child.py")


def start(channels, folder, out, cache):
    command = [sys.executable, str(CHILD), str(channels), str(folder), str(out)]
    return subprocess.Popen(command, env=os.environ | {"ADVDET_CACHE": str(cache)})


@pytest.mark.parametrize(
    "channels",
    [pytest.param(1, id="MnistNet"), pytest.param(3, id="ResNet32", marks=pytest.mark.slow)],
)
def test_killed_after_a_checkpoint_and_resumed_the_weights_are_equal_bit_for_bit(
    channels, tmp_path, session_cache
):
    whole, resumed = tmp_path / "whole.npz", tmp_path / "resumed.npz"
    assert start(channels, tmp_path / "a", whole, session_cache).wait() == 0
    kills = 0
    for slot in (1, 0):  # after the first and the second epoch
        process = start(channels, tmp_path / "b", resumed, session_cache)
        waited = time.monotonic()
        while not (tmp_path / "b" / f"state-{slot}.json").exists() and process.poll() is None:
            assert time.monotonic() - waited < 600
            time.sleep(0.002)
        if process.poll() is None:
            process.kill()
            kills += process.wait() == -9
    assert kills, "the training was over before it could be killed"
    assert start(channels, tmp_path / "b", resumed, session_cache).wait() == 0
    assert resumed.read_bytes() == whole.read_bytes()
    print(f"{kills} kills: {whole.stat().st_size:,} bytes equal")
