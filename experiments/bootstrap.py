"""Sets everything up in a virtual environment of its own, then runs the main job or the tests.

    python3 -m experiments.bootstrap run                      the main job
    python3 -m experiments.bootstrap run --defense=dropout --preset=smoke     with its flags
    python3 -m experiments.bootstrap test                     the tests

Needs nothing but Python 3.11 to 3.14 with venv, and the package index. The environment lies in
.venv, or where the variable ADVDET_VENV says; it is made once and brought up to date when
pyproject.toml changes.
"""

import hashlib
import os
import subprocess
import sys

# Written for any Python 3, so that one that is too old can say so.
_LOWEST, _HIGHEST = (3, 11), (3, 14)
_JOBS = {
    "run": ["-m", "experiments.perfect_knowledge"],
    "test": ["-m", "pytest", "-n", "2", "--dist", "loadfile"],  # a file stays with one process
}
_DEFAULTS = {"run": ["--defense=dropout"], "test": []}


def refuse(message):
    """Prints one line and ends with status 2."""
    sys.stderr.write("error: %s\n" % message)
    sys.exit(2)


def check_python():
    """Refuses a Python that is too old, too new, or cannot make environments."""
    found = "%d.%d" % sys.version_info[:2]
    if not _LOWEST <= sys.version_info[:2] <= _HIGHEST:
        refuse(
            "this is Python %s (%s); advdet needs %d.%d to %d.%d: call this with another, such as "
            "python3.12 -m experiments.bootstrap" % ((found, sys.executable) + _LOWEST + _HIGHEST)
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        refuse(
            "this Python %s has no venv with pip; install it (on Debian and Ubuntu: "
            "apt install python%s-venv) and call this again" % (found, found)
        )


def prepare(root):
    """Makes or updates the environment.

    Args:
      root: folder of the checkout.

    Returns:
      Its Python.
    """
    folder = os.path.abspath(os.environ.get("ADVDET_VENV") or os.path.join(root, ".venv"))
    parts = ["Scripts", "python.exe"] if os.name == "nt" else ["bin", "python"]
    python = os.path.join(folder, *parts)
    with open(os.path.join(root, "pyproject.toml"), "rb") as file:
        wanted = hashlib.sha256(file.read() + root.encode()).hexdigest()
    stamp = os.path.join(folder, "advdet-installed")
    if os.path.exists(stamp) and open(stamp).read() == wanted and os.path.exists(python):
        return python
    sys.stderr.write("making the environment %s (a minute or two)\n" % folder)
    sys.stderr.flush()
    try:
        subprocess.check_call([sys.executable, "-m", "venv", folder])
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.check_call(install + ["--editable", ".[test]"], cwd=root)
    except subprocess.CalledProcessError as error:
        refuse(
            "the environment could not be made (%s ended with status %d; its own words are above); "
            "mend that, remove %s and call this again"
            % (os.path.basename(error.cmd[0]), error.returncode, folder)
        )
    with open(stamp, "w") as file:
        file.write(wanted)
    return python


def main(words):
    """Runs one of the jobs; returns its exit status."""
    if not words or words[0] not in _JOBS:
        refuse("say what to do: `run` (the main job, flags may follow) or `test`")
    check_python()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    python = prepare(root)
    rest = words[1:] or _DEFAULTS[words[0]]
    if words[0] == "run" and not any(word.startswith("--defense") for word in rest):
        rest = _DEFAULTS["run"] + rest
    try:
        return subprocess.call([python] + _JOBS[words[0]] + rest, cwd=root)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
