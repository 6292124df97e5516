"""Does a detector keep what the interface promises? Half a minute, before any evaluation of it.

python -m experiments.check --defense=dropout
python -m experiments.check --defense=package.module:Class:size=3 --dataset=cifar10
python -m experiments.check --defense=mine:detector --classifier=mine:classifier --dataset=mine:data

Each line says ok, warning or fault, with a figure, and what to change. The detector is fitted on a
few images only, so its figures here say nothing of how good it is.
"""

from __future__ import annotations

import sys
import textwrap
import time

from absl import flags

from experiments import common, evaluation, subject

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(subject)
_WIDTH = 100


def show(finding) -> str:
    """A finding as text: its line, and what to change below it."""
    text = f"{finding.level:<8} {finding.name:<26} {finding.said}"
    if finding.change:
        text += "\n" + textwrap.indent(textwrap.fill(f"-> {finding.change}", _WIDTH - 9), " " * 9)
    return text


def main() -> int:
    """Checks the defence of the flags (`all`: the ten); 1 if there is a fault."""
    import advdet

    faults = 0

    def check_one(spec):
        nonlocal faults
        print(f"{spec} on {common.DATASET.value}")
        began = time.perf_counter()
        findings = advdet.check(
            spec, classifier=subject.classifier(), data=common.data(),
            data_source=common.DATA_SOURCE.value, data_dir=common.DATA_DIR.value,
            seed=common.SEED.value,
            tell=lambda finding: print(show(finding), flush=True),
        )  # fmt: skip
        levels = [finding.level for finding in findings]
        faults += levels.count("fault")
        print(
            f"{levels.count('fault')} faults, {levels.count('warning')} warnings, "
            f"{levels.count('ok')} ok"
        )
        print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr)

    failed = evaluation.each_defense(check_one)
    return 1 if faults or failed else 0


if __name__ == "__main__":
    common.run(main)
