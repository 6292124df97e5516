"""What a random defence costs an attacker: success against L2 over z of `quantile`.

The attacker aims at mean + z standard deviations of the score. A small z gives near images that
some of the judge's draws flag, a large one images that pass, further away.

python -m experiments.quantile_curve --defense=dropout --num_images=200 --attack=ddn
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from experiments import common, evaluation, subject

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(evaluation)
ZS = flags.DEFINE_list(
    "z", ["0", "0.5", "1", "1.5", "2", "2.5", "3", "4"], "Values of z, with commas."
)


def main() -> None:
    """Runs the sweep (one compilation for all of it), prints the curve and saves a picture."""
    import advdet
    from advdet.types import InputError
    from experiments import report

    values = sorted(set(evaluation.numbers("z", ZS.value)))
    settings = evaluation.settings(budget=True)
    if settings.pop("objective") not in (None, "auto", "quantile"):
        raise InputError("the curve is one of the objective `quantile`; leave --objective away")
    done = advdet.sweep(
        [{"objective": f"quantile:z={z:g}"} for z in values], subject.DEFENSE.value,
        command=evaluation.command("quantile_curve"), **settings,
    )  # fmt: skip
    records = [list(each.records.values())[-1] for each in done]
    print(report.curve("z", values, records))
    run = records[0]["run"]
    name = (
        f"{run['dataset']}-{run['defense']}-{run['attack']}-{run['operating_point']}-quantile.png"
    )
    path = Path(evaluation.RESULTS_DIR.value, name)
    report.curve_picture(path, "z", values, records)
    print(f"picture {path}")


if __name__ == "__main__":
    common.run(main)
