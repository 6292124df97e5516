"""check, judge and verify as a user calls them."""

import os

import numpy as np
import pytest
from cli_tools import ROOT, read_record

pytest_plugins = ["cli_tools"]

_DATA = ("--dataset=mnist_5k", "--data_source=embedded")


@pytest.fixture(scope="module")
def record(cli, tmp_path_factory):
    """The JSON of a record of the undefended classifier."""
    folder = tmp_path_factory.mktemp("results")
    ran = cli(*_DATA, "--preset=smoke", "--defense=none", "--attack=ddn", "--num_images=8",
              f"--results_dir={folder}")  # fmt: skip
    assert ran.status == 0, ran.err
    return next(folder.rglob("*.json"))


def test_verify_confirms_a_folder_and_refutes_a_flipped_byte(cli, record, tmp_path):
    ran = cli(str(record.parents[4]), module="verify")
    assert ran.status == 0, ran.err
    assert ", 0 refuted, " in ran.out and "confirmed      attack.mean_l2" in ran.out
    copy = tmp_path / record.name
    copy.write_bytes(record.read_bytes())
    content = bytearray(record.with_suffix(".npz").read_bytes())
    content[len(content) // 2] ^= 1
    copy.with_suffix(".npz").write_bytes(bytes(content))
    ran = cli(str(copy), "--noall", module="verify")
    assert ran.status == 1
    assert "refuted        seal" in ran.out and ", 1 refuted, 0 not decidable" in ran.out


def test_judge_takes_a_record_or_a_pair_of_files(cli, record, splits, tmp_path):
    npz = record.with_suffix(".npz")
    out = tmp_path / "verdicts.npz"
    words = (*_DATA, "--defense=none")
    ran = cli(*words, f"--adversarial={npz}", f"--out={out}", module="judge")
    assert ran.status == 0, ran.err
    assert "8 images" in ran.out and "nothing is flagged" in ran.out
    with np.load(npz) as theirs, np.load(out) as ours:
        np.testing.assert_array_equal(ours["fooled"], theirs["classified_as_wanted"])
        adversarial, goal = theirs["image_uint8"], theirs["target_class"]
    clean = splits.test.take(slice(8))
    np.savez(tmp_path / "clean.npz", images=clean.images, labels=clean.labels)
    np.savez(tmp_path / "adversarial.npz", images=adversarial, targets=goal)
    files = [f"--{name}={tmp_path / name}.npz" for name in ("clean", "adversarial")]
    as_json = tmp_path / "verdicts.json"
    ran = cli(*words, *files, f"--out={as_json}", module="judge")
    assert ran.status == 0 and "holds uint8: taken as 0 ... 255" in ran.err
    assert '"fooled_8bit"' in as_json.read_text()


_MINE = """
import own_data, own_jax
detector, classifier, data = own_jax.detector, own_data.jax_classifier(), own_data.splits()
"""


def test_objects_of_a_module_of_ones_own_go_through_every_command(cli, tmp_path):
    (tmp_path / "mine.py").write_text(_MINE)
    env = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(tmp_path)])}
    mine = ("--defense=mine:detector", "--classifier=mine:classifier", "--dataset=mine:data")
    folder = tmp_path / "results"
    run = lambda *words, module="perfect_knowledge": cli(*words, module=module, env=env)
    ran = run(*mine, "--preset=smoke", "--attack=ddn", "--num_images=8", f"--results_dir={folder}")
    assert ran.status == 0, ran.err
    (path,) = folder.glob("digits8/perfect_knowledge/reconstruction/*/*.json")
    assert read_record(path)[0]["run"]["command"].count("mine:") == 3
    ran = run(str(folder), *mine, module="verify")
    assert ran.status == 0 and "0 refuted, 0 undecided" in ran.out.splitlines()[-1], ran.out
    ran = run(str(path), "--seed=3", module="verify")
    assert ran.status == 3 and "handed over as arrays" in ran.out
    assert "seed of fresh draws: 3" in ran.out
    ran = run(*mine, f"--adversarial={path.with_suffix('.npz')}", module="judge")
    assert ran.status == 0 and "8 images" in ran.out, ran.err
    ran = run(*mine, module="check")
    assert ran.status == 0 and "0 faults" in ran.out, ran.out
    ran = run(mine[0], "--classifier=mine:data", module="check")
    said = "the classifier mine:data must be an advdet.Classifier, not a Splits"
    assert ran.status == 2 and said in ran.err
    ran = run("--defense=own_jax:fit", module="check")
    assert ran.status == 2 and "wrap it by advdet.Detector.from_function" in ran.err


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("judge", ("--defense=none", "--adversarial=nowhere.npz"), "there is no file nowhere.npz"),
        ("judge", ("--defense=none", "--adversarial=README.md"), "is no npz file"),
        ("judge", ("--defense=none", "--adversarial=README.md", "--out=x.csv"), "--out must end"),
        ("judge", ("--defense=none",), "--adversarial"),
        ("verify", ("nowhere",), "there is no file or folder nowhere"),
        ("verify", (), "name a folder of results"),
        ("verify", ("one", "two"), "left over on the command line: two"),
        ("check", ("--defense=droput",), "did you mean dropout"),
    ],
)
def test_bad_input_is_one_line_and_status_2(cli, module, words, said):
    ran = cli(*(_DATA if module != "verify" else ()), *words, module=module)
    assert ran.status == 2 and ran.out == "" or module == "check"
    assert said in ran.err and ran.err.count("\n") == 1 and ran.err.startswith("error: ")


def test_check_prints_a_line_for_each_finding(cli):
    ran = cli(*_DATA, "--defense=none", module="check")
    assert ran.status == 0, ran.out + ran.err
    for part in ("ok       classifier: logits", "logits: gradient", "0 faults"):
        assert part in ran.out
