"""Interrupted runs: kill -9, Ctrl-C, --resume; the record is that of a run never interrupted."""

import json
import pathlib
import random
import signal
import subprocess
import time

import numpy as np
import pytest
from cli_tools import files_in

import advdet
from advdet.attacks import driver

pytest_plugins = ["cli_tools"]

_SMOKE = ("--dataset=mnist_5k", "--preset=smoke", "--defense=none")
# Two images at once, so that they finish one after another; enough of them for some saves.
_N = 40
_QUICK = (*_SMOKE, "--attack=carlini_wagner", "--steps=400", f"--num_images={_N}", "--lanes=1")
_LONG = (
    *_SMOKE, "--attack=carlini_wagner", "--binary_search_steps=9", "--steps=1000",
    "--learning_rate=0.01", "--num_images=48", "--lanes=2",
)  # fmt: skip


def _comparable(folder) -> dict[str, bytes]:
    """Files of finished records, without `seconds` and `run.command`."""
    files = {}
    for name, content in files_in(folder).items():
        if name.endswith(".json"):
            record = json.loads(content)
            del record["seconds"], record["run"]["command"]
            content = json.dumps(record, indent=1).encode()
        if not name.endswith(".png"):
            files[name] = content
    return files


def _kept(folder) -> int:
    """How many finished images lie in the partial file."""
    for path in pathlib.Path(folder).rglob("*.partial.npz"):
        try:
            with np.load(path) as stored:
                return int(stored["finished"].sum())
        except FileNotFoundError:  # finished meanwhile
            return 0
    return 0


def _wait_for(process, folder, more_than: int) -> int:
    """Waits until so many images are kept; the process stands still then, and must be continued."""
    while process.poll() is None:
        process.send_signal(signal.SIGSTOP)  # or it might be over before it gets its signal
        if _kept(folder) > more_than:
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()
    return _kept(folder)


@pytest.fixture(scope="module")
def uninterrupted(cli, tmp_path_factory):
    """The records of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    ran = cli(*_QUICK, f"--results_dir={folder}")
    assert ran.status == 0, ran.err
    return _comparable(folder)


def test_killed_then_stopped_by_ctrl_c_then_resumed_equals_an_uninterrupted_run(
    cli, uninterrupted, tmp_path
):
    words = (*_QUICK, f"--results_dir={tmp_path}")
    process = cli.popen(*words)
    kept = _wait_for(process, tmp_path, 0)
    process.kill()
    process.communicate()

    process = cli.popen(*words, "--resume")
    kept = _wait_for(process, tmp_path, kept)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert "Traceback" not in err and out == ""
    assert f"of {_N} images are kept in" in err and "the same command with --resume goes on" in err
    assert f"{next(tmp_path.rglob('*.partial.npz'))};" in err
    assert kept <= _kept(tmp_path) < _N
    assert not list(tmp_path.rglob("*.json"))

    ran = cli(*words, "--resume")
    assert ran.status == 0, ran.err
    assert _comparable(tmp_path) == uninterrupted
    assert "carlini_wagner" in ran.out and "verdict:" in ran.out


@pytest.mark.slow
def test_ten_kills_at_random_moments_leave_no_trace_in_the_record(cli, tmp_path):
    chance = random.Random(20170522)
    assert cli.popen(*_LONG, f"--results_dir={tmp_path / 'warm'}").wait() == 0  # compiles
    began = time.monotonic()
    assert cli.popen(*_LONG, f"--results_dir={tmp_path / 'whole'}").wait() == 0
    whole_seconds = time.monotonic() - began
    whole = _comparable(tmp_path / "whole")
    assert _comparable(tmp_path / "warm") == whole
    print(f"\nuninterrupted: {whole_seconds:.1f} s")

    kills, lives = 0, 0
    while True:
        folder = tmp_path / f"life{lives}"
        left = whole_seconds * (1 - _kept(folder) / 48)
        moment = chance.uniform(0.0, max(8.0, left)) if kills < 10 else None
        process = cli.popen(*_LONG, f"--results_dir={folder}", "--resume")
        try:
            _, err = process.communicate(timeout=moment)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            print(f"kill {kills} after {moment:.2f} s: {_kept(folder)} of 48 images kept")
            continue
        assert process.returncode == 0, err
        assert _comparable(folder) == whole
        print(f"finished after {kills} kills: equal to the uninterrupted run")
        if kills == 10:
            break
        lives += 1  # it outran the kill: begin another


def test_without_resume_a_partial_result_is_announced_and_begun_anew(
    classifier, splits, tmp_path, monkeypatch, capsys
):
    settings = dict(
        classifier=classifier, data=splits, attack="ddn", preset="smoke", num_images=12, lanes=1,
        steps=31,
    )  # fmt: skip
    whole = advdet.evaluate("none", **settings, results_dir=tmp_path / "whole", progress=False)

    original, slices = driver.run, []

    def interrupted(*arguments, on_slice, todo, **options):
        slices.append(len(todo))

        def then_stop(progress):
            on_slice(progress)
            if progress.finished.any():
                raise KeyboardInterrupt

        return original(*arguments, on_slice=then_stop, todo=todo, **options)

    folder = tmp_path / "parts"
    with monkeypatch.context() as patch:
        patch.setattr(driver, "run", interrupted)
        for resume in (False, True, False):
            with pytest.raises(KeyboardInterrupt):
                advdet.evaluate("none", **settings, results_dir=folder, resume=resume)
            said = capsys.readouterr().err
            assert "of 12 images are kept in" in said and "--resume goes on" in said
            announced = "without --resume this run starts anew" in said
            assert announced == (len(slices) == 3)
    assert slices[0] == slices[2] == 12 and 0 < slices[1] < 12

    parts = advdet.evaluate("none", **settings, results_dir=folder, resume=True, progress=False)
    assert _comparable(folder) == _comparable(tmp_path / "whole")
    for name, value in whole.arrays["ddn"].items():
        np.testing.assert_array_equal(parts.arrays["ddn"][name], value)
    assert not list(folder.rglob("*.partial.npz"))


def test_a_damaged_partial_result_is_refused_and_left_alone(cli, tmp_path):
    words = (*_QUICK, f"--results_dir={tmp_path}")
    process = cli.popen(*words)
    _wait_for(process, tmp_path, 0)
    process.kill()
    process.communicate()
    partial = next(tmp_path.rglob("*.partial.npz"))
    content = bytearray(partial.read_bytes())
    content[len(content) // 2] ^= 1
    partial.write_bytes(bytes(content))
    before = files_in(tmp_path)
    ran = cli(*words, "--resume")
    assert ran.status == 2 and ran.out == ""
    assert ran.err.startswith(f"error: the partial result {partial} is damaged")
    assert "delete it, or run without --resume" in ran.err and ran.err.count("\n") == 1
    assert files_in(tmp_path) == before
