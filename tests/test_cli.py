"""The command line as a user meets it: bad input, help, finished records."""

import pathlib
import re
import time

import pytest
from cli_tools import files_in

pytest_plugins = ["cli_tools"]

_SMOKE = ("--dataset=mnist_5k", "--preset=smoke")
_ONE = (*_SMOKE, "--defense=none", "--attack=ddn", "--steps=8", "--num_images=8")

# What is typed -> what the one line must say.
_REFUSED = {
    "unknown defence": (
        ["--defense=droput"], ["'droput'", "none, ", "did you mean dropout"]
    ),
    "no defence": ([], ["--defense"]),
    "empty defence": (["--defense="], ["unknown defence ''", "dropout"]),
    "no such module": (["--defense=no_package.module:Class"], ["no_package", "cannot be imported"]),
    "no such class": (["--defense=advdet.types:Nothing"], ["advdet.types:Nothing", "imported"]),
    "no detector": (["--defense=advdet.types:Batch"], ["advdet.types:Batch", "advdet.Detector"]),
    "hyperparameter": (
        ["--defense=dropout:samples=3"], ["'samples'", "num_samples, tau", "name=value"]
    ),
    "hyperparameter out of range": (
        ["--defense=dropout:num_samples=1"], ["num_samples must be at least 2, not 1"]
    ),
    "data set": (["--dataset=mnits"], ["'mnits'", "did you mean mnist", "cifar10, mnist"]),
    "attack": (["--attack=cw"], ["'cw'", "carlini_wagner, ddn, all"]),
    "objective": (["--objective=genric"], ["'genric'", "generic", "quantile"]),
    "objective setting": (["--objective=quantile:y=1"], ["'y'", "z"]),
    "objective setting, form": (["--objective=quantile:z=x"], ["'z=x'", "name=number"]),
    "preset": (["--preset=quick"], ["'quick'", "smoke, fast, thorough, paper"]),
    "targets": (["--targets=rnadom"], ["'rnadom'", "random, untargeted, least_likely, nearest"]),
    "operating point": (["--operating_point=0.1"], ["'0.1'", "native, 0.01, 0.05, 0.5"]),
    "operating point of none": (["--defense=none", "--operating_point=0.05"], ["flags nothing"]),
    "train_attack": (["--train_attack=cw"], ["'cw'", "carlini_wagner, ddn"]),
    "num_images": (["--num_images=-3"], ["--num_images=-3", "positive"]),
    "lanes": (["--lanes=0"], ["--lanes=0", "positive"]),
    "steps": (["--steps=0"], ["--steps=0", "positive"]),
    "seed": (["--seed=-1"], ["--seed=-1", "negative"]),
    "confidence": (["--confidence=-1"], ["--confidence=-1", "non-negative"]),
    "confidence, no number": (["--confidence=nan"], ["confidence", "nan"]),
    "confidence, endless": (["--confidence=inf"], ["confidence", "finite", "inf"]),
    "detector_margin": (["--detector_margin=-0.1"], ["--detector_margin=-0.1"]),
    "learning_rate 0": (["--learning_rate=0"], ["learning_rate must be above 0, not 0"]),
    "learning_rate -1": (["--learning_rate=-1"], ["learning_rate must be above 0, not -1"]),
    "learning_rate, endless": (["--learning_rate=inf"], ["learning_rate", "inf"]),
    "initial_const": (["--initial_const=0"], ["initial_const must be above 0, not 0"]),
    "time_budget": (["--time_budget=soon"], ["'soon'", "such as 90s, 20m or 1.5h"]),
    "time_budget, nothing left to choose": (
        ["--time_budget=1m", "--steps=8", "--num_images=8"], ["nothing to choose"]
    ),
    "wrong type": (["--steps=many"], ["--steps=many"]),
    "wrong choice": (["--data_source=web"], ["web", "auto|tfds|embedded"]),
    "unknown flag": (["--confidnce=3"], ["confidnce", "confidence"]),
    "leftover words": (["preset=smoke", "more"], ["preset=smoke more", "--name=value"]),
    "too many images": (["--num_images=1001"], ["1001", "mnist_5k has 1000 test images"]),
    "embedded CIFAR": (["--dataset=cifar10", "--data_source=embedded"], ["cifar10", "mnist_5k"]),
    "not prepared": (["--dataset=mnist", "--data_source=tfds"], ["mnist", "prepare_data"]),
}  # fmt: skip


@pytest.mark.parametrize("case", _REFUSED)
def test_bad_input_is_one_line_and_status_2_and_writes_nothing(cli, tmp_path, case):
    words, wanted = _REFUSED[case]
    results = tmp_path / "results"
    given = [*_SMOKE, f"--results_dir={results}", f"--data_dir={tmp_path / 'none'}"]
    if case != "no defence" and not any(word.startswith("--defense") for word in words):
        given.append("--defense=dropout")
    ran = cli(*given, *words)
    assert ran.status == 2, ran.err
    assert ran.out == ""
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1 and ran.err.endswith("\n")
    for part in wanted:
        assert part in ran.err
    assert files_in(tmp_path) == {}


def test_a_results_folder_below_a_file_is_refused(cli, tmp_path):
    (tmp_path / "file").write_text("mine")
    ran = cli(*_ONE, f"--results_dir={tmp_path / 'file' / 'results'}")
    assert ran.status == 2 and ran.err.count("\n") == 1
    assert "file/results cannot be written" in ran.err and "--results_dir" in ran.err
    assert files_in(tmp_path) == {"file": b"mine"}


def test_cifar10_without_data_or_network_is_noticed_soon(cli, tmp_path):
    nowhere = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}
    began = time.monotonic()
    ran = cli(
        "--dataset=cifar10", "--defense=dropout", f"--data_dir={tmp_path / 'none'}",
        f"--results_dir={tmp_path / 'results'}", env=nowhere | {"no_proxy": ""},
    )  # fmt: skip
    assert time.monotonic() - began < 15
    assert ran.status == 2 and ran.err.count("\n") == 1
    assert "no prepared cifar10" in ran.err and "experiments.prepare_data" in ran.err
    assert files_in(tmp_path) == {}


def test_a_finished_record_is_printed_and_not_run_again(cli, tmp_path):
    words = (*_ONE, f"--results_dir={tmp_path}")
    first = cli(*words)
    assert first.status == 0, first.err
    for part in ("undefended classifier", "ddn", "verdict:", "not comparable", "record  ", "sheet"):
        assert part in first.out
    before = files_in(tmp_path)
    assert sorted(pathlib.Path(name).suffix for name in before) == [".json", ".npz", ".png"]
    second = cli(*words)
    assert second.status == 0
    assert "finished before, read from" in second.err and "steps/s" not in second.err
    assert second.out == first.out
    assert files_in(tmp_path) == before


def _record_in(folder) -> pathlib.Path:
    return next(pathlib.Path(folder).rglob("*.json"))


def _cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


_DAMAGE = {
    "json cut": lambda path: _cut(path),
    "npz flipped": lambda path: _flip(path.with_suffix(".npz")),
}


@pytest.fixture(scope="module")
def finished(cli, tmp_path_factory):
    """Files of one finished record."""
    folder = tmp_path_factory.mktemp("finished")
    assert cli(*_ONE, f"--results_dir={folder}").status == 0
    return files_in(folder)


def _put(files, folder):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.mark.parametrize("damage", _DAMAGE)
def test_a_damaged_finished_record_is_refused_and_left_alone(cli, finished, tmp_path, damage):
    _put(finished, tmp_path)
    path = _record_in(tmp_path)
    _DAMAGE[damage](path)
    before = files_in(tmp_path)
    ran = cli(*_ONE, f"--results_dir={tmp_path}")
    assert ran.status == 2 and ran.out == ""
    assert ran.err.count("\n") == 1 and ran.err.startswith("error: the result ")
    assert str(path) in ran.err and "away to run again" in ran.err
    assert files_in(tmp_path) == before


def test_help_teaches_and_lists_the_flags(cli):
    ran = cli("--help")
    text = " ".join((ran.out + ran.err).split())
    assert "Traceback" not in text
    for part in (
        "Does a detector survive", "--defense", "--attack", "--[no]resume", "--dataset", "--seed",
        "found out at 0.05", "Distances of different regimes cannot be compared",
    ):  # fmt: skip
        assert part in text


# ---- odd environments


@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_a_device_that_is_not_there_is_one_line(cli, tmp_path, monkeypatch, platform):
    monkeypatch.setenv("JAX_PLATFORMS", platform)  # which JAX reads when it is imported
    process = cli.popen(*_ONE, f"--results_dir={tmp_path}")
    (line,) = process.communicate()[1].splitlines()
    assert process.returncode == 2 and not files_in(tmp_path)
    assert line.startswith("error: JAX finds no device")
    assert f"JAX_PLATFORMS={platform}" in line and "unset it" in line


def test_debugging_switches_of_jax_change_no_record(cli, tmp_path):
    records = {}
    for switch in ("JAX_LOG_COMPILES", "JAX_ENABLE_X64", "JAX_DEBUG_NANS", "JAX_DEBUG_INFS"):
        folder = tmp_path / switch
        value = "0" if switch == "JAX_LOG_COMPILES" else "1"
        ran = cli(*_ONE, f"--results_dir={folder}", env={switch: value})
        assert ran.status == 0, ran.err
        records[switch] = {name: data for name, data in files_in(folder).items()
                           if name.endswith(".npz")}  # fmt: skip
    assert len(set(map(str, records.values()))) == 1 and all(records.values())


def test_help_may_be_cut_short(cli):
    command = cli.popen("--help", stderr=-1)
    command.stdout.close()  # as `| head` does once it has seen enough
    assert command.stderr.read() == ""
    command.wait()


def test_a_tilde_that_no_shell_replaced_is_home(cli, tmp_path):
    ran = cli(*_ONE, "--results_dir=~/out", env={"HOME": str(tmp_path)})
    assert ran.status == 0, ran.err
    assert any(name.startswith("out/mnist_5k") for name in files_in(tmp_path))
    assert not pathlib.Path("~").exists()
    for module, words in (
        ("verify", ["~/out"]), ("table", ["--results_dir=~/out"]),
        ("judge", ["--defense=none", "--dataset=mnist_5k", "--adversarial=~/none.npz"]),
    ):  # fmt: skip
        ran = cli(*words, module=module, env={"HOME": str(tmp_path)})
        assert "no file or folder" not in ran.err, (module, ran)
        assert ran.status == (2 if module == "judge" else 0), (module, ran.err)
    nobody = cli(*_ONE, "--results_dir=~no_such_user/out")
    assert nobody.status == 2 and "give the whole path" in nobody.err


def test_every_flag_of_a_path_knows_home():
    for file in pathlib.Path(__file__).parents[1].glob("experiments/*.py"):
        for made in re.findall(r"flags\.DEFINE_string\((.*?)\n\)", file.read_text(), re.S):
            assert not re.search(r"\b([Ff]older of|[Ff]older for|[Ff]older with|npz of)\b", made), (
                f"{file.name}: a path belongs in path_flags.define: {made}"
            )
